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
seen the longest ago. With weights (`Mixture`) an epoch is as long, and frames come more or less often.

Several datasets by weight: an epoch stays as long as all frames together. Each dataset gives its weight's share of it, from an endless stream of
passes over its own frames, every pass in another order of runs:

    dataset of 5 frames, 3 per epoch      pass 0: d a c b e      pass 1: b e a d c
                                          epoch 0 d a c | epoch 1 b e b | epoch 2 e a d | ...

So no frame is left out for good, and after any number of epochs no frame of a dataset has come more than once more
often than another, whether its dataset is drawn ten times an epoch or a tenth. Where a dataset stands is arithmetic.
Runs of the datasets alternate by their shares, and each is dealt to the lane that is shortest: shares hold in every stretch of steps,
to a few runs, and not only over an epoch. Shuffled, 10,000 samples in runs of 32 would be off by 3 in 100, and at times by 9.

Runs are neighbouring frames of one episode that are decoded together, as half-open ranges of flat samples.
"""

import heapq
import itertools
from dataclasses import dataclass

import numpy as np

from vlatune.random_streams import Stream, make_generator

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


@dataclass(frozen=True)
class Mixture:
    dataset: tuple[int, ...]
    """Number of the dataset of each selected episode."""
    weights: tuple[float, ...]
    """Of each dataset; only their ratios count."""


def check_mixture(mixture: Mixture, lengths: tuple[int, ...]) -> None:
    """By size, a dataset that is held out whole has the weight 0, and gives nothing."""
    frames = _frames_of(mixture, np.asarray(lengths))
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
                f"--dataset.weight={mixture.weights[number]}: dataset {number} would give not one of the "
                f"{sum(lengths)} samples of an epoch; raise its weight or leave the dataset out"
            )


def quotas(mixture: Mixture, num_samples: int) -> list[int]:
    """Samples that each dataset gives to an epoch: whole numbers, nearest to its share, `num_samples` together."""
    exact = np.asarray(mixture.weights) / sum(mixture.weights) * num_samples
    whole = np.floor(exact).astype(np.int64)
    largest_rest = np.argsort(whole - exact, kind="stable")
    whole[largest_rest[: num_samples - int(whole.sum())]] += 1
    return whole.tolist()


def mixed_runs(mixture: Mixture, lengths: np.ndarray, run_length: int, *, seed: int, epoch: int) -> Ranges:
    """The runs of an epoch, dataset by dataset; shuffling them is the caller's business."""
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
            runs = _one_pass(starts[chosen], lengths[chosen], run_length, rng)
            parts.append(take_stretch(runs, first - nth * frames, last - nth * frames))
    begins, ends = zip(*parts, strict=True)
    return np.concatenate(begins), np.concatenate(ends)


def _one_pass(starts: np.ndarray, lengths: np.ndarray, run_length: int, rng: np.random.Generator) -> Ranges:
    begin, end = cut_runs(starts, lengths, run_length, rng)
    shuffled = rng.permutation(len(begin))
    return begin[shuffled], end[shuffled]


def _frames_of(mixture: Mixture, lengths: np.ndarray) -> np.ndarray:
    return np.bincount(mixture.dataset, weights=lengths, minlength=len(mixture.weights))


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

    @property
    def samples_per_lane(self) -> int:
        """Of an epoch."""
        return self.batches_per_epoch * self.samples_per_lane_step


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
    runs = (begin[shuffled], end[shuffled])
    lanes = _cut_lanes(spec, runs) if spec.mixture is None else _deal_lanes(spec, _alternate(spec, spec.mixture, runs))
    for lane in range(spec.lanes):
        _mix_windows(lanes[lane], window_edges(spec, lane), rng)
    return lanes


def _cut_lanes(spec: OrderSpec, runs: Ranges) -> np.ndarray:
    """Cuts the ragged end off, or goes on from the beginning."""
    return np.resize(concatenate_runs(runs), (spec.lanes, spec.samples_per_lane))


def _alternate(spec: OrderSpec, mixture: Mixture, runs: Ranges) -> Ranges:
    """The runs of each dataset in their order, each at the place that it has among its own: a third of the way, say."""
    begin, end = runs
    episode = np.searchsorted(np.cumsum(spec.lengths), begin, side="right")
    dataset = np.asarray(mixture.dataset)[episode]
    place = np.empty(len(begin))
    for number in range(len(mixture.weights)):
        sizes = (end - begin)[dataset == number]
        place[dataset == number] = (np.cumsum(sizes) - sizes / 2) / sizes.sum()
    order = np.argsort(place, kind="stable")
    return begin[order], end[order]


def _deal_lanes(spec: OrderSpec, runs: Ranges) -> np.ndarray:
    """Each run to the lane that is shortest so far, so that all lanes are about as far in the order of runs at any step. What is
    too long for its lane fills up those that are too short, then the beginning does.
    """
    begin, end = runs
    shortest = [(0, lane) for lane in range(spec.lanes)]
    lane_of = np.empty(len(begin), dtype=np.int64)
    for run, size in enumerate((end - begin).tolist()):
        filled, lane_of[run] = shortest[0]
        heapq.heapreplace(shortest, (filled + size, int(lane_of[run])))
    own = [np.flatnonzero(lane_of == lane) for lane in range(spec.lanes)]
    rows = [concatenate_runs((begin[of_lane], end[of_lane])) for of_lane in own]
    spare = np.concatenate([*(row[spec.samples_per_lane :] for row in rows), concatenate_runs(runs)])
    lanes, used = np.empty((spec.lanes, spec.samples_per_lane), dtype=np.int64), 0
    for lane, row in zip(lanes, rows, strict=True):
        missing = max(0, len(lane) - len(row))
        lane[:] = np.concatenate([row[: len(lane)], spare[used : used + missing]])
        used += missing
    return lanes


def window_edges(spec: OrderSpec, lane: int) -> np.ndarray:
    """Positions in a lane at which a new mixing window begins: 0, first, first + window, ..., end."""
    per_lane = spec.samples_per_lane
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
