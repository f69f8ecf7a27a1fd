"""Collate batches and copy them to the device on a prefetching thread.

Collating removes ids and trims prompt padding. All tensor shapes are determined on the host,
because asking the device would synchronise.

Accelerators: the feed assembles batches in pinned memory from `empty`, which is copied to the
device on a separate stream and reused when the copy is done. The compute stream waits for the
copy's event on the device. Only the prefetching thread may block, on the oldest copy if
MAX_PENDING are pending. Columns that are not contiguous pinned memory are copied first: trimmed
prompts, and batches that are not from the feed.

    prefetching thread    fill N+1 | send N+1 ............ | fill N+2 | ...
    copy stream                      [ copy N+1, event ]
    compute stream        [ N computes ............ ] wait for event [ N+1 computes

CPU: tensors share the feed's memory; only trimmed columns are copied. `depth` batches are ready on
the device, and one more on the host.
"""

import math
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from vlatune.batch import IDS, SLOT, TOKEN_MASK, Columns
from vlatune.bounded_queue import ReadAhead
from vlatune.data.transforms import cut_prompts

MAX_PENDING = 2
"""Maximum pending copies; together with the batch being assembled, three batches are pinned."""


@dataclass(frozen=True)
class DeviceBatch:
    tensors: dict[str, Tensor]
    samples: np.ndarray
    """(B, 2): dataset_index and index of every row, on the host."""


@dataclass(frozen=True)
class HostBatch:
    columns: Columns
    """Columns to copy to the device; views of the feed's arrays."""
    samples: np.ndarray

    def to_tensors(self) -> DeviceBatch:
        """Return tensors that share memory; only non-contiguous columns are copied."""
        columns = {key: np.ascontiguousarray(values) for key, values in self.columns.items()}
        return DeviceBatch({key: torch.from_numpy(values) for key, values in columns.items()}, self.samples)


def collate(columns: Columns) -> HostBatch:
    """Convert a batch of the feed to the policy's input."""
    samples = np.stack([columns["dataset_index"], columns["index"]], axis=1)
    if TOKEN_MASK in columns:
        columns = cut_prompts(columns)
    return HostBatch({key: values for key, values in columns.items() if key not in (*IDS, SLOT)}, samples)


class Lease:
    """Owns memory of the pool while an array or a tensor over it is alive."""

    def __init__(self, memory: np.ndarray) -> None:
        self.__array_interface__ = memory.__array_interface__


class HostMemory:
    """Pool of memory for arrays, reused when they are freed. For one thread; any thread may free.

    Avoids page faults and repeated pinning, which can cost more than filling the memory.
    """

    def __init__(self, make: Callable[[int], np.ndarray]) -> None:
        """Create a pool; `make` returns flat uint8 memory."""
        self._make = make
        self._free: defaultdict[int, list[np.ndarray]] = defaultdict(list)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        free = self._free[num_bytes]
        memory = free.pop() if free else self._make(num_bytes)
        lease = Lease(memory)
        weakref.finalize(lease, free.append, memory)
        return np.asarray(lease).view(dtype).reshape(shape)


class Accelerator:
    """PyTorch's device-neutral streams and events."""

    def __init__(self, device: torch.device) -> None:
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self._device = torch.device(device.type, index)
        self.copy_stream = torch.Stream(self._device)

    def enter_thread(self) -> None:
        torch.accelerator.set_device_index(self._device.index)  # the current device is thread-local

    def compute_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)

    def event(self) -> torch.Event:
        return torch.Event(self._device, enable_timing=True)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def is_pinned(self, host: Tensor) -> bool:
        return host.is_pinned()

    def on_copy_stream(self) -> AbstractContextManager[Any]:
        return self.copy_stream

    def to_device(self, host: Tensor) -> Tensor:
        return host.to(self._device, non_blocking=True)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)


@dataclass(frozen=True)
class Copy:
    """A copy to the device that may be pending."""

    begun: torch.Event
    copied: torch.Event
    host: DeviceBatch
    """Its source, kept until the copy is done."""
    batch: DeviceBatch


