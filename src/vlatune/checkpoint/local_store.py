"""Checkpoints and their manifests in a local or shared folder.

    checkpoints/00000500/            a complete checkpoint
    checkpoints/.writing-00001000/   being written; leftovers of killed processes are removed
    checkpoints/.removing-00000000/  being deleted

Renames make a checkpoint appear and disappear atomically. The manifest is written last: names,
sizes and SHA-256 of the other files, and the scores for pruning. A checkpoint without a readable
manifest, or with files that do not match it, is damaged.
"""

import hashlib
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from vlatune.storage.files import parse_json, reject_link, replace_folder
from vlatune.storage.root import Root

MANIFEST = "manifest.json"
FORMAT = 1
WRITING, REMOVING = ".writing-", ".removing-"
PHASES = ("begun", "file", "written", "synced", "uploading", "uploaded", "committed", "removing", "pruned")
"""Phases of a save, so that a test can kill the process at any of them.

begun       the temporary folder exists
file        a file is written (once per file)
written     all files are written
synced      all files and the manifest are on disk
uploading   an object is about to be sent (object stores; once per object)
uploaded    all objects but the manifest are sent (object stores)
committed   the checkpoint is visible and the newest
removing    an older checkpoint is no longer visible, but its files exist
pruned      old checkpoints are deleted"""
OnPhase = Callable[[str], None]


@dataclass(frozen=True)
class Entry:
    num_bytes: int
    sha256: str


@dataclass
class Score:
    """Scores of a checkpoint, lower is better; None if unknown. Read when the manifest is written."""

    loss: float | None = None
    """Mean training loss since the previous checkpoint."""
    val_error: float | None = None
    """Action error of its weights; None if not validated."""


NO_SCORE = Score()


@dataclass(frozen=True)
class Manifest:
    optimizer_step: int
    score: Score
    files: dict[str, Entry]

    def to_bytes(self) -> bytes:
        files = {name: {"bytes": one.num_bytes, "sha256": one.sha256} for name, one in self.files.items()}
        content = {"format": FORMAT, "optimizer_step": self.optimizer_step, **vars(self.score), "files": files}
        return json.dumps(content, indent=2).encode()


def parse_manifest(data: bytes) -> Manifest:
    """Parse a manifest; raise ValueError if it is invalid or names files outside of the folder."""
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
    """Hash all files below a folder."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST):
        with path.open("rb") as file:
            files[path.relative_to(folder).as_posix()] = _hash(file)
    return Manifest(optimizer_step, score, files)


def _hash(file: IO[bytes]) -> Entry:
    sha256 = hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]
    return Entry(file.tell(), sha256)


def share(path: Path) -> None:
    """Give a file its folder's permissions; safetensors creates files for the owner only."""
    if path.is_file():
        path.chmod(path.parent.stat().st_mode & 0o666)


def no_phase(_: str) -> None:
    """Ignore the phases of a save."""


def folder_name(optimizer_step: int) -> str:
    return f"{optimizer_step:08d}"


def find_damage(root: Root, prefix: str, optimizer_step: int) -> str | None:
    """Return what is wrong with the checkpoint whose names begin with `prefix`, or None."""
    name = MANIFEST
    try:
        manifest = parse_manifest(root.read_bytes(f"{prefix}{MANIFEST}"))
        if manifest.optimizer_step != optimizer_step:
            return f"{MANIFEST} is of step {manifest.optimizer_step}, expected {optimizer_step}"
        for name, entry in manifest.files.items():
            with root.open(f"{prefix}{name}") as file:
                found = _hash(file)
            if found.num_bytes != entry.num_bytes:
                return f"{name} has {found.num_bytes} bytes, expected {entry.num_bytes}"
            if found != entry:
                return f"{name} does not match its hash"
    except FileNotFoundError:
        return f"{name} is missing"
    except ValueError as error:
        return str(error)
    except OSError as error:
        if not root.is_local:
            raise
        return f"{name} is not readable ({error.strerror})"
    return None


