"""The order of operations on host, copy stream and compute stream, recorded by a fake accelerator."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from vlatune.batch import SLOT, TOKEN_MASK, TOKENS, Columns
from vlatune.data.order.sample_order import OrderSpec
from vlatune.feed.feed import StageTimes, assemble
from vlatune.feed.plan import Segment, Share
from vlatune.feed.ray_blocks import CACHED, READ_S
from vlatune.train.worker.transfer import MAX_PENDING, HostBatch, HostTransfer, Prefetcher, StreamTransfer


class FakeEvent:
    def __init__(self, accelerator: "FakeAccelerator", name: str) -> None:
        self.accelerator, self.name = accelerator, name
        self.at_ms: float | None = None

    def record(self, stream: "FakeStream") -> None:
        self.accelerator.log.append(f"{self.name} recorded on {stream.name}")
        self.at_ms = self.accelerator.now_ms

    def synchronize(self) -> None:
        self.accelerator.log.append(f"host waits for {self.name}")

    def query(self) -> bool:
        return self.at_ms is not None and not self.accelerator.is_behind

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.at_ms is not None
        assert end.at_ms is not None
        return end.at_ms - self.at_ms


class FakeStream:
    def __init__(self, accelerator: "FakeAccelerator", name: str) -> None:
        self.accelerator, self.name = accelerator, name

    def wait_event(self, event: FakeEvent) -> None:
        self.accelerator.log.append(f"{self.name} waits for {event.name}")


class FakeAccelerator:
    """An accelerator that does everything at once and records the order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now_ms, self.is_behind = 0.0, False
        self.copy_stream, self._compute = FakeStream(self, "copy"), FakeStream(self, "compute")
        self.made_events, self.pinned_bytes = 0, []
        self.memory: list[Tensor] = []
        self.current = "compute"

    def enter_thread(self) -> None:
        self.log.append("thread")

    def compute_stream(self) -> FakeStream:
        return self._compute

    def event(self) -> FakeEvent:
        self.made_events += 1
        return FakeEvent(self, f"e{self.made_events}")

    def pinned(self, num_bytes: int) -> Tensor:
        self.pinned_bytes.append(num_bytes)
        self.memory.append(torch.empty(num_bytes, dtype=torch.uint8))
        return self.memory[-1]

    def is_pinned(self, host: Tensor) -> bool:
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


def test_compute_stream_waits_for_the_copys_event():
    accelerator = FakeAccelerator()
    transfer = StreamTransfer(accelerator)
    sent = transfer.send(transfer.stage(batch_of(1)))
    batch = transfer.receive(sent, transfer.request())
    assert without_addresses(accelerator.log) == [
        "e1 recorded on copy",
        "copy 1 on copy",
        "e2 recorded on copy",
        "e3 recorded on compute",
        "compute waits for e2",
        "1 is used by compute",
        "e4 recorded on compute",
    ]
    assert torch.equal(batch.tensors["state"], torch.ones(2, 3))


def addresses(accelerator: FakeAccelerator) -> list[str]:
    return [line.partition(" from ")[2] for line in accelerator.log if line.startswith("copy")]


def test_memory_is_reused_after_its_copy_is_done():
    accelerator = FakeAccelerator()
    transfer = StreamTransfer(accelerator)
    for number, is_behind in enumerate((True, True, False, False)):
        transfer.receive(transfer.send(transfer.stage(batch_of(number))), None)  # nobody keeps it but the copy
        accelerator.is_behind = is_behind
    first, second, third, fourth = addresses(accelerator)
    assert first != second
    assert third in (first, second)
    assert fourth in (first, second)
    assert accelerator.pinned_bytes == [24, 24]


def test_memory_is_reused_after_its_last_view_is_freed():
    empty = HostTransfer().empty
    array = empty((4, 3), np.float32)
    address, part = array.ctypes.data, torch.from_numpy(array[2:]).view(torch.uint8)[0]
    del array
    other = empty((4, 3), np.float32)
    assert other.ctypes.data != address
    del part
    again = empty((2, 6), np.int32)
    assert (again.ctypes.data, again.shape, again.dtype) == (address, (2, 6), np.int32)


def test_host_waits_for_the_oldest_copy_if_too_many_are_pending():
    accelerator = FakeAccelerator()
    transfer = StreamTransfer(accelerator)
    accelerator.is_behind = True
    for number in (1, 2, 3, 4):
        accelerator.log.append(f"stage {number}")
        transfer.send(transfer.stage(batch_of(number)))
    assert len(accelerator.pinned_bytes) == MAX_PENDING
    assert [line for line in without_addresses(accelerator.log) if not line.endswith("recorded on copy")] == [
        *("stage 1", "copy 1 on copy"),
        *("stage 2", "copy 2 on copy"),
        *("stage 3", "host waits for e2", "copy 3 on copy"),
        *("stage 4", "host waits for e4", "copy 4 on copy"),
    ]


