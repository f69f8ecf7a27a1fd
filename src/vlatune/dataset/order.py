"""Which sample comes when: a pure function of (seed, epoch), cut into lanes.

    frames of all episodes   cut into runs      runs shuffled, laid end to end, cut into lanes of equal length
    |ep0......|ep1....|  ->  a b c | d e    ->  lane 0: d a | e ...     lane 1: b | c ...
                                                rows mixed inside a window of each lane

Every optimizer step takes the same number of samples from every lane; a worker serves whole lanes. So the
global batches do not depend on the number of workers, and the order after any number of samples is known
without reading anything. Windows are staggered over the lanes, so that their edges, where new runs must be
decoded, do not fall on the same step. Samples are numbered 0..N-1 over the selected episodes ("flat").

Assumes: lanes divide the global batch; the ragged end of an epoch (less than a global batch) is dropped,
another end every epoch since runs are shuffled anew.
"""

import itertools
from dataclasses import dataclass

import numpy as np

ORDER_STREAM = 1
"""Sets this generator apart from those of the noise, which are seeded with the same numbers."""
MAX_LANES = 64
"""More lanes mix better and cost one window of rows each; 64 gives a batch of 64 its own lane per sample."""


@dataclass(frozen=True)
class OrderSpec:
    """All that decides the order; two equal specs give equal orders, on any machine."""

    lengths: tuple[int, ...]
    """Frames of each selected episode."""
    seed: int
    global_batch: int
    lanes: int
    run_length: int
    window_rows: int

    @property
    def num_samples(self) -> int:
        return sum(self.lengths)

    @property
    def batches_per_epoch(self) -> int:
        return self.num_samples // self.global_batch

    @property
    def samples_per_lane_step(self) -> int:
        """Samples that one optimizer step takes from each lane."""
        return self.global_batch // self.lanes


@dataclass(frozen=True)
class Cursor:
    """Where a run stands: whole optimizer steps of `epoch` already taken."""

    epoch: int
    batch: int


def choose_lanes(global_batch: int, num_workers: int) -> int:
    """The largest divisor of the global batch up to MAX_LANES that the workers can share evenly.

    Independent of the number of workers wherever possible: it is for every batch up to MAX_LANES.
    """
    fits = [n for n in range(1, global_batch + 1) if global_batch % n == 0 and n % num_workers == 0]
    return max([n for n in fits if n <= MAX_LANES], default=min(fits))


def check_order(spec: OrderSpec) -> None:
    if spec.num_samples < spec.global_batch:
        raise ValueError(
            f"the selected episodes hold {spec.num_samples} frames, less than one global batch of {spec.global_batch}; "
            f"lower --batch_size, --grad_accum or --num_workers, or use more episodes"
        )
    if spec.global_batch % spec.lanes:
        raise ValueError(f"{spec.lanes} lanes do not divide the global batch of {spec.global_batch}")


def cursor_at(spec: OrderSpec, optimizer_steps: int) -> Cursor:
    """The place after so many optimizer steps from the start of the run."""
    epoch, batch = divmod(optimizer_steps, spec.batches_per_epoch)
    return Cursor(epoch, batch)


def epoch_order(spec: OrderSpec, epoch: int) -> np.ndarray:
    """Flat sample numbers, (lanes, samples per lane): optimizer step k takes columns [k*s, (k+1)*s) of every lane."""
    rng = _generator(spec, epoch)
    begin, end = _cut_runs(spec, rng)
    shuffled = rng.permutation(len(begin))
    sequence = _concatenate_ranges(begin[shuffled], end[shuffled])
    per_lane = spec.batches_per_epoch * spec.samples_per_lane_step
    lanes = sequence[: per_lane * spec.lanes].reshape(spec.lanes, per_lane).copy()
    for lane in range(spec.lanes):
        _mix_windows(lanes[lane], window_edges(spec, lane), rng)
    return lanes


def window_edges(spec: OrderSpec, lane: int) -> np.ndarray:
    """Positions in a lane at which a new mixing window begins: 0, first, first + window, ..., end."""
    per_lane = spec.batches_per_epoch * spec.samples_per_lane_step
    first = max(1, spec.window_rows * (lane + 1) // spec.lanes)
    return np.unique(np.minimum(np.r_[0, np.arange(first, per_lane + spec.window_rows, spec.window_rows)], per_lane))


def step_samples(spec: OrderSpec, order: np.ndarray, batch: int) -> np.ndarray:
    """Flat samples of one optimizer step, lane by lane: the order in which samples.jsonl lists them."""
    per_step = spec.samples_per_lane_step
    return order[:, batch * per_step : (batch + 1) * per_step].reshape(-1)


def _generator(spec: OrderSpec, epoch: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([ORDER_STREAM, spec.seed, epoch])))


def _cut_runs(spec: OrderSpec, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Runs as half-open flat ranges; the first of each episode has a random length, so cuts move every epoch."""
    lengths = np.asarray(spec.lengths, dtype=np.int64)
    first = np.minimum(rng.integers(1, spec.run_length + 1, size=len(lengths)), lengths)
    runs = 1 + -(-(lengths - first) // spec.run_length)
    episode = np.repeat(np.arange(len(lengths)), runs)
    nth = np.arange(runs.sum()) - np.repeat(np.cumsum(runs) - runs, runs)
    begin_of = np.cumsum(lengths) - lengths
    begin = begin_of[episode] + np.where(nth == 0, 0, first[episode] + (nth - 1) * spec.run_length)
    end = np.minimum(begin_of[episode] + first[episode] + nth * spec.run_length, begin_of[episode] + lengths[episode])
    return begin, end


def _concatenate_ranges(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """arange(begin[0], end[0]), arange(begin[1], end[1]), ... as one array."""
    sizes = end - begin
    starts = np.cumsum(sizes) - sizes
    return np.arange(sizes.sum()) + np.repeat(begin - starts, sizes)


def _mix_windows(lane: np.ndarray, edges: np.ndarray, rng: np.random.Generator) -> None:
    for begin, end in itertools.pairwise(edges):
        rng.shuffle(lane[begin:end])
