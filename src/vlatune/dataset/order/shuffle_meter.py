"""How well an epoch is mixed: figures of its order beside those of a true permutation of the same samples. Pure.

Two figures look into a batch: how many episodes it holds, and how many of its samples have their next frame in it.
Two look along the epoch: how many optimizer steps lie between a frame and the next one, and the distance to a true
permutation: the largest difference between the shares of such pairs that come within k steps of each other, over all
k. It is 0 for a permutation and near 1 for recorded order. The permutation's figures are expectations in closed form,
so nothing is drawn for them.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlatune.dataset.order.sample_order import OrderSpec, all_batches, epoch_order

MAX_SAMPLES = 1 << 18
"""Samples that are looked into batch by batch, some 25 ms; of longer epochs, batches at even distances."""


@dataclass(frozen=True)
class Figure:
    order: float
    permutation: float

    def to_json(self) -> dict[str, float | None]:
        ratio = self.order / self.permutation if self.permutation else None
        return {"order": self.order, "permutation": self.permutation, "ratio": ratio}


@dataclass(frozen=True)
class Shuffle:
    global_batch: int
    batches: int
    """Of the epoch."""
    distinct_episodes: Figure
    """Per batch, mean."""
    neighbour_rate: Figure
    """Share of a batch's samples whose next frame is in the batch, too."""
    neighbour_steps: Figure
    """Optimizer steps between a frame and the next one, median."""
    distance: float
    """To a true permutation, 0 to 1."""

    def to_json(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value.to_json() if isinstance(value, Figure) else value for name, value in values.items()}


def measure_shuffle(spec: OrderSpec, epoch: int = 0) -> Shuffle:
    """The figures of one epoch of a run."""
    return measure_batches(all_batches(spec, epoch_order(spec, epoch)), spec.lengths)


def measure_batches(samples_SB: np.ndarray, lengths: tuple[int, ...]) -> Shuffle:
    """The figures of (optimizer steps, global batch) flat samples over episodes of these lengths."""
    episode = np.repeat(np.arange(len(lengths)), lengths)
    has_next = np.append(np.diff(episode) == 0, False)
    num_steps, global_batch = samples_SB.shape
    looked_into = np.sort(samples_SB[:: -(-samples_SB.size // MAX_SAMPLES)], axis=1)
    times = np.bincount(samples_SB.reshape(-1), minlength=len(episode))
    steps, distance = _along_the_epoch(samples_SB, has_next, comes_again=bool(times.max() > 1))
    return Shuffle(
        global_batch,
        num_steps,
        Figure(_distinct(episode[looked_into]), _distinct_of_permutation(times, episode, global_batch)),
        Figure(_neighbours(looked_into, has_next), _neighbours_of_permutation(times, has_next, global_batch)),
        steps,
        distance,
    )


def _distinct(sorted_SB: np.ndarray) -> float:
    return float(1 + np.count_nonzero(np.diff(sorted_SB, axis=1), axis=1).mean())


def _distinct_of_permutation(times: np.ndarray, episode: np.ndarray, batch: int) -> float:
    per_episode = np.bincount(episode, weights=times).astype(np.int64)
    return float(_chance_of_any(per_episode, int(times.sum()), batch).sum())


def _neighbours(sorted_SB: np.ndarray, has_next: np.ndarray) -> float:
    """Rows are made to lie far apart on one rising line, where the next frame is found by its value."""
    line = (sorted_SB + np.arange(len(sorted_SB))[:, None] * (len(has_next) + 1)).reshape(-1)
    after = np.searchsorted(line, line + 1)
    found = line[np.minimum(after, len(line) - 1)] == line + 1
    return float((found & has_next[sorted_SB.reshape(-1)]).mean())


def _neighbours_of_permutation(times: np.ndarray, has_next: np.ndarray, batch: int) -> float:
    """For each sample: its chance to meet one of its next frame's copies among the other samples of its batch."""
    total = int(times.sum())
    times_next = np.where(has_next, np.append(times[1:], 0), 0)
    return float((times * _chance_of_any(times_next, total - 1, batch - 1)).sum() / total)


def _chance_of_any(wanted: np.ndarray, total: int, draws: int) -> np.ndarray:
    """Chance that `draws` of `total` things without putting back hold at least one of so many wanted ones."""
    kinds = np.flatnonzero(np.bincount(wanted))  # a few numbers, each wanted by very many
    shares = np.minimum(kinds[:, None] / (total - np.arange(draws)), 1.0)  # of what is left before each draw
    chance = np.zeros(kinds[-1] + 1)
    with np.errstate(divide="ignore"):  # log(0): they cannot be missed
        chance[kinds] = -np.expm1(np.log1p(-shares).sum(axis=1))
    return chance[wanted]


def _along_the_epoch(samples_SB: np.ndarray, has_next: np.ndarray, *, comes_again: bool) -> tuple[Figure, float]:
    """Steps between neighbouring frames, and the distance to a true permutation."""
    step_of = _step_of_each(samples_SB, len(has_next), comes_again=comes_again)
    frames = np.flatnonzero(has_next & (step_of >= 0) & (np.append(step_of[1:], -1) >= 0))
    if len(frames) == 0:  # episodes of one frame have no neighbours to keep apart
        return Figure(0.0, 0.0), 0.0
    apart = np.abs(step_of[frames + 1] - step_of[frames])
    ours = np.cumsum(np.bincount(apart, minlength=len(samples_SB))) / len(frames)
    true = _steps_of_permutation(*samples_SB.shape)
    medians = (float(np.searchsorted(share, 0.5)) for share in (ours, true))
    return Figure(*medians), float(np.abs(ours - true).max())


def _step_of_each(samples_SB: np.ndarray, num_frames: int, *, comes_again: bool) -> np.ndarray:
    """Step of each frame, -1 where it does not come; of a frame that comes several times, any of its steps."""
    step_of = np.full(num_frames, -1)
    places = np.arange(samples_SB.size)
    if comes_again:  # the last one written stays: without this, always the latest
        np.random.Generator(np.random.Philox(key=0)).shuffle(places)
    step_of[samples_SB.reshape(-1)[places]] = places // samples_SB.shape[1]
    return step_of


def _steps_of_permutation(num_steps: int, batch: int) -> np.ndarray:
    """Chance that two samples of a permutation come within 0, 1, 2, ... steps of each other."""
    pairs = 2.0 * (num_steps - np.arange(num_steps)) * batch * batch
    pairs[0] = num_steps * batch * (batch - 1)
    return np.cumsum(pairs) / pairs.sum()
