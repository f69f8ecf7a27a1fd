"""[ray] A worker's batches: blocks in, batches out, in the order of the plan, on threads of their own.

One thread pulls blocks and goes on to the next stretch of the plan by itself, so that an epoch's end is no pause. The
other copies their rows out at once and assembles the next batches while the trainer computes. `next()` measures how
long the trainer had to wait. Ends cleanly on error, on exhaustion and on `close()` at any moment.
"""

import queue
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from vlatune.batch import Columns
from vlatune.pipeline.build import DataPlan, Segment, plan_segments, stream_blocks
from vlatune.pipeline.memory import Budget
from vlatune.pipeline.plan import Share
from vlatune.pipeline.rows import RowBuffer
from vlatune.pipeline.source import READ_S

QUEUED_BYTES = 64 * 1024 * 1024
MIN_QUEUED, MAX_QUEUED = 2, 8
"""Batches assembled ahead of need, as many as these bytes hold. At an epoch's beginning all lanes ask for new runs at once:
two small batches last for a tenth of a second, less than it takes to copy these out of the store."""
QUEUED_BLOCKS = 1
"""Blocks pulled ahead of need; each keeps its shared memory until its rows are copied out."""


class Feed:
    """Micro-batches of optimizer steps [first_step, last_step), for one worker."""

    def __init__(self, plan: DataPlan, share: Share, budget: Budget, *, first_step: int, last_step: int) -> None:
        self.wait_s = 0.0
        """Seconds that `next()` has waited so far."""
        self.times = StageTimes()
        self._stop = threading.Event()
        self._blocks = Channel[Segment | Columns](QUEUED_BLOCKS, self._stop)
        self._batches = Channel[Columns](queued_batches(plan.batch_size * budget.row_bytes), self._stop)
        segments = plan_segments(plan, share, budget, first_step=first_step, last_step=last_step)
        self._threads = [
            threading.Thread(target=self._blocks.fill, args=(_pull(plan, budget, segments),), name="feed-pull"),
            threading.Thread(
                target=self._batches.fill, args=(_assemble_all(plan, share, self._blocks, self.times),), name="feed"
            ),
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def __iter__(self) -> Iterator[Columns]:
        return self

    def __next__(self) -> Columns:
        begin = time.perf_counter()
        try:
            return next(self._batches)
        finally:
            self.wait_s += time.perf_counter() - begin

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


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


class Channel[T]:
    """A bounded queue from one thread to another that carries the end and errors along, and lets go when stopped."""

    def __init__(self, size: int, stop: threading.Event) -> None:
        self._queue: queue.Queue[tuple[str, T | BaseException | None]] = queue.Queue(maxsize=size)
        self._stop = stop

    def fill(self, items: Generator[T]) -> None:
        """Put all items, then the end; runs on the giving thread."""
        try:
            for item in items:
                if not self._put(("item", item)):
                    return
            self._put(("end", None))
        except BaseException as error:  # raised where it is taken
            self._put(("error", error))
        finally:
            items.close()  # Ray Data stops its executor when its iterator is closed

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        while not self._stop.is_set():
            try:
                kind, item = self._queue.get(timeout=0.2)
            except queue.Empty:
                continue
            if kind == "item":
                return item  # pyright: ignore[reportReturnType]
            self._put((kind, item))  # the end and an error are met by every later call, too
            if isinstance(item, BaseException):
                raise item
            break
        raise StopIteration

    def _put(self, entry: tuple[str, T | BaseException | None]) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(entry, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False


def _pull(plan: DataPlan, budget: Budget, segments: Iterator[Segment]) -> Generator[Segment | Columns]:
    """Each segment, followed by its blocks."""
    for segment in segments:
        yield segment
        yield from stream_blocks(plan, segment, budget)


def _assemble_all(
    plan: DataPlan, share: Share, stream: Iterator[Segment | Columns], times: StageTimes
) -> Generator[Columns]:
    for segment in stream:
        assert isinstance(segment, Segment)  # all blocks of the one before have been taken
        yield from assemble(plan, share, segment, _blocks_of(segment, stream), times)


def _blocks_of(segment: Segment, stream: Iterator[Segment | Columns]) -> Iterator[Columns]:
    for block in stream:
        if isinstance(block, Segment):
            raise RuntimeError(f"the blocks of optimizer steps up to {segment.end_step} ended before all rows had come")
        yield block


def assemble(
    plan: DataPlan, share: Share, segment: Segment, blocks: Iterator[Columns], times: StageTimes
) -> Iterator[Columns]:
    """Put a segment's rows in order and cut them into micro-batches."""
    per_step = share.slots_per_step(plan.order)
    first, last = segment.begin_step * per_step, segment.end_step * per_step
    buffer = RowBuffer(capacity=segment.reorder_rows, first_slot=first, total_slots=last - first)
    for begin in range(first, last, plan.batch_size):
        end = begin + plan.batch_size
        while not buffer.has(begin, end):
            block = next(blocks, None)
            if block is None:
                raise RuntimeError(
                    f"the data ended early: optimizer step {begin // per_step}, sample {begin} is missing"
                )
            began = time.perf_counter()
            times.decode_s += float(block.pop(READ_S).sum())
            buffer.put(block)
            times.copied_bytes += sum(values.nbytes for values in block.values())
            times.transport_s += time.perf_counter() - began
        began = time.perf_counter()
        batch = buffer.take(begin, end)
        times.copied_bytes += sum(values.nbytes for values in batch.values())
        times.collate_s += time.perf_counter() - began
        yield batch
