"""The prefetcher: batches in order, some ahead; errors, early exit and Ctrl-C leave no thread."""

import gc
import signal
import threading
import traceback
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from vlatune.batch import STATE, TOKEN_MASK, TOKENS, Columns
from vlatune.train.worker.device import device_batches

CPU = torch.device("cpu")


def columns_of(number: int, rows: int = 2) -> Columns:
    ids = np.full(rows, number)
    length = 1 + number % 30
    return {
        "dataset_index": np.zeros(rows, np.int64),
        "index": ids,
        STATE: np.full((rows, 3), number, np.float32),
        TOKENS: np.full((rows, 32), number, np.int64),
        TOKEN_MASK: np.tile(np.arange(32) < length, (rows, 1)),
    }


class Source:
    """Batches 0 .. end-1 that tell which were asked for; then the end, or what `at_end` does."""

    def __init__(self, end: int, at_end=None) -> None:
        self.asked: list[int] = []
        self.asked_more = threading.Semaphore(0)
        self._end, self._at_end = end, at_end

    def __iter__(self) -> Iterator[Columns]:
        return self

    def __next__(self) -> Columns:
        number = len(self.asked)
        self.asked.append(number)
        self.asked_more.release()
        if number >= self._end:
            if self._at_end:
                self._at_end()
            raise StopIteration
        return columns_of(number)


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    gc.collect()  # a prefetcher that a test has dropped
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=60)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("depth", [1, 3])
def test_all_batches_come_in_order_and_then_the_end(depth):
    batches = device_batches(Source(5), CPU, depth=depth)
    taken = list(batches)
    assert [batch.samples.tolist() for batch in taken] == [[[0, n]] * 2 for n in range(5)]
    assert [float(batch.tensors[STATE][0, 0]) for batch in taken] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert {batch.tensors[TOKENS].shape for batch in taken} == {(2, 8)}
    assert next(batches, None) is None


@pytest.mark.parametrize("depth", [1, 2])
def test_while_one_batch_is_used_so_many_are_prepared_and_no_more(depth):
    source = Source(100)
    batches = device_batches(source, CPU, depth=depth)
    for _ in range(depth + 1):  # `depth` that are ready, and one that waits for room
        assert source.asked_more.acquire(timeout=60)
    for taken in range(3):
        next(batches)
        assert source.asked_more.acquire(timeout=60)  # what was taken made room for the next
        assert len(source.asked) == depth + 2 + taken
    assert not source.asked_more.acquire(blocking=False)
    batches.close()
    assert len(source.asked) == depth + 4


def test_an_error_of_the_feed_comes_after_the_batches_before_it_and_says_where_it_was_raised():
    def broken_camera() -> None:
        raise ValueError("episode 12, camera 'top': no frame")

    batches = device_batches(Source(2, broken_camera), CPU)
    assert [int(next(batches).samples[0, 1]) for _ in range(2)] == [0, 1]
    for _ in range(2):  # whoever asks again is told again
        with pytest.raises(ValueError, match="camera 'top'") as raised:
            next(batches)
    assert "broken_camera" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]


def test_close_at_any_moment_ends_the_thread_and_the_batches():
    for taken in range(4):
        batches = device_batches(Source(10**9), CPU)
        for _ in range(taken):
            next(batches)
        batches.close()
        batches.close()
        assert next(batches, None) is None


def test_a_prefetcher_that_nobody_holds_ends_by_itself():
    next(device_batches(Source(10**9), CPU))  # the fixture looks for its thread


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_while_waiting_for_a_batch_gets_through():
    is_waiting, closed = threading.Event(), threading.Event()

    def interrupt() -> None:
        is_waiting.wait(timeout=60)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        closed.wait(timeout=60)

    batches = device_batches(Source(1, interrupt), CPU)
    next(batches)
    try:
        with pytest.raises(KeyboardInterrupt):
            _ = is_waiting.set(), next(batches)
    finally:
        closed.set()  # as closing the feed does
        batches.close()


def test_waits_and_collating_are_counted_but_for_the_first_batch():
    batches = device_batches(Source(3), CPU)
    next(batches)
    assert batches.take_waited_s() == 0.0
    next(batches)
    assert batches.take_waited_s() > 0.0
    assert batches.take_waited_s() == 0.0
    batches.close()
    assert batches.stage_s()["collate"] > 0.0
    assert batches.stage_s()["copy"] == 0.0


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 2])
def test_cuda_computes_with_the_right_bytes_though_all_buffers_are_reused(depth):
    """Long kernels between the batches give a copy that came too early every chance to do harm."""
    batches = device_batches((columns_of(n, rows=4096) for n in range(40)), torch.device("cuda"), depth=depth)
    sums = []
    for batch in batches:
        torch.cuda._sleep(3_000_000)
        sums.append(torch.stack([batch.tensors[STATE].double().mean(), batch.tensors[TOKENS].double().mean()]))
    expected = torch.arange(40, dtype=torch.float64)[:, None].expand(40, 2)
    assert torch.equal(torch.stack(sums).cpu(), expected)
    assert batches.stage_s()["copy"] > 0


@pytest.mark.gpu
def test_cuda_copies_the_next_batch_while_one_computes():
    batches = device_batches((columns_of(n) for n in range(4)), torch.device("cuda"))
    next(batches)
    torch.cuda._sleep(4_000_000_000)  # seconds
    computed = torch.Event("cuda")
    computed.record(torch.accelerator.current_stream())
    ready = batches._ahead._ready
    with ready._changed:
        ready._changed.wait_for(lambda: ready._items, timeout=60)
        ahead = ready._items[0]
    ahead.copied.synchronize()
    assert not computed.query()
    batches.close()
    torch.cuda.synchronize()
