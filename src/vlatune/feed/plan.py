"""Plan units of work from sample order and episodes, in the order in which they are needed. Pure.

A worker serves some lanes. Its samples of an epoch are numbered by *slot*: step by step, lane by
lane.

    step 0: lane 0 | lane 1     step 1: lane 0 | lane 1
    slot    0  1     2  3               4  5     6  7        (two samples per lane and step)

A shuffle window of a lane contains runs of frames or parts of them. A run becomes one unit when its
first frame is needed; it is read in frame order, and its rows carry their slots. Units are sorted
by their first slot, so a consumer that takes them in this order can reorder rows in a buffer of
`reorder_rows` rows. `read_lerobot` and training cut units into blocks with the same function.
"""

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vlatune.batch import ACTION
from vlatune.data.meta.dataset_meta import DatasetMeta
from vlatune.data.order.partition import Selection
from vlatune.data.order.sample_order import OrderSpec, epoch_order, step_samples
from vlatune.data.reader import ReadSpec, Unit, make_blank_row, make_unit
from vlatune.data.transforms import Transform, apply_all
from vlatune.feed.memory import Budget

MAX_GAP = 4
"""Maximum gap within a unit; decoding through it is cheaper than opening the file again."""
SEGMENT_TASKS = 128
"""Read tasks per segment, to limit the cost of submitting them before the first row."""
TASKS_PER_READER = 8
"""Minimum read tasks per reader and segment, because readers are idle between segments."""


@dataclass(frozen=True)
class DataPlan:
    """Data of a run, independent of the worker; plain values, sent to every worker."""

    metas: tuple[DatasetMeta, ...]
    selection: Selection
    specs: tuple[ReadSpec, ...]
    order: OrderSpec
    transforms: tuple[Transform, ...]
    batch_size: int
    segment_tasks: int | None = None
    """Read tasks per segment; chosen by the number of readers if None."""
    has_robots: bool = False
    """True if the datasets are of several robots, each with a separate loss."""

    def row_bytes(self) -> int:
        """Return the bytes of one row in the object store."""
        row = apply_all(self.transforms, make_blank_row(self.specs[0]))
        return sum(values.nbytes for values in row.values())


@dataclass(frozen=True)
class Piece:
    """Frames of one selected episode in increasing order, possibly repeated, with their slots."""

    episode: int
    """Index in the list of selected episodes."""
    frames: np.ndarray
    slots: np.ndarray


@dataclass(frozen=True)
class Share:
    """The lanes that one of `num_workers` workers serves."""

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

    def positions(self, spec: OrderSpec, slots: np.ndarray) -> np.ndarray:
        """Convert this worker's slots to positions in the run's order (all lanes)."""
        per_step = self.slots_per_step(spec)
        step, within = np.divmod(slots, per_step)
        return step * spec.global_batch + self.rank * per_step + within

    def slots(self, spec: OrderSpec, positions: np.ndarray) -> np.ndarray:
        """Convert positions in the run's order to this worker's slots."""
        step, within = np.divmod(positions, spec.global_batch)
        per_step = self.slots_per_step(spec)
        return step * per_step + within - self.rank * per_step


Blocks = tuple[list[Unit], ...]
"""The units of each block of a read task."""


@dataclass(frozen=True)
class Segment:
    """Optimizer steps [begin_step, end_step) of one worker, possibly over several epochs."""

    begin_step: int
    end_step: int
    reorder_rows: int
    step_actions_SD: np.ndarray
    """See `count_actions`."""


