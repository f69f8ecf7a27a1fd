"""Several datasets by weight: how many samples of an epoch each gives, and which. Pure.

An epoch stays as long as all frames together. Each dataset gives its weight's share of it, from an endless stream of
passes over its own frames, every pass in another order of runs:

    dataset of 5 frames, 3 per epoch      pass 0: d a c b e      pass 1: b e a d c
                                          epoch 0 d a c | epoch 1 b e b | epoch 2 e a d | ...

So no frame is left out for good, and after any number of epochs no frame of a dataset has come more than once more
often than another, whether its dataset is drawn ten times an epoch or a tenth. Where a dataset stands is arithmetic.
"""

from dataclasses import dataclass

import numpy as np

from vlatune.dataset.order.runs import Ranges, cut_runs, take_stretch
from vlatune.random_streams import Stream, make_generator


@dataclass(frozen=True)
class Mixture:
    dataset: tuple[int, ...]
    """Number of the dataset of each selected episode."""
    weights: tuple[float, ...]
    """Of each dataset; only their ratios count."""


def check_mixture(mixture: Mixture, lengths: tuple[int, ...]) -> None:
    frames = _frames_of(mixture, np.asarray(lengths))
    for number, quota in enumerate(quotas(mixture, sum(lengths))):
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
