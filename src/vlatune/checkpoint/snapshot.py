"""Copy tensors at one point in time and write them to files on a background thread.

Bytes pass through a bounded host buffer of reused chunks, pinned if the tensors are on an accelerator,
whose copies are queued on the compute stream before anything can change the tensors; the writer waits for
them, not the training loop.

    training loop   copy 1 | copy 2 | copy 3 | wait for a free chunk | copy 4, the last | train
    writer                   write 1 .............................. | write 2 | ...

If a save fits into the buffer, the loop only spends the time to copy. For a larger one, it also
waits until the excess is written. The writer hashes, writes, syncs, uploads and prunes, one save at
a time. A failed save stops the run at its next step (RunStoppedError); the same command resumes
from the last good checkpoint.
"""

import errno
import json
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlatune.bounded_queue import BoundedQueue
from vlatune.checkpoint.local_store import OnPhase, Score, no_phase
from vlatune.checkpoint.state import Tensors, complete
from vlatune.checkpoint.store import Store, WriteFile, prune, write_checkpoint
from vlatune.errors import RunStoppedError

CHUNK_BYTES = 64 * 1024 * 1024
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
"""safetensors' dtype names."""


class TorchHost:
    """Host memory for copies from a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def memory(self, num_bytes: int) -> Tensor:
        """Allocate flat uint8 host memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._device.type != "cpu")

    def mark(self) -> torch.Event | None:
        """Return an event after all copies so far, or None if copies are synchronous."""
        if self._device.type == "cpu":
            return None
        copied = torch.Event(self._device)
        copied.record(torch.accelerator.current_stream(self._device))
        return copied


@dataclass(frozen=True)
class Layout:
    """Header and tensor order of a safetensors file."""

    header: bytes
    names: tuple[str, ...]
    """Names in the order of their bytes."""
    num_bytes: int
    """Number of bytes after the header."""


def plan_file(tensors: Tensors) -> Layout:
    """Plan a file sorted by dtype size, then name, as safetensors does for alignment."""
    names = tuple(sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)))
    entries, end = {}, 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return Layout(len(text).to_bytes(8, "little") + text, names, end)


def join_copy(files: Mapping[str, Tensors]) -> None:
    """Take part in the gathering of sharded tensors that `Snapshot.copy` does on rank 0, one at a time."""
    for tensors in files.values():
        for name in plan_file(tensors).names:
            complete(tensors[name].detach())


@dataclass
class Chunk:
    memory: Tensor
    used: int = 0
    copied: Any = None


class SaveAbortedError(RuntimeError):
    """The other thread has failed."""


