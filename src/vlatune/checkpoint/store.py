"""Checkpoints of a run: written atomically, verified when read, pruned after the next commit.

A store is a folder (local_store.py) or an fsspec URL. In both, the manifest is written last and
removed first, and a checkpoint exists if its manifest does. Does not import torch.

    s3://bucket/runs/fold/checkpoints/00000500/trainable.safetensors ... manifest.json

Remote files are written locally, then uploaded. Objects without a manifest are leftovers of an
interrupted upload, which readers ignore and the next writer removes. Calls are retried
(remote_retry.py), also uploads without progress. Credentials come from the environment.
"""

import hashlib
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from vlatune.checkpoint.local_store import (
    MANIFEST,
    NO_SCORE,
    LocalStore,
    OnPhase,
    Score,
    Store,
    find_damage,
    folder_name,
    make_manifest,
    no_phase,
    share,
)
from vlatune.storage.files import make_folder, sync
from vlatune.storage.paths import run_url
from vlatune.storage.remote_retry import retried
from vlatune.storage.root import Root
from vlatune.storage.url_folder import CHUNK_BYTES, cache_folder, make_once, upload_file

WriteFile = Callable[[Path], object]
BEST = "best"
"""Name that selects the best checkpoint."""
CHECKPOINTS = "checkpoints"
"""Folder of checkpoints, in the run's folder or below --storage_path."""


def open_store(run_dir: Path, storage_path: str | None) -> Store:
    """Open the checkpoints in the run's folder, or below `storage_path` under the run's name."""
    if storage_path is None:
        return LocalStore(run_dir / CHECKPOINTS)
    root = storage_root(f"{run_url(run_dir, storage_path)}/{CHECKPOINTS}")
    if root.is_local:
        return LocalStore(Path(root.path))
    # A worker on another node does not have the run's folder, and must not create one.
    staging = run_dir if run_dir.is_dir() else cache_folder() / "staging" / run_dir.resolve().name
    return RemoteStore(root, staging / CHECKPOINTS)


def storage_root(url: str, what: str = "--storage_path") -> Root:
    """Return a folder of a run in storage; raise if it cannot be one."""
    try:
        root = Root(url, has_checksums=False)
        root.filesystem()
    except (ValueError, RuntimeError) as error:  # unknown scheme, missing driver, or a password
        reason = str(error).removeprefix(f"dataset '{url}': ").removeprefix("a dataset's ")
        raise type(error)(f"{what}: {reason}") from None
    return root


def absolute_storage(storage_path: str | None) -> str | None:
    """Make a relative path absolute, for processes in another folder; URLs are unchanged."""
    if storage_path is None or "://" in storage_path:
        return storage_path
    return str(Path(storage_path).expanduser().resolve())


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints in a run's folder, oldest first."""
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
    """Write all files, then the manifest, then publish the checkpoint."""
    temporary = store.begin(optimizer_step)
    try:
        on_phase("begun")
        for name, write in files.items():
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
            share(path)
            sync(path)
            on_phase("file")
        on_phase("written")
        (temporary / MANIFEST).write_bytes(make_manifest(temporary, optimizer_step, score).to_bytes())
        for path in (temporary / MANIFEST, *(path for path in temporary.rglob("*") if path.is_dir()), temporary):
            sync(path)
        on_phase("synced")
        store.commit(optimizer_step, temporary, on_phase)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # at once, as the disk may be full
        raise
    on_phase("committed")


def find_newest(store: Store, *, warn: Callable[[str], None]) -> int | None:
    """Return the newest intact checkpoint; None if there are no checkpoints.

    Damaged ones are skipped with a warning. Raises if all are damaged, because starting over is the
    user's decision.
    """
    steps = store.steps()
    for step in reversed(steps):
        problem = store.problem(step)
        if problem is None:
            return step
        warn(f"WARNING: checkpoint {store.where(step)} is DAMAGED ({problem}); taking the one before it")
    if steps:
        raise ValueError(
            f"all {len(steps)} checkpoints are damaged, the newest is {store.where(steps[-1])}; restore one, or remove them to start over"
        )
    return None


def choose(store: Store, name: str | None, *, warn: Callable[[str], None]) -> int:
    """Return the checkpoint of that name or number, by default the newest intact one."""
    if name is None:
        newest = find_newest(store, warn=warn)
        if newest is None:
            raise ValueError(f"there is no checkpoint yet in '{store.root.url}'; train first, or check RUN")
        return newest
    steps = store.steps()
    if name == BEST:
        for step in best_first(store, steps):
            problem = store.problem(step)
            if problem is None:
                return step
            warn(f"WARNING: checkpoint {store.where(step)} is DAMAGED ({problem}); taking the next best")
        raise ValueError(
            f"--checkpoint={BEST}: no intact checkpoint in '{store.root.url}' has a validation error or a loss; "
            f"leave the flag out to take the newest"
        )
    if not name.isdecimal() or int(name) not in steps:
        there = ", ".join(folder_name(step) for step in steps) or "none"
        raise ValueError(f"--checkpoint={name}: there is no such checkpoint; there are: {there}")
    problem = store.problem(int(name))
    if problem:
        raise ValueError(f"--checkpoint={name}: {store.where(int(name))} is damaged ({problem}); choose another")
    return int(name)


