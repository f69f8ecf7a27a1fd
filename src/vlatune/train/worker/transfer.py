"""Host columns -> batches on the device, the next ones prepared on a thread while one computes: the only thread between
the object store and the device.

Collate: ids are set apart, the prompt's padding is cut. Everything that decides a tensor's shape is decided here, on the
host, before a byte goes to the device: asking the device for the longest prompt would make the host wait for it.

Accelerators: the feed puts a batch together in page-locked memory that `empty` gives; from there it goes to the device on
a stream of its own. The memory is held until the copy out of it is done, then given out again. The compute stream waits
on the device for the copy's event; the host waits for nothing but, on the prefetcher's thread, for the oldest copy where
MOST_UNDER_WAY of them are not done. Only what does not lie in page-locked memory in one piece is copied once more: prompts
that were cut, and batches that come from elsewhere than the feed.

    prefetcher's thread   fill N+1 | send N+1 ............ | fill N+2 | ...
    copy stream                      [ copy N+1, event ]
    compute stream        [ N computes ............ ] wait for event [ N+1 computes

The CPU: tensors over the feed's memory, nothing is copied but what was cut. The prefetcher takes host columns from the
feed, waits for room, collates and sends them; so `depth` batches lie ready on the device and one more on the host.
"""

import math
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from vlatune.batch import IDS, SLOT, TOKEN_MASK, Columns
from vlatune.bounded_queue import ReadAhead
from vlatune.pipeline.reorder_buffer import Empty
from vlatune.pipeline.transforms import cut_prompts


@dataclass(frozen=True)
class DeviceBatch:
    tensors: dict[str, Tensor]
    samples: np.ndarray
    """(B, 2): dataset_index and index of every row, on the host."""


@dataclass(frozen=True)
class HostBatch:
    columns: Columns
    """What goes to the device, key by key; views of the feed's arrays."""
    samples: np.ndarray

    def wrapped(self) -> DeviceBatch:
        """Tensors over the same memory; only a column that was cut is copied, to be in one piece again."""
        whole = {key: np.ascontiguousarray(values) for key, values in self.columns.items()}
        return DeviceBatch({key: torch.from_numpy(values) for key, values in whole.items()}, self.samples)


def collate(columns: Columns) -> HostBatch:
    """A batch of the feed as the policy takes it."""
    samples = np.stack([columns["dataset_index"], columns["index"]], axis=1)
    if TOKEN_MASK in columns:
        columns = cut_prompts(columns)
    return HostBatch({key: values for key, values in columns.items() if key not in (*IDS, SLOT)}, samples)


MOST_UNDER_WAY = 2
"""Copies to the device: with the batch that is put together meanwhile, three batches lie in page-locked memory."""


class Event(Protocol):
    def record(self, stream: Any, /) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds; both events must be done."""
        ...


class Machine(Protocol):
    """What is asked of an accelerator; tests write down the calls, and their order."""

    copy_stream: Any

    def enter_thread(self) -> None:
        """Called once on the thread that stages and sends."""
        ...

    def compute_stream(self) -> Any: ...
    def event(self) -> Event: ...
    def page_locked(self, num_bytes: int) -> Tensor:
        """Flat uint8 host memory that the device can copy from by itself."""
        ...

    def is_page_locked(self, host: Tensor) -> bool: ...

    def on_copy_stream(self) -> AbstractContextManager[Any]: ...
    def to_device(self, host: Tensor) -> Tensor:
        """Begin a copy on the current stream; the host does not wait for it."""
        ...

    def record_stream(self, tensor: Tensor, stream: Any) -> None: ...


class Lease:
    """Stands for memory that is given out; NumPy and torch hold it as long as an array or a tensor over it lives."""

    def __init__(self, memory: np.ndarray) -> None:
        self.__array_interface__ = memory.__array_interface__


class HostMemory:
    """Memory for arrays, given out again when nobody holds them any more. For one thread; any may let go.

    Fresh memory can cost more than the copy that fills it: 32 rows of three pictures took 1.5 to 5 ms of CPU, and 1.4 ms
    in memory that was used before; the rest are page faults. To page-lock it costs more still.
    """

    def __init__(self, make: Callable[[int], np.ndarray]) -> None:
        """`make` gives flat uint8 memory."""
        self._make = make
        self._free: defaultdict[int, list[np.ndarray]] = defaultdict(list)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        free = self._free[num_bytes]
        memory = free.pop() if free else self._make(num_bytes)
        lease = Lease(memory)
        weakref.finalize(lease, free.append, memory)
        return np.asarray(lease).view(dtype).reshape(shape)


class TorchMachine:
    """PyTorch's device-neutral streams and events."""

    def __init__(self, device: torch.device) -> None:
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self._device = torch.device(device.type, index)
        self.copy_stream = torch.Stream(self._device)

    def enter_thread(self) -> None:
        torch.accelerator.set_device_index(self._device.index)  # the current device is each thread's own

    def compute_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)

    def event(self) -> Event:
        return torch.Event(self._device, enable_timing=True)

    def page_locked(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def is_page_locked(self, host: Tensor) -> bool:
        return host.is_pinned()

    def on_copy_stream(self) -> AbstractContextManager[Any]:
        return self.copy_stream

    def to_device(self, host: Tensor) -> Tensor:
        return host.to(self._device, non_blocking=True)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)