class Store(ABC):
    """Checkpoints in a folder or below a URL. Only one process may write."""

    def __init__(self, root: Root, staging: Path) -> None:
        self.root = root
        self.staging = staging
        """Local folder in which checkpoints are written before they are published."""

    @abstractmethod
    def steps(self) -> list[int]:
        """Return the optimizer steps of the checkpoints, oldest first."""

    @abstractmethod
    def opened(self, optimizer_step: int) -> AbstractContextManager[Path]:
        """Yield a local folder with the files of a verified checkpoint."""

    @abstractmethod
    def local_copy(self, optimizer_step: int) -> Path:
        """Return a verified copy of a checkpoint that all processes of this machine share."""

    @abstractmethod
    def drop_copy(self, copy: Path) -> None:
        """Remove what `local_copy` has downloaded, when no process reads it any more."""

    @abstractmethod
    def publish(self, optimizer_step: int, temporary: Path, on_phase: OnPhase) -> None:
        """Make the files in a temporary folder the checkpoint of this step."""

    @abstractmethod
    def remove(self, optimizer_step: int, on_phase: OnPhase) -> None: ...

    @abstractmethod
    def check_writable(self) -> None:
        """Raise if checkpoints cannot be written here."""

    def where(self, optimizer_step: int) -> str:
        return f"{self.root.url}/{folder_name(optimizer_step)}"

    def read_bytes(self, optimizer_step: int, name: str) -> bytes:
        return self.root.read_bytes(f"{folder_name(optimizer_step)}/{name}")

    def manifest(self, optimizer_step: int) -> Manifest:
        return parse_manifest(self.read_bytes(optimizer_step, MANIFEST))

    def problem(self, optimizer_step: int) -> str | None:
        """Return what is wrong with a checkpoint, or None; reads every file once."""
        return find_damage(self.root, f"{folder_name(optimizer_step)}/", optimizer_step)

    def begin(self, optimizer_step: int) -> Path:
        """Create an empty temporary folder for a checkpoint, replacing leftovers."""
        reject_link(self.staging)
        temporary = self.staging / f"{WRITING}{folder_name(optimizer_step)}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        return temporary

    def commit(self, optimizer_step: int, temporary: Path, on_phase: OnPhase) -> None:
        """Publish what was written as the checkpoint of this step.

        An intact checkpoint of the same step is kept: replacing it would leave a moment without
        one.
        """
        if optimizer_step in self.steps():
            if self.problem(optimizer_step) is None:
                shutil.rmtree(temporary)
                return
            self.remove(optimizer_step, on_phase)
        self.publish(optimizer_step, temporary, on_phase)

    def clean(self) -> None:
        """Remove leftovers of interrupted writes and removals."""
        reject_link(self.staging)
        for prefix in (WRITING, REMOVING):
            for leftover in self.staging.glob(f"{prefix}*"):
                shutil.rmtree(leftover, ignore_errors=True)


class LocalStore(Store):
    def __init__(self, folder: Path) -> None:
        super().__init__(Root(str(folder), has_checksums=False), folder)

    def path(self, optimizer_step: int) -> Path:
        return self.staging / folder_name(optimizer_step)

    def steps(self) -> list[int]:
        reject_link(self.staging)  # pruning must not follow links out of the run's folder
        names = [path.name for path in self.staging.glob("[0-9]*") if path.is_dir() and not path.is_symlink()]
        return sorted(int(name) for name in names if name.isdecimal() and name == folder_name(int(name)))

    def problem(self, optimizer_step: int) -> str | None:
        found = super().problem(optimizer_step)
        if found is not None:
            return found
        folder, known = self.path(optimizer_step), {MANIFEST, *self.manifest(optimizer_step).files}
        present = (path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir())
        unknown = [path for path in present if path.relative_to(folder).as_posix() not in known]
        return f"{unknown[0].relative_to(folder)} is not in {MANIFEST}" if unknown else None

    @contextmanager
    def opened(self, optimizer_step: int) -> Iterator[Path]:
        yield self.path(optimizer_step)

    def local_copy(self, optimizer_step: int) -> Path:
        return self.path(optimizer_step)

    def drop_copy(self, copy: Path) -> None:
        del copy  # it is the checkpoint

    def publish(self, optimizer_step: int, temporary: Path, on_phase: OnPhase) -> None:
        del on_phase  # a rename has no intermediate phases
        replace_folder(temporary, self.path(optimizer_step))

    def remove(self, optimizer_step: int, on_phase: OnPhase) -> None:
        going = self.staging / f"{REMOVING}{folder_name(optimizer_step)}"
        shutil.rmtree(going, ignore_errors=True)
        replace_folder(self.path(optimizer_step), going)
        on_phase("removing")
        shutil.rmtree(going)

    def check_writable(self) -> None:
        try:
            probe = self.begin(0)
            (probe / "probe").write_bytes(b"vlatune")
            shutil.rmtree(probe)
        except OSError as error:
            raise ValueError(
                f"checkpoints cannot be written to '{self.staging}' ({error.strerror}); choose another --output_dir or --storage_path"
            ) from None
