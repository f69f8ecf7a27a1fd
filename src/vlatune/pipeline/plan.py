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
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlatune.dataset.order import OrderSpec

MAX_GAP = 4
"""Frames a unit may skip over: decoding through a short gap is cheaper than opening the file again."""


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
