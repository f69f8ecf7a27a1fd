"""The reorder buffer: rows arrive in any order and leave in the order of their slots, each exactly once."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlatune.batch import Columns
from vlatune.feed.reorder_buffer import ReorderBuffer


def block(slots) -> Columns:
    """Return rows whose values equal their slots."""
    slots = np.asarray(slots, dtype=np.int64)
    return {"slot": slots, "image": np.repeat(slots.astype(np.uint8), 6).reshape(-1, 2, 3), "wide": slots * 1000.0}


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_rows_leave_in_the_order_of_their_slots(data):
    first = data.draw(st.integers(0, 50))
    batch_rows, batches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    last = first + batch_rows * batches
    arriving = data.draw(st.permutations(range(first, last)))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(arriving)))) | {len(arriving)})
    blocks = iter([arriving[begin:end] for begin, end in zip([0, *cuts[:-1]], cuts, strict=True)])
    buffer = ReorderBuffer(capacity=len(arriving), first_slot=first, total_slots=len(arriving))
    for begin in range(first, last, batch_rows):
        while not buffer.has(begin, begin + batch_rows):
            arrived = block(next(blocks))
            buffer.put(arrived)
            for values in arrived.values():
                values[:] = 0  # rows were copied
        taken, expected = buffer.take(begin, begin + batch_rows), block(range(begin, begin + batch_rows))
        assert taken.keys() == expected.keys()
        for key, values in expected.items():
            assert np.array_equal(taken[key], values)
            assert taken[key].dtype == values.dtype


def test_rows_that_do_not_fit_or_arrive_twice_raise():
    buffer = ReorderBuffer(capacity=3, first_slot=0, total_slots=9)
    buffer.put(block([4, 5]))
    with pytest.raises(RuntimeError, match="reorder buffer of 3 rows is full"):
        buffer.put(block([6, 7]))
    with pytest.raises(RuntimeError, match="a sample arrived twice"):
        buffer.put(block([5]))


def test_a_batch_uses_the_given_memory_without_temporary_arrays():
    """tracemalloc sees every array that NumPy allocates."""
    rows = {"slot": np.arange(8), "image": np.arange(8 * 3 * 64 * 64).astype(np.uint8).reshape(8, 3, 64, 64)}
    buffer = ReorderBuffer(capacity=16, first_slot=0, total_slots=16)
    buffer.put(rows)  # makes the buffer
    given: list[np.ndarray] = [np.empty((8, 3, 64, 64), np.uint8), np.empty(8, np.int64)]
    left, one_row = list(given), rows["image"][0].nbytes
    tracemalloc.start()
    try:
        buffer.put(rows | {"slot": np.arange(8, 16)})
        batch = buffer.take(8, 16, lambda shape, dtype: left.pop())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert batch["image"] is given[0]
    assert batch["slot"] is given[1]
    assert np.array_equal(batch["image"], rows["image"])
    assert peak < one_row
