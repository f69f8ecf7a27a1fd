"""Copies and memory on the host. The order of operations of streams is tested in tests/virtual_device."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import torch

from vlatune.batch import SLOT, TOKEN_MASK, TOKENS, Columns
from vlatune.data.order.sample_order import OrderSpec
from vlatune.feed.feed import StageTimes, assemble
from vlatune.feed.plan import Segment, Share
from vlatune.feed.ray_blocks import CACHED, READ_S
from vlatune.train.worker.transfer import HostBatch, HostTransfer, Prefetcher


def batch_of(number: float, rows: int = 2) -> HostBatch:
    return HostBatch({"state": np.full((rows, 3), number, np.float32)}, np.zeros((rows, 2), np.int64))


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


def test_rows_are_copied_twice_on_the_host():
    """Out of the object store and into the batch."""
    transfer = HostTransfer()
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
