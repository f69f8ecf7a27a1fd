"""Checkpoints in a folder of this machine, or of a filesystem that all machines share, and their manifest.

    checkpoints/00000500/            a checkpoint: visible only when it is whole
    checkpoints/.writing-00001000/   being written; what a killed process leaves here is ignored and cleaned
    checkpoints/.removing-00000000/  being deleted

One rename makes a checkpoint visible and one makes it invisible, so there is never half of one. The manifest is its last
file: names, sizes and SHA-256 of the others, and the few numbers that pruning needs. A checkpoint without a readable one is
not there; one whose files are not what it says is damaged.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from vlatune.files import RefusedFileError, open_file, parse_json, put_folder, read_file, refuse_link

MANIFEST = "manifest.json"
FORMAT = 1
CHUNK_BYTES = 4 * 1024 * 1024
PHASES = ("begun", "file", "written", "synced", "uploading", "uploaded", "committed", "removing", "pruned")
"""The moments of a save, by name, so that a test can end the process at any of them.

begun       an empty folder lies aside
file        one of its files is written (once per file)
written     all of them are
synced      and are on the disk, with their manifest
uploading   an object is about to be sent (object stores; once per object)
uploaded    all objects but the manifest are there (object stores)
committed   the checkpoint is visible: from here on it is the newest
removing    an older one is no longer visible, its files still there
pruned      what need not be kept is gone
"""
OnPhase = Callable[[str], None]


@dataclass(frozen=True)
class Entry:
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Score:
    """How good a checkpoint is held to be, the lower the better; None where it is not known."""

    loss: float | None = None
    """Mean training loss of the steps since the checkpoint before."""
    val_error: float | None = None
    """Action error of the newest validation at or before its step."""


NO_SCORE = Score()


@dataclass(frozen=True)
class Manifest:
    optimizer_step: int
    score: Score
    files: dict[str, Entry]

    def to_bytes(self) -> bytes:
        files = {name: {"bytes": one.num_bytes, "sha256": one.sha256} for name, one in self.files.items()}
        scores = {"loss": self.score.loss, "val_error": self.score.val_error}
        content = {"format": FORMAT, "optimizer_step": self.optimizer_step, **scores, "files": files}
        return json.dumps(content, indent=2).encode()


def parse_manifest(data: bytes) -> Manifest:
    """Raises ValueError with what is wrong; names that would leave the checkpoint's folder are wrong, too."""
    try:
        raw: dict[str, Any] = parse_json(data, "it", remedy="restore it")
        files = {str(name): Entry(int(one["bytes"]), str(one["sha256"])) for name, one in raw["files"].items()}
        scores = {name: None if raw.get(name) is None else float(raw[name]) for name in ("loss", "val_error")}
        found = Manifest(int(raw["optimizer_step"]), Score(**scores), files)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{MANIFEST} is not readable ({type(error).__name__}: {error})") from None
    if not files:
        raise ValueError(f"{MANIFEST} names no files, so that nothing could be verified")
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or not name.isprintable():
            raise ValueError(f"{MANIFEST} names a file outside of its folder: '{name}'")
    return found


