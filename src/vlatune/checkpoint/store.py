"""Checkpoint folders on disk: written aside, verified when read, never half there.

    checkpoints/00000500/   trainable.safetensors  optimizer.safetensors  state.json  manifest.json

A checkpoint is written into a hidden sibling folder, every file and folder is synced, `manifest.json` with sizes
and SHA-256 comes last, and one rename makes it visible. What is read is checked against the manifest first; a
damaged one is passed over for the one before it. Nothing here knows torch.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

MANIFEST = "manifest.json"
ASIDE_PREFIX = ".writing-"


def checkpoint_path(run_dir: Path, optimizer_step: int) -> Path:
    return run_dir / "checkpoints" / f"{optimizer_step:08d}"


def write_checkpoint(run_dir: Path, optimizer_step: int, write_files: Callable[[Path], None]) -> Path:
    """Let `write_files` fill a folder, then make it the checkpoint of this step."""
    final = checkpoint_path(run_dir, optimizer_step)
    aside = final.with_name(f"{ASIDE_PREFIX}{final.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    write_files(aside)
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _hash(path)} for path in sorted(aside.iterdir())}
    (aside / MANIFEST).write_text(json.dumps({"format": 1, "optimizer_step": optimizer_step, "files": files}, indent=2))
    for path in aside.iterdir():
        _sync(path)
    _sync(aside)
    if final.exists():  # the same step, written before a restart: the new one is as good
        shutil.rmtree(final)
    aside.rename(final)
    _sync(final.parent)
    return final


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    folder = run_dir / "checkpoints"
    return sorted(path for path in folder.glob("[0-9]*") if path.is_dir()) if folder.is_dir() else []


def find_newest(run_dir: Path, *, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose files are what its manifest says; damaged ones are named through `warn`."""
    for path in reversed(list_checkpoints(run_dir)):
        problem = verify(path)
        if problem is None:
            return path
        warn(f"checkpoint {path} is damaged ({problem}); taking the one before it")
    return None


def verify(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        files = json.loads((path / MANIFEST).read_bytes())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"{MANIFEST}: {error}"
    for name, entry in files.items():
        file = path / name
        if not file.exists():
            return f"{name} is missing"
        if file.stat().st_size != entry["bytes"]:
            return f"{name} has {file.stat().st_size} bytes, the manifest says {entry['bytes']}"
        if _hash(file) != entry["sha256"]:
            return f"{name} does not match its hash"
    return None


def prune(run_dir: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and what interrupted writes left."""
    for path in list_checkpoints(run_dir)[:-keep]:
        shutil.rmtree(path)
    for leftover in (run_dir / "checkpoints").glob(f"{ASIDE_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
