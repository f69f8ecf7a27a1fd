"""Collating and prefetching: batches in order, some ahead; errors, early exit and Ctrl-C leave no thread."""

import gc
import signal
import threading
import traceback
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlatune.batch import ACTION, STATE, TOKEN_MASK, TOKENS, Columns
from vlatune.data.transforms import PROMPT_MULTIPLE, cut_prompts
from vlatune.train.worker.device import device_batches
from vlatune.train.worker.transfer import collate

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
    """Yields batches 0 to end-1 and records requests; calls `at_end` at the end."""

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


def prompts(*lengths: int, width: int = 20) -> Columns:
    mask_BL = np.arange(width) < np.array(lengths)[:, None]
    return {TOKENS: np.where(mask_BL, np.arange(1, width + 1), 0), TOKEN_MASK: mask_BL}


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(50, 60), st.booleans())
def test_prompts_are_cut_to_the_longest_rounded_up(lengths, width, is_padded_left):
    columns = prompts(*lengths, width=width)
    if is_padded_left:  # the last column is used, so nothing may be cut
        columns = {key: values[:, ::-1] for key, values in columns.items()}
    cut = cut_prompts(columns)
    assert cut[TOKEN_MASK].sum() == columns[TOKEN_MASK].sum()
    assert np.array_equal(cut[TOKENS], columns[TOKENS][:, : cut[TOKENS].shape[1]])
    spare = cut[TOKENS].shape[1] - max(1, *(int(row.nonzero()[0][-1]) + 1 for row in cut[TOKEN_MASK] if row.any()), 0)
    assert 0 <= spare < PROMPT_MULTIPLE


def test_ids_stay_on_the_host_and_other_columns_are_not_copied():
    ids = {"dataset_index": np.array([0, 1]), "index": np.array([7, 3]), "slot": np.array([4, 5])}
    ids |= {"episode_index": np.array([0, 0]), "frame_index": np.array([7, 3])}
    columns: Columns = ids | {ACTION: np.arange(12, dtype=np.float32).reshape(2, 3, 2), **prompts(2, 4)}
    batch = collate(columns)
    assert batch.samples.tolist() == [[0, 7], [1, 3]]
    assert set(batch.columns) == {ACTION, TOKENS, TOKEN_MASK}
    tensors = batch.to_tensors().tensors
    assert tensors[ACTION].data_ptr() == columns[ACTION].ctypes.data
    assert tensors[TOKENS].is_contiguous()
    assert set(collate(ids | {STATE: np.zeros((2, 2), np.float32)}).columns) == {STATE}


@pytest.mark.parametrize("depth", [1, 3])
def test_all_batches_are_returned_in_order(depth):
    batches = device_batches(Source(5), CPU, depth=depth)
    taken = list(batches)
    assert [batch.samples.tolist() for batch in taken] == [[[0, n]] * 2 for n in range(5)]
    assert [float(batch.tensors[STATE][0, 0]) for batch in taken] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert {batch.tensors[TOKENS].shape for batch in taken} == {(2, 8)}
    assert next(batches, None) is None


@pytest.mark.parametrize("depth", [1, 2])
def test_depth_limits_the_prepared_batches(depth):
    source = Source(100)
    batches = device_batches(source, CPU, depth=depth)
    for _ in range(depth + 1):  # `depth` that are ready, and one that waits
        assert source.asked_more.acquire(timeout=60)
    for taken in range(3):
        next(batches)
        assert source.asked_more.acquire(timeout=60)  # taking one starts the next
        assert len(source.asked) == depth + 2 + taken
    assert not source.asked_more.acquire(blocking=False)
    batches.close()
    assert len(source.asked) == depth + 4


def test_error_of_the_feed_is_raised_after_the_batches_before_it():
    def broken_camera() -> None:
        raise ValueError("episode 12, camera 'top': no frame")

    batches = device_batches(Source(2, broken_camera), CPU)
    assert [int(next(batches).samples[0, 1]) for _ in range(2)] == [0, 1]
    for _ in range(2):  # also at the next call
        with pytest.raises(ValueError, match="camera 'top'") as raised:
            next(batches)
    assert "broken_camera" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]


def test_close_ends_thread_and_batches():
    for taken in range(4):
        batches = device_batches(Source(10**9), CPU)
        for _ in range(taken):
            next(batches)
        batches.close()
        batches.close()
        assert next(batches, None) is None


def test_dropped_prefetcher_ends_its_thread():
    next(device_batches(Source(10**9), CPU))  # the fixture checks its thread


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_interrupts_the_wait_for_a_batch():
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


def test_waiting_is_counted_after_the_first_batch():
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
def test_cuda_computes_with_the_right_bytes_though_buffers_are_reused(depth):
    """Long kernels between the batches make copies that are too early visible."""
    batches = device_batches((columns_of(n, rows=4096) for n in range(40)), torch.device("cuda"), depth=depth)
    sums = []
    for batch in batches:
        torch.cuda._sleep(3_000_000)
        sums.append(torch.stack([batch.tensors[STATE].double().mean(), batch.tensors[TOKENS].double().mean()]))
    expected = torch.arange(40, dtype=torch.float64)[:, None].expand(40, 2)
    assert torch.equal(torch.stack(sums).cpu(), expected)
    assert batches.stage_s()["copy"] > 0
