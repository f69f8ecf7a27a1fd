"""[ray] From a run's data settings to one worker's stream of blocks: the stages, in order, on one screen.

    order (pure) -> pieces -> units -> read tasks: decode, resize, join, transform -> blocks -> feed

Ray Data keeps no place in its stream and its splitter knows nothing of lanes; so each worker runs its own
small Dataset over its own plan. A stretch of batches (`Segment`) is one execution.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import ray

from vlatune.batch import Columns
from vlatune.dataset.meta import DatasetMeta
from vlatune.dataset.order import OrderSpec, epoch_order
from vlatune.dataset.reader import ReadSpec, Unit, allocate, make_unit
from vlatune.dataset.select import Selection
from vlatune.pipeline.memory import Budget
from vlatune.pipeline.plan import Piece, Share, plan_pieces, reorder_rows
from vlatune.pipeline.source import UnitSource
from vlatune.pipeline.transforms import Transform, apply_all

SEGMENT_TASKS = 512
"""Read tasks per execution: Ray pays about a millisecond for each before the first row, whatever their work."""


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

    def row_bytes(self) -> int:
        """Bytes of one row as it travels through the store."""
        blank = allocate(self.specs[0], 1)
        blank["task"][:] = ""
        for values in (values for values in blank.values() if values.dtype != object):
            values[:] = 0
        return sum(values.nbytes for values in apply_all(self.transforms(0), blank).values())


@dataclass(frozen=True)
class Segment:
    """Batches [begin_batch, end_batch) of one epoch for one worker."""

    epoch: int
    begin_batch: int
    end_batch: int
    pieces: tuple[Piece, ...]
    reorder_rows: int


def plan_segments(
    plan: DataPlan, share: Share, budget: Budget, *, first_step: int, last_step: int
) -> Iterator[Segment]:
    """The stretches of optimizer steps [first_step, last_step), epoch by epoch, none longer than SEGMENT_TASKS tasks."""
    per_epoch = plan.order.batches_per_epoch
    most = max(1, SEGMENT_TASKS * budget.block_rows // share.slots_per_step(plan.order))
    step = first_step
    while step < last_step:
        epoch, begin = divmod(step, per_epoch)
        order = epoch_order(plan.order, epoch)
        epoch_end = min(per_epoch, begin + last_step - step)
        for batch in range(begin, epoch_end, most):
            end = min(batch + most, epoch_end)
            pieces = plan_pieces(plan.order, order, share, begin_batch=batch, end_batch=end, max_rows=budget.block_rows)
            held = reorder_rows(pieces, plan.batch_size, budget.block_rows)
            yield Segment(epoch, batch, end, tuple(pieces), held)
        step += epoch_end - begin


def make_units(plan: DataPlan, pieces: tuple[Piece, ...]) -> list[Unit]:
    units = []
    for piece in pieces:
        dataset = int(plan.selection.dataset[piece.episode])
        position = int(plan.selection.position[piece.episode])
        units.append(make_unit(plan.metas[dataset], plan.specs[dataset], position, piece.frames, piece.slots))
    return units


def stream_blocks(plan: DataPlan, segment: Segment, budget: Budget) -> Iterator[Columns]:
    """Run a segment's read tasks and give their blocks in the order of the plan."""
    source = UnitSource(
        plan.specs, make_units(plan, segment.pieces), plan.transforms(segment.epoch), block_rows=budget.block_rows
    )
    dataset = ray.data.read_datasource(
        source, override_num_blocks=source.num_tasks, concurrency=budget.readers, ray_remote_args={"num_cpus": 1}
    )
    _set_limits(dataset.context, budget)
    batches = dataset.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=1)
    yield from cast(Iterator[Columns], batches)


def _set_limits(context: ray.data.DataContext, budget: Budget) -> None:
    """Settings of one Dataset; its context is its own copy, so other Datasets of this process keep theirs."""
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.target_max_block_size = 2 * budget.block_bytes  # a task makes one table, and it must not be split
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = ray.data.ExecutionResources.for_limits(
        cpu=budget.readers, object_store_memory=budget.limit_bytes
    )
