"""[ray] A worker's batches: blocks in, batches out, in the order of the plan, on a thread of its own.

The thread takes blocks from the coordinator's process, which goes on to the next stretch of the plan by itself, so that
an epoch's end is no pause; it copies their rows out at once and assembles the next batches while the trainer computes. A
coordinator that dies is replaced by one that begins at the next batch. Ends cleanly on error, on exhaustion and on
`close()` at any moment.
"""

import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import ray

from vlatune.batch import SLOT, Columns
from vlatune.bounded_queue import BoundedQueue
from vlatune.pipeline.coordinator import LOST, BlockStream, SegmentHead, start_coordinator
from vlatune.pipeline.memory import Budget
from vlatune.pipeline.plan import DataPlan, Share
from vlatune.pipeline.reorder_buffer import ReorderBuffer
from vlatune.pipeline.source import READ_S

QUEUED_BYTES = 64 * 1024 * 1024
MIN_QUEUED, MAX_QUEUED = 2, 8
"""Batches assembled ahead of need, as many as these bytes hold. At an epoch's beginning all lanes ask for new runs at once:
two small batches last for a tenth of a second, less than it takes to copy these out of the store."""
MAX_LOST = 3
"""Coordinators that may die one after the other without a batch between them."""


class Feed:
    """Micro-batches of optimizer steps [first_step, last_step), for one worker."""

    def __init__(
        self,
        plan: DataPlan,
        share: Share,
        budget: Budget,
        *,
        first_step: int,
        last_step: int,
        coordinator: Any = None,
    ) -> None:
        """`coordinator` is one that was started ahead, for the same steps."""
        self.times = StageTimes()
        self.restarts = 0
        """Coordinators that died and were replaced."""
        self._plan, self._share, self._budget = plan, share, budget
        self._ahead = coordinator
        self._steps = range(first_step, last_step)
        self._stop = threading.Event()
        self._stream: BlockStream | None = None
        self._ready = BoundedQueue(queued_batches(plan.batch_size * budget.row_bytes))
        self._thread = threading.Thread(target=self._fill, name="feed", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Columns]:
        return self

    def __next__(self) -> Columns:
        return self._ready.take()

    def close(self) -> None:
        self._stop.set()
        if self._stream is not None:
            self._stream.stop()
        self._ready.stop()
        self._thread.join()

    def _fill(self) -> None:
        """The thread's whole life."""
        try:
            with closing(self._batches()) as batches:
                for batch in batches:
                    if not self._ready.wait_for_room():
                        return
                    self._ready.put(batch)
            self._ready.end(None)
        except BaseException as error:  # raised where it is taken
            self._ready.end(error)

    def _batches(self) -> Generator[Columns]:
        """All batches, through as many coordinators as it takes."""
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
        try:
            yield from islice(assemble_all(self._plan, self._share, stream, self.times), begun, None)
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
    plan: DataPlan, share: Share, items: Iterator[SegmentHead | Columns], times: StageTimes
) -> Iterator[Columns]:
    """Segment by segment: each is a head, then its blocks."""
    for head in items:
        assert isinstance(head, SegmentHead)  # all blocks of the one before have been taken
        yield from assemble(plan, share, head, items, times)


def assemble(
    plan: DataPlan, share: Share, head: SegmentHead, blocks: Iterator[SegmentHead | Columns], times: StageTimes
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
        batch = buffer.take(begin, end)
        times.copied_bytes += sum(values.nbytes for values in batch.values())
        times.collate_s += time.perf_counter() - began
        yield batch


def _copy_out(block: Columns, buffer: ReorderBuffer, times: StageTimes) -> None:
    began = time.perf_counter()
    times.decode_s += float(block.pop(READ_S).sum())
    buffer.put(block)
    times.copied_bytes += sum(values.nbytes for values in block.values())
    times.transport_s += time.perf_counter() - began
