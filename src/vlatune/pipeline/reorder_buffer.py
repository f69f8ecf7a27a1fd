"""The reorder buffer: rows arrive in blocks in the order of decoding and leave in the order of training.

One numpy array per column, of a size computed beforehand (`plan.reorder_rows`). A row is copied twice, for every device:
out of its block when that arrives, so that nothing keeps the block's shared memory alive, and into the batch when that
leaves, there into the memory that the device reads from. No other copy is made of it on the host.

One copy would mean to write a row to its place in a batch when it arrives. But a run's rows are spread over two windows:
batches would lie open, most of them half empty, for as far ahead as any row that is there belongs, and that takes 1.7 to 5
times the rows' own memory (68 batches of 32 for 1,098 rows with the default windows; 159 of 256 for 7,622), all of it
page-locked beside a GPU. Here three batches are.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from vlatune.batch import SLOT, Columns, num_rows

Empty = Callable[[tuple[int, ...], Any], np.ndarray]
"""Memory for an array of a shape and dtype, as `np.empty` gives it."""


class ReorderBuffer:
    """Rows by slot. Slots [first, first + total) arrive each exactly once and are taken in rising order."""

    def __init__(self, *, capacity: int, first_slot: int, total_slots: int) -> None:
        self._columns: Columns = {}
        self._capacity = capacity
        self._first = first_slot
        self._place = np.full(total_slots, -1, dtype=np.int64)  # slot -> row of the arrays, -1: not here
        self._free = list(range(capacity - 1, -1, -1))

    def put(self, columns: Columns) -> None:
        """Copy a block's rows in."""
        if not self._columns:
            self._columns = {
                key: np.empty((self._capacity, *values.shape[1:]), values.dtype) for key, values in columns.items()
            }
        rows = num_rows(columns)
        if rows > len(self._free):
            raise RuntimeError(
                f"reorder buffer of {self._capacity} rows is full: a block of {rows} rows came out of order"
            )
        places = np.array([self._free.pop() for _ in range(rows)], dtype=np.int64)
        slots = columns[SLOT] - self._first
        if (self._place[slots] >= 0).any():
            raise RuntimeError("a sample arrived twice")
        self._place[slots] = places
        for key, values in columns.items():
            self._columns[key][places] = values

    def has(self, begin: int, end: int) -> bool:
        """Whether all slots of [begin, end) have arrived."""
        return bool((self._place[begin - self._first : end - self._first] >= 0).all())

    def take(self, begin: int, end: int, empty: Empty = np.empty) -> Columns:
        """Rows [begin, end) as a batch of their own, in memory that `empty` gives; their places become free."""
        window = slice(begin - self._first, end - self._first)
        places = self._place[window].copy()
        batch = {key: _pick(values, places, empty) for key, values in self._columns.items()}
        self._place[window] = -1
        self._free.extend(places.tolist())
        return batch


def _pick(values: np.ndarray, places: np.ndarray, empty: Empty) -> np.ndarray:
    """Some rows, copied once: with the usual mode, which checks the places, NumPy copies into memory of its own first."""
    out = empty((len(places), *values.shape[1:]), values.dtype)
    return np.take(values, places, axis=0, out=out, mode="clip")
