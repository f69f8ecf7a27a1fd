"""Sample order as a pure function of (seed, epoch), split into lanes.

    frames of all episodes   split into runs    runs shuffled, concatenated, split into equal lanes
    |ep0......|ep1....|  ->  a b c | d e    ->  lane 0: d a | e ...     lane 1: b | c ...
                                                rows shuffled within a window of each lane

A run is a half-open range of flat samples: neighbouring frames of one episode that are decoded
together. Flat samples are numbered 0..N-1 over the selected episodes.

Every optimizer step takes the same number of samples from every lane, and a worker serves whole
lanes. Global batches are therefore independent of the number of workers, and the order after any
number of samples is known without reading data. Windows are staggered over the lanes, so that their
edges, where new runs must be decoded, do not coincide.

The number of lanes divides the global batch. The incomplete last batch of an epoch is either
dropped (different samples every epoch) or filled up with the first samples of the epoch.

With several weighted datasets (`Mixture`), an epoch is as long as all frames together. Each dataset
contributes its share from an endless stream of passes over its frames, each pass with a different
order of runs:

    dataset of 5 frames, 3 per epoch      pass 0: d a c b e      pass 1: b e a d c
                                          epoch 0 d a c | epoch 1 b e b | epoch 2 e a d | ...

Within a dataset, the numbers of uses of two frames differ by at most one, and the position in the
stream is computed arithmetically. Runs of the datasets alternate by their shares, and each goes to
the shortest lane, so the shares hold over any stretch of steps to within a few runs.
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vlatune.random_streams import Stream, make_generator

Ranges = tuple[np.ndarray, np.ndarray]
"""Begin and end of each run."""


def cut_runs(starts: np.ndarray, lengths: np.ndarray, run_length: int, rng: np.random.Generator) -> Ranges:
    """Split episodes that start at samples `starts` into runs, the first with a random length."""
    first = np.minimum(rng.integers(1, run_length + 1, size=len(lengths)), lengths)
    runs = 1 + -(-(lengths - first) // run_length)
    last_run = np.cumsum(runs) - 1
    sizes = np.full(runs.sum(), run_length)
    sizes[last_run] = lengths - first - (runs - 2) * run_length
    sizes[last_run - runs + 1] = first
    end = np.cumsum(sizes)
    end += np.repeat(starts + lengths - end[last_run], runs)
    return end - sizes, end


def take_stretch(runs: Ranges, first: int, last: int) -> Ranges:
    """Return samples [first, last) of the concatenated runs, as runs; the outer ones may be cut.

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
    """Concatenate arange(begin[0], end[0]), arange(begin[1], end[1]), ... into one array."""
    begin, end = runs
    sizes = end - begin
    starts = np.cumsum(sizes) - sizes
    return np.arange(sizes.sum()) + np.repeat(begin - starts, sizes)


@dataclass(frozen=True)
class Mixture:
    dataset: tuple[int, ...]
    """Dataset index of each selected episode."""
    weights: tuple[float, ...]
    """Weight of each dataset; only the ratios matter."""


def check_mixture(mixture: Mixture, lengths: tuple[int, ...]) -> None:
    """Reject weighted datasets without frames or samples; those with weight 0 are skipped."""
    frames = np.bincount(mixture.dataset, weights=lengths, minlength=len(mixture.weights))
    for number, quota in enumerate(quotas(mixture, sum(lengths))):
        if mixture.weights[number] == 0:
            continue
        if frames[number] == 0:
            raise ValueError(
                f"dataset {number} has the weight {mixture.weights[number]} and no episode to train on; "
                f"lower --dataset.eval_split, correct --dataset.episodes, or leave the dataset out"
            )
        if quota == 0:
            raise ValueError(
                f"--dataset.weight={mixture.weights[number]}: dataset {number} would contribute none of the "
                f"{sum(lengths)} samples of an epoch; raise its weight or leave the dataset out"
            )


def quotas(mixture: Mixture, num_samples: int) -> list[int]:
    """Return the samples per dataset of an epoch: its rounded share; the sum is `num_samples`."""
    exact = np.asarray(mixture.weights) / sum(mixture.weights) * num_samples
    rounded = np.floor(exact).astype(np.int64)
    largest_rest = np.argsort(rounded - exact, kind="stable")
    rounded[largest_rest[: num_samples - int(rounded.sum())]] += 1
    return rounded.tolist()