def make_manifest(folder: Path, optimizer_step: int, score: Score) -> Manifest:
    """Hash everything in a folder and below it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    files = {path.relative_to(folder).as_posix(): Entry(path.stat().st_size, hash_file(path)) for path in paths}
    return Manifest(optimizer_step, score, files)


def read_manifest(folder: Path) -> Manifest:
    try:
        return parse_manifest(read_file(folder, MANIFEST))
    except OSError as error:
        raise ValueError(f"{MANIFEST} is not readable ({error.strerror})") from None


def find_problem(folder: Path) -> str | None:
    """What is wrong with the files of a checkpoint, or None."""
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return str(error)
    present = {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()
    }
    unknown = sorted(present - manifest.files.keys() - {MANIFEST})
    if unknown:
        return f"{unknown[0]} is not in {MANIFEST}"
    problems = (_file_problem(folder, name, entry) for name, entry in manifest.files.items())
    return next((problem for problem in problems if problem), None)


def _file_problem(folder: Path, name: str, entry: Entry) -> str | None:
    try:
        with open_file(folder, name) as file:
            sha256 = hash_stream(file)
            return compare_entry(name, entry, Entry(file.tell(), sha256))
    except FileNotFoundError:
        return f"{name} is missing"
    except RefusedFileError as error:
        return str(error)
    except OSError as error:
        return f"{name} is not readable ({error.strerror})"


def compare_entry(name: str, expected: Entry, found: Entry) -> str | None:
    if found.num_bytes != expected.num_bytes:
        return f"{name} has {found.num_bytes} bytes, the manifest says {expected.num_bytes}"
    if found.sha256 != expected.sha256:
        return f"{name} does not match its hash"
    return None


def hash_file(path: Path) -> str:
    with open_file(path.parent, path.name) as file:
        return hash_stream(file)


def hash_stream(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)  # lets other threads run meanwhile
    return digest.hexdigest()


def share(path: Path) -> None:
    """Give a file the rights of its folder: safetensors makes files that only their owner may read."""
    if path.is_file():
        path.chmod(path.parent.stat().st_mode & 0o666)


def no_phase(_: str) -> None:
    """What a save calls when nobody watches."""


ASIDE, REMOVING = ".writing-", ".removing-"


def folder_name(optimizer_step: int) -> str:
    return f"{optimizer_step:08d}"


def begin_aside(folder: Path, optimizer_step: int) -> Path:
    """An empty folder in which to write a checkpoint; what a killed process left of it goes."""
    refuse_link(folder)
    aside = folder / f"{ASIDE}{folder_name(optimizer_step)}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


class LocalStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def where(self, optimizer_step: int) -> str:
        return str(self.path(optimizer_step))

    def path(self, optimizer_step: int) -> Path:
        return self.folder / folder_name(optimizer_step)

    def steps(self) -> list[int]:
        """Optimizer steps of the checkpoints, oldest first."""
        refuse_link(self.folder)  # what is older is deleted: only in the run's own folder
        if not self.folder.is_dir():
            return []
        names = [path.name for path in self.folder.glob("[0-9]*") if path.is_dir() and not path.is_symlink()]
        return sorted(int(name) for name in names if name.isdecimal() and name == folder_name(int(name)))

    def manifest(self, optimizer_step: int) -> Manifest:
        return read_manifest(self.path(optimizer_step))

    def problem(self, optimizer_step: int) -> str | None:
        return find_problem(self.path(optimizer_step))

    def read_bytes(self, optimizer_step: int, name: str) -> bytes:
        return read_file(self.path(optimizer_step), name)

    @contextmanager
    def opened(self, optimizer_step: int) -> Iterator[Path]:
        """A folder with the checkpoint's files: the checkpoint itself."""
        yield self.path(optimizer_step)

    def begin(self, optimizer_step: int) -> Path:
        """An empty folder in which to write, on the filesystem of the checkpoints."""
        return begin_aside(self.folder, optimizer_step)

    def commit(self, optimizer_step: int, aside: Path, on_phase: OnPhase) -> None:
        """Make what was written the checkpoint of this step.

        A whole one that is already there stays: it was written by this run at this step, and replacing it would
        leave a moment without any.
        """
        del on_phase  # one rename has no moments in between
        final = self.path(optimizer_step)
        if final.exists():
            if find_problem(final) is None:
                shutil.rmtree(aside)
                return
            shutil.rmtree(final)
        put_folder(aside, final)

    def remove(self, optimizer_step: int, on_phase: OnPhase) -> None:
        going = self.folder / f"{REMOVING}{folder_name(optimizer_step)}"
        shutil.rmtree(going, ignore_errors=True)
        put_folder(self.path(optimizer_step), going)
        on_phase("removing")
        shutil.rmtree(going)

    def clean(self) -> None:
        """Remove what interrupted writers and removers left; only one process may write here."""
        refuse_link(self.folder)
        for prefix in (ASIDE, REMOVING):
            for leftover in self.folder.glob(f"{prefix}*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def check_writable(self) -> None:
        """Refuse a place where no checkpoint could be written, before a run has cost anything."""
        try:
            probe = self.begin(0)
            (probe / "probe").write_bytes(b"vlatune")
            shutil.rmtree(probe)
        except OSError as error:
            raise ValueError(
                f"checkpoints cannot be written to '{self.folder}' ({error.strerror}); choose another --output_dir or --storage_path"
            ) from None
