"""Tensors as they were at one moment, on their way to files: the part of a save that the training loop pays for.

Bytes go through a bounded buffer on the host, in chunks that are kept and used again, page-locked where the tensors are
on a GPU. There the copies are queued on the stream that computes, before anything that could change the tensors, and
the host does not wait for them; who writes them does.

    loop's thread     copy 1 | copy 2 | copy 3 | no chunk is free: wait | copy 4, the last | train on
    writer's thread            write 1 ............................... | write 2 | ...

A save that fits into the buffer costs the loop the copying alone. Of a larger one the loop also waits until all but the
buffer's size is written: the host never holds more.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from vlatune.bounded_queue import BoundedQueue
from vlatune.checkpoint.state import Tensors

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
