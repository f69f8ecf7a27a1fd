"""Assemble a worker's batches from blocks, in plan order, on the calling thread.

This is the prefetching thread. It copies the rows of a block immediately, to release its shared
memory, and assembles batches in the memory that they are sent from.
"""

import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np

from vlatune.batch import ACTION_IS_PAD, SLOT, STEP_ACTIONS, Columns
from vlatune.feed.memory import Budget
from vlatune.feed.plan import DataPlan, Segment, Share
from vlatune.feed.ray_blocks import CACHED, READ_S, BlockStream, SplitUnit, StoppedError
from vlatune.feed.reorder_buffer import Empty, ReorderBuffer

QUEUED_BYTES = 64 * 1024 * 1024
MIN_QUEUED, MAX_QUEUED = 2, 8
"""Limits of prefetched batches, within QUEUED_BYTES.

At the start of an epoch, all lanes need new runs at once; the queue bridges this time.
"""


class Feed:
    """Iterator over a worker's micro-batches of optimizer steps [first_step, last_step).

    Reading starts with the first `next`.
    """

    def __init__(
        self,
        plan: DataPlan,
        share: Share,
        budget: Budget,
        *,
        first_step: int,
        last_step: int,
        empty: Empty = np.empty,
        split: SplitUnit | None = None,
    ) -> None:
        """Create a feed; `empty` allocates the memory of batches, `split` finds images not to read."""
        self.times = StageTimes()
        self._stream = BlockStream(plan, share, budget, first_step=first_step, last_step=last_step, split=split)
        self._batches = assemble(plan, share, iter(self._stream), self.times, empty)
        self._taking = threading.Lock()

    def __iter__(self) -> Iterator[Columns]:
        return self

    def __next__(self) -> Columns:
        with self._taking:
            try:
                return next(self._batches)
            except StoppedError:
                raise StopIteration from None

    def close(self) -> None:
        """Stop reading and release a waiting thread; may be called from any thread."""
        self._stream.stop()
        with self._taking:
            self._batches.close()
            self._stream.close()


def queued_batches(batch_bytes: int) -> int:
    return min(MAX_QUEUED, max(MIN_QUEUED, QUEUED_BYTES // batch_bytes))


@dataclass
class StageTimes:
    """Seconds spent on this worker's rows by stage; written by one thread, readable by any."""

    decode_s: float = 0.0
    """Time in read tasks, summed over tasks."""
    transport_s: float = 0.0
    """Time to copy rows out of the object store."""
    collate_s: float = 0.0
    """Time to gather rows into batches."""
    copied_bytes: int = 0
    """Bytes copied in transport and collation."""
    rows: int = 0
    """Rows read."""
    cached_rows: float = 0.0
    """Rows whose images came from the frame cache; a part of a row's cameras counts as a part."""


def assemble(
    plan: DataPlan, share: Share, items: Iterator[Segment | Columns], times: StageTimes, empty: Empty = np.empty
) -> Generator[Columns]:
    """Reorder the rows of each segment, which its blocks follow, and split them into micro-batches."""
    per_step = share.slots_per_step(plan.order)
    for segment in items:
        assert isinstance(segment, Segment)  # all blocks of the previous segment were taken
        first, last = segment.begin_step * per_step, segment.end_step * per_step
        buffer = ReorderBuffer(capacity=segment.reorder_rows, first_slot=first, total_slots=last - first)
        for begin in range(first, last, plan.batch_size):
            end = begin + plan.batch_size
            while not buffer.has(begin, end):
                block = next(items, None)
                if not isinstance(block, dict):
                    raise RuntimeError(
                        f"the data ended early: optimizer step {begin // per_step}, sample {begin} is missing"
                    )
                began = time.perf_counter()
                times.decode_s += float(block.pop(READ_S).sum())
                cached_N = block.pop(CACHED)
                times.rows += len(cached_N)
                times.cached_rows += float(cached_N.sum())
                block[SLOT] = share.slots(plan.order, block[SLOT])
                buffer.put(block)
                times.copied_bytes += sum(values.nbytes for values in block.values())
                times.transport_s += time.perf_counter() - began
                del block  # release its shared memory
            began = time.perf_counter()
            batch = buffer.take(begin, end, empty)
            if ACTION_IS_PAD in batch:
                step = begin // per_step - segment.begin_step
                batch[STEP_ACTIONS] = empty((plan.batch_size,), np.dtype(np.float32))
                batch[STEP_ACTIONS][:] = segment.step_actions_SD[step, batch["dataset_index"]]
            times.copied_bytes += sum(values.nbytes for values in batch.values())
            times.collate_s += time.perf_counter() - began
            yield batch
