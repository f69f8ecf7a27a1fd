"""Byte budget of the object store, and a meter that detects spilling.

The budget is a pure function of store size, row size, workers and readers: all blocks that a worker
has in flight must fit its share of the store. `sizing.py` chooses the store size and the readers'
CPUs. The meter reads the raylets' counters relative to its start, and raises if it cannot measure.
"""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from vlatune.ray_internals import store_counters

STORE_SHARE = 0.45
"""Share of the store for blocks in flight; the rest holds unfreed blocks and validation rows."""
MAX_BLOCK_BYTES = 16 * 1024 * 1024
"""Large enough to amortise Ray's cost per block, small enough that many fit a small store."""
FEED_BLOCK_BYTES = 8 * 1024 * 1024
"""Block size of the feed; small, so that every read task has several blocks in a small store."""
MAX_BLOCK_ROWS = 256
MAX_TASK_BLOCKS = 32
"""Maximum blocks per read task; long tasks amortise the idle time between tasks."""
CONSUMER_BLOCKS = 2
"""Blocks taken but not freed: one being copied, one waiting for the raylet."""
TASKS_PER_READER = 2
"""Read tasks submitted per reader: one runs, the blocks of another are taken."""
STORE_FLAG = "--ray.object_store_bytes"


@dataclass(frozen=True)
class Budget:
    """Limits that keep one worker's pipeline within its share of the store."""

    block_rows: int
    block_bytes: int
    readers: int
    max_blocks: int
    """Maximum number of blocks of submitted read tasks that were not taken yet."""
    task_blocks: int = 1
    """Number of blocks that a read task produces."""

    @property
    def row_bytes(self) -> int:
        return self.block_bytes // self.block_rows

    @property
    def task_rows(self) -> int:
        return self.block_rows * self.task_blocks

    def reason(self, store_bytes: int, num_workers: int) -> str:
        return (
            f"blocks of {self.block_rows} rows ({self.block_bytes / 1e6:.1f} MB), {self.task_blocks} per read task, "
            f"{self.readers} readers and at most {self.max_blocks * self.block_bytes / 1e6:.0f} MB in flight per worker: {STORE_SHARE:.0%} of a store of {store_bytes / 1e6:.0f} MB "
            f"over {num_workers} worker{'s' if num_workers > 1 else ''}"
        )


def plan_budget(
    *, store_bytes: int, row_bytes: int, num_workers: int, num_cpus: int, store_flag: str = STORE_FLAG
) -> Budget:
    """Choose block and task sizes so that TASKS_PER_READER tasks per reader fit the worker's share.

    Blocks are taken in order: while the first task's blocks are taken, the blocks of all others wait in
    the store. `num_cpus` are the CPUs available to readers.
    """
    readers = max(1, num_cpus // num_workers)
    share_bytes = int(store_bytes * STORE_SHARE / num_workers)
    wanted = min(max(FEED_BLOCK_BYTES, row_bytes), share_bytes // (TASKS_PER_READER * readers + CONSUMER_BLOCKS))
    block_rows = min(MAX_BLOCK_ROWS, wanted // row_bytes)
    if block_rows < 1:
        enough = _store_of(row_bytes * (TASKS_PER_READER * readers + CONSUMER_BLOCKS), num_workers)
        raise ValueError(
            f"a sample of {row_bytes / 1e6:.1f} MB does not fit the object store of {store_bytes / 1e6:.0f} MB with {num_workers} workers "
            f"and {readers} readers each; raise {store_flag} to {enough} or more"
        )
    block_bytes = int(block_rows * row_bytes)
    max_blocks = share_bytes // block_bytes - CONSUMER_BLOCKS
    task_blocks = min(MAX_TASK_BLOCKS, max_blocks // (TASKS_PER_READER * readers))
    return Budget(int(block_rows), block_bytes, readers, max_blocks, task_blocks)


def plan_store_bytes(*, row_bytes: int, num_workers: int, readers: int, task_rows: int) -> int:
    """Return the smallest store for full-size blocks and tasks of `task_rows` rows.

    Tasks are shorter if MAX_TASK_BLOCKS blocks hold fewer rows.
    """
    block_rows = min(MAX_BLOCK_ROWS, max(1, FEED_BLOCK_BYTES // row_bytes))
    task_blocks = min(MAX_TASK_BLOCKS, max(2, math.ceil(task_rows / block_rows)))
    blocks = TASKS_PER_READER * readers * task_blocks + CONSUMER_BLOCKS
    return _store_of(block_rows * row_bytes * blocks, num_workers)


def _store_of(worker_bytes: int, num_workers: int) -> int:
    """Return the store size that gives each worker `worker_bytes`."""
    return math.ceil(worker_bytes * num_workers / STORE_SHARE) + num_workers


SAMPLE_EVERY_S = 0.5
MAX_GAP_S = 180.0
"""Seconds without a reading after which the meter fails. Ray may take a minute to notice a lost node."""


@dataclass(frozen=True)
class StoreCounters:
    spilled_bytes: int
    fallback_bytes: int
    used_bytes: int


def read_counters() -> StoreCounters:
    """Return the object store counters of the cluster, from the raylets."""
    try:
        return StoreCounters(*store_counters())
    except Exception as error:
        raise RuntimeError(
            f"the object store's counters cannot be read ({error}); without them a spill would go unseen"
        ) from error


class SpillMeter:
    """Samples the counters that `read` returns on a thread; `latest()` and `peak_bytes` do not block."""

    def __init__(self, read: Callable[[], StoreCounters], max_gap_s: float = MAX_GAP_S) -> None:
        self._read, self._max_gap_s = read, max_gap_s
        self._start = read()
        self._latest = self._start
        self.peak_bytes = self._start.used_bytes
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="spill-meter", daemon=True)
        self._thread.start()

    def latest(self) -> StoreCounters:
        """Return spilled and fallback bytes since the start of the meter, and bytes in use."""
        if self._failure is not None:
            raise RuntimeError(f"the spill meter stopped: {self._failure}")
        now, start = self._latest, self._start
        return StoreCounters(
            now.spilled_bytes - start.spilled_bytes, now.fallback_bytes - start.fallback_bytes, now.used_bytes
        )

    def close(self) -> StoreCounters:
        """Stop and return a final exact reading."""
        self._stop.set()
        self._thread.join()
        self._sample()
        return self.latest()

    def _watch(self) -> None:
        read_s = time.monotonic()
        while not self._stop.wait(SAMPLE_EVERY_S):
            try:
                self._sample()
                read_s = time.monotonic()
            except Exception as error:
                if time.monotonic() - read_s > self._max_gap_s:
                    self._failure = error  # reported by `latest()`
                    return

    def _sample(self) -> None:
        self._latest = self._read()
        self.peak_bytes = max(self.peak_bytes, self._latest.used_bytes)
