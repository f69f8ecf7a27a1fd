"""The run folder on the driver's side: may this run start here.

A folder that holds a finished run is refused, one that holds the same run unfinished is continued, and one that
holds another run is refused with what differs (resume_rules.py). One process at a time: a lock file says so.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlatune.checkpoint.store import open_store
from vlatune.config import RunConfig
from vlatune.files import make_folder, open_to_append, refuse_links_out
from vlatune.report.run_folder import (
    BESIDE,
    CONFIG_FILE,
    DRIVER_LOCK,
    LOGS,
    WRITER_LOCK,
    RunFolder,
    read_settings,
    write_settings,
)
from vlatune.report.run_places import seal_places
from vlatune.report.summary import SUMMARY_FILE
from vlatune.train.driver.resume_rules import accepted, config_changes


def check_run(config: RunConfig) -> None:
    """Refuse a folder in which the run may neither start nor go on; nothing is written."""
    folder = RunFolder(config.run_dir)
    stored = read_settings(folder.path)
    if stored is not None:
        _check_same_run(config, folder, stored)
    elif folder.path.exists() and any(folder.path.iterdir()) and not _only_ours(folder.path):
        raise ValueError(
            f"run folder '{folder.path}' is not empty and holds no run; choose another --output_dir or --job_name"
        )
    elif config.resume and not _has_checkpoints_elsewhere(config):
        raise ValueError(f"--resume=true: there is no run in '{folder.path}'; check --output_dir and --job_name")


def open_run(config: RunConfig) -> RunFolder:
    """Check the folder and record the run's config there."""
    check_run(config)
    folder = RunFolder(config.run_dir)
    make_folder(folder.path, LOGS)
    write_settings(folder.path, replace(config, resume=False, allow_changed=()))
    seal_places(folder.path, config)
    (folder.path / SUMMARY_FILE).unlink(missing_ok=True)  # a run that goes on is not finished
    return folder


@contextmanager
def only_one(folder: RunFolder) -> Iterator[None]:
    """Hold the folder's lock; it falls with the process, however that ends."""
    folder.path.mkdir(parents=True, exist_ok=True)
    refuse_links_out(folder.path, skip=BESIDE)
    with open_to_append(folder.path / DRIVER_LOCK) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"run folder '{folder.path}' is in use by another process; wait for it or choose another --output_dir"
            ) from error
        yield


def _check_same_run(config: RunConfig, folder: RunFolder, stored: dict[str, Any]) -> None:
    summary = folder.summary()
    if summary and summary.finished:
        longer = config.resume and config.steps > summary.optimizer_steps
        if not longer:
            raise ValueError(
                f"run folder '{folder.path}' already holds a finished run of {summary.optimizer_steps} steps; choose another --job_name or "
                f"--output_dir, delete the folder, or go on with --resume=true and more --steps"
            )
    what = f"run folder '{folder.path}' holds a run with other settings"
    accepted(list(config_changes(config, stored, f"'{folder.path}/{CONFIG_FILE}'")), config.allow_changed, what)


def _has_checkpoints_elsewhere(config: RunConfig) -> bool:
    """A run whose folder was lost with its machine goes on from --storage_path."""
    return config.storage_path is not None and bool(open_store(config.run_dir, config.storage_path).steps())


def _only_ours(folder: Path) -> bool:
    """Nothing in it but what a start that was broken off leaves, or what the demo puts beside a run."""
    return all(entry.name in (DRIVER_LOCK, WRITER_LOCK, LOGS, *BESIDE) for entry in folder.iterdir())
