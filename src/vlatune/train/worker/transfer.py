"""How a collated batch reaches the device, and how long the device waited for it.

Accelerators: one copy per tensor into page-locked memory, which is kept and written again once the copy out of it is
done; from there to the device on a stream of its own. The compute stream waits on the device for the copy's event; the
host waits for nothing but, on the prefetcher's thread, for the oldest page-locked memory to be free.

    prefetcher's thread   stage N+1 | send N+1 ............ | stage N+2 | ...
    copy stream                       [ copy N+1, event ]
    compute stream        [ N computes ............ ] wait for event [ N+1 computes

The CPU: tensors over the feed's memory, nothing is copied.
"""

import time
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from vlatune.train.worker.collate import DeviceBatch, HostBatch


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

    def on_copy_stream(self) -> AbstractContextManager[Any]: ...
    def to_device(self, host: Tensor) -> Tensor:
        """Begin a copy on the current stream; the host does not wait for it."""
        ...

    def record_stream(self, tensor: Tensor, stream: Any) -> None: ...


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

    def on_copy_stream(self) -> AbstractContextManager[Any]:
        return self.copy_stream

    def to_device(self, host: Tensor) -> Tensor:
        return host.to(self._device, non_blocking=True)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)


class HostSlot:
    """Page-locked memory for one batch, a buffer per key, grown to the largest batch seen."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._buffers: dict[str, Tensor] = {}
        self._copy: tuple[Event, Event] | None = None

    def wait_until_free(self) -> float:
        """Until the last copy out of it is done; returns the seconds which that copy took."""
        if self._copy is None:
            return 0.0
        (begun, done), self._copy = self._copy, None
        done.synchronize()  # of a copy that was begun a whole ring ago: the prefetcher's thread alone may stand here
        return begun.elapsed_time(done) / 1000

    def write(self, key: str, values: np.ndarray) -> Tensor:
        """The one copy on the host, by NumPy: torch's would start threads of its own, which computing needs."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < values.nbytes:
            buffer = self._buffers[key] = self._machine.page_locked(values.nbytes)
        view = buffer[: values.nbytes].numpy().view(values.dtype).reshape(values.shape)
        np.copyto(view, values)
        return torch.from_numpy(view)

    def is_read_between(self, begun: Event, done: Event) -> None:
        self._copy = (begun, done)


@dataclass(frozen=True)
class Staged:
    batch: DeviceBatch
    """On the host."""
    slot: HostSlot


@dataclass(frozen=True)
class Sent:
    batch: DeviceBatch
    copied: Event


class StreamTransfer:
    """To an accelerator. `stage` and `send` on the prefetcher's thread, `ask` and `receive` on the trainer's."""

    def __init__(self, machine: Machine, *, slots: int) -> None:
        self.collate_s, self.copy_s = 0.0, 0.0
        self.enter_thread = machine.enter_thread
        self._machine = machine
        self._turns = cycle([HostSlot(machine) for _ in range(slots)])
        self._waits: deque[tuple[Event, Event]] = deque()
        self._waited_s = 0.0

    def stage(self, batch: HostBatch) -> Staged:
        slot = next(self._turns)
        self.copy_s += slot.wait_until_free()
        begin = time.perf_counter()
        tensors = {key: slot.write(key, values) for key, values in batch.columns.items()}
        self.collate_s += time.perf_counter() - begin
        return Staged(DeviceBatch(tensors, batch.samples), slot)

    def send(self, staged: Staged) -> Sent:
        begun, copied = self._machine.event(), self._machine.event()
        with self._machine.on_copy_stream():
            begun.record(self._machine.copy_stream)
            tensors = {key: self._machine.to_device(host) for key, host in staged.batch.tensors.items()}
            copied.record(self._machine.copy_stream)
        staged.slot.is_read_between(begun, copied)
        return Sent(DeviceBatch(tensors, staged.batch.samples), copied)

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
