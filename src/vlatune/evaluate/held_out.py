"""Select and read the held-out frames of a validation, without torch or Ray.

Frames are spread evenly over the held-out episodes and split into batches of a fixed size, so that
figures do not depend on the number of workers.
"""

from dataclasses import dataclass

import numpy as np

from vlatune.batch import Columns
from vlatune.data.reader import allocate, make_unit, read_into
from vlatune.run_setup import Inputs


def choose_held_out(setup: Inputs, max_samples: int) -> np.ndarray:
    """Return the chosen frames as indices into the concatenated held-out episodes."""
    total = int(setup.held_out.length.sum())
    return np.unique(np.linspace(0, total - 1, min(max_samples, total)).round().astype(np.int64))


def read_chosen(setup: Inputs, chosen: np.ndarray) -> Columns:
    """Read the chosen rows."""
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


def read_held_out(setup: Inputs, max_samples: int) -> Columns:
    """Read up to `max_samples` frames, spread evenly over the held-out episodes."""
    return read_chosen(setup, choose_held_out(setup, max_samples))


@dataclass(frozen=True)
class HeldOutBatch:
    """Frames that are evaluated together."""

    dataset: int | None
    """Dataset index if there are several robots; a batch holds frames of one robot only."""
    frames: np.ndarray


def cut_batches(setup: Inputs, chosen: np.ndarray, batch_size: int) -> dict[int, HeldOutBatch]:
    """Return batch number -> batch."""
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


def by_robot(setup: Inputs, rows: Columns) -> list[tuple[int | None, Columns]]:
    """Return (dataset, rows) for each robot; (None, all rows) if there is one robot."""
    if not setup.binding.parts:
        return [(None, rows)]
    numbers = np.unique(rows["dataset_index"]).tolist()
    masks = [rows["dataset_index"] == number for number in numbers]
    return [
        (number, {name: values[mask] for name, values in rows.items()})
        for number, mask in zip(numbers, masks, strict=True)
    ]
