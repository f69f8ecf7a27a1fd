"""[ray] From a run's data settings to one worker's stream of blocks: the stages, in order, on one screen.

    order (pure) -> pieces -> units -> read tasks: decode, resize, join, transform -> blocks -> feed

Ray Data keeps no place in its stream and its splitter knows nothing of lanes; so each worker has its own
small Dataset over its own plan. A stretch of optimizer steps (`Segment`) is one execution. It runs in the process of
`coordinator.py`, never in the one that trains.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from vlatune.dataset.meta import DatasetMeta
from vlatune.dataset.order import OrderSpec, epoch_order
from vlatune.dataset.reader import ReadSpec, Unit, allocate, make_unit
from vlatune.dataset.select import Selection
from vlatune.pipeline.execution import TARGET_SHARE, keep_pace
from vlatune.pipeline.memory import Budget
from vlatune.pipeline.plan import Piece, Share, plan_pieces, reorder_rows
from vlatune.pipeline.source import UnitSource
from vlatune.pipeline.transforms import Transform, apply_all

SEGMENT_TASKS = 128
"""Read tasks per execution: Ray pays about a millisecond for each before the first row, whatever their work."""
TASKS_PER_READER = 8
"""At least, however many readers there are: the readers stand still between two executions."""


@dataclass(frozen=True)
class DataPlan:
    """Everything about the data of a run that does not depend on the worker; plain values, sent to every worker."""

    metas: tuple[DatasetMeta, ...]
    selection: Selection
    specs: tuple[ReadSpec, ...]
    order: OrderSpec
    transforms: Callable[[int], Sequence[Transform]]
    """Epoch -> the policy's transforms."""
    batch_size: int
    segment_tasks: int | None = None
    """Read tasks of one execution; as many as suit the readers when None."""

    def row_bytes(self) -> int:
        """Bytes of one row as it travels through the store."""
        blank = allocate(self.specs[0], 1)
        blank["task"][:] = ""
        for values in (values for values in blank.values() if values.dtype != object):
            values[:] = 0
        return sum(values.nbytes for values in apply_all(self.transforms(0), blank).values())


@dataclass(frozen=True)
class EpochPart:
    """The pieces of one epoch; their slots count on from the run's first sample."""

    epoch: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Segment:
    """Optimizer steps [begin_step, end_step) for one worker, over as many epochs as they touch."""

    begin_step: int
    end_step: int
    parts: tuple[EpochPart, ...]
    reorder_rows: int


def plan_segments(
    plan: DataPlan, share: Share, budget: Budget, *, first_step: int, last_step: int
) -> Iterator[Segment]:
    """The stretches of optimizer steps [first_step, last_step), none longer than the read tasks of one execution."""
    tasks = plan.segment_tasks or max(SEGMENT_TASKS, TASKS_PER_READER * budget.readers)
    most = max(1, tasks * budget.task_blocks * budget.block_rows // share.slots_per_step(plan.order))
    for begin in range(first_step, last_step, most):
        end = min(begin + most, last_step)
        parts = tuple(plan_parts(plan, share, begin, end))
        pieces = [piece for part in parts for piece in part.pieces]
        yield Segment(begin, end, parts, reorder_rows(pieces, plan.batch_size, budget.block_rows))


def plan_parts(plan: DataPlan, share: Share, begin: int, end: int) -> Iterator[EpochPart]:
    """Epoch by epoch; a short epoch is no reason to start anew, so that its end is no pause."""
    per_epoch, per_step = plan.order.batches_per_epoch, share.slots_per_step(plan.order)
    while begin < end:
        epoch, batch = divmod(begin, per_epoch)
        stop = min(per_epoch, batch + end - begin)
        pieces = plan_pieces(
            plan.order,
            epoch_order(plan.order, epoch),
            share,
            begin_batch=batch,
            end_batch=stop,
        )
        shift = epoch * per_epoch * per_step
        yield EpochPart(epoch, tuple(replace(piece, slots=piece.slots + shift) for piece in pieces))
        begin += stop - batch


def make_units(plan: DataPlan, pieces: tuple[Piece, ...]) -> list[Unit]:
    units = []
    for piece in pieces:
        dataset = int(plan.selection.dataset[piece.episode])
        position = int(plan.selection.position[piece.episode])
        units.append(make_unit(plan.metas[dataset], plan.specs[dataset], position, piece.frames, piece.slots))
    return units


def stream_blocks(plan: DataPlan, segment: Segment, budget: Budget) -> Iterator[Any]:
    """Run a segment's read tasks and give references to their blocks in the order of the plan, each when it lies in this
    node's store.
    """
    work = [(make_units(plan, part.pieces), plan.transforms(part.epoch)) for part in segment.parts]
    source = UnitSource(
        plan.specs, work, block_rows=budget.block_rows, task_blocks=budget.task_blocks, readers=budget.readers
    )
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