class Staging:
    """A buffer of chunks shared by the training loop and the writer, for one save at a time."""

    def __init__(self, host: TorchHost, *, most_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._host = host
        self._chunk_bytes = min(chunk_bytes, most_bytes)
        self._most_chunks = most_bytes // self._chunk_bytes
        self._num_chunks = 0
        # Large enough that `put` never blocks.
        self._free, self._full = BoundedQueue(self._most_chunks), BoundedQueue(self._most_chunks)

    def begin(self, files: Mapping[str, Tensors]) -> "Snapshot":
        """Begin a save of these files; the previous one must have ended."""
        layouts = {file: plan_file(tensors) for file, tensors in files.items()}
        if not self._num_chunks:  # all saves of a run have the same size
            self._chunk_bytes = max(1, min(self._chunk_bytes, sum(one.num_bytes for one in layouts.values())))
        return Snapshot(self, files, layouts)

    def take_free(self) -> Chunk:
        """Return a free chunk for the training loop; wait if all memory is in use."""
        may_grow = self._num_chunks < self._most_chunks
        try:
            return self._free.take(0.0 if may_grow else None)
        except TimeoutError:
            self._num_chunks += 1
            return Chunk(self._host.memory(self._chunk_bytes))
        except StopIteration:
            raise SaveAbortedError("the writer of a checkpoint has failed") from None

    def put_full(self, chunk: Chunk) -> None:
        chunk.copied = self._host.mark()
        self._full.put(chunk)

    def take_full(self) -> Chunk:
        """Return a filled chunk for the writer."""
        try:
            chunk: Chunk = self._full.take()
        except StopIteration:
            raise SaveAbortedError("the copy of a checkpoint's tensors has failed") from None
        if chunk.copied is not None:
            chunk.copied.synchronize()  # device sync, on the thread that writes
        return chunk

    def put_free(self, chunk: Chunk) -> None:
        chunk.used = 0
        self._free.put(chunk)

    def abort(self) -> None:
        """Wake all waiting threads with an error; no save can follow."""
        self._free.stop()
        self._full.stop()


class Snapshot:
    """One save: `copy` runs on the training thread while `write` runs on the writer's."""

    def __init__(self, staging: Staging, files: Mapping[str, Tensors], layouts: Mapping[str, Layout]) -> None:
        self._staging, self._tensors, self.layouts = staging, files, layouts
        self.abort = staging.abort

    def copy(self) -> None:
        """Copy all tensors, which may change afterwards; return early if the writer has failed."""
        try:
            for file, layout in self.layouts.items():
                self._copy_file(self._tensors[file], layout)
        except SaveAbortedError:
            return
        except BaseException:
            self.abort()
            raise

    def write(self, file: str, path: Path) -> None:
        layout = self.layouts[file]
        with path.open("wb") as out:
            out.write(layout.header)
            left = layout.num_bytes
            while left:
                chunk = self._staging.take_full()
                out.write(memoryview(chunk.memory.numpy())[: chunk.used])
                left -= chunk.used
                self._staging.put_free(chunk)

    def _copy_file(self, tensors: Tensors, layout: Layout) -> None:
        chunk: Chunk | None = None
        for name in layout.names:
            data = complete(tensors[name].detach()).contiguous().flatten().view(torch.uint8)
            while len(data):
                chunk = chunk or self._staging.take_free()
                fits = min(len(data), len(chunk.memory) - chunk.used)
                chunk.memory[chunk.used : chunk.used + fits].copy_(data[:fits], non_blocking=True)
                chunk.used, data = chunk.used + fits, data[fits:]
                if chunk.used == len(chunk.memory):
                    self._staging.put_full(chunk)
                    chunk = None
        if chunk:
            self._staging.put_full(chunk)


REMEDIES = {
    errno.ENOSPC: "free some space, keep fewer (--keep_checkpoints, --keep_best), or use another --storage_path",
    errno.EDQUOT: "the quota is used up: free some space, or use another --storage_path",
    errno.EFBIG: "the filesystem or a limit (ulimit -f) allows no file of this size",
    errno.EACCES: "give this user write permission, or use another --storage_path",
    errno.EROFS: "the filesystem is read-only: mount it for writing, or use another --storage_path",
}


@dataclass(frozen=True)
class Keep:
    """Number of checkpoints to keep."""

    last: int
    best: int = 0
    """Number of checkpoints to keep by validation error, or else by training loss; see `Score`."""


class BackgroundWriter:
    def __init__(
        self,
        store: Store,
        keep: Keep,
        *,
        every_s: float = 0.0,
        on_phase: OnPhase = no_phase,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._keep, self._on_phase = store, keep, on_phase
        self._every_s, self._clock, self._last_s = every_s, clock, clock()
        self._thread: threading.Thread | None = None
        self._error: RunStoppedError | None = None
        store.clean()

    def is_due(self) -> bool:
        """True if `every_s` has passed since the last save began."""
        return self._every_s > 0 and self._clock() - self._last_s >= self._every_s

    def save(
        self,
        optimizer_step: int,
        files: Mapping[str, WriteFile],
        *,
        score: Score,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        """Write a checkpoint in the background, after waiting for the previous save.

        `on_failure` is called on the thread once `check` raises the error.
        """
        self.wait()
        self._last_s = self._clock()
        self._thread = threading.Thread(
            target=self._write, args=(optimizer_step, files, score, on_failure), name="checkpoint", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a failed save, if any."""
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        """Wait for the current save, whether or not it succeeds."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Wait until the last save is committed; raise if it failed."""
        self.join()
        self.check()

    def _write(
        self,
        optimizer_step: int,
        files: Mapping[str, WriteFile],
        score: Score,
        on_failure: Callable[[], None] | None,
    ) -> None:
        doing = f"checkpoint {self._store.where(optimizer_step)} could not be written"
        try:
            write_checkpoint(self._store, optimizer_step, files, score=score, on_phase=self._on_phase)
            doing = f"checkpoint {self._store.where(optimizer_step)} is written, but an older one could not be removed"
            prune(self._store, keep_last=self._keep.last, keep_best=self._keep.best, on_phase=self._on_phase)
        except Exception as error:  # raised on the training thread at its next step
            self._error = self._explain(doing, error)
            # A note instead of a cause: the root of the exception chain must stay RunStoppedError.
            self._error.add_note("".join(traceback.format_exception(error)))
            if on_failure is not None:
                on_failure()

    def _explain(self, doing: str, error: Exception) -> RunStoppedError:
        # safetensors has the number of the error only in its message.
        found = re.search(r"\(os error (\d+)\)", str(error))
        number = int(found[1]) if found else getattr(error, "errno", None)
        reason = " ".join(str(error).split()) or type(error).__name__
        if number is not None:
            reason = os.strerror(number)
        elif not isinstance(error, OSError | RuntimeError | ValueError):
            reason = f"{type(error).__name__}: {reason}"
        try:
            steps = self._store.steps()
            last = f"the last good one is of step {steps[-1]}" if steps else "there is no earlier one"
        except Exception:  # the store itself may have failed
            last = "earlier ones are unchanged"
        remedy = REMEDIES.get(number or 0, "fix the cause")
        return RunStoppedError(f"{doing}: {reason}; {last}; {remedy}, then start the same command again")
