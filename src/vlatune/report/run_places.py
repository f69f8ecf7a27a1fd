"""Places outside of a run's folder that its files name: opened only where the user has named them.

A run folder may be a stranger's, and its settings name checkpoints, datasets and a base model: any folder, repository or
address. `vlatune train` writes the places that its command named to RUN/places.json, with a seal by a key that this user
alone has; `eval`, `export` and `report` follow sealed places, what lies inside the run's folder, and what a flag says. A
seal is not for the run's content: it says only "these places were named on a command line of mine".
"""

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from vlatune.config import RunConfig
from vlatune.files import parse_json, read_file, write_json, write_new

PLACES_FILE = "places.json"
KEY_FILE, KEY_CHARS = "run_key", 64
STORAGE, BASE = "--storage_path", "--policy.path"


def places_of(config: RunConfig) -> list[tuple[str, str]]:
    """(flag, place) of what the settings make us open. Options of a store are among them: they may hold its address."""
    data = config.dataset
    found = [(STORAGE, config.storage_path), (BASE, config.policy.path), ("--dataset.repo_id", data.repo_id)]
    found += [("--dataset.root", root) for root in data.root]
    found.append(("--dataset.storage_options", data.storage_options))
    return [(flag, place) for flag, place in found if place]


def seal_places(run_dir: Path, config: RunConfig) -> None:
    """The run's command was this user's own: remember what it named, beside what earlier ones did."""
    key = _key(make=True)
    if key is None:  # no home to keep it in: `eval` and `export` will ask
        return
    places = sorted(sealed_places(run_dir) | {place for _, place in places_of(config)})
    write_json(run_dir / PLACES_FILE, {"places": places, "seal": _seal(key, places)})


def sealed_places(run_dir: Path) -> frozenset[str]:
    """What this user has named for the run; nothing where the seal is another's or broken."""
    key = _key(make=False)
    try:
        found = parse_json(read_file(run_dir, PLACES_FILE), PLACES_FILE)
        places, seal = found["places"], found["seal"]
        if key is None or not hmac.compare_digest(_seal(key, places), seal):
            return frozenset()
        return frozenset(places)
    except (OSError, ValueError, KeyError, TypeError):
        return frozenset()


def is_trusted(run_dir: Path, place: str) -> bool:
    """Whether a place that the run's files name may be opened without asking."""
    return is_inside(run_dir, place) or place in sealed_places(run_dir)


def is_inside(run_dir: Path, place: str) -> bool:
    """In the run's folder, links followed; or a base that has moved with it (run_setup.py finds it beside the run)."""
    if "://" in place or "\0" in place:
        return False
    real, path = Path(os.path.realpath(run_dir)), Path(place).expanduser()
    if Path(os.path.realpath(path)).is_relative_to(real):
        return True
    beside = real / path.name
    return path.is_absolute() and not path.exists() and beside.is_dir() and not beside.is_symlink()


def require_trusted(run_dir: Path, places: Iterable[tuple[str, str]], *, trust_run: bool) -> None:
    """Refuse places that nobody has named but the run's own files."""
    odd = [] if trust_run else [(flag, place) for flag, place in places if not is_trusted(run_dir, place)]
    if odd:
        named = ", ".join(dict.fromkeys(f"{flag}={place[:200]}" for flag, place in odd))
        raise ValueError(
            f"run '{run_dir}' names places outside of its folder, and no command of yours has named them on this machine: {named}; "
            f"look at them, and if you trust who made the run, add --trust_run=true"
        )


def only(places: Sequence[tuple[str, str]], flags: Collection[str]) -> list[tuple[str, str]]:
    return [(flag, place) for flag, place in places if flag in flags]


def _seal(key: bytes, places: Sequence[str]) -> str:
    return hmac.new(key, json.dumps(list(places)).encode(), hashlib.sha256).hexdigest()


def _key(*, make: bool) -> bytes | None:
    """This user's own, made at the first run; None where it cannot be had."""
    try:
        folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "vlatune"
        if make and not (folder / KEY_FILE).exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_new(folder / KEY_FILE, secrets.token_hex(KEY_CHARS // 2).encode(), mode=0o600)
        key = read_file(folder, KEY_FILE, max_bytes=KEY_CHARS)
    except (OSError, RuntimeError, ValueError):  # no home, or two first runs at the same moment
        return None
    return key if len(key) == KEY_CHARS else None
