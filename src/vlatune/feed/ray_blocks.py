"""[ray] Blocks of one worker, planned and read by Ray tasks within the worker's byte budget.

A stream plans one segment ahead, submits as many read tasks as fit the budget, and yields their
blocks in plan order. A read task is a streaming generator that never waits for its consumer, so it
always ends; its blocks count against the budget from submission until they are taken. Ray retries
tasks whose process or node died; order and content are pure functions of the plan, so retries are
transparent. The training process only submits tasks and maps finished blocks.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError

from vlatune.batch import Columns
from vlatune.data.reader import ReadSpec, Unit, read_units
from vlatune.data.transforms import Transform, apply_all
from vlatune.feed.memory import Budget
from vlatune.feed.plan import Blocks, DataPlan, Segment, Share, plan_segment

READ_S = "read_s"
"""Column of a block: seconds to read a row; removed by the feed."""
CACHED = "cached"
"""Column of a block: share of a row's images that came from the frame cache; removed by the feed."""
HAS_IMAGES = "has_images"
"""Column of a block of a run that keeps the prefix: False if images were not read; removed by its reader."""
POLL_S = 0.5
"""Interval for checking whether the stream was stopped."""
MAX_RETRIES = 10
"""Retries of a read task whose process or node died."""
READER_NICENESS = 19
"""Lowest priority. Ray starts workers with 15 by default, including training workers."""
IDLE_POLICY: int | None = getattr(os, "SCHED_IDLE", None)
"""Linux treats cores that only run SCHED_IDLE tasks as idle, so training threads wake up there."""


SplitUnit = Callable[[Unit], list[Unit]]
"""Splits a unit by whether its images have to be read."""


class StoppedError(Exception):
    """The stream was stopped while waiting for a block."""


class BlockStream:
    """Segments, each followed by its blocks, of steps [first_step, last_step)."""

    def __init__(
        self,
        plan: DataPlan,
        share: Share,
        budget: Budget,
        *,
        first_step: int,
        last_step: int,
        split: SplitUnit | None = None,
    ) -> None:
        self._budget, self._split = budget, split
        self._stopped = threading.Event()
        self._submitted: deque[tuple[Segment | None, Blocks, Any]] = deque()
        self.open_blocks = 0
        """Blocks of submitted tasks that were not taken yet."""
        planner = ray.remote(plan_segment).options(num_cpus=0)
        self._reader = ray.remote(_read_blocks).options(num_cpus=1, num_returns="streaming", max_retries=MAX_RETRIES)
        plan_ref = ray.put(plan)
        self._source = ray.put((plan.specs, plan.transforms))
        self._steps = range(first_step, last_step)
        self._plan_next = lambda step: planner.remote(plan_ref, share, budget, step, last_step)  # pyright: ignore[reportArgumentType]
        self._tasks = self._planned_tasks()
        self._next = None

    def __iter__(self) -> Iterator[Segment | Columns]:
        """Yield until the end of the plan; raise StoppedError after `stop`.

        A block's columns are views of shared memory, which is released when the caller drops them.
        """
        self._submit()
        while self._submitted:
            segment, blocks, generator = self._submitted[0]
            if segment is not None:
                yield segment
            for _ in blocks:
                yield self._take(generator)  # no variable: a suspended frame would pin the block
                self.open_blocks -= 1
                self._submit()
            self._submitted.popleft()

    def stop(self) -> None:
        """Stop the iteration; may be called from any thread."""
        self._stopped.set()

    def close(self) -> None:
        """Cancel the read tasks that were submitted but not taken."""
        for *_, generator in self._submitted:
            with contextlib.suppress(Exception):  # the task or the cluster may have ended
                ray.cancel(generator)
        self._submitted.clear()

    def _submit(self) -> None:
        """Submit read tasks while their blocks fit the budget, at least one."""
        while (task := self._next or next(self._tasks, None)) is not None:
            self._next, (segment, blocks) = task, task
            if self.open_blocks and self.open_blocks + len(blocks) > self._budget.max_blocks:
                return
            if self._split:
                blocks = tuple([part for unit in units for part in self._split(unit)] for units in blocks)
            self._submitted.append((segment, blocks, self._reader.remote(self._source, blocks)))
            self.open_blocks += len(blocks)
            self._next = None

    def _planned_tasks(self) -> Iterator[tuple[Segment | None, Blocks]]:
        """Yield the read tasks; the first one of a segment carries it."""
        planned = self._plan_next(self._steps.start) if self._steps else None
        while planned is not None:
            segment, (first, *others) = ray.get(planned)
            planned = self._plan_next(segment.end_step) if segment.end_step < self._steps.stop else None
            yield segment, first
            yield from ((None, blocks) for blocks in others)

    def _take(self, generator: Any) -> Columns:
        """Return the next block of a task."""
        ref = None
        while not self._stopped.is_set():
            if ref is None and ray.wait([generator], timeout=POLL_S)[0]:
                ref = next(generator)
            if ref is not None:
                with contextlib.suppress(GetTimeoutError):
                    return ray.get(ref, timeout=POLL_S)
        raise StoppedError


def _read_blocks(source: tuple[tuple[ReadSpec, ...], tuple[Transform, ...]], blocks: Blocks) -> Iterator[Columns]:
    """Read blocks on cores that training leaves idle; runs in a Ray worker."""
    if os.getpriority(os.PRIO_PROCESS, 0) < READER_NICENESS:
        os.setpriority(os.PRIO_PROCESS, 0, READER_NICENESS)
    if IDLE_POLICY is not None and os.sched_getscheduler(0) != IDLE_POLICY:
        with contextlib.suppress(PermissionError):  # may be forbidden in containers
            os.sched_setscheduler(0, IDLE_POLICY, os.sched_param(0))
    yield from read_blocks(*source, blocks)


def read_blocks(
    specs: Sequence[ReadSpec], transforms: Sequence[Transform], blocks: Iterable[Sequence[Unit]]
) -> Iterator[Columns]:
    """Read the units of each block and apply the transforms."""
    for units in blocks:
        begin, cached = time.perf_counter(), []
        columns = apply_all(transforms, read_units(specs, units, cached))
        sizes = [len(unit.frames) for unit in units]
        columns[CACHED] = np.repeat(np.array(cached, np.float32), sizes)
        if units[0].skips_images is not None:
            columns[HAS_IMAGES] = np.repeat([not unit.skips_images for unit in units], sizes)
        columns[READ_S] = np.full(sum(sizes), (time.perf_counter() - begin) / sum(sizes), np.float32)
        yield columns