def mixed_runs(mixture: Mixture, lengths: np.ndarray, run_length: int, *, seed: int, epoch: int) -> Ranges:
    """Return the runs of an epoch, dataset by dataset, not yet shuffled across datasets."""
    parts: list[Ranges] = []
    starts = np.cumsum(lengths) - lengths
    for number, quota in enumerate(quotas(mixture, int(lengths.sum()))):
        if quota == 0:
            continue
        chosen = np.asarray(mixture.dataset) == number
        frames = int(lengths[chosen].sum())
        first, last = epoch * quota, (epoch + 1) * quota
        for nth in range(first // frames, -(-last // frames)):
            rng = make_generator(Stream.MIXTURE, seed, number, nth)
            runs = _shuffle_runs(cut_runs(starts[chosen], lengths[chosen], run_length, rng), rng)
            parts.append(take_stretch(runs, first - nth * frames, last - nth * frames))
    return _join_runs(parts)


def _shuffle_runs(runs: Ranges, rng: np.random.Generator) -> Ranges:
    """Shuffle the runs in place, because copies of millions of them need much memory."""
    shuffled = rng.permutation(np.arange(len(runs[0]), dtype=np.uint32))
    for one in runs:
        one[:] = one[shuffled]
    return runs


MAX_LANES = 512
"""Upper limit of the number of lanes. One lane per sample mixes best, because samples of one lane
and step come from the same few runs. Each lane holds half a window of decoded rows on average.
"""
STAGGERED_IN_LINE = 64
"""Up to this many lanes are staggered linearly, which is exactly even over all lanes together."""
GOLDEN_16 = 40503
"""Fraction of the golden ratio in units of 1 / 65536; integers are exact on every machine."""


@dataclass(frozen=True)
class OrderSpec:
    """Everything that determines the order; equal specs give equal orders on any machine."""

    lengths: tuple[int, ...]
    """Frames of each selected episode."""
    seed: int
    global_batch: int
    lanes: int
    run_length: int
    window_rows: int
    mixture: Mixture | None = None
    """Weights of several datasets; every frame is used once per epoch when None."""
    drop_last: bool = True
    """Drop the incomplete last batch of an epoch instead of filling it up."""

    @cached_property
    def num_samples(self) -> int:
        return sum(self.lengths)

    @property
    def batches_per_epoch(self) -> int:
        full, rest = divmod(self.num_samples, self.global_batch)
        return full if self.drop_last else full + (rest > 0)

    @property
    def samples_per_lane_step(self) -> int:
        """Samples that one optimizer step takes from each lane."""
        return self.global_batch // self.lanes

    @property
    def samples_per_lane(self) -> int:
        """Samples of one epoch per lane."""
        return self.batches_per_epoch * self.samples_per_lane_step


@dataclass(frozen=True)
class Cursor:
    """Position in the order: number of optimizer steps already taken in `epoch`."""

    epoch: int
    batch: int


def choose_lanes(global_batch: int, num_workers: int) -> int:
    """Return the largest divisor of the global batch up to MAX_LANES that workers can share.

    It is independent of the number of workers for batches up to MAX_LANES.
    """
    fits = [n for n in range(1, global_batch + 1) if global_batch % n == 0 and n % num_workers == 0]
    return max([n for n in fits if n <= MAX_LANES], default=min(fits))


def group_sizes(lanes: int, smallest: int, largest: int) -> tuple[int, ...]:
    """Return the numbers of workers in this range that can share the lanes, largest first."""
    return tuple(size for size in range(largest, smallest - 1, -1) if lanes % size == 0)


def micro_batch(global_batch: int, num_workers: int, most: int) -> int:
    """Return the largest micro-batch of up to `most` samples that divides a worker's samples of a step."""
    samples = global_batch // num_workers
    return next(size for size in range(min(most, samples), 0, -1) if samples % size == 0)


def check_order(spec: OrderSpec) -> None:
    if spec.num_samples < spec.global_batch:
        raise ValueError(
            f"the selected episodes hold {spec.num_samples} frames, less than one global batch of {spec.global_batch}; "
            f"lower --batch_size, --grad_accum or --num_workers, or use more episodes"
        )
    if spec.global_batch % spec.lanes:
        raise ValueError(f"{spec.lanes} lanes do not divide the global batch of {spec.global_batch}")
    if spec.mixture is not None:
        check_mixture(spec.mixture, spec.lengths)


def cursor_at(spec: OrderSpec, optimizer_steps: int) -> Cursor:
    """Return the position after this many optimizer steps."""
    epoch, batch = divmod(optimizer_steps, spec.batches_per_epoch)
    return Cursor(epoch, batch)


def epoch_order(spec: OrderSpec, epoch: int, begin: int = 0, end: int | None = None) -> np.ndarray:
    """Return the flat samples of steps [begin, end) of the epoch, (lanes, samples per lane).

    Only the runs are shuffled as a whole: they fit in memory where the samples of an epoch do not.
    """
    first, last = (one * spec.samples_per_lane_step for one in (begin, spec.batches_per_epoch if end is None else end))
    run_begin, run_end = _epoch_runs(spec, epoch)
    stream_end = np.cumsum(run_end - run_begin)
    lanes = np.empty((spec.lanes, last - first), dtype=np.int64)
    for lane, start in enumerate(range(0, spec.lanes * spec.samples_per_lane, spec.samples_per_lane)):
        edges = window_edges(spec, lane, first, last)
        a, b = start + edges[0], start + edges[-1]
        left, right = np.searchsorted(stream_end, (a, b - 1), side="right")
        inside = slice(left, right + 1)
        skipped = stream_end[left] - (run_end[left] - run_begin[left])
        rows = concatenate_runs(take_stretch((run_begin[inside], run_end[inside]), a - skipped, b - skipped))
        for window, stop in itertools.pairwise(edges.tolist()):
            make_generator(Stream.WINDOW, spec.seed, epoch, lane, window).shuffle(
                rows[window - edges[0] : stop - edges[0]]
            )
        lanes[lane] = rows[first - edges[0] : last - edges[0]]
    return lanes


def _epoch_runs(spec: OrderSpec, epoch: int) -> Ranges:
    """Return the shuffled runs of all lanes, one lane after the other."""
    rng, lengths = make_generator(Stream.ORDER, spec.seed, epoch), np.asarray(spec.lengths, dtype=np.int64)
    if spec.mixture is not None:
        runs = mixed_runs(spec.mixture, lengths, spec.run_length, seed=spec.seed, epoch=epoch)
        return _deal_lanes(spec, _alternate(spec, spec.mixture, _shuffle_runs(runs, rng)))
    runs = _shuffle_runs(cut_runs(np.cumsum(lengths) - lengths, lengths, spec.run_length, rng), rng)
    missing = spec.lanes * spec.samples_per_lane - spec.num_samples
    return _join_runs([runs, take_stretch(runs, 0, missing)]) if missing > 0 else runs


def _join_runs(parts: Sequence[Ranges]) -> Ranges:
    begins, ends = zip(*parts, strict=True)
    return np.concatenate(begins), np.concatenate(ends)


def _alternate(spec: OrderSpec, mixture: Mixture, runs: Ranges) -> Ranges:
    """Interleave the datasets: order runs by their relative position within their own dataset."""
    begin, end = runs
    episode = np.searchsorted(np.cumsum(spec.lengths), begin, side="right")
    dataset = np.asarray(mixture.dataset)[episode]
    place = np.empty(len(begin))
    for number in range(len(mixture.weights)):
        sizes = (end - begin)[dataset == number]
        place[dataset == number] = (np.cumsum(sizes) - sizes / 2) / sizes.sum()
    order = np.argsort(place, kind="stable")
    return begin[order], end[order]


def _deal_lanes(spec: OrderSpec, runs: Ranges) -> Ranges:
    """Assign each run to the shortest lane; fill gaps from the excess, then the epoch's start."""
    begin, end = runs
    shortest = [(0, lane) for lane in range(spec.lanes)]
    lane_of = np.empty(len(begin), dtype=np.int64)
    for run, size in enumerate((end - begin).tolist()):
        filled, lane_of[run] = shortest[0]
        heapq.heapreplace(shortest, (filled + size, int(lane_of[run])))
    filled = np.array([filled for filled, _ in sorted(shortest, key=lambda one: one[1])])
    missing, length = np.maximum(spec.samples_per_lane - filled, 0), spec.samples_per_lane
    by_lane = np.split(np.argsort(lane_of, kind="stable"), np.cumsum(np.bincount(lane_of, minlength=spec.lanes))[:-1])
    own = [(begin[of_lane], end[of_lane]) for of_lane in by_lane]
    excess = [take_stretch(one, length, int(most)) for one, most in zip(own, filled, strict=True)]
    spare, used = _join_runs([*excess, take_stretch(runs, 0, int(missing.sum()))]), np.cumsum(missing)
    parts = [
        part
        for one, first, last in zip(own, used - missing, used, strict=True)
        for part in (take_stretch(one, 0, length), take_stretch(spare, first, last))
    ]
    return _join_runs(parts)


def window_edges(spec: OrderSpec, lane: int, begin: int = 0, end: int | None = None) -> np.ndarray:
    """Return where the mixing windows with samples [begin, end) of a lane begin, and where the last one ends.

    The first window of a lane is shorter, which staggers the windows.
    """
    per_lane, rows = spec.samples_per_lane, spec.window_rows
    if spec.lanes <= STAGGERED_IN_LINE:
        first = max(1, rows * (lane + 1) // spec.lanes)
    else:  # multiples of the golden ratio also spread the lanes of one of many workers evenly
        first = 1 + rows * (lane * GOLDEN_16 % (1 << 16)) // (1 << 16)
    cut = rows - first
    numbers = np.arange((begin + cut) // rows, ((per_lane if end is None else end) - 1 + cut) // rows + 2)
    return np.clip(numbers * rows - cut, 0, per_lane)


def step_samples(spec: OrderSpec, order: np.ndarray, begin: int = 0, end: int | None = None) -> np.ndarray:
    """Return the flat samples of steps [begin, end) of an order, (steps, global batch), lane by lane."""
    lanes = order.reshape(spec.lanes, -1, spec.samples_per_lane_step)[:, begin:end]
    return lanes.transpose(1, 0, 2).reshape(-1, spec.global_batch)
