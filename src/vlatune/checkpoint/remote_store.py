"""Checkpoints in an object store (any fsspec URL): a checkpoint is there when its manifest object is.

    s3://bucket/runs/fold/checkpoints/00000500/trainable.safetensors ... manifest.json

Files are written on this machine first, then sent, the manifest last; removing takes the manifest first. Objects without
a manifest are what an interrupted upload left: ignored by readers, cleaned by the next writer. Calls are tried again as
remote_retry.py says, and an upload that makes no progress is given up and tried again, too. Credentials come from the
environment.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vlatune.checkpoint.local_store import ASIDE, folder_name
from vlatune.checkpoint.manifest import (
    MANIFEST,
    Entry,
    Manifest,
    OnPhase,
    compare_entry,
    find_problem,
    hash_stream,
    parse_manifest,
)
from vlatune.dataset.storage.remote_retry import retried
from vlatune.dataset.storage.root import Root
from vlatune.files import refuse_link

MIN_UPLOAD_BYTES_PER_S = 1_000_000
"""An object that goes slower than this is held to hang."""
UPLOAD_GRACE_S = 30.0
"""Time for an object beside that for its bytes."""
PROBE = ".vlatune-probe"


class RemoteStore:
    def __init__(self, root: Root, *, staging: Path) -> None:
        self.root, self.staging = root, staging

    def where(self, optimizer_step: int) -> str:
        return f"{self.root.url}/{folder_name(optimizer_step)}"

    def steps(self) -> list[int]:
        """Optimizer steps of the checkpoints, oldest first."""
        names = (found.partition("/")[0] for found in self.root.glob(f"*/{MANIFEST}"))
        return sorted(int(name) for name in names if name.isdecimal())

    def manifest(self, optimizer_step: int) -> Manifest:
        return parse_manifest(self.read_bytes(optimizer_step, MANIFEST))

    def problem(self, optimizer_step: int) -> str | None:
        """Reads every byte once and keeps none."""
        try:
            manifest = self.manifest(optimizer_step)
        except (ValueError, FileNotFoundError) as error:
            return str(error)
        problems = (self._object_problem(optimizer_step, name, entry) for name, entry in manifest.files.items())
        return next((problem for problem in problems if problem), None)

    def read_bytes(self, optimizer_step: int, name: str) -> bytes:
        return self.root.read_bytes(f"{folder_name(optimizer_step)}/{name}")

    @contextmanager
    def opened(self, optimizer_step: int) -> Iterator[Path]:
        """A folder with the checkpoint's files: a copy that is verified, and gone afterwards."""
        with tempfile.TemporaryDirectory(prefix="vlatune-checkpoint-") as name:
            folder = Path(name)
            for file in (MANIFEST, *self.manifest(optimizer_step).files):
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                self._download(f"{folder_name(optimizer_step)}/{file}", folder / file)
            problem = find_problem(folder)
            if problem:
                raise RuntimeError(f"checkpoint {self.where(optimizer_step)} is damaged ({problem}); start again")
            yield folder

    def begin(self, optimizer_step: int) -> Path:
        """An empty folder of this machine in which to write what will be sent."""
        refuse_link(self.staging)
        aside = self.staging / f"{ASIDE}{folder_name(optimizer_step)}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        return aside

    def commit(self, optimizer_step: int, aside: Path, on_phase: OnPhase) -> None:
        """Send everything, the manifest last. A whole checkpoint that is already there stays, as in a folder."""
        if optimizer_step in self.steps():
            if self.problem(optimizer_step) is None:
                shutil.rmtree(aside)
                return
            self.remove(optimizer_step, on_phase)
        names = sorted(path.relative_to(aside).as_posix() for path in aside.rglob("*") if path.is_file())
        names.remove(MANIFEST)
        for name in names:
            on_phase("uploading")
            self._upload(aside / name, f"{folder_name(optimizer_step)}/{name}")
        on_phase("uploaded")
        self._upload(aside / MANIFEST, f"{folder_name(optimizer_step)}/{MANIFEST}")
        shutil.rmtree(aside)

    def remove(self, optimizer_step: int, on_phase: OnPhase) -> None:
        fs, folder = self.root.filesystem(), self.root.join(folder_name(optimizer_step))
        with suppress(FileNotFoundError):  # the first try may have removed it before its answer was lost
            self._call(lambda: fs.rm_file(f"{folder}/{MANIFEST}"), folder)
        on_phase("removing")
        self._remove_folder(fs, folder)

    def clean(self) -> None:
        """Remove objects of uploads and removals that broke off; only one process may write here."""
        refuse_link(self.staging)
        for leftover in self.staging.glob(f"{ASIDE}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        whole = {folder_name(step) for step in self.steps()}
        for name in self.root.glob("*"):
            if name.isdecimal() and name not in whole:
                self._remove_folder(self.root.filesystem(), self.root.join(name))

    def check_writable(self) -> None:
        """Refuse a place where no checkpoint could be written, before a run has cost anything."""
        try:
            fs, name = self.root.filesystem(), self.root.join(PROBE)
            self._call(lambda: fs.pipe_file(name, b"vlatune"), name)
            self._call(lambda: fs.rm_file(name), name)
        except Exception as error:  # each means: not here
            raise ValueError(
                f"checkpoints cannot be written to '{self.root.url}' ({error}); check --storage_path and the credentials"
            ) from None

    def _object_problem(self, optimizer_step: int, name: str, entry: Entry) -> str | None:
        try:
            with self.root.open(f"{folder_name(optimizer_step)}/{name}") as file:
                sha256 = hash_stream(file)
                return compare_entry(name, entry, Entry(file.tell(), sha256))
        except FileNotFoundError:
            return f"{name} is missing"

    def _upload(self, path: Path, name: str) -> None:
        fs, full = self.root.filesystem(), self.root.join(name)
        allowed_s = UPLOAD_GRACE_S + path.stat().st_size / MIN_UPLOAD_BYTES_PER_S
        # fsspec's asynchronous filesystems take a time limit for any call; silence while sending has no other.
        limit = {"timeout": allowed_s} if fs.async_impl else {}
        self._call(lambda: fs.put_file(str(path), full, **limit), full)

    def _download(self, name: str, path: Path) -> None:
        with self.root.open(name) as file, path.open("wb") as into:
            shutil.copyfileobj(file, into, length=8 * 1024 * 1024)

    def _remove_folder(self, fs: Any, folder: str) -> None:
        with suppress(FileNotFoundError):  # an empty folder is none in an object store
            self._call(lambda: fs.rm(folder, recursive=True), folder)

    def _call[T](self, call: Callable[[], T], full: str) -> T:
        return retried(call, f"'{self.root.url.partition('://')[0]}://{full.removeprefix('/')}'")
