"""Restrict which paths and URLs outside of a run folder are opened.

A run folder may come from an untrusted source, and its settings name checkpoints, datasets and a
base model: any folder, repository or URL. `vlatune train` records the paths of its command in the
user's state directory, under the real path of the run folder. `eval`, `export` and `report` open
only recorded paths, paths inside the run folder, and paths given as a flag. Nothing inside a run
folder can add to the record.
"""

import hashlib
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from vlatune.config.settings import RunConfig
from vlatune.storage.files import read_json, write_json

STORAGE, BASE = "--storage_path", "--policy.path"


def external_paths(config: RunConfig) -> list[tuple[str, str]]:
    """Return (flag, path) of everything the settings refer to, including storage options. Storage
    options may contain the address of the store."""
    data = config.dataset
    found = [(STORAGE, config.storage_path), (BASE, config.policy.path), ("--dataset.repo_id", data.repo_id)]
    found += [("--dataset.root", root) for root in data.root]
    found.append(("--dataset.storage_options", data.storage_options))
    return [(flag, path) for flag, path in found if path]


def record_paths(run_dir: Path, config: RunConfig) -> None:
    """Add the paths of the user's command to those recorded for the run."""
    paths = sorted(recorded_paths(run_dir) | {path for _, path in external_paths(config)})
    try:
        file = _record(run_dir)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(file, {"run": os.path.realpath(run_dir), "paths": paths})
    except (OSError, RuntimeError):  # no home directory: `eval` and `export` will ask
        return


def recorded_paths(run_dir: Path) -> frozenset[str]:
    """Return the paths recorded for the run."""
    try:
        file = _record(run_dir)
        found = read_json(file.parent, file.name)
    except (OSError, RuntimeError, ValueError):
        return frozenset()
    same_run = found.get("run") == os.path.realpath(run_dir)
    return frozenset(str(path) for path in found.get("paths", ())) if same_run else frozenset()


def is_allowed(run_dir: Path, path: str) -> bool:
    """True if a path from the run's files may be opened without asking: it was recorded, resolves into the run folder,
    or is a base model that moved with it."""
    if path in recorded_paths(run_dir):
        return True
    if "://" in path or "\0" in path:
        return False
    real, given = Path(os.path.realpath(run_dir)), Path(path).expanduser()
    if Path(os.path.realpath(given)).is_relative_to(real):
        return True
    moved = real / given.name
    return given.is_absolute() and not given.exists() and moved.is_dir() and not moved.is_symlink()


def require_allowed(run_dir: Path, paths: Iterable[tuple[str, str]], *, trust_run: bool) -> None:
    """Raise if one of the paths is named only by the run's own files."""
    unknown = [] if trust_run else [(flag, path) for flag, path in paths if not is_allowed(run_dir, path)]
    if unknown:
        named = ", ".join(dict.fromkeys(f"{flag}={path[:200]}" for flag, path in unknown))
        raise ValueError(
            f"run '{run_dir}' names paths outside of its folder that your `vlatune train` did not use: {named}; "
            f"check them, and add --trust_run=true if you trust the origin of the run"
        )


def only(paths: Sequence[tuple[str, str]], flags: Collection[str]) -> list[tuple[str, str]]:
    return [(flag, path) for flag, path in paths if flag in flags]


def _record(run_dir: Path) -> Path:
    """Return the file in the user's state directory that records the run's paths."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
    key = hashlib.sha256(os.fsencode(os.path.realpath(run_dir))).hexdigest()[:32]
    return state / "vlatune" / "runs" / f"{key}.json"
