"""Which sample comes when: a pure function of (seed, epoch), cut into lanes.

    frames of all episodes   cut into runs      runs shuffled, laid end to end, cut into lanes of equal length
    |ep0......|ep1....|  ->  a b c | d e    ->  lane 0: d a | e ...     lane 1: b | c ...
                                                rows mixed inside a window of each lane

Every optimizer step takes the same number of samples from every lane; a worker serves whole lanes. So the
global batches do not depend on the number of workers, and the order after any number of samples is known
without reading anything. Windows are staggered over the lanes, so that their edges, where new runs must be
decoded, do not fall on the same step. Samples are numbered 0..N-1 over the selected episodes ("flat").

Lanes divide the global batch. The ragged end of an epoch, less than a global batch, is dropped, another end every
epoch since runs are shuffled anew; or kept, and filled up with the frames that the epoch began with: those have been
seen the longest ago. With weights (mixture.py) an epoch is as long, and frames come more or less often.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from vlatune.dataset.order.mixture import Mixture, check_mixture, mixed_runs
from vlatune.dataset.order.runs import Ranges, concatenate_runs, cut_runs
from vlatune.random_streams import Stream, make_generator

MAX_LANES = 512
"""A lane per sample mixes best: samples of one lane and step come from the same few runs. A lane costs half a window
of decoded rows; so a worker holds half a window for each of its samples of a step, whatever the number of workers."""
STAGGERED_IN_LINE = 64
"""Orders of up to so many lanes are fixed by the checkpoints of runs that began with them."""
GOLDEN_16 = 40503
"""The golden ratio's fraction in units of 1 / 65536: whole numbers are the same on every machine."""


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
    mixture: Mixture | None = None
    """Weights of several datasets; without them every frame comes once in an epoch."""
    drop_last: bool = True
    """Whether samples that fill no whole global batch are left out of the epoch, or filled up to one."""

    @property
    def num_samples(self) -> int:
        return sum(self.lengths)

    @property
    def batches_per_epoch(self) -> int:
        whole, rest = divmod(self.num_samples, self.global_batch)
        return whole if self.drop_last else whole + (rest > 0)

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
    if spec.mixture is not None:
        check_mixture(spec.mixture, spec.lengths)


def cursor_at(spec: OrderSpec, optimizer_steps: int) -> Cursor:
    """The place after so many optimizer steps from the start of the run."""
    epoch, batch = divmod(optimizer_steps, spec.batches_per_epoch)
    return Cursor(epoch, batch)


def epoch_order(spec: OrderSpec, epoch: int) -> np.ndarray:
    """Flat sample numbers, (lanes, samples per lane): optimizer step k takes columns [k*s, (k+1)*s) of every lane."""
    rng = _generator(spec, epoch)
    begin, end = _epoch_runs(spec, epoch, rng)
    shuffled = rng.permutation(len(begin))
    sequence = concatenate_runs((begin[shuffled], end[shuffled]))
    per_lane = spec.batches_per_epoch * spec.samples_per_lane_step
    lanes = np.resize(sequence, (spec.lanes, per_lane))  # cuts the ragged end off, or goes on from the beginning
    for lane in range(spec.lanes):
        _mix_windows(lanes[lane], window_edges(spec, lane), rng)
    return lanes


def window_edges(spec: OrderSpec, lane: int) -> np.ndarray:
    """Positions in a lane at which a new mixing window begins: 0, first, first + window, ..., end."""
    per_lane = spec.batches_per_epoch * spec.samples_per_lane_step
    first = _first_edge(spec, lane)
    return np.unique(np.minimum(np.r_[0, np.arange(first, per_lane + spec.window_rows, spec.window_rows)], per_lane))


def _first_edge(spec: OrderSpec, lane: int) -> int:
    """Length of a lane's first window, which staggers all its windows.

    In line, the lanes of one of several workers would begin their windows within a few steps of each other: at 8
    workers, one step asks for 10 times a step's rows. Multiples of the golden ratio spread any stretch of lanes evenly.
    """
    if spec.lanes <= STAGGERED_IN_LINE:
        return max(1, spec.window_rows * (lane + 1) // spec.lanes)
    return 1 + spec.window_rows * (lane * GOLDEN_16 % (1 << 16)) // (1 << 16)


def step_samples(spec: OrderSpec, order: np.ndarray, batch: int) -> np.ndarray:
    """Flat samples of one optimizer step, lane by lane: the order in which samples.jsonl lists them."""
    per_step = spec.samples_per_lane_step
    return order[:, batch * per_step : (batch + 1) * per_step].reshape(-1)


def all_batches(spec: OrderSpec, order: np.ndarray) -> np.ndarray:
    """(optimizer steps, global batch): `step_samples` of every step of the epoch."""
    steps = spec.batches_per_epoch
    return order.reshape(spec.lanes, steps, -1).transpose(1, 0, 2).reshape(steps, spec.global_batch)


def _generator(spec: OrderSpec, epoch: int) -> np.random.Generator:
    return make_generator(Stream.ORDER, spec.seed, epoch)


def _epoch_runs(spec: OrderSpec, epoch: int, rng: np.random.Generator) -> Ranges:
    lengths = np.asarray(spec.lengths, dtype=np.int64)
    if spec.mixture is None:
        return cut_runs(np.cumsum(lengths) - lengths, lengths, spec.run_length, rng)
    return mixed_runs(spec.mixture, lengths, spec.run_length, seed=spec.seed, epoch=epoch)


def _mix_windows(lane: np.ndarray, edges: np.ndarray, rng: np.random.Generator) -> None:
    for begin, end in itertools.pairwise(edges):
        rng.shuffle(lane[begin:end])
