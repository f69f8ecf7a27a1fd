"""Runs: neighbouring frames of one episode that are decoded together, as half-open ranges of flat samples. Pure."""

import numpy as np

Ranges = tuple[np.ndarray, np.ndarray]
"""Begin and end of each run."""


def cut_runs(starts: np.ndarray, lengths: np.ndarray, run_length: int, rng: np.random.Generator) -> Ranges:
    """Episodes, from flat sample `starts` on, cut into runs.

    The first run of each episode has a random length, so that the cuts lie elsewhere every time.
    """
    first = np.minimum(rng.integers(1, run_length + 1, size=len(lengths)), lengths)
    runs = 1 + -(-(lengths - first) // run_length)
    episode = np.repeat(np.arange(len(lengths)), runs)
    nth = np.arange(runs.sum()) - np.repeat(np.cumsum(runs) - runs, runs)
    begin = starts[episode] + np.where(nth == 0, 0, first[episode] + (nth - 1) * run_length)
    end = np.minimum(starts[episode] + first[episode] + nth * run_length, starts[episode] + lengths[episode])
    return begin, end


def take_stretch(runs: Ranges, first: int, last: int) -> Ranges:
    """Samples [first, last) of the runs laid end to end, still as runs; one may be cut at either end.

    runs      a a a | b b b b | c c        stretch [2, 5)      a | b b
    sample    0 1 2   3 4 5 6   7 8                            2   3 4
    """
    begin, end = runs
    sizes = end - begin
    at = np.cumsum(sizes) - sizes
    skipped = np.clip(first - at, 0, sizes)
    kept = np.clip(last - at, 0, sizes)
    inside = skipped < kept
    return (begin + skipped)[inside], (begin + kept)[inside]


def concatenate_runs(runs: Ranges) -> np.ndarray:
    """arange(begin[0], end[0]), arange(begin[1], end[1]), ... as one array."""
    begin, end = runs
    sizes = end - begin
    starts = np.cumsum(sizes) - sizes
    return np.arange(sizes.sum()) + np.repeat(begin - starts, sizes)
