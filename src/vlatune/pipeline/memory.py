"""The byte budget of the object store, and the meter that watches that it held.

The budget is arithmetic over the store's size, a row's size and the number of workers and readers, pure: blocks, tasks and
readers of a worker's pipeline are chosen so that all that it has in flight fits its share of the store. How large the store
is and how many CPUs readers get is decided in `sizing.py`.

The meter reads the raylets' own counters; they only grow, so it keeps differences from its start. A meter that cannot
measure raises: a zero that was never measured is worse than an error.
"""

import math
import threading
from dataclasses import dataclass

from vlatune.ray_internals import store_counters

STORE_SHARE = 0.45
"""Of the store that the pipelines of all workers may plan to fill. Ray's limits are soft: it overshoots by about five blocks,
and in a store that frees once a second by what was consumed in it."""
MAX_BLOCK_BYTES = 16 * 1024 * 1024
"""Large enough that Ray's cost per block is below 3 % of decoding it, small enough that many fit a small store."""
FEED_BLOCK_BYTES = 12 * 1024 * 1024
"""Blocks of the feed: smaller, since the store holds several more than were planned."""
MAX_BLOCK_ROWS = 256
MAX_TASK_BLOCKS = 32
"""Blocks of a read task: seconds of decoding, as a core is idle for a moment between two tasks."""
CONSUMER_BLOCKS = 6
"""On their way to the consumer or in its hands: two that Ray has fetched ahead, one queued, one being copied out, and two in
the buffer of the task that they come from."""
STORE_FLAG = "--ray.object_store_bytes"


@dataclass(frozen=True)
class Budget:
    """How one worker's pipeline is held to its share of the store."""

    block_rows: int
    block_bytes: int
    readers: int
    limit_bytes: int
    task_blocks: int = 1
    """Blocks that a read task makes, one after the other."""
    reader_cpus: float = 1.0
    """CPUs that a reader holds, less than one where workers outnumber CPUs. A reader whose consumer takes nothing waits and
    keeps its CPUs, and that consumer may be waiting for a worker whose reader would never begin."""

    @property
    def row_bytes(self) -> int:
        return self.block_bytes // self.block_rows

    @property
    def task_rows(self) -> int:
        return self.block_rows * self.task_blocks

    def reason(self, store_bytes: int, num_workers: int) -> str:
        return (
            f"blocks of {self.block_rows} rows ({self.block_bytes / 1e6:.1f} MB), {self.task_blocks} per read task, "
            f"{self.readers} readers and at most {self.limit_bytes / 1e6:.0f} MB in flight per worker: {STORE_SHARE:.0%} of a store of {store_bytes / 1e6:.0f} MB "
            f"over {num_workers} worker{'s' if num_workers > 1 else ''}"
        )


def plan_budget(
    *, store_bytes: int, row_bytes: int, num_workers: int, num_cpus: int, store_flag: str = STORE_FLAG
) -> Budget:
    """Blocks small enough that every reader may hold two and the consumer six within the worker's share.

    Blocks are handed over in order: while the consumer takes those of the first task, the other readers' pile up in the
    store. So a task is as long as lets all of theirs fit, or as is useful. `num_cpus` are those that readers may have.
    """
    readers = max(1, num_cpus // num_workers)
    share_bytes = int(store_bytes * STORE_SHARE / num_workers)
    wanted = min(max(FEED_BLOCK_BYTES, row_bytes), share_bytes // (2 * readers + CONSUMER_BLOCKS))
    block_rows = min(MAX_BLOCK_ROWS, wanted // row_bytes)
    if block_rows < 1:
        enough = _store_of(row_bytes * (2 * readers + CONSUMER_BLOCKS), num_workers)
        raise ValueError(
            f"a sample of {row_bytes / 1e6:.1f} MB does not fit the object store of {store_bytes / 1e6:.0f} MB with {num_workers} workers "
            f"and {readers} readers each; raise {store_flag} to {enough} or more"
        )
    block_bytes = int(block_rows * row_bytes)
    task_blocks = min(MAX_TASK_BLOCKS, (share_bytes // block_bytes - CONSUMER_BLOCKS) // readers)
    return Budget(
        int(block_rows), block_bytes, readers, share_bytes, task_blocks, _cpus_of_reader(num_cpus, num_workers)
    )


def plan_store_bytes(*, row_bytes: int, num_workers: int, readers: int, task_rows: int) -> int:
    """The smallest store with which `plan_budget` makes blocks of full size and tasks of `task_rows` rows.

    Of fewer where rows are so large that MAX_TASK_BLOCKS blocks hold less.
    """
    block_rows = min(MAX_BLOCK_ROWS, max(1, FEED_BLOCK_BYTES // row_bytes))
    task_blocks = min(MAX_TASK_BLOCKS, max(2, math.ceil(task_rows / block_rows)))
    return _store_of(block_rows * row_bytes * (readers * task_blocks + CONSUMER_BLOCKS), num_workers)


def _store_of(worker_bytes: int, num_workers: int) -> int:
    """The store of which each worker's share is so large."""
    return math.ceil(worker_bytes * num_workers / STORE_SHARE) + num_workers


def _cpus_of_reader(num_cpus: int, num_workers: int) -> float:
    """A whole part of one CPU, so that all readers find a place also where the CPUs are of several nodes."""
    readers_per_cpu = math.ceil(num_workers / num_cpus)
    return 1000 // readers_per_cpu / 1000


SAMPLE_EVERY_S = 0.5


@dataclass(frozen=True)
class StoreCounters:
    spilled_bytes: int
    fallback_bytes: int
    used_bytes: int


def read_counters() -> StoreCounters:
    """Cluster-wide counters of the object stores, from the raylets."""
    try:
        return StoreCounters(*store_counters())
    except Exception as error:
        raise RuntimeError(
            f"the object store's counters cannot be read ({error}); without them a spill would go unseen"
        ) from error


class SpillMeter:
    """Samples the counters on a thread; `latest()` and `peak_bytes` are free to read."""

    def __init__(self) -> None:
        self._start = read_counters()
        self._latest = self._start
        self.peak_bytes = self._start.used_bytes
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="spill-meter", daemon=True)
        self._thread.start()

    def latest(self) -> StoreCounters:
        """Spilled and fallback bytes since the meter's start, and bytes in use."""
        if self._failure is not None:
            raise RuntimeError(f"the spill meter stopped: {self._failure}")
        now, start = self._latest, self._start
        return StoreCounters(
            now.spilled_bytes - start.spilled_bytes, now.fallback_bytes - start.fallback_bytes, now.used_bytes
        )

    def close(self) -> StoreCounters:
        """A last exact reading."""
        self._stop.set()
        self._thread.join()
        self._sample()
        return self.latest()

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY_S):
            try:
                self._sample()
            except Exception as error:  # kept for the next reader; a thread must not die unseen
                self._failure = error
                return

    def _sample(self) -> None:
        self._latest = read_counters()
        self.peak_bytes = max(self.peak_bytes, self._latest.used_bytes)
