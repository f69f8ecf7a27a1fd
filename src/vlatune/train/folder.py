"""The run folder on the driver's side: may this run start here, and from where.

A folder that holds a finished run is refused, one that holds the same run unfinished is continued, and one that
holds another run is refused with what differs. One process at a time: a lock file says so.
"""

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlatune.checkpoint.store import find_newest
from vlatune.config import RunConfig, to_json
from vlatune.report.sinks import write_json

MAY_DIFFER = ("resume", "output_dir", "job_name", "steps", "num_workers", "log_freq", "save_freq", "keep_checkpoints")
MAY_DIFFER += ("log_samples", "max_restarts", "max_spilled_bytes", "ray", "recipe", "batch_size", "grad_accum")
"""Settings that another attempt at the same run may change; the global batch as a whole may not."""


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def summary(self) -> dict[str, Any] | None:
        file = self.path / "summary.json"
        return json.loads(file.read_bytes()) if file.exists() else None

    def newest_checkpoint(self, warn: Callable[[str], None]) -> Path | None:
        return find_newest(self.path, warn=warn)


def open_run(config: RunConfig) -> RunFolder:
    """Check that the run may start or go on in its folder, and record its config there."""
    folder = RunFolder(config.run_dir)
    stored = folder.path / "config.json"
    if stored.exists():
        _check_same_run(config, folder, json.loads(stored.read_bytes()))
    elif folder.path.exists() and any(folder.path.iterdir()) and not _only_ours(folder.path):
        raise ValueError(
            f"run folder '{folder.path}' is not empty and holds no run; choose another --output_dir or --job_name"
        )
    elif config.resume:
        raise ValueError(f"--resume=true: there is no run in '{folder.path}'; check --output_dir and --job_name")
    folder.logs.mkdir(parents=True, exist_ok=True)
    write_json(stored, to_json(replace(config, resume=False)))
    summary = folder.path / "summary.json"
    summary.unlink(missing_ok=True)  # a run that goes on is not finished
    return folder


@contextmanager
def only_one(folder: RunFolder) -> Iterator[None]:
    """Hold the folder's lock; it falls with the process, however that ends."""
    folder.path.mkdir(parents=True, exist_ok=True)
    with (folder.path / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"run folder '{folder.path}' is in use by another process; wait for it or choose another --output_dir"
            ) from error
        yield


def _check_same_run(config: RunConfig, folder: RunFolder, stored: dict[str, Any]) -> None:
    summary = folder.summary()
    if summary and summary.get("finished"):
        longer = config.resume and config.steps > summary["optimizer_steps"]
        if not longer:
            raise ValueError(
                f"run folder '{folder.path}' already holds a finished run of {summary['optimizer_steps']} steps; choose another --job_name or "
                f"--output_dir, delete the folder, or go on with --resume=true and more --steps"
            )
    differing = _differences(to_json(config), stored)
    if differing:
        key, now, then = differing[0]
        raise ValueError(
            f"run folder '{folder.path}' holds a run with other settings: --{key} was {then!r}, now {now!r}"
            f"{f' (and {len(differing) - 1} more)' if len(differing) > 1 else ''}; choose another --output_dir or --job_name, or use the same settings"
        )


def _differences(now: dict[str, Any], then: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    found = [("batch_size * grad_accum * num_workers", _global(now), _global(then))]
    flat_now, flat_then = dict(_flatten(now)), dict(_flatten(then))
    keys = [key for key in sorted(flat_now.keys() | flat_then.keys()) if key.split(".")[0] not in MAY_DIFFER]
    found += [(key, flat_now.get(key), flat_then.get(key)) for key in keys]
    return [(key, a, b) for key, a, b in found if a != b]


def _global(config: dict[str, Any]) -> int:
    return config["batch_size"] * config["grad_accum"] * config["num_workers"]


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and key != "rename_map":
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _only_ours(folder: Path) -> bool:
    """Nothing in it but what a start that was broken off leaves, or what the demo puts beside a run."""
    return all(entry.name in (".lock", "logs", "base", "dataset") for entry in folder.iterdir())
