"""Checkpoints of a run: written aside, verified when read, pruned only after the next one is whole.

A store is a folder (local_store.py) or a place in an object store (any fsspec URL). In both a checkpoint is there when its
manifest is, the manifest comes last, and it goes first. Nothing here knows torch.

    s3://bucket/runs/fold/checkpoints/00000500/trainable.safetensors ... manifest.json

Remote: files are written on this machine first, then sent. Objects without a manifest are what an interrupted upload left:
ignored by readers, cleaned by the next writer. Calls are tried again as remote_retry.py says, and an upload that makes no
progress is given up and tried again, too. Credentials come from the environment.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from vlatune.checkpoint.local_store import (
    ASIDE,
    MANIFEST,
    NO_SCORE,
    Entry,
    LocalStore,
    Manifest,
    OnPhase,
    Score,
    begin_aside,
    compare_entry,
    find_problem,
    folder_name,
    hash_stream,
    make_manifest,
    no_phase,
    parse_manifest,
    share,
)
from vlatune.dataset.storage.remote_retry import retried
from vlatune.dataset.storage.root import Root
from vlatune.files import refuse_link, sync

WriteFile = Callable[[Path], object]
CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints, in the run's own or below --storage_path."""


class Store(Protocol):
    def where(self, optimizer_step: int) -> str: ...
    def steps(self) -> list[int]: ...
    def manifest(self, optimizer_step: int) -> Manifest: ...
    def problem(self, optimizer_step: int) -> str | None: ...
    def read_bytes(self, optimizer_step: int, name: str) -> bytes: ...
    def opened(self, optimizer_step: int) -> AbstractContextManager[Path]: ...
    def begin(self, optimizer_step: int) -> Path: ...
    def commit(self, optimizer_step: int, aside: Path, on_phase: OnPhase) -> None: ...
    def remove(self, optimizer_step: int, on_phase: OnPhase) -> None: ...
    def clean(self) -> None: ...
    def check_writable(self) -> None: ...


def open_store(run_dir: Path, storage_path: str | None) -> Store:
    """Where a run's checkpoints are: in its folder, or below `storage_path` (a folder or URL) under the run's name."""
    if storage_path is None:
        return LocalStore(run_dir / CHECKPOINTS)
    from vlatune.checkpoint.store import RemoteStore
    from vlatune.dataset.storage.root import Root

    url = f"{storage_path.rstrip('/')}/{run_dir.resolve().name}/{CHECKPOINTS}"
    try:
        root = Root(url, has_checksums=False)
        root.filesystem()
    except (ValueError, RuntimeError) as error:  # an unknown scheme, a driver that is not installed, a password
        reason = str(error).removeprefix(f"dataset '{url}': ").removeprefix("a dataset's ")
        raise type(error)(f"--storage_path: {reason}") from None
    return LocalStore(Path(root.path)) if root.is_local else RemoteStore(root, staging=run_dir / CHECKPOINTS)


def place_of(store: Store) -> str:
    """Folder or URL that a store's checkpoints lie in."""
    return store.where(0).rpartition("/")[0]


def absolute_storage(storage_path: str | None) -> str | None:
    """The same place for a process that runs in another folder: a relative path made absolute, a URL as it is."""
    if storage_path is None or "://" in storage_path:
        return storage_path
    return str(Path(storage_path).expanduser().resolve())


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints in a run's folder, oldest first."""
    store = LocalStore(run_dir / CHECKPOINTS)
    return [store.path(step) for step in store.steps()]


def write_checkpoint(
    store: Store,
    optimizer_step: int,
    files: Mapping[str, WriteFile],
    *,
    score: Score = NO_SCORE,
    on_phase: OnPhase = no_phase,
) -> None:
    """Write each file (name -> what writes it), then the manifest, then make it the checkpoint of this step."""
    aside = store.begin(optimizer_step)
    try:
        on_phase("begun")
        _fill(aside, optimizer_step, files, score, on_phase)
        store.commit(optimizer_step, aside, on_phase)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)  # at once: on a full disk it is in the way
        raise
    on_phase("committed")


def _fill(aside: Path, optimizer_step: int, files: Mapping[str, WriteFile], score: Score, on_phase: OnPhase) -> None:
    for name, write in files.items():
        path = aside / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
        share(path)
        sync(path)
        on_phase("file")
    on_phase("written")
    (aside / MANIFEST).write_bytes(make_manifest(aside, optimizer_step, score).to_bytes())
    for path in (aside / MANIFEST, *(path for path in aside.rglob("*") if path.is_dir()), aside):
        sync(path)
    on_phase("synced")


def find_newest(store: Store, *, warn: Callable[[str], None], strict: bool = False) -> int | None:
    """The newest checkpoint whose files are what its manifest says; None when there is none at all.

    A damaged one is passed over with a warning, or refused when `strict`. When all are damaged it is refused: to begin
    anew is the user's decision.
    """
    steps = store.steps()
    for step in reversed(steps):
        problem = store.problem(step)
        if problem is None:
            return step
        if strict:
            raise ValueError(
                f"checkpoint {store.where(step)} is damaged ({problem}); --strict_resume=true does not go back to the one before it: "
                f"restore it, remove it, or leave the flag out"
            )
        warn(f"WARNING: checkpoint {store.where(step)} is DAMAGED ({problem}); taking the one before it")
    if steps:
        raise ValueError(
            f"all {len(steps)} checkpoints are damaged, the newest is {store.where(steps[-1])}; restore one, or remove them to begin anew"
        )
    return None


def choose(store: Store, name: str | None, *, warn: Callable[[str], None]) -> int:
    """The checkpoint that a person asked for, by its name or number; the newest whole one when they did not."""
    if name is None:
        newest = find_newest(store, warn=warn)
        if newest is None:
            raise ValueError(f"there is no checkpoint yet in '{place_of(store)}'; train first, or check RUN")
        return newest
    steps = store.steps()
    if not name.isdecimal() or int(name) not in steps:
        there = ", ".join(folder_name(step) for step in steps) or "none"
        raise ValueError(f"--checkpoint={name}: there is no such checkpoint; there are: {there}")
    problem = store.problem(int(name))
    if problem:
        raise ValueError(f"--checkpoint={name}: {store.where(int(name))} is damaged ({problem}); choose another")
    return int(name)


def prune(store: Store, *, keep_last: int, keep_best: int = 0, on_phase: OnPhase = no_phase) -> None:
    """Remove all but the newest `keep_last` and the `keep_best`; call it when a new one is committed.

    Those of lowest validation error are best; where none was validated, those of lowest training loss.
    """
    steps = store.steps()
    kept = set(steps[-keep_last:]) | set(_best(store, steps, keep_best))
    for step in steps:
        if step not in kept:
            store.remove(step, on_phase)
    on_phase("pruned")


def _best(store: Store, steps: Iterable[int], count: int) -> list[int]:
    if count == 0:
        return []
    scores = {step: _score(store, step) for step in steps}
    by_loss = {step: score.loss for step, score in scores.items() if score.loss is not None}
    by_error = {step: score.val_error for step, score in scores.items() if score.val_error is not None}
    figures = by_error or by_loss
    return sorted(figures, key=lambda step: (figures[step], -step))[:count]


def _score(store: Store, optimizer_step: int) -> Score:
    try:
        return store.manifest(optimizer_step).score
    except ValueError:  # damaged: not among the best
        return NO_SCORE


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
        return begin_aside(self.staging, optimizer_step)

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
