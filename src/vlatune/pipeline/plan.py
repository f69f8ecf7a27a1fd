"""Order + episodes -> units of work, in the order in which they are needed. Pure.

A worker serves some lanes. Its samples of an epoch are numbered by *slot*: step by step, lane by lane.

    step 0: lane 0 | lane 1     step 1: lane 0 | lane 1
    slot    0  1     2  3               4  5     6  7        (two samples per lane and step)

A mixing window of a lane holds runs of frames, whole or in part. A run becomes one unit when its first frame is needed,
read in rising frame order, whose rows carry their slots: what the next window needs of it waits. Units are sorted by
their first slot, so a consumer that takes them in this order can put rows in place with a buffer whose size
`reorder_rows` computes.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vlatune.dataset.meta.dataset_meta import DatasetMeta
from vlatune.dataset.order.partition import Selection
from vlatune.dataset.order.sample_order import OrderSpec, epoch_order
from vlatune.dataset.reader import ReadSpec, Unit, allocate, make_unit
from vlatune.pipeline.memory import Budget
from vlatune.pipeline.transforms import Transform, apply_all

MAX_GAP = 4
"""Frames a unit may skip over: decoding through a short gap is cheaper than opening the file again."""
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
    transforms: tuple[Transform, ...]
    batch_size: int
    segment_tasks: int | None = None
    """Read tasks of one execution; as many as suit the readers when None."""

    def row_bytes(self) -> int:
        """Bytes of one row as it travels through the store."""
        blank = allocate(self.specs[0], 1)
        blank["task"][:] = ""
        for values in (values for values in blank.values() if values.dtype != object):
            values[:] = 0
        return sum(values.nbytes for values in apply_all(self.transforms, blank).values())


@dataclass(frozen=True)
class Piece:
    """Frames of one selected episode, rising, one that comes twice side by side, with the slots they fill."""

    episode: int
    """Place in the list of selected episodes."""
    frames: np.ndarray
    slots: np.ndarray


@dataclass(frozen=True)
class Share:
    """What one of `num_workers` workers serves: whole lanes."""

    rank: int
    num_workers: int

    def lanes(self, spec: OrderSpec) -> range:
        if spec.lanes % self.num_workers:
            raise ValueError(
                f"{self.num_workers} workers cannot share {spec.lanes} lanes evenly; use a number of workers that divides {spec.lanes}"
            )
        each = spec.lanes // self.num_workers
        return range(self.rank * each, (self.rank + 1) * each)

    def slots_per_step(self, spec: OrderSpec) -> int:
        return spec.global_batch // self.num_workers

    def places(self, spec: OrderSpec, slots: np.ndarray) -> np.ndarray:
        """Slots of this worker -> places in the run's order: step by step, all lanes."""
        per_step = self.slots_per_step(spec)
        step, within = np.divmod(slots, per_step)
        return step * spec.global_batch + self.rank * per_step + within

    def slots(self, spec: OrderSpec, places: np.ndarray) -> np.ndarray:
        """And back."""
        step, within = np.divmod(places, spec.global_batch)
        per_step = self.slots_per_step(spec)
        return step * per_step + within - self.rank * per_step


@dataclass(frozen=True)
class Segment:
    """Optimizer steps [begin_step, end_step) for one worker, over as many epochs as they touch: one execution."""

    begin_step: int
    end_step: int
    pieces: tuple[Piece, ...]
    """Their slots count on from the run's first sample."""
    reorder_rows: int


