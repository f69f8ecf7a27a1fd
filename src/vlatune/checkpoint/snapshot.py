"""Tensors as they were at one moment, on their way to files, and the thread that writes them.

Bytes go through a bounded buffer on the host, in chunks that are kept and used again, page-locked where the tensors are
on a GPU. There the copies are queued on the stream that computes, before anything that could change the tensors, and
the host does not wait for them; who writes them does.

    loop's thread     copy 1 | copy 2 | copy 3 | no chunk is free: wait | copy 4, the last | train on
    writer's thread            write 1 ............................... | write 2 | ...

A save that fits into the buffer costs the loop the copying alone. Of a larger one the loop also waits until all but the
buffer's size is written: the host never holds more. Hashing, writing, syncing, uploading and pruning happen on the thread,
one save at a time. A failed save ends the run at its next step (RunStoppedError): the same command continues from the last
good checkpoint once the cause, which is named, is gone.
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
from typing import Any, Protocol

import torch
from torch import Tensor

from vlatune.bounded_queue import BoundedQueue
from vlatune.checkpoint.local_store import OnPhase, Score, no_phase
from vlatune.checkpoint.state import Tensors
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
"""As safetensors names them."""


class Host(Protocol):
    """What is asked of the host's side of a device."""

    def memory(self, num_bytes: int) -> Tensor:
        """Flat uint8 memory on the host."""
        ...

    def mark(self) -> Any:
        """Behind all copies so far: an event with `synchronize`, or None where a copy is done when it returns."""
        ...


class TorchHost:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def mark(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self._device))
        return copied


@dataclass(frozen=True)
class Layout:
    """A safetensors file before its bytes are there."""

    header: bytes
    names: tuple[str, ...]
    """In the order of their bytes."""
    num_bytes: int
    """Behind the header."""


def plan_file(tensors: Tensors) -> Layout:
    """Larger dtypes first, then by name, as safetensors itself does: so every tensor is aligned."""
    names = tuple(sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)))
    entries, end = {}, 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return Layout(len(text).to_bytes(8, "little") + text, names, end)


@dataclass
class Chunk:
    memory: Tensor
    used: int = 0
    copied: Any = None


class BrokenOffError(RuntimeError):
    """The other thread has given up."""


class Staging:
    """The buffer: chunks that go round between the loop's thread and the writer's, for one save at a time."""

    def __init__(self, host: Host, *, most_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._host = host
        self._chunk_bytes = min(chunk_bytes, most_bytes)
        self._most_chunks = most_bytes // self._chunk_bytes
        self._num_chunks = 0
        self._free, self._full = BoundedQueue(self._most_chunks), BoundedQueue(self._most_chunks)  # room for all

    def begin(self, files: Mapping[str, Tensors]) -> "Snapshot":
        """A save of these files; the one before must have ended."""
        layouts = {file: plan_file(tensors) for file, tensors in files.items()}
        if not self._num_chunks:  # every save of a run is of one size
            self._chunk_bytes = max(1, min(self._chunk_bytes, sum(one.num_bytes for one in layouts.values())))
        return Snapshot(self, files, layouts)

    def take_free(self) -> Chunk:
        """For the loop's thread; waits where all memory is in use."""
        may_grow = self._num_chunks < self._most_chunks
        try:
            return _take(self._free, timeout_s=0.0 if may_grow else None)
        except TimeoutError:
            self._num_chunks += 1
            return Chunk(self._host.memory(self._chunk_bytes))

    def put_full(self, chunk: Chunk) -> None:
        chunk.copied = self._host.mark()
        self._full.put(chunk)

    def take_full(self) -> Chunk:
        """For the writer's thread; its bytes are there."""
        chunk = _take(self._full)
        if chunk.copied is not None:
            chunk.copied.synchronize()  # device sync, on the thread that writes
        return chunk

    def put_free(self, chunk: Chunk) -> None:
        chunk.used = 0
        self._free.put(chunk)

    def break_off(self) -> None:
        """Whoever waits is told; no save comes after."""
        self._free.stop()
        self._full.stop()


def _take(chunks: BoundedQueue, timeout_s: float | None = None) -> Chunk:
    try:
        return chunks.take(timeout_s)
    except StopIteration:
        raise BrokenOffError("the copy of a checkpoint's tensors was broken off") from None


class Snapshot:
    """One save: `copy` on the loop's thread, `write` for each file in order on the writer's, at the same time."""

    def __init__(self, staging: Staging, files: Mapping[str, Tensors], layouts: Mapping[str, Layout]) -> None:
        self._staging, self._tensors, self.layouts = staging, files, layouts
        self.break_off = staging.break_off

    def copy(self) -> None:
        """When it returns the tensors may change. Returns also where the writer has failed, which says so itself."""
        try:
            for file, layout in self.layouts.items():
                self._copy_file(self._tensors[file], layout)
        except BrokenOffError:
            return
        except BaseException:
            self.break_off()
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
            data = tensors[name].detach().contiguous().flatten().view(torch.uint8)
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
    errno.EACCES: "give this user the right to write there, or use another --storage_path",
    errno.EPERM: "give this user the right to write there, or use another --storage_path",
    errno.EROFS: "the filesystem is read-only: mount it for writing, or use another --storage_path",
}


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay."""

    last: int
    best: int = 0
    """By validation error, or by training loss; see `Score`."""


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
        """Has `every_s` passed since the last save began?"""
        return self._every_s > 0 and self._clock() - self._last_s >= self._every_s

    def save(
        self,
        optimizer_step: int,
        files: Mapping[str, WriteFile],
        *,
        score: Score,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        """Write a checkpoint on the thread; waits first for the one that is under way.

        `on_failure` is called there, once what went wrong can be asked for with `check`.
        """
        self.wait()
        self._last_s = self._clock()
        self._thread = threading.Thread(
            target=self._write, args=(optimizer_step, files, score, on_failure), name="checkpoint", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raise what went wrong in the background; costs nothing when nothing did."""
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        """Let the save under way end, however it ends."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Until the last save is committed; raises when it failed."""
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
        except Exception as error:  # raised on the loop's thread, at its next step
            self._error = self._explain(doing, error)
            # A note, not a cause: whoever looks for the root of a failure shall find this error, which ends the run.
            self._error.add_note("".join(traceback.format_exception(error)))
            if on_failure is not None:
                on_failure()

    def _explain(self, doing: str, error: Exception) -> RunStoppedError:
        number = error_number(error)
        reason = os.strerror(number) if number is not None else _in_words(error)
        remedy = REMEDIES.get(number, "mend it") if number is not None else "mend it"
        return RunStoppedError(f"{doing}: {reason}; {self._last_good()}; {remedy}, then start the same command again")

    def _last_good(self) -> str:
        try:
            steps = self._store.steps()
        except Exception:  # the store may be what is broken
            return "earlier ones are as they were"
        return f"the last good one is of step {steps[-1]}" if steps else "there is no earlier one"


def _in_words(error: Exception) -> str:
    text = " ".join(str(error).split())
    is_message = text and isinstance(error, (OSError, RuntimeError, ValueError))
    return text if is_message else f"{type(error).__name__}: {text or 'no message'}"


def error_number(error: BaseException) -> int | None:
    """The system's number of an error; safetensors keeps it in its text only."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None
