"""Reorder buffer: rows arrive in blocks in decoding order and leave in training order.

One numpy array per column, of a precomputed size (`plan.reorder_rows`). A row is copied twice: out
of its block on arrival, which releases the block's shared memory, and into the batch, in the memory
that the device reads from. Writing rows directly into batches would need several times the memory,
all of it pinned, because the rows of a run are spread over many batches.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from vlatune.batch import SLOT, Columns, num_rows

Empty = Callable[[tuple[int, ...], Any], np.ndarray]
"""Allocates an array of a shape and dtype, like `np.empty`."""


class ReorderBuffer:
    """Rows by slot. Slots [first, first + total) arrive exactly once and are taken in order."""

    def __init__(self, *, capacity: int, first_slot: int, total_slots: int) -> None:
        self._columns: Columns = {}
        self._capacity = capacity
        self._first = first_slot
        self._row_of = np.full(total_slots, -1, dtype=np.int64)  # slot -> row of the arrays; -1 if absent
        self._free = list(range(capacity - 1, -1, -1))

    def put(self, columns: Columns) -> None:
        """Copy the rows of a block."""
        if not self._columns:
            self._columns = {
                key: np.empty((self._capacity, *values.shape[1:]), values.dtype) for key, values in columns.items()
            }
        rows = num_rows(columns)
        if rows > len(self._free):
            raise RuntimeError(
                f"reorder buffer of {self._capacity} rows is full: a block of {rows} rows came out of order"
            )
        at = np.array([self._free.pop() for _ in range(rows)], dtype=np.int64)
        slots = columns[SLOT] - self._first
        if (self._row_of[slots] >= 0).any():
            raise RuntimeError("a sample arrived twice")
        self._row_of[slots] = at
        for key, values in columns.items():
            self._columns[key][at] = values

    def has(self, begin: int, end: int) -> bool:
        """True if all slots of [begin, end) have arrived."""
        return bool((self._row_of[begin - self._first : end - self._first] >= 0).all())

    def take(self, begin: int, end: int, empty: Empty = np.empty) -> Columns:
        """Remove rows [begin, end) as a batch in memory from `empty`."""
        window = slice(begin - self._first, end - self._first)
        at = self._row_of[window].copy()
        batch = {}
        for key, values in self._columns.items():
            out = empty((len(at), *values.shape[1:]), values.dtype)
            batch[key] = np.take(values, at, axis=0, out=out, mode="clip")  # "raise" would use a temporary array
        self._row_of[window] = -1
        self._free.extend(at.tolist())
        return batch
