"""[ray] The process beside a training worker that runs its plan's executions and hands over references to their blocks.

Ray Data's executor is a loop of Python that would take the interpreter from the training thread, so it lives in an actor
on the worker's node, and planning with it: Ray Data keeps no place in its stream and its splitter knows nothing of
lanes, so each worker has its own small Datasets, one for each stretch of its plan. Blocks stay where the readers put them, in shared memory. An actor that dies
takes its executions and their blocks with it; since the order is pure, the feed starts another at its own position.
"""

import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import ray
from ray.data.block import BlockAccessor
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vlatune.batch import Columns
from vlatune.pipeline.memory import Budget
from vlatune.pipeline.plan import DataPlan, Segment, Share, make_units, plan_segments
from vlatune.pipeline.source import TARGET_SHARE, LeRobotSource, unit_tasks
from vlatune.ray_internals import keep_pace

ASKED_AHEAD = 2
"""Blocks asked for before they are needed: one is handed over while the next is fetched."""
LOOK_EVERY_S = 0.5
"""How often a thread that waits for a block looks whether it should still wait."""
LEAVE_S = 5.0
LOST = (RayActorError, ObjectLostError)
"""What the worker meets when the process is dead, or blocks died with it or with another node."""


@dataclass(frozen=True)
class SegmentHead:
    """The blocks that follow are those of optimizer steps [begin_step, end_step)."""

    begin_step: int
    end_step: int
    reorder_rows: int


@dataclass(frozen=True)
class BlockRef:
    ref: Any


class Coordinator:
    """The actor. `take` gives what comes next: a segment's head, its blocks, and None after the last."""

    def __init__(self, plan: DataPlan, share: Share, budget: Budget, first_step: int, last_step: int) -> None:
        self._stream = _stream(plan, share, budget, first_step, last_step)
        self._begun: list[SegmentHead | BlockRef] = []
        self._failed: Exception | None = None

    def begin(self) -> None:
        """Up to the first block, before anybody takes it."""
        try:
            self._begun.extend(islice(self._stream, 2))
        except Exception as error:  # told to the one who takes
            self._failed = error

    def take(self) -> SegmentHead | BlockRef | None:
        if self._begun:
            return self._begun.pop(0)
        if self._failed:
            raise self._failed
        return next(self._stream, None)

    def close(self) -> None:
        """Ends the execution, so that its readers are free for another."""
        self._stream.close()


def _stream(
    plan: DataPlan, share: Share, budget: Budget, first_step: int, last_step: int
) -> Generator[SegmentHead | BlockRef]:
    for segment in plan_segments(plan, share, budget, first_step=first_step, last_step=last_step):
        yield SegmentHead(segment.begin_step, segment.end_step, segment.reorder_rows)
        yield from map(BlockRef, stream_blocks(plan, share, segment, budget))


def stream_blocks(plan: DataPlan, share: Share, segment: Segment, budget: Budget) -> Iterator[Any]:
    """Run a segment's read tasks and give references to their blocks in the order of the plan, each when it lies in this
    node's store.
    """
    units = make_units(plan, share, segment.pieces)
    tasks = unit_tasks(
        plan.specs,
        units,
        plan.transforms,
        block_rows=budget.block_rows,
        task_blocks=budget.task_blocks,
        readers=budget.readers,
    )
    source = LeRobotSource(tasks)
    readers = min(budget.readers, source.num_tasks)  # Ray warns of more
    dataset = ray.data.read_datasource(
        source, override_num_blocks=source.num_tasks, concurrency=readers, num_cpus=budget.reader_cpus
    )
    _set_limits(dataset.context, budget)
    for bundle in dataset.iter_internal_ref_bundles():
        for ref in bundle.block_refs:
            ray.wait([ref])  # one that another node made is fetched
            yield ref


def _set_limits(context: ray.data.DataContext, budget: Budget) -> None:
    """Settings of one Dataset; its context is its own copy, so other Datasets of this process keep theirs."""
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.target_max_block_size = max(1, int(TARGET_SHARE * budget.block_bytes))
    keep_pace(context)
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = ray.data.ExecutionResources.for_limits(
        cpu=budget.readers * budget.reader_cpus, object_store_memory=budget.limit_bytes
    )


def start_coordinator(plan: Any, share: Share, budget: Budget, *, first_step: int, last_step: int) -> Any:
    """One for optimizer steps [first_step, last_step), on this node; `plan` is a DataPlan or a reference to one."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor: Any = ray.remote(Coordinator)
    return actor.options(num_cpus=0, max_restarts=0, scheduling_strategy=here).remote(
        plan, share, budget, first_step, last_step
    )


def start_ahead(
    plan: DataPlan, num_workers: int, budget: Budget, *, first_step: int, last_step: int
) -> tuple[Any, ...]:
    """One for each worker, all of which will be on this node: they read while the workers are still being started."""
    there = ray.put(plan)
    steps = {"first_step": first_step, "last_step": last_step}
    started = [start_coordinator(there, Share(rank, num_workers), budget, **steps) for rank in range(num_workers)]
    for one in started:
        one.begin.remote()
    return tuple(started)


def end_coordinators(coordinators: Iterable[Any]) -> None:
    """Also those that have ended."""
    for one in coordinators:
        ray.kill(one)


class BlockStream:
    """The worker's side: segment heads and blocks of a coordinator's steps, for one thread."""

    def __init__(self, coordinator: Any) -> None:
        self._stopped = threading.Event()
        self._actor = coordinator
        self._asked = deque(self._actor.take.remote() for _ in range(ASKED_AHEAD))

    def __iter__(self) -> "BlockStream":
        return self

    def __next__(self) -> SegmentHead | Columns:
        """What comes next, until the plan's end or `stop`. A block's columns lie in shared memory, which is free again when
        nobody holds them: no frame of ours keeps one.
        """
        item = self._take()
        if item is None:
            raise StopIteration
        return item if isinstance(item, SegmentHead) else _columns(item)

    def stop(self) -> None:
        """From any thread: nothing more is wanted, and nobody waits for it."""
        self._stopped.set()

    def close(self) -> None:
        """Let the readers go, then end the process; one that is dead or does not answer is killed."""
        try:
            ray.get(self._actor.close.remote(), timeout=LEAVE_S)
        except (*LOST, RayTaskError, GetTimeoutError):
            pass
        ray.kill(self._actor)

    def _take(self) -> SegmentHead | BlockRef | None:
        asked = self._asked.popleft()
        while not self._stopped.is_set():
            try:
                item: Any = ray.get(asked, timeout=LOOK_EVERY_S)
            except GetTimeoutError:
                continue
            self._asked.append(self._actor.take.remote())
            return item
        return None


def _columns(block: BlockRef) -> Columns:
    """Views of a block; nothing is copied."""
    return BlockAccessor.for_block(ray.get(block.ref)).to_numpy()  # pyright: ignore[reportReturnType]