def test_pinned_memory_is_not_copied_on_the_host():
    accelerator = FakeAccelerator()
    transfer = StreamTransfer(accelerator)
    values = transfer.empty((2, 3), np.float32)
    values[:] = 7
    staged = transfer.stage(HostBatch({"state": values}, np.zeros((2, 2), np.int64)))
    assert staged.tensors["state"].data_ptr() == values.ctypes.data
    assert (transfer.copied_bytes, accelerator.pinned_bytes) == (0, [24])
    transfer.stage(batch_of(1))  # one that lies elsewhere
    assert transfer.copied_bytes == 24


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_, np.int64, np.float32])
def test_every_dtype_and_a_view_that_is_not_contiguous(dtype):
    values = np.arange(24).reshape(4, 6).astype(dtype)[:, :5]
    staged = StreamTransfer(FakeAccelerator()).stage(HostBatch({"x": values}, np.zeros((4, 2))))
    assert torch.equal(staged.tensors["x"], torch.from_numpy(values.copy()))
    assert staged.tensors["x"].is_contiguous()


def test_waiting_is_measured_on_the_device():
    accelerator = FakeAccelerator()
    transfer = StreamTransfer(accelerator)
    first = transfer.send(transfer.stage(batch_of(1)))
    accelerator.now_ms = 500.0
    transfer.receive(first, None)  # the first batch: everything waited, and it is not counted
    assert transfer.take_waited_s() == 0.0
    requested = transfer.request()
    accelerator.now_ms = 530.0
    accelerator.is_behind = True
    transfer.receive(transfer.send(transfer.stage(batch_of(2))), requested)
    assert transfer.take_waited_s() == 0.0  # the device has not come to it yet
    accelerator.is_behind = False
    assert transfer.take_waited_s() == pytest.approx(0.030)
    assert transfer.take_waited_s() == 0.0


def test_copying_is_measured_on_the_device():
    accelerator = FakeAccelerator()
    transfer = StreamTransfer(accelerator)
    staged = transfer.stage(batch_of(1))
    accelerator.to_device = lambda host: (setattr(accelerator, "now_ms", accelerator.now_ms + 40.0), host.clone())[1]
    transfer.send(staged)
    transfer.stage(batch_of(2))
    assert transfer.copy_s == pytest.approx(0.040)


def test_nothing_is_copied_on_the_cpu():
    transfer, batch = HostTransfer(), batch_of(3)
    received = transfer.receive(transfer.send(transfer.stage(batch)), None)
    assert received.tensors["state"].data_ptr() == batch.columns["state"].ctypes.data
    assert transfer.take_waited_s() == 0.0


BATCH, BATCHES = 4, 6


def blocks_of_rows() -> Iterator[Columns]:
    """Yield all rows, from the last to the first, in blocks of three, with prompts of 5 tokens of 40."""
    for begin in range(BATCH * BATCHES, 0, -3):
        slots = np.arange(begin - 1, begin - 4, -1)
        yield {
            SLOT: slots,
            "dataset_index": np.zeros(3, np.int64),
            "index": slots.copy(),
            "image": np.repeat(slots.astype(np.uint8), 3 * 32 * 32).reshape(3, 3, 32, 32),
            TOKENS: np.repeat(slots, 40).reshape(3, 40),
            TOKEN_MASK: np.tile(np.arange(40) < 5, (3, 1)),
            READ_S: np.zeros(3, np.float32),
            CACHED: np.zeros(3, np.float32),
        }


@pytest.mark.parametrize("device", ["cpu", "accelerator"])
def test_rows_are_copied_twice_on_the_host(device):
    """Copy out of the object store and into the batch; cut prompts again."""
    transfer = HostTransfer() if device == "cpu" else StreamTransfer(FakeAccelerator())
    order = OrderSpec((24,), seed=0, global_batch=BATCH, lanes=BATCH, run_length=4, window_rows=4)
    plan, segment, times = (
        SimpleNamespace(order=order, batch_size=BATCH),
        Segment(0, BATCHES, 24, np.ones((BATCHES, 1))),
        StageTimes(),
    )
    filled: list[int] = []

    def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        memory = transfer.empty(shape, dtype)
        filled.append(memory.ctypes.data)
        return memory

    sent_from: list[int] = []
    stage = transfer.stage

    def watched_stage(batch: HostBatch) -> object:
        staged = stage(batch)
        sent_from.append(staged.tensors["image"].data_ptr())
        assert sent_from[-1] in filled[-6:]  # of this batch
        return staged

    transfer.stage = watched_stage
    batches = Prefetcher(
        assemble(plan, Share(0, 1), itertools.chain([segment], blocks_of_rows()), times, empty), transfer, depth=2
    )
    for number, batch in enumerate(batches):
        slots = number * BATCH + torch.arange(BATCH)
        assert torch.equal(batch.tensors["image"][:, 0, 0, 0], slots)
        assert torch.equal(batch.tensors[TOKENS], slots[:, None].expand(BATCH, 8))
    assert len(sent_from) == BATCHES
    in_the_store = sum(
        values.nbytes for block in blocks_of_rows() for key, values in block.items() if key not in (CACHED, READ_S)
    )
    assert times.copied_bytes == 2 * in_the_store
    if device == "accelerator":
        assert transfer.copied_bytes == BATCHES * BATCH * 8 * (8 + 1)
