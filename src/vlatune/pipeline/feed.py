"""[ray] A worker's batches: blocks in, batches out, in the order of the plan, on the thread that asks for them.

That is the prefetcher's, beside the trainer's. It takes blocks from the coordinator's process, which goes on to the next
stretch of the plan by itself, so that an epoch's end is no pause; it copies their rows out at once and assembles batches in
the memory that they are sent from. A coordinator that dies is replaced by one that begins at the next batch. Ends cleanly on
error, on exhaustion and on `close()` at any moment.
"""

import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import ray

from vlatune.batch import SLOT, Columns
from vlatune.pipeline.coordinator import LOST, BlockStream, SegmentHead, start_coordinator
from vlatune.pipeline.memory import Budget
from vlatune.pipeline.plan import DataPlan, Share
from vlatune.pipeline.reorder_buffer import Empty, ReorderBuffer
from vlatune.pipeline.source import READ_S

QUEUED_BYTES = 64 * 1024 * 1024
MIN_QUEUED, MAX_QUEUED = 2, 8
"""Batches ready ahead of need, as many as these bytes hold. At an epoch's beginning all lanes ask for new runs at once: two
small batches last for a tenth of a second, less than it takes to copy these out of the store."""
MAX_LOST = 3
"""Coordinators that may die one after the other without a batch between them."""


class Feed:
    """Micro-batches of optimizer steps [first_step, last_step), for one worker; begins with the first that is asked for."""

    def __init__(
        self,
        plan: DataPlan,
        share: Share,
        budget: Budget,
        *,
        first_step: int,
        last_step: int,
        coordinator: Any = None,
        empty: Empty = np.empty,
    ) -> None:
        """`coordinator` is one that was started ahead, for the same steps; batches lie in memory that `empty` gives."""
        self.times = StageTimes()
        self.restarts = 0
        """Coordinators that died and were replaced."""
        self._plan, self._share, self._budget, self._empty = plan, share, budget, empty
        self._ahead = coordinator
        self._steps = range(first_step, last_step)
        self._stop = threading.Event()
        self._stream: BlockStream | None = None
        self._batches = self._all_batches()
        self._taking = threading.Lock()

    def __iter__(self) -> Iterator[Columns]:
        return self

    def __next__(self) -> Columns:
        with self._taking:
            return next(self._batches)

    def close(self) -> None:
        """From any thread: one that waits for a batch is let go."""
        self._stop.set()
        if self._stream is not None:
            self._stream.stop()
        with self._taking:
            self._batches.close()

    def _all_batches(self) -> Generator[Columns]:
        """Through as many coordinators as it takes."""
        plan = ray.put(self._plan)  # once for all of them
        done, in_vain = 0, 0
        while not self._stop.is_set():
            try:
                for batch in self._batches_from(plan, done):
                    done, in_vain = done + 1, 0
                    yield batch
                return
            except LOST:
                self.restarts, in_vain = self.restarts + 1, in_vain + 1
                if in_vain > MAX_LOST:
                    raise
            except Exception:
                if not self._stop.is_set():  # else the data ended because nobody wants more
                    raise

    def _batches_from(self, plan: ray.ObjectRef, done: int) -> Generator[Columns]:
        """The batches behind the first `done`, from a new coordinator, or first of all from the one started ahead."""
        per_step = self._share.slots_per_step(self._plan.order) // self._plan.batch_size
        steps, begun = divmod(done, per_step)
        coordinator, self._ahead = self._ahead, None
        stream = BlockStream(
            coordinator
            or start_coordinator(
                plan, self._share, self._budget, first_step=self._steps.start + steps, last_step=self._steps.stop
            )
        )
        self._stream = stream
        if self._stop.is_set():  # since the last look: `close` has not seen this one
            stream.stop()
        try:
            yield from islice(assemble_all(self._plan, self._share, stream, self.times, self._empty), begun, None)
        finally:
            stream.close()


def queued_batches(batch_bytes: int) -> int:
    return min(MAX_QUEUED, max(MIN_QUEUED, QUEUED_BYTES // batch_bytes))


@dataclass
class StageTimes:
    """Seconds of this worker's rows so far, by stage; written by the feed's thread, free to read."""

    decode_s: float = 0.0
    """In read tasks, summed over them."""
    transport_s: float = 0.0
    """Copying rows out of the object store."""
    collate_s: float = 0.0
    """Picking rows into batches."""
    copied_bytes: int = 0
    """Bytes that these copies moved."""


def assemble_all(
    plan: DataPlan,
    share: Share,
    items: Iterator[SegmentHead | Columns],
    times: StageTimes,
    empty: Empty = np.empty,
) -> Iterator[Columns]:
    """Segment by segment: each is a head, then its blocks."""
    for head in items:
        assert isinstance(head, SegmentHead)  # all blocks of the one before have been taken
        yield from assemble(plan, share, head, items, times, empty)


def assemble(
    plan: DataPlan,
    share: Share,
    head: SegmentHead,
    blocks: Iterator[SegmentHead | Columns],
    times: StageTimes,
    empty: Empty = np.empty,
) -> Iterator[Columns]:
    """Put a segment's rows in order and cut them into micro-batches."""
    per_step = share.slots_per_step(plan.order)
    first, last = head.begin_step * per_step, head.end_step * per_step
    buffer = ReorderBuffer(capacity=head.reorder_rows, first_slot=first, total_slots=last - first)
    for begin in range(first, last, plan.batch_size):
        end = begin + plan.batch_size
        while not buffer.has(begin, end):
            block = next(blocks, None)
            if not isinstance(block, dict):
                raise RuntimeError(
                    f"the data ended early: optimizer step {begin // per_step}, sample {begin} is missing"
                )
            block[SLOT] = share.slots(plan.order, block[SLOT])
            _copy_out(block, buffer, times)
            del block  # its shared memory is free again
        began = time.perf_counter()
        batch = buffer.take(begin, end, empty)
        times.copied_bytes += sum(values.nbytes for values in batch.values())
        times.collate_s += time.perf_counter() - began
        yield batch


def _copy_out(block: Columns, buffer: ReorderBuffer, times: StageTimes) -> None:
    began = time.perf_counter()
    times.decode_s += float(block.pop(READ_S).sum())
    buffer.put(block)
    times.copied_bytes += sum(values.nbytes for values in block.values())
    times.transport_s += time.perf_counter() - began
