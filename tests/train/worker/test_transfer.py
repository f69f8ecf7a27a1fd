"""The order of what happens between host, copy stream and compute stream, written down by fakes."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from vlatune.train.worker.collate import HostBatch
from vlatune.train.worker.transfer import HostTransfer, StreamTransfer


class FakeEvent:
    def __init__(self, machine: "FakeMachine", name: str) -> None:
        self.machine, self.name = machine, name
        self.at_ms: float | None = None

    def record(self, stream: "FakeStream") -> None:
        self.machine.log.append(f"{self.name} recorded on {stream.name}")
        self.at_ms = self.machine.now_ms

    def synchronize(self) -> None:
        self.machine.log.append(f"host waits for {self.name}")

    def query(self) -> bool:
        return self.at_ms is not None and not self.machine.is_behind

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.at_ms is not None
        assert end.at_ms is not None
        return end.at_ms - self.at_ms


class FakeStream:
    def __init__(self, machine: "FakeMachine", name: str) -> None:
        self.machine, self.name = machine, name

    def wait_event(self, event: FakeEvent) -> None:
        self.machine.log.append(f"{self.name} waits for {event.name}")


class FakeMachine:
    """An accelerator that does everything at once and remembers in which order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now_ms, self.is_behind = 0.0, False
        self.copy_stream, self._compute = FakeStream(self, "copy"), FakeStream(self, "compute")
        self.made_events, self.page_locked_bytes = 0, []
        self.current = "compute"

    def enter_thread(self) -> None:
        self.log.append("thread")

    def compute_stream(self) -> FakeStream:
        return self._compute

    def event(self) -> FakeEvent:
        self.made_events += 1
        return FakeEvent(self, f"e{self.made_events}")

    def page_locked(self, num_bytes: int) -> Tensor:
        self.page_locked_bytes.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    @contextmanager
    def on_copy_stream(self) -> Iterator[None]:
        self.current = "copy"
        yield
        self.current = "compute"

    def to_device(self, host: Tensor) -> Tensor:
        self.log.append(f"copy {host.flatten()[0]:g} on {self.current} from {host.data_ptr()}")
        return host.clone()

    def record_stream(self, tensor: Tensor, stream: FakeStream) -> None:
        self.log.append(f"{tensor.flatten()[0]:g} is used by {stream.name}")


def batch_of(number: float, rows: int = 2) -> HostBatch:
    return HostBatch({"state": np.full((rows, 3), number, np.float32)}, np.zeros((rows, 2), np.int64))


def without_addresses(log: list[str]) -> list[str]:
    return [line.partition(" from ")[0] for line in log]


def test_a_copy_is_announced_on_its_stream_and_awaited_on_the_other():
    machine = FakeMachine()
    transfer = StreamTransfer(machine, slots=2)
    sent = transfer.send(transfer.stage(batch_of(1)))
    batch = transfer.receive(sent, transfer.ask())
    assert without_addresses(machine.log) == [
        "e1 recorded on copy",
        "copy 1 on copy",
        "e2 recorded on copy",
        "e3 recorded on compute",
        "compute waits for e2",
        "1 is used by compute",
        "e4 recorded on compute",
    ]
    assert torch.equal(batch.tensors["state"], torch.ones(2, 3))


def test_page_locked_memory_is_written_again_only_after_its_copy_and_never_allocated_again():
    machine = FakeMachine()
    transfer = StreamTransfer(machine, slots=2)
    for number in (1, 2, 3, 4):
        machine.log.append(f"stage {number}")
        transfer.send(transfer.stage(batch_of(number)))
    assert [line for line in without_addresses(machine.log) if not line.endswith("recorded on copy")] == [
        *("stage 1", "copy 1 on copy"),
        *("stage 2", "copy 2 on copy"),
        *("stage 3", "host waits for e2", "copy 3 on copy"),
        *("stage 4", "host waits for e4", "copy 4 on copy"),
    ]
    addresses = [line.partition(" from ")[2] for line in machine.log if line.startswith("copy")]
    assert addresses[:2] == addresses[2:]
    assert addresses[0] != addresses[1]
    assert machine.page_locked_bytes == [24, 24]


def test_a_slot_grows_for_a_larger_batch_and_serves_a_smaller_one():
    machine = FakeMachine()
    transfer = StreamTransfer(machine, slots=1)
    for number, rows in enumerate((2, 5, 3)):
        staged = transfer.stage(batch_of(number, rows))
        assert torch.equal(staged.batch.tensors["state"], torch.full((rows, 3), float(number)))
        transfer.send(staged)
    assert machine.page_locked_bytes == [24, 60]


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_, np.int64, np.float32])
def test_every_dtype_and_a_view_that_is_not_in_one_piece(dtype):
    values = np.arange(24).reshape(4, 6).astype(dtype)[:, :5]
    staged = StreamTransfer(FakeMachine(), slots=1).stage(HostBatch({"x": values}, np.zeros((4, 2))))
    assert torch.equal(staged.batch.tensors["x"], torch.from_numpy(values.copy()))


def test_the_devices_wait_is_from_the_last_work_to_the_batchs_arrival():
    machine = FakeMachine()
    transfer = StreamTransfer(machine, slots=1)
    first = transfer.send(transfer.stage(batch_of(1)))
    machine.now_ms = 500.0
    transfer.receive(first, None)  # the first batch: everything waited, and it is not counted
    assert transfer.take_waited_s() == 0.0
    asked = transfer.ask()
    machine.now_ms = 530.0
    machine.is_behind = True
    transfer.receive(transfer.send(transfer.stage(batch_of(2))), asked)
    assert transfer.take_waited_s() == 0.0  # the device has not come to it yet
    machine.is_behind = False
    assert transfer.take_waited_s() == pytest.approx(0.030)
    assert transfer.take_waited_s() == 0.0


def test_the_seconds_of_copying_are_the_devices():
    machine = FakeMachine()
    transfer = StreamTransfer(machine, slots=1)
    staged = transfer.stage(batch_of(1))
    machine.to_device = lambda host: (setattr(machine, "now_ms", machine.now_ms + 40.0), host.clone())[1]
    transfer.send(staged)
    transfer.stage(batch_of(2))
    assert transfer.copy_s == pytest.approx(0.040)


def test_on_the_cpu_nothing_is_copied():
    transfer, batch = HostTransfer(), batch_of(3)
    received = transfer.receive(transfer.send(transfer.stage(batch)), None)
    assert received.tensors["state"].data_ptr() == batch.columns["state"].ctypes.data
    assert transfer.take_waited_s() == 0.0
