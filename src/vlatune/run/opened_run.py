"""Runs named on the command line: a folder, or the URL of a run that `run/mirror.py` has copied.

What reads URLs is imported when it is needed, so that a wrong path is reported at once.
"""

import re
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vlatune.storage.files import make_folder, read_json, write_json
from vlatune.storage.paths import is_local, local_path


@dataclass(frozen=True)
class OpenRun:
    """A run named on the command line."""

    folder: Path
    is_copy: bool = False
    """True for a temporary copy of a mirrored run."""
    allowed: Collection[str] = ()
    """Paths of the run's files that may be opened, in addition to those of `is_allowed`."""
    base: str | None = None
    """URL of the base model, if the run's own path does not exist here."""


@contextmanager
def opened_run(run: str) -> Iterator[OpenRun]:
    """Yield a run given as a folder or as a URL; of a mirrored one, a temporary copy of its small files."""
    if "://" not in run or is_local(run):
        yield OpenRun(local_path(run) if "://" in run else Path(run))
        return
    from vlatune.checkpoint.store import storage_root
    from vlatune.run.external_paths import recorded_paths
    from vlatune.run.mirror import fetch
    from vlatune.run.run_folder import LOGS, SAMPLES_FILE

    url = run.rstrip("/")
    storage_path, _, name = url.rpartition("/")
    if not re.fullmatch(r"[^:]+://.+", storage_path) or name in ("", ".", "..") or not name.isprintable():
        raise ValueError(f"'{run}' is not a run; RUN is a folder, or a URL such as s3://bucket/runs/NAME")
    root = storage_root(url, "RUN")
    with tempfile.TemporaryDirectory(prefix="vlatune-run-") as temporary:
        folder = make_folder(Path(temporary).resolve(), name)
        try:
            fetch(root, folder, skip=(SAMPLES_FILE, f"{LOGS}/*"))
            base = _use_storage(folder, storage_path)
            allowed = recorded_paths(url) | {storage_path, *([base] if base else [])}
            yield OpenRun(folder, is_copy=True, allowed=allowed, base=base)
        except (ValueError, RuntimeError, OSError) as error:
            if str(folder) not in str(error):
                raise
            kind = ValueError if isinstance(error, ValueError) else RuntimeError
            raise kind(str(error).replace(str(folder), url)) from error


def _use_storage(folder: Path, storage_path: str) -> str | None:
    """Change the copied settings to the storage they were read from; return the base model's URL there."""
    from vlatune.run.mirror import base_url
    from vlatune.run.run_folder import CONFIG_FILE, DATA_FILE, read_settings

    settings = read_settings(folder)
    if settings is None:
        return None
    policy, base = settings.get("policy"), None
    content = read_json(folder, DATA_FILE).get("base") if (folder / DATA_FILE).exists() else None
    path = policy.get("path") if isinstance(policy, dict) else None
    is_missing = isinstance(path, str) and is_local(path) and "\0" not in path and not local_path(path).is_dir()
    if is_missing and isinstance(policy, dict) and isinstance(content, str) and re.fullmatch("[0-9a-f]{16}", content):
        base = policy["path"] = base_url(storage_path, content)
    write_json(folder / CONFIG_FILE, settings | {"storage_path": storage_path})
    return base
