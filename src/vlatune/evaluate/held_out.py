"""The rows that a validation looks at: which frames of the held-out episodes, and reading them. No torch, no Ray.

Frames are spread evenly over the held-out episodes and cut into batches of a fixed size, whoever computes them: the same
batches for one worker and for eight, so the same figures.
"""

from dataclasses import dataclass

import numpy as np

from vlatune.batch import Columns
from vlatune.dataset.reader import allocate, make_unit, read_into
from vlatune.run_setup import Setup


def choose_held_out(setup: Setup, max_samples: int) -> np.ndarray:
    """Numbers of the chosen frames, in the order of the held-out episodes laid end to end."""
    total = int(setup.held_out.length.sum())
    return np.unique(np.linspace(0, total - 1, min(max_samples, total)).round().astype(np.int64))


def read_chosen(setup: Setup, chosen: np.ndarray) -> Columns:
    """Those rows, as the reader delivers them."""
    lengths = setup.held_out.length
    starts = np.cumsum(lengths) - lengths
    columns = allocate(setup.specs[0], len(chosen))
    at = 0
    for episode, start in enumerate(starts):
        frames = chosen[(chosen >= start) & (chosen < start + lengths[episode])] - start
        if len(frames):
            dataset, position = int(setup.held_out.dataset[episode]), int(setup.held_out.position[episode])
            spec = setup.specs[dataset]
            slots = at + np.arange(len(frames))
            read_into(spec, make_unit(setup.metas[dataset], spec, position, frames, slots), columns, at)
            at += len(frames)
    return columns


def read_held_out(setup: Setup, max_samples: int) -> Columns:
    """Frames spread evenly over the held-out episodes, in one go."""
    return read_chosen(setup, choose_held_out(setup, max_samples))


@dataclass(frozen=True)
class HeldOutBatch:
    """Frames that are looked at together."""

    dataset: int | None
    """Of several robots the one that they are of; a batch has one robot's frames alone."""
    frames: np.ndarray


def cut_batches(setup: Setup, chosen: np.ndarray, batch_size: int) -> dict[int, HeldOutBatch]:
    """Number of a batch -> its frames."""
    episode = np.searchsorted(np.cumsum(setup.held_out.length), chosen, side="right")
    of_frame = setup.held_out.dataset[episode]
    groups = (
        [(n, chosen[of_frame == n]) for n in np.unique(of_frame).tolist()] if setup.binding.parts else [(None, chosen)]
    )
    batches = (
        HeldOutBatch(dataset, frames[begin : begin + batch_size])
        for dataset, frames in groups
        for begin in range(0, len(frames), batch_size)
    )
    return dict(enumerate(batches))


def by_robot(setup: Setup, rows: Columns) -> list[tuple[int | None, Columns]]:
    """(dataset, its rows), of each robot by itself; all rows where there is one robot."""
    if not setup.binding.parts:
        return [(None, rows)]
    numbers = np.unique(rows["dataset_index"]).tolist()
    masks = [rows["dataset_index"] == number for number in numbers]
    return [
        (number, {name: values[mask] for name, values in rows.items()})
        for number, mask in zip(numbers, masks, strict=True)
    ]
