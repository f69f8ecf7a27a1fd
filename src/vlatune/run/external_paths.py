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


def record_paths(run: Path | str, config: RunConfig) -> None:
    """Add the paths of the user's command to those recorded for the run, a folder or URL."""
    paths = sorted(recorded_paths(run) | {path for _, path in external_paths(config)})
    try:
        file = _record(run)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(file, {"run": _real(run), "paths": paths})
    except (OSError, RuntimeError):  # no home directory: `eval` and `export` will ask
        return


def recorded_paths(run: Path | str) -> frozenset[str]:
    """Return the paths recorded for the run."""
    try:
        file = _record(run)
        found = read_json(file.parent, file.name)
    except (OSError, RuntimeError, ValueError):
        return frozenset()
    same_run = found.get("run") == _real(run)
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


def require_allowed(
    run_dir: Path, paths: Iterable[tuple[str, str]], *, trust_run: bool, allowed: Collection[str] = ()
) -> None:
    """Raise if one of the paths is named only by the run's own files and not in `allowed`."""
    unknown = [(flag, path) for flag, path in paths if path not in allowed and not is_allowed(run_dir, path)]
    if unknown and not trust_run:
        named = ", ".join(dict.fromkeys(f"{flag}={path[:200]}" for flag, path in unknown))
        raise ValueError(
            f"run '{run_dir}' names paths outside of its folder that your `vlatune train` did not use: {named}; "
            f"check them, and add --trust_run=true if you trust the origin of the run"
        )


def only(paths: Sequence[tuple[str, str]], flags: Collection[str]) -> list[tuple[str, str]]:
    return [(flag, path) for flag, path in paths if flag in flags]


def _real(run: Path | str) -> str:
    return run if isinstance(run, str) else os.path.realpath(run)


def _record(run: Path | str) -> Path:
    """Return the file in the user's state directory that records the run's paths."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
    key = hashlib.sha256(os.fsencode(_real(run))).hexdigest()[:32]
    return state / "vlatune" / "runs" / f"{key}.json"