def prune(store: Store, *, keep_last: int, keep_best: int = 0, on_phase: OnPhase = no_phase) -> None:
    """Remove all but the newest `keep_last` and the best `keep_best` checkpoints."""
    steps = store.steps()
    kept = set(steps[-keep_last:]) | set(best_first(store, steps)[:keep_best] if keep_best else ())
    for step in steps:
        if step not in kept:
            store.remove(step, on_phase)
    on_phase("pruned")


def best_first(store: Store, steps: Iterable[int]) -> list[int]:
    """Sort validated checkpoints by validation error or, if there are none, all by training loss.

    The earlier of two equal ones comes first.
    """
    errors, losses = {}, {}
    for step in steps:
        with suppress(ValueError):  # a damaged one is not among the best
            score = store.manifest(step).score
            errors[step], losses[step] = score.val_error, score.loss
    for figures in (errors, losses):
        if known := {step: one for step, one in figures.items() if one is not None and math.isfinite(one)}:
            return sorted(known, key=lambda step: (known[step], step))
    return []


PROBE = ".vlatune-probe"


class RemoteStore(Store):
    def steps(self) -> list[int]:
        names = (found.partition("/")[0] for found in self.root.glob(f"*/{MANIFEST}"))
        return sorted(int(name) for name in names if name.isdecimal())

    @contextmanager
    def opened(self, optimizer_step: int) -> Iterator[Path]:
        """Yield a temporary folder with a verified copy of the checkpoint."""
        with tempfile.TemporaryDirectory(prefix="vlatune-checkpoint-") as name:
            self._download(optimizer_step, Path(name))
            yield Path(name)

    def local_copy(self, optimizer_step: int) -> Path:
        content = f"{self.where(optimizer_step)} {self.read_bytes(optimizer_step, MANIFEST)}".encode()
        copy = make_folder(cache_folder(), CHECKPOINTS) / hashlib.sha256(content).hexdigest()[:32]
        make_once(copy, lambda temporary: self._download(optimizer_step, temporary))
        return copy

    def drop_copy(self, copy: Path) -> None:
        shutil.rmtree(copy, ignore_errors=True)

    def _download(self, optimizer_step: int, folder: Path) -> None:
        for file in (MANIFEST, *self.manifest(optimizer_step).files):
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            with self.root.open(f"{folder_name(optimizer_step)}/{file}") as source, path.open("wb") as into:
                shutil.copyfileobj(source, into, length=CHUNK_BYTES)
        if problem := find_damage(Root(str(folder), has_checksums=False), "", optimizer_step):
            raise RuntimeError(f"checkpoint {self.where(optimizer_step)} is damaged ({problem}); start again")

    def publish(self, optimizer_step: int, temporary: Path, on_phase: OnPhase) -> None:
        """Upload all files, the manifest last."""
        names = sorted(path.relative_to(temporary).as_posix() for path in temporary.rglob("*") if path.is_file())
        names.remove(MANIFEST)
        for name in names:
            on_phase("uploading")
            upload_file(temporary / name, self.root, f"{folder_name(optimizer_step)}/{name}")
        on_phase("uploaded")
        upload_file(temporary / MANIFEST, self.root, f"{folder_name(optimizer_step)}/{MANIFEST}")
        shutil.rmtree(temporary)

    def remove(self, optimizer_step: int, on_phase: OnPhase) -> None:
        fs, folder = self.root.filesystem(), self.root.join(folder_name(optimizer_step))
        with suppress(FileNotFoundError):  # a retry after a lost response
            self._call(lambda: fs.rm_file(f"{folder}/{MANIFEST}"), folder)
        on_phase("removing")
        self._remove_folder(folder)

    def clean(self) -> None:
        super().clean()
        complete = {folder_name(step) for step in self.steps()}
        for name in self.root.glob("*"):
            if name.isdecimal() and name not in complete:
                self._remove_folder(self.root.join(name))

    def check_writable(self) -> None:
        try:
            fs, name = self.root.filesystem(), self.root.join(PROBE)
            self._call(lambda: fs.pipe_file(name, b"vlatune"), name)
            self._call(lambda: fs.rm_file(name), name)
        except Exception as error:  # any error means that it is not writable
            raise ValueError(
                f"checkpoints cannot be written to '{self.root.url}' ({error}); check --storage_path and the credentials"
            ) from None

    def _remove_folder(self, folder: str) -> None:
        fs = self.root.filesystem()
        with suppress(FileNotFoundError):  # object stores have no empty folders
            self._call(lambda: fs.rm(folder, recursive=True), folder)

    def _call[T](self, call: Callable[[], T], full: str) -> T:
        return retried(call, f"'{self.root.url.partition('://')[0]}://{full.removeprefix('/')}'")
