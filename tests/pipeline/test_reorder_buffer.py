"""The reorder buffer: rows in as they come, out in the order of their slots, each exactly once."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlatune.batch import Columns
from vlatune.pipeline.reorder_buffer import ReorderBuffer


def block(slots) -> Columns:
    """Rows whose values tell their slot."""
    slots = np.asarray(slots, dtype=np.int64)
    return {"slot": slots, "picture": np.repeat(slots.astype(np.uint8), 6).reshape(-1, 2, 3), "wide": slots * 1000.0}


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_rows_leave_in_the_order_of_their_slots_whatever_the_order_they_come_in(data):
    first = data.draw(st.integers(0, 50))
    batch_rows, batches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    last = first + batch_rows * batches
    arriving = data.draw(st.permutations(range(first, last)))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(arriving)))) | {len(arriving)})
    blocks = iter([arriving[begin:end] for begin, end in zip([0, *cuts[:-1]], cuts, strict=True)])
    buffer = ReorderBuffer(capacity=len(arriving), first_slot=first, total_slots=len(arriving))
    for begin in range(first, last, batch_rows):
        while not buffer.has(begin, begin + batch_rows):
            buffer.put(block(next(blocks)))
        taken, expected = buffer.take(begin, begin + batch_rows), block(range(begin, begin + batch_rows))
        assert taken.keys() == expected.keys()
        for key, values in expected.items():
            assert np.array_equal(taken[key], values)
            assert taken[key].dtype == values.dtype


def test_places_are_used_again():
    buffer = ReorderBuffer(capacity=2, first_slot=0, total_slots=8)
    for begin in range(0, 8, 2):
        buffer.put(block([begin + 1, begin]))
        assert buffer.take(begin, begin + 2)["wide"].tolist() == [begin * 1000.0, (begin + 1) * 1000.0]


def test_a_block_may_be_changed_after_it_was_put_in():
    buffer = ReorderBuffer(capacity=2, first_slot=0, total_slots=2)
    arrived = block([0, 1])
    buffer.put(arrived)
    for values in arrived.values():
        values[:] = 0
    assert buffer.take(0, 2)["wide"].tolist() == [0.0, 1000.0]


def test_a_batch_is_its_takers_own():
    buffer = ReorderBuffer(capacity=2, first_slot=0, total_slots=4)
    buffer.put(block([0, 1]))
    batch = buffer.take(0, 2)
    buffer.put(block([2, 3]))
    assert batch["wide"].tolist() == [0.0, 1000.0]


def test_has_asks_for_every_slot():
    buffer = ReorderBuffer(capacity=4, first_slot=10, total_slots=4)
    assert not buffer.has(10, 12)
    buffer.put(block([10, 12]))
    assert buffer.has(10, 11)
    assert not buffer.has(10, 12)
    buffer.put(block([11]))
    assert buffer.has(10, 13)
    buffer.take(10, 12)
    assert not buffer.has(10, 12)
    assert buffer.has(12, 13)


def test_a_block_that_does_not_fit_is_refused():
    buffer = ReorderBuffer(capacity=3, first_slot=0, total_slots=9)
    buffer.put(block([4, 5]))
    with pytest.raises(RuntimeError, match="reorder buffer of 3 rows is full: a block of 2 rows came out of order"):
        buffer.put(block([6, 7]))


def test_a_row_that_comes_twice_is_refused():
    buffer = ReorderBuffer(capacity=4, first_slot=0, total_slots=4)
    buffer.put(block([1, 2]))
    with pytest.raises(RuntimeError, match="a sample arrived twice"):
        buffer.put(block([3, 2]))


def test_a_batch_lies_in_the_memory_that_is_given_and_rows_go_nowhere_else():
    """tracemalloc sees every array that NumPy makes, also those that it makes for a moment."""
    rows = {"slot": np.arange(8), "picture": np.arange(8 * 3 * 64 * 64).astype(np.uint8).reshape(8, 3, 64, 64)}
    buffer = ReorderBuffer(capacity=16, first_slot=0, total_slots=16)
    buffer.put(rows)  # makes the buffer
    given: list[np.ndarray] = [np.empty((8, 3, 64, 64), np.uint8), np.empty(8, np.int64)]
    left, one_row = list(given), rows["picture"][0].nbytes
    tracemalloc.start()
    try:
        buffer.put(rows | {"slot": np.arange(8, 16)})
        batch = buffer.take(8, 16, lambda shape, dtype: left.pop())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert batch["picture"] is given[0]
    assert batch["slot"] is given[1]
    assert np.array_equal(batch["picture"], rows["picture"])
    assert peak < one_row