@dataclass(frozen=True)
class UnderWay:
    """A copy to the device that may not be done, and the memory that it reads."""

    begun: Event
    copied: Event
    host: DeviceBatch


@dataclass(frozen=True)
class Sent:
    batch: DeviceBatch
    copied: Event


class StreamTransfer:
    """To an accelerator. `empty`, `stage` and `send` on the prefetcher's thread, `ask` and `receive` on the trainer's."""

    def __init__(self, machine: Machine) -> None:
        self.collate_s, self.copy_s = 0.0, 0.0
        self.copied_bytes = 0
        """Copied on the host, to be page-locked or in one piece."""
        self.enter_thread = machine.enter_thread
        self.empty = HostMemory(lambda num_bytes: machine.page_locked(num_bytes).numpy()).empty
        self._machine = machine
        self._under_way: deque[UnderWay] = deque()
        self._waits: deque[tuple[Event, Event]] = deque()
        self._waited_s = 0.0

    def stage(self, batch: HostBatch) -> DeviceBatch:
        """The batch in page-locked memory, where it lies already but for what was cut."""
        self._let_go()
        begin = time.perf_counter()
        tensors = {key: self._page_locked(values) for key, values in batch.columns.items()}
        self.collate_s += time.perf_counter() - begin
        return DeviceBatch(tensors, batch.samples)

    def send(self, staged: DeviceBatch) -> Sent:
        begun, copied = self._machine.event(), self._machine.event()
        with self._machine.on_copy_stream():
            begun.record(self._machine.copy_stream)
            tensors = {key: self._machine.to_device(host) for key, host in staged.tensors.items()}
            copied.record(self._machine.copy_stream)
        self._under_way.append(UnderWay(begun, copied, staged))
        return Sent(DeviceBatch(tensors, staged.samples), copied)

    def _let_go(self) -> None:
        """Of the memory of copies that are done; waits for the oldest where too many are not."""
        while self._under_way and (len(self._under_way) >= MOST_UNDER_WAY or self._under_way[0].copied.query()):
            oldest = self._under_way.popleft()
            oldest.copied.synchronize()  # device sync, for the copy alone: the prefetcher's thread alone may stand here
            self.copy_s += oldest.begun.elapsed_time(oldest.copied) / 1000

    def _page_locked(self, values: np.ndarray) -> Tensor:
        if values.flags.c_contiguous and self._machine.is_page_locked(there := torch.from_numpy(values)):
            return there
        out = self.empty(values.shape, values.dtype)
        np.copyto(out, values)  # by NumPy: torch's would start threads of its own, which computing needs
        self.copied_bytes += values.nbytes
        return torch.from_numpy(out)

    def ask(self) -> Event:
        """A mark on the compute stream behind all work so far: from here on the device waits for data."""
        asked = self._machine.event()
        asked.record(self._machine.compute_stream())
        return asked

    def receive(self, sent: Sent, asked: Event | None) -> DeviceBatch:
        """The batch, for work on the current stream; without `asked` the wait is not counted."""
        stream = self._machine.compute_stream()
        stream.wait_event(sent.copied)
        for tensor in sent.batch.tensors.values():
            # Allocated for the copy stream: without this its memory could be written again while computing reads it.
            self._machine.record_stream(tensor, stream)
        if asked is not None:
            arrived = self._machine.event()
            arrived.record(stream)
            self._waits.append((asked, arrived))
        self._count_waits()
        return sent.batch

    def take_waited_s(self) -> float:
        """Seconds since the last call for which the device had nothing to do but wait for data; never waits itself.

        A wait that the device has not come to yet is counted by a later call.
        """
        self._count_waits()
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def _count_waits(self) -> None:
        while self._waits and self._waits[0][1].query():
            asked, arrived = self._waits.popleft()
            self._waited_s += asked.elapsed_time(arrived) / 1000


