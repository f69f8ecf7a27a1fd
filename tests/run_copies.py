"""Copy a run folder and record its external paths, as `vlatune train` does."""

import shutil
from pathlib import Path

from vlatune.run.external_paths import record_paths
from vlatune.run.run_folder import read_config


def copy_run(run_dir: Path, to: Path) -> Path:
    shutil.copytree(run_dir, to)
    record_paths(to, read_config(to))
    return to
