"""The order of what happens between host, copy stream and compute stream, written down by fakes."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from vlatune.batch import SLOT, TOKEN_MASK, TOKENS, Columns
from vlatune.dataset.order.sample_order import OrderSpec
from vlatune.pipeline.coordinator import SegmentHead
from vlatune.pipeline.feed import StageTimes, assemble
from vlatune.pipeline.plan import Share
from vlatune.pipeline.source import READ_S
from vlatune.train.worker.transfer import MOST_UNDER_WAY, HostBatch, HostTransfer, Prefetcher, StreamTransfer


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
        self.memory: list[Tensor] = []
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
        self.memory.append(torch.empty(num_bytes, dtype=torch.uint8))
        return self.memory[-1]

    def is_page_locked(self, host: Tensor) -> bool:
        return any(0 <= host.data_ptr() - one.data_ptr() < one.numel() for one in self.memory)

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
    transfer = StreamTransfer(machine)
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


def addresses(machine: FakeMachine) -> list[str]:
    return [line.partition(" from ")[2] for line in machine.log if line.startswith("copy")]


def test_memory_is_held_until_the_copy_out_of_it_is_done_and_then_used_again():
    machine = FakeMachine()
    transfer = StreamTransfer(machine)
    for number, is_behind in enumerate((True, True, False, False)):
        transfer.receive(transfer.send(transfer.stage(batch_of(number))), None)  # nobody keeps it but the copy
        machine.is_behind = is_behind
    first, second, third, fourth = addresses(machine)
    assert first != second
    assert third in (first, second)
    assert fourth in (first, second)
    assert machine.page_locked_bytes == [24, 24]


def test_memory_is_used_again_when_the_last_who_holds_a_part_of_it_lets_go():
    empty = HostTransfer().empty
    array = empty((4, 3), np.float32)
    address, part = array.ctypes.data, torch.from_numpy(array[2:]).view(torch.uint8)[0]
    del array
    other = empty((4, 3), np.float32)
    assert other.ctypes.data != address
    del part
    again = empty((2, 6), np.int32)
    assert (again.ctypes.data, again.shape, again.dtype) == (address, (2, 6), np.int32)


def test_the_host_waits_for_the_oldest_copy_where_too_many_are_under_way():
    machine = FakeMachine()
    transfer = StreamTransfer(machine)
    machine.is_behind = True
    for number in (1, 2, 3, 4):
        machine.log.append(f"stage {number}")
        transfer.send(transfer.stage(batch_of(number)))
    assert len(machine.page_locked_bytes) == MOST_UNDER_WAY
    assert [line for line in without_addresses(machine.log) if not line.endswith("recorded on copy")] == [
        *("stage 1", "copy 1 on copy"),
        *("stage 2", "copy 2 on copy"),
        *("stage 3", "host waits for e2", "copy 3 on copy"),
        *("stage 4", "host waits for e4", "copy 4 on copy"),
    ]


def test_what_lies_in_page_locked_memory_is_sent_from_there():
    machine = FakeMachine()
    transfer = StreamTransfer(machine)
    values = transfer.empty((2, 3), np.float32)
    values[:] = 7
    staged = transfer.stage(HostBatch({"state": values}, np.zeros((2, 2), np.int64)))
    assert staged.tensors["state"].data_ptr() == values.ctypes.data
    assert (transfer.copied_bytes, machine.page_locked_bytes) == (0, [24])
    transfer.stage(batch_of(1))  # one that lies elsewhere
    assert transfer.copied_bytes == 24


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_, np.int64, np.float32])
def test_every_dtype_and_a_view_that_is_not_in_one_piece(dtype):
    values = np.arange(24).reshape(4, 6).astype(dtype)[:, :5]
    staged = StreamTransfer(FakeMachine()).stage(HostBatch({"x": values}, np.zeros((4, 2))))
    assert torch.equal(staged.tensors["x"], torch.from_numpy(values.copy()))
    assert staged.tensors["x"].is_contiguous()


def test_the_devices_wait_is_from_the_last_work_to_the_batchs_arrival():
    machine = FakeMachine()
    transfer = StreamTransfer(machine)
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
    transfer = StreamTransfer(machine)
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


BATCH, BATCHES = 4, 6


def blocks_of_rows() -> Iterator[Columns]:
    """All rows of the batches, from the last to the first, in blocks of three: whole pictures, prompts of 5 tokens of 40."""
    for begin in range(BATCH * BATCHES, 0, -3):
        slots = np.arange(begin - 1, begin - 4, -1)
        yield {
            SLOT: slots,
            "dataset_index": np.zeros(3, np.int64),
            "index": slots.copy(),
            "picture": np.repeat(slots.astype(np.uint8), 3 * 32 * 32).reshape(3, 3, 32, 32),
            TOKENS: np.repeat(slots, 40).reshape(3, 40),
            TOKEN_MASK: np.tile(np.arange(40) < 5, (3, 1)),
            READ_S: np.zeros(3, np.float32),
        }


@pytest.mark.parametrize("device", ["cpu", "accelerator"])
def test_a_row_is_copied_twice_on_the_host_whatever_the_device(device):
    """Out of the store's memory and into the batch's, from which it is sent; and 13 % of its prompt, which was cut."""
    transfer = HostTransfer() if device == "cpu" else StreamTransfer(FakeMachine())
    order = OrderSpec((24,), seed=0, global_batch=BATCH, lanes=BATCH, run_length=4, window_rows=4)
    plan, head, times = SimpleNamespace(order=order, batch_size=BATCH), SegmentHead(0, BATCHES, 24), StageTimes()
    filled: list[int] = []

    def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        memory = transfer.empty(shape, dtype)
        filled.append(memory.ctypes.data)
        return memory

    sent_from: list[int] = []
    stage = transfer.stage

    def watched_stage(batch: HostBatch) -> object:
        staged = stage(batch)
        sent_from.append(staged.tensors["picture"].data_ptr())
        assert sent_from[-1] in filled[-6:]  # of this batch
        return staged

    transfer.stage = watched_stage
    batches = Prefetcher(assemble(plan, Share(0, 1), head, blocks_of_rows(), times, empty), transfer, depth=2)
    for number, batch in enumerate(batches):
        slots = number * BATCH + torch.arange(BATCH)
        assert torch.equal(batch.tensors["picture"][:, 0, 0, 0], slots)
        assert torch.equal(batch.tensors[TOKENS], slots[:, None].expand(BATCH, 8))
    assert len(sent_from) == BATCHES
    in_the_store = sum(values.nbytes for block in blocks_of_rows() for key, values in block.items() if key != READ_S)
    assert times.copied_bytes == 2 * in_the_store
    if device == "accelerator":
        assert transfer.copied_bytes == BATCHES * BATCH * 8 * (8 + 1)
