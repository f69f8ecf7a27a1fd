"""[ray] A worker's batches: blocks in, batches out, in the order of the plan, on a thread of its own.

The thread pulls blocks, copies their rows out at once, and assembles the next batches while the trainer
computes. `next()` measures how long the trainer had to wait. Ends cleanly on error, on exhaustion and on
`close()` at any moment.
"""

import queue
import threading
import time
from collections.abc import Iterator

from vlatune.batch import Columns
from vlatune.pipeline.build import DataPlan, Segment, plan_segments, stream_blocks
from vlatune.pipeline.memory import Budget
from vlatune.pipeline.plan import Share
from vlatune.pipeline.rows import RowBuffer

QUEUED_BATCHES = 2


class Feed:
    """Micro-batches of optimizer steps [first_step, last_step), for one worker."""

    def __init__(self, plan: DataPlan, share: Share, budget: Budget, *, first_step: int, last_step: int) -> None:
        self.wait_s = 0.0
        """Seconds that `next()` has waited so far."""
        self._queue: queue.Queue[Columns | BaseException | None] = queue.Queue(maxsize=QUEUED_BATCHES)
        self._stop = threading.Event()
        segments = plan_segments(plan, share, budget, first_step=first_step, last_step=last_step)
        self._thread = threading.Thread(
            target=self._run, args=(plan, share, budget, segments), name="feed", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[Columns]:
        return self

    def __next__(self) -> Columns:
        begin = time.perf_counter()
        item = self._queue.get()
        self.wait_s += time.perf_counter() - begin
        if item is None:
            raise StopIteration
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._queue.get_nowait()  # room for a blocked put
            except queue.Empty:
                self._thread.join(timeout=0.05)

    def _run(self, plan: DataPlan, share: Share, budget: Budget, segments: Iterator[Segment]) -> None:
        try:
            for segment in segments:
                for batch in assemble(plan, share, segment, stream_blocks(plan, segment, budget)):
                    if not self._put(batch):
                        return
            self._put(None)
        except BaseException as error:  # handed to the trainer, which raises it
            self._put(error)

    def _put(self, item: Columns | BaseException | None) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False


def assemble(plan: DataPlan, share: Share, segment: Segment, blocks: Iterator[Columns]) -> Iterator[Columns]:
    """Put a segment's rows in order and cut them into micro-batches."""
    per_step = share.slots_per_step(plan.order)
    first, last = segment.begin_batch * per_step, segment.end_batch * per_step
    buffer = RowBuffer(capacity=segment.reorder_rows, first_slot=first, total_slots=last - first)
    for begin in range(first, last, plan.batch_size):
        end = begin + plan.batch_size
        while not buffer.has(begin, end):
            block = next(blocks, None)
            if block is None:
                raise RuntimeError(f"the data ended early: epoch {segment.epoch}, sample {begin} of {last} is missing")
            buffer.put(block)
        yield buffer.take(begin, end)
