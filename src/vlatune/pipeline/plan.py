"""Order + episodes -> units of work, in the order in which they are needed. Pure.

A worker serves some lanes. Its samples of an epoch are numbered by *slot*: step by step, lane by lane.

    step 0: lane 0 | lane 1     step 1: lane 0 | lane 1
    slot    0  1     2  3               4  5     6  7        (two samples per lane and step)

A mixing window of a lane is a few runs of frames; each becomes one unit, read in rising frame order, whose
rows carry their slots. Units are sorted by their first slot, so a consumer that takes them in this order can
put rows in place with a buffer whose size `reorder_rows` computes.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlatune.dataset.order import OrderSpec, window_edges

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


def plan_pieces(
    spec: OrderSpec, order: np.ndarray, share: Share, *, begin_batch: int, end_batch: int, max_rows: int | None = None
) -> list[Piece]:
    """All pieces of optimizer steps [begin_batch, end_batch) of an epoch for one worker, by first need.

    None is longer than `max_rows`, so that a piece always fits a block.
    """
    pieces: list[Piece] = []
    starts = np.cumsum(spec.lengths) - spec.lengths
    per_step = spec.samples_per_lane_step
    for local, lane in enumerate(share.lanes(spec)):
        edges = np.clip(window_edges(spec, lane), begin_batch * per_step, end_batch * per_step)
        for begin, end in itertools.pairwise(edges):
            if begin < end:
                slots = _slots(spec, share, local, np.arange(begin, end))
                pieces += _split(order[lane, begin:end], slots, starts, max_rows or spec.window_rows)
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


def _split(samples: np.ndarray, slots: np.ndarray, starts: np.ndarray, max_rows: int) -> list[Piece]:
    """Samples of a window, sorted, cut where the episode changes, frames are far apart, or the piece is too long."""
    by_frame = np.argsort(samples)
    samples, slots = samples[by_frame], slots[by_frame]
    episode = np.searchsorted(starts, samples, side="right") - 1
    cut = (np.diff(episode) != 0) | (np.diff(samples) > MAX_GAP)
    natural = [0, *(np.flatnonzero(cut) + 1).tolist(), len(samples)]
    bounds = [at for begin, end in itertools.pairwise(natural) for at in range(begin, end, max_rows)] + [len(samples)]
    return [
        Piece(int(episode[begin]), samples[begin:end] - starts[episode[begin]], slots[begin:end])
        for begin, end in itertools.pairwise(bounds)
    ]