def plan_segment(
    plan: DataPlan, share: Share, budget: Budget, begin: int, last_step: int
) -> tuple[Segment, list[Blocks]]:
    """Plan the segment that starts with optimizer step `begin`, and its read tasks in order."""
    tasks = plan.segment_tasks or max(SEGMENT_TASKS, TASKS_PER_READER * budget.readers)
    most = max(1, tasks * budget.task_blocks * budget.block_rows // share.slots_per_step(plan.order))
    end = min(begin + most, last_step)
    parts = list(split_epochs(plan.order, begin, end))
    pieces = _plan_parts(plan.order, share, parts)
    samples_SG = np.concatenate([step_samples(plan.order, order) for *_, order in parts])
    segment = Segment(
        begin, end, reorder_rows(pieces, plan.batch_size, budget.block_rows), count_actions(plan, samples_SG)
    )
    return segment, list(cut_tasks(make_units(plan, share, pieces), budget.block_rows, budget.task_blocks))


EpochPart = tuple[int, int, np.ndarray]
"""Epoch, the first of some of its optimizer steps, and their order."""


def split_epochs(spec: OrderSpec, begin: int, end: int) -> Iterator[EpochPart]:
    """Split optimizer steps [begin, end) of the run at epoch boundaries."""
    while begin < end:
        epoch, batch = divmod(begin, spec.batches_per_epoch)
        stop = min(spec.batches_per_epoch, batch + end - begin)
        yield epoch, batch, epoch_order(spec, epoch, batch, stop)
        begin += stop - batch


def plan_steps(spec: OrderSpec, share: Share, begin: int, end: int) -> list[Piece]:
    """Return the pieces of optimizer steps [begin, end) of the run, epoch by epoch."""
    return _plan_parts(spec, share, split_epochs(spec, begin, end))


def _plan_parts(spec: OrderSpec, share: Share, parts: Iterable[EpochPart]) -> list[Piece]:
    """Return the pieces with slots counted from the run's first sample."""
    per_epoch = spec.batches_per_epoch * share.slots_per_step(spec)
    return [
        replace(piece, slots=piece.slots + epoch * per_epoch)
        for epoch, begin, order in parts
        for piece in plan_pieces(spec, order, share, begin)
    ]


def count_actions(plan: DataPlan, samples_SG: np.ndarray) -> np.ndarray:
    """Return STEP_ACTIONS by step and dataset, (steps, datasets), from the steps' flat samples.

    episode of 5 frames, chunks of 4:   frame 0 1 2 3 4
                                        valid 4 4 3 2 1
    """
    selection, starts = plan.selection, np.cumsum(plan.order.lengths) - plan.order.lengths
    episode_SG = np.searchsorted(starts, samples_SG, side="right") - 1
    frame_SG, dataset_SG = samples_SG - starts[episode_SG], selection.dataset[episode_SG]
    valid_SD, rows_SD = np.zeros((2, len(samples_SG), len(plan.specs)), dtype=np.int64)
    for number, (meta, spec) in enumerate(zip(plan.metas, plan.specs, strict=True)):
        step, column = np.nonzero(dataset_SG == number)
        frame = frame_SG[step, column]
        # Use the table's length: the order may omit last frames that start no sample.
        length = meta.episodes.length[selection.position[episode_SG[step, column]]]
        offsets = np.sort(next((one.offsets or (0,) for one in spec.vectors if one.column == ACTION), (0,)))
        valid = np.searchsorted(offsets, length - frame) - np.searchsorted(offsets, -frame)
        np.add.at(valid_SD[:, number], step, valid)
        np.add.at(rows_SD[:, number], step, 1)
    if not plan.has_robots:
        valid_SD, rows_SD = (np.broadcast_to(one.sum(axis=1, keepdims=True), one.shape) for one in (valid_SD, rows_SD))
    return (np.maximum(valid_SD, 1) * plan.batch_size / np.maximum(rows_SD, 1)).astype(np.float32)


def make_units(plan: DataPlan, share: Share, pieces: Iterable[Piece]) -> list[Unit]:
    """Return the units for the pieces; rows carry their position in the run's order."""
    units = []
    for piece in pieces:
        dataset = int(plan.selection.dataset[piece.episode])
        row = int(plan.selection.position[piece.episode])
        slots = share.positions(plan.order, piece.slots)
        units.append(make_unit(plan.metas[dataset], plan.specs[dataset], row, piece.frames, slots))
    return units


def cut_units(units: Iterable[Unit], block_rows: int) -> Iterator[list[Unit]]:
    """Split the units' rows into lists of `block_rows` rows; units may span several lists."""
    block: list[Unit] = []
    free = block_rows
    for unit in units:
        rest = unit
        while len(rest.frames) >= free:
            begin, rest = _split_unit(rest, free)
            yield [*block, begin]
            block, free = [], block_rows
        if len(rest.frames):
            block.append(rest)
            free -= len(rest.frames)
    if block:
        yield block


def cut_tasks(units: Sequence[Unit], block_rows: int, task_blocks: int) -> Iterator[Blocks]:
    """Yield tasks of at most `task_blocks` blocks each, ending at unit boundaries if possible.

    The rest of a split unit is read by another process, which has to seek in every video again.
    """
    rest = collections.deque(units)
    while rest:
        free = task_blocks * block_rows
        taken: list[Unit] = []
        while rest and len(rest[0].frames) <= free:
            taken.append(rest.popleft())
            free -= len(taken[-1].frames)
        if not taken:
            begin, end = _split_unit(rest.popleft(), free)
            taken.append(begin)
            rest.appendleft(end)
        yield tuple(cut_units(taken, block_rows))


def _split_unit(unit: Unit, rows: int) -> tuple[Unit, Unit]:
    """Return the first `rows` rows, and the rest."""
    return (
        replace(unit, frames=unit.frames[:rows], slots=unit.slots[:rows]),
        replace(unit, frames=unit.frames[rows:], slots=unit.slots[rows:]),
    )


def plan_pieces(spec: OrderSpec, order: np.ndarray, share: Share, begin_batch: int = 0) -> list[Piece]:
    """Return the pieces of an order that starts with optimizer step `begin_batch` of an epoch, by first slot."""
    pieces: list[Piece] = []
    per_step, starts = spec.samples_per_lane_step, np.cumsum(spec.lengths) - spec.lengths
    positions = begin_batch * per_step + np.arange(order.shape[1])
    step, within = np.divmod(positions, per_step)
    for local, lane in enumerate(share.lanes(spec)):
        slots = step * share.slots_per_step(spec) + local * per_step + within
        pieces += _split_lane(spec, order[lane], positions, slots, starts)
    return sorted(pieces, key=lambda piece: int(piece.slots.min()))


def reorder_rows(pieces: Sequence[Piece], batch_rows: int, block_rows: int) -> int:
    """Return the maximum rows that a consumer of `batch_rows` at a time holds, for pieces in order.

    Before a batch ending at slot t can leave, every piece that starts before t has arrived, plus up
    to one block, since rows arrive in blocks.
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


def _split_lane(
    spec: OrderSpec, samples: np.ndarray, positions: np.ndarray, slots: np.ndarray, starts: np.ndarray
) -> list[Piece]:
    """Split a lane's samples where the episode changes, or frames are distant in video or in time.

    Frames of one run are in one window or in two consecutive ones. Adjacent runs may be merged, but
    no piece is longer than a run, since all its rows wait for the last of them.
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