def plan_segments(
    plan: DataPlan, share: Share, budget: Budget, *, first_step: int, last_step: int
) -> Iterator[Segment]:
    """The stretches of optimizer steps [first_step, last_step), none longer than the read tasks of one execution."""
    tasks = plan.segment_tasks or max(SEGMENT_TASKS, TASKS_PER_READER * budget.readers)
    most = max(1, tasks * budget.task_blocks * budget.block_rows // share.slots_per_step(plan.order))
    for begin in range(first_step, last_step, most):
        end = min(begin + most, last_step)
        pieces = tuple(plan_steps(plan.order, share, begin, end))
        yield Segment(begin, end, pieces, reorder_rows(pieces, plan.batch_size, budget.block_rows))


def plan_steps(spec: OrderSpec, share: Share, begin: int, end: int) -> Iterator[Piece]:
    """The pieces of optimizer steps [begin, end) of the run, epoch by epoch."""
    per_epoch, per_step = spec.batches_per_epoch, share.slots_per_step(spec)
    while begin < end:
        epoch, batch = divmod(begin, per_epoch)
        stop = min(per_epoch, batch + end - begin)
        shift = epoch * per_epoch * per_step
        for piece in plan_pieces(spec, epoch_order(spec, epoch), share, begin_batch=batch, end_batch=stop):
            yield replace(piece, slots=piece.slots + shift)
        begin += stop - batch


def make_units(plan: DataPlan, share: Share, pieces: Iterable[Piece]) -> list[Unit]:
    """What is read for the pieces. A row carries its place in the run's order, which is no worker's own."""
    units = []
    for piece in pieces:
        dataset = int(plan.selection.dataset[piece.episode])
        position = int(plan.selection.position[piece.episode])
        places = share.places(plan.order, piece.slots)
        units.append(make_unit(plan.metas[dataset], plan.specs[dataset], position, piece.frames, places))
    return units


def plan_pieces(spec: OrderSpec, order: np.ndarray, share: Share, *, begin_batch: int, end_batch: int) -> list[Piece]:
    """All pieces of optimizer steps [begin_batch, end_batch) of an epoch for one worker, by first need."""
    pieces: list[Piece] = []
    starts = np.cumsum(spec.lengths) - spec.lengths
    positions = np.arange(begin_batch * spec.samples_per_lane_step, end_batch * spec.samples_per_lane_step)
    for local, lane in enumerate(share.lanes(spec)):
        pieces += _split(spec, order[lane, positions], positions, _slots(spec, share, local, positions), starts)
    return sorted(pieces, key=lambda piece: int(piece.slots.min()))


def reorder_rows(pieces: Sequence[Piece], batch_rows: int, block_rows: int) -> int:
    """Rows that a consumer of `batch_rows` at a time must be able to hold: exact for pieces in this order.

    Before a batch ending at slot t can leave, every piece that starts before t has arrived; rows come in
    blocks, so up to a block more than that.
    """
    if not pieces:
        return 0
    first = np.array([piece.slots.min() for piece in pieces])
    arrived = np.cumsum([len(piece.frames) for piece in pieces])
    lowest, total = int(first.min()), int(arrived[-1])
    batch_ends = np.minimum(np.arange(batch_rows, total + batch_rows, batch_rows), total)
    pieces_needed = np.searchsorted(first, lowest + batch_ends, side="left")
    held = np.minimum(arrived[pieces_needed - 1] + block_rows, total) - (batch_ends - batch_rows)
    return int(held.max())


def _slots(spec: OrderSpec, share: Share, local_lane: int, positions: np.ndarray) -> np.ndarray:
    per_step = spec.samples_per_lane_step
    step, within = np.divmod(positions, per_step)
    return step * share.slots_per_step(spec) + local_lane * per_step + within


def _split(
    spec: OrderSpec, samples: np.ndarray, positions: np.ndarray, slots: np.ndarray, starts: np.ndarray
) -> list[Piece]:
    """A lane's samples, sorted, cut where the episode changes, frames are far apart, or are needed at other times.

    Frames of one run lie in one window or in two that follow each other. Runs that are neighbours in the video and by
    chance in the lane become one piece, but none longer than a run, since all its rows wait for the last of them.
    """
    by_frame = np.argsort(samples, kind="stable")
    samples, positions, slots = samples[by_frame], positions[by_frame], slots[by_frame]
    episode = np.searchsorted(starts, samples, side="right") - 1
    apart = np.abs(np.diff(positions)) > 2 * spec.window_rows
    cut = (np.diff(episode) != 0) | (np.diff(samples) > MAX_GAP) | apart
    natural = [0, *(np.flatnonzero(cut) + 1).tolist(), len(samples)]
    longest = max(spec.run_length, spec.window_rows)
    bounds = [at for begin, end in itertools.pairwise(natural) for at in range(begin, end, longest)] + [len(samples)]
    return [
        Piece(int(episode[begin]), samples[begin:end] - starts[episode[begin]], slots[begin:end])
        for begin, end in itertools.pairwise(bounds)
    ]
