"""Checkpoints of a run: written aside, verified when read, pruned only after the next one is whole.

A store is a folder (local_store.py) or a place in an object store (remote_store.py). In both a checkpoint is there
when its manifest is, the manifest comes last, and it goes first. Nothing here knows torch.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from vlatune.checkpoint.local_store import LocalStore, folder_name
from vlatune.checkpoint.manifest import MANIFEST, Manifest, OnPhase, make_manifest, no_phase, share
from vlatune.files import sync

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
    from vlatune.checkpoint.remote_store import RemoteStore
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
    loss: float | None = None,
    on_phase: OnPhase = no_phase,
) -> None:
    """Write each file (name -> what writes it), then the manifest, then make it the checkpoint of this step."""
    aside = store.begin(optimizer_step)
    try:
        on_phase("begun")
        _fill(aside, optimizer_step, files, loss, on_phase)
        store.commit(optimizer_step, aside, on_phase)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)  # at once: on a full disk it is in the way
        raise
    on_phase("committed")


def _fill(
    aside: Path, optimizer_step: int, files: Mapping[str, WriteFile], loss: float | None, on_phase: OnPhase
) -> None:
    for name, write in files.items():
        path = aside / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
        share(path)
        sync(path)
        on_phase("file")
    on_phase("written")
    (aside / MANIFEST).write_bytes(make_manifest(aside, optimizer_step, loss).to_bytes())
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
    """Remove all but the newest `keep_last` and the `keep_best` of lowest loss; call it when a new one is committed."""
    steps = store.steps()
    kept = set(steps[-keep_last:]) | set(_best(store, steps, keep_best))
    for step in steps:
        if step not in kept:
            store.remove(step, on_phase)
    on_phase("pruned")


def _best(store: Store, steps: Iterable[int], count: int) -> list[int]:
    if count == 0:
        return []
    losses = {step: loss for step in steps if (loss := _loss(store, step)) is not None}
    return sorted(losses, key=lambda step: (losses[step], -step))[:count]


def _loss(store: Store, optimizer_step: int) -> float | None:
    try:
        return store.manifest(optimizer_step).loss
    except ValueError:  # damaged: not among the best
        return None