class StreamTransfer:
    """Transfer to an accelerator.

    The prefetching thread calls `empty`, `stage` and `send`; the trainer calls `request` and
    `receive`.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.collate_s, self.copy_s = 0.0, 0.0
        self.copied_bytes = 0
        """Bytes copied on the host to be pinned or contiguous."""
        self.enter_thread = accelerator.enter_thread
        self.empty = HostMemory(lambda num_bytes: accelerator.pinned(num_bytes).numpy()).empty
        self._accelerator = accelerator
        self._pending: deque[Copy] = deque()
        self._waits: deque[tuple[torch.Event, torch.Event]] = deque()
        self._waited_s = 0.0

    def stage(self, batch: HostBatch) -> DeviceBatch:
        """Return the batch in pinned memory; columns that already are pinned are not copied."""
        self._release_finished()
        begin = time.perf_counter()
        tensors = {key: self._pin(values) for key, values in batch.columns.items()}
        self.collate_s += time.perf_counter() - begin
        return DeviceBatch(tensors, batch.samples)

    def send(self, staged: DeviceBatch) -> Copy:
        begun, copied = self._accelerator.event(), self._accelerator.event()
        with self._accelerator.on_copy_stream():
            begun.record(self._accelerator.copy_stream)
            tensors = {key: self._accelerator.to_device(host) for key, host in staged.tensors.items()}
            copied.record(self._accelerator.copy_stream)
        copy = Copy(begun, copied, staged, DeviceBatch(tensors, staged.samples))
        self._pending.append(copy)
        return copy

    def _release_finished(self) -> None:
        """Release the memory of finished copies; blocks on the oldest if too many are pending."""
        while self._pending and (len(self._pending) >= MAX_PENDING or self._pending[0].copied.query()):
            oldest = self._pending.popleft()
            oldest.copied.synchronize()  # device sync of one copy, on the prefetching thread
            self.copy_s += oldest.begun.elapsed_time(oldest.copied) / 1000

    def _pin(self, values: np.ndarray) -> Tensor:
        if values.flags.c_contiguous and self._accelerator.is_pinned(tensor := torch.from_numpy(values)):
            return tensor
        out = self.empty(values.shape, values.dtype)
        np.copyto(out, values)  # torch's copy would start threads that compete with training
        self.copied_bytes += values.nbytes
        return torch.from_numpy(out)

    def request(self) -> torch.Event:
        """Mark the compute stream after all work so far: from here, the device waits for data."""
        requested = self._accelerator.event()
        requested.record(self._accelerator.compute_stream())
        return requested

    def receive(self, sent: Copy, requested: torch.Event | None) -> DeviceBatch:
        """Return the batch for the current stream; without `requested` the wait is not counted."""
        stream = self._accelerator.compute_stream()
        stream.wait_event(sent.copied)
        for tensor in sent.batch.tensors.values():
            # Allocated on the copy stream: prevents reuse of its memory while in use.
            self._accelerator.record_stream(tensor, stream)
        if requested is not None:
            arrived = self._accelerator.event()
            arrived.record(stream)
            self._waits.append((requested, arrived))
        self._count_waits()
        return sent.batch

    def take_waited_s(self) -> float:
        """Return the seconds since the last call that the device waited for data; does not block.

        Waits that the device has not reached yet are counted by a later call.
        """
        self._count_waits()
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def _count_waits(self) -> None:
        while self._waits and self._waits[0][1].query():
            requested, arrived = self._waits.popleft()
            self._waited_s += requested.elapsed_time(arrived) / 1000


class HostTransfer:
    """Transfer to the CPU: no copies."""

    copy_s = 0.0

    def __init__(self) -> None:
        self.empty = HostMemory(lambda num_bytes: np.empty(num_bytes, np.uint8)).empty
        self.collate_s = 0.0
        self._waited_s = 0.0

    def enter_thread(self) -> None: ...

    def stage(self, batch: HostBatch) -> DeviceBatch:
        begin = time.perf_counter()
        staged = batch.to_tensors()
        self.collate_s += time.perf_counter() - begin
        return staged

    def send(self, staged: DeviceBatch) -> DeviceBatch:
        return staged

    def request(self) -> float:
        return time.perf_counter()

    def receive(self, sent: DeviceBatch, requested: float | None) -> DeviceBatch:
        if requested is not None:
            self._waited_s += time.perf_counter() - requested
        return sent

    def take_waited_s(self) -> float:
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s


Transfer = StreamTransfer | HostTransfer


class Prefetcher:
    """Iterator over batches on the device, for one consumer thread."""

    def __init__(self, source: Iterator[Columns], transfer: Transfer, *, depth: int) -> None:
        self._transfer = untyped = cast(Any, transfer)
        self._is_first = True

        def send(columns: Columns) -> Any:
            return untyped.send(
                untyped.stage(collate(columns))
            )  # no reference to `self`: a dropped prefetcher ends its thread

        self._ahead = ReadAhead(_on_thread(source, transfer), depth=depth, name="prefetch", prepare=send)

    def __iter__(self) -> Iterator[DeviceBatch]:
        return self

    def __next__(self) -> DeviceBatch:
        # Waiting for the first batch is startup time.
        requested = None if self._is_first else self._transfer.request()
        sent = next(self._ahead)
        self._is_first = False
        return self._transfer.receive(sent, requested)

    def take_waited_s(self) -> float:
        """Return the seconds since the last call that training waited for data, after startup."""
        return self._transfer.take_waited_s()

    def stage_s(self) -> dict[str, float]:
        """Return the seconds so far spent on collating and copying."""
        return {"collate": self._transfer.collate_s, "copy": self._transfer.copy_s}

    def close(self) -> None:
        """Stop the thread. Close a source with a blocking `next` first: the thread may be waiting
        in it."""
        self._ahead.close()


def _on_thread(source: Iterator[Columns], transfer: Transfer) -> Iterator[Columns]:
    """Iterate over the source on the prefetching thread."""
    transfer.enter_thread()
    yield from source
