"""What the length of a run costs: frames that are decoded in one go, against whole episodes, on one core."""

import time
from collections.abc import Sequence

import numpy as np

from vlatune.dataset.meta import DatasetMeta
from vlatune.dataset.reader import ReadSpec, Unit, make_unit, read_unit

LENGTHS = (1, 2, 4, 8, 16, 32, 64)
MAX_ROWS, MIN_PIECES = 200, 16
"""Of a length; pieces are taken at random places, as a shuffled order does."""


def cost_by_length(meta: DatasetMeta, spec: ReadSpec) -> dict[int, float]:
    """Length -> CPU time per row, by that of whole episodes."""
    whole = _pieces(meta, spec, int(meta.episodes.length.max()))[: max(1, 2 * MAX_ROWS // int(meta.episodes.length[0]))]
    _seconds_per_row(spec, whole[:1])  # the files are in memory from here on
    whole_s = _seconds_per_row(spec, whole)
    chance = np.random.default_rng(0)
    costs = {}
    for length in (length for length in LENGTHS if length < meta.episodes.length.max()):
        pieces = _pieces(meta, spec, length)
        some = [pieces[number] for number in chance.permutation(len(pieces))[: max(MIN_PIECES, MAX_ROWS // length)]]
        costs[length] = _seconds_per_row(spec, some) / whole_s
    return costs


def _pieces(meta: DatasetMeta, spec: ReadSpec, length: int) -> list[Unit]:
    """All episodes, cut into pieces of this length."""
    units = []
    for position, frames in enumerate(meta.episodes.length.tolist()):
        for begin in range(0, frames, length):
            rows = np.arange(begin, min(begin + length, frames))
            units.append(make_unit(meta, spec, position, rows, rows))
    return units


def _seconds_per_row(spec: ReadSpec, units: Sequence[Unit]) -> float:
    begin = time.process_time()
    for unit in units:
        read_unit(spec, unit)
    return (time.process_time() - begin) / sum(len(unit.frames) for unit in units)
