"""The reorder buffer: rows arrive in blocks in the order of decoding and leave in the order of training.

One numpy array per column, of a size computed beforehand (`plan.reorder_rows`). Rows are copied in when a
block arrives, so that nothing keeps the block's shared memory alive, and copied out once, into the batch.
"""

import numpy as np

from vlatune.batch import SLOT, Columns, num_rows


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

    def take(self, begin: int, end: int) -> Columns:
        """Rows [begin, end) as a batch of their own; their places become free."""
        window = slice(begin - self._first, end - self._first)
        places = self._place[window].copy()
        batch = {key: values[places] for key, values in self._columns.items()}
        self._place[window] = -1
        self._free.extend(places.tolist())
        return batch