class HostTransfer:
    """To the CPU: nothing moves."""

    copy_s = 0.0

    def __init__(self) -> None:
        self.empty = HostMemory(lambda num_bytes: np.empty(num_bytes, np.uint8)).empty
        self.collate_s = 0.0
        self._waited_s = 0.0

    def enter_thread(self) -> None: ...

    def stage(self, batch: HostBatch) -> DeviceBatch:
        begin = time.perf_counter()
        wrapped = batch.wrapped()
        self.collate_s += time.perf_counter() - begin
        return wrapped

    def send(self, staged: DeviceBatch) -> DeviceBatch:
        return staged

    def ask(self) -> float:
        return time.perf_counter()

    def receive(self, sent: DeviceBatch, asked: float | None) -> DeviceBatch:
        if asked is not None:
            self._waited_s += time.perf_counter() - asked
        return sent

    def take_waited_s(self) -> float:
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s


class Transfer(Protocol):
    """See transfer.py: what is staged and sent is its own business."""

    collate_s: float
    copy_s: float

    empty: Empty
    """Memory that batches are best put together in; for the thread that stages and sends."""

    def enter_thread(self) -> None: ...
    def stage(self, batch: HostBatch, /) -> Any: ...
    def send(self, staged: Any, /) -> Any: ...
    def ask(self) -> Any: ...
    def receive(self, sent: Any, asked: Any, /) -> DeviceBatch: ...
    def take_waited_s(self) -> float: ...


class Prefetcher:
    """An iterator of batches on the device; for one consuming thread."""

    def __init__(self, source: Iterator[Columns], transfer: Transfer, *, depth: int) -> None:
        self._transfer = transfer
        self._is_first = True

        def send(columns: Columns) -> Any:
            return transfer.send(transfer.stage(collate(columns)))

        self._ahead = ReadAhead(_on_thread(source, transfer), depth=depth, name="prefetch", prepare=send)

    def __iter__(self) -> Iterator[DeviceBatch]:
        return self

    def __next__(self) -> DeviceBatch:
        # Before the first batch everything waits for the run to start: that is no wait of the loop.
        asked = None if self._is_first else self._transfer.ask()
        sent = next(self._ahead)
        self._is_first = False
        return self._transfer.receive(sent, asked)

    def take_waited_s(self) -> float:
        """Seconds since the last call in which the trainer stood still for data; the first batch does not count."""
        return self._transfer.take_waited_s()

    def stage_s(self) -> dict[str, float]:
        """Seconds so far that collating and copying took, beside the loop."""
        return {"collate": self._transfer.collate_s, "copy": self._transfer.copy_s}

    def close(self) -> None:
        """At any moment. A source whose `next` can block must be closed first: the thread may be waiting in it."""
        self._ahead.close()


def _on_thread(source: Iterator[Columns], transfer: Transfer) -> Iterator[Columns]:
    """The source, on the thread that has taken its first item."""
    transfer.enter_thread()
    yield from source
