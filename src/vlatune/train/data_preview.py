"""Describe the training data before a run: datasets, robots, first batch. No torch, no Ray."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vlatune.batch import ACTION, SLOT, TASK, Columns
from vlatune.console import redacted
from vlatune.data.reader import ReadSpec, read_units
from vlatune.feed.plan import Share, make_units, plan_steps
from vlatune.run.kept_samples import TrainedSample
from vlatune.run_setup import Setup

FIRST_SAMPLES = 4
"""Number of samples of the first batch in the report."""
MAX_TASKS, MAX_TASK_CHARS = 100, 1000
"""Maximum number and length of the tasks in the report."""


def describe_data(setup: Setup) -> dict[str, Any]:
    """Return a description of the training data for the report, as plain JSON values."""
    datasets, shares = range(len(setup.metas)), _shares(setup)
    tasks = list(dict.fromkeys(task for meta in setup.metas for task in meta.tasks))
    return {
        "datasets": [
            {
                "root": redacted(setup.metas[number].root.url),
                "episodes": int((setup.training.dataset == number).sum()),
                "held_out": int((setup.held_out.dataset == number).sum()),
                "frames": int(setup.training.length[setup.training.dataset == number].sum()),
                "share": float(shares[number]),
            }
            for number in datasets
        ],
        "tasks": [task[:MAX_TASK_CHARS] for task in tasks[:MAX_TASKS]],
        "num_tasks": len(tasks),
        "task_episodes": _episodes_of(setup, tasks[:MAX_TASKS]),
    }


def _episodes_of(setup: Setup, tasks: Sequence[str]) -> list[int]:
    """Count the training episodes of each task, if meta/ lists the tasks of episodes."""
    found: Counter[str] = Counter()
    for number, meta in enumerate(setup.metas):
        if meta.episodes.task is not None:
            tasks_E = meta.episodes.task[setup.training.position[setup.training.dataset == number]]
            counts = np.bincount(tasks_E[tasks_E >= 0], minlength=len(meta.tasks))
            for task, count in zip(meta.tasks, counts.tolist(), strict=True):
                found[task] += count
    return [found[task] for task in tasks]


def _shares(setup: Setup) -> np.ndarray:
    """Return the share of samples from each dataset."""
    frames = np.bincount(setup.training.dataset, weights=setup.training.length, minlength=len(setup.metas))
    weights = np.asarray(setup.order.mixture.weights) if setup.order.mixture else frames
    return weights / weights.sum()


def mixture_lines(setup: Setup) -> list[str]:
    """Describe a run on several robots: features, share and chunk duration of each dataset."""
    if not setup.binding.parts:
        return []
    shares = _shares(setup)
    lines = ["several robots: padded to the widest, masked, each with its own statistics"]
    for number, (meta, part, spec) in enumerate(zip(setup.metas, setup.binding.parts, setup.specs, strict=True)):
        offsets = next(vector.offsets for vector in spec.vectors if vector.column == ACTION) or (0,)
        lacks = f"; without {', '.join(part.missing_cameras)}" if part.missing_cameras else ""
        lines.append(
            f"dataset {number}, {meta.root.url}: {shares[number]:.1%} of the samples; {part.state_dim} state and "
            f"{part.action_dim} action dims{lacks}; {len(offsets)} actions reach {offsets[-1] / meta.fps:.2f} s at {meta.fps:g} frames per second"
        )
    return lines


def read_first_rows(setup: Setup, specs: Sequence[ReadSpec], share: Share, count: int) -> Columns:
    """Read the first rows of a worker's first micro-batch, in training order, untransformed."""
    pieces = [
        replace(piece, frames=piece.frames[first], slots=piece.slots[first])
        for piece in plan_steps(setup.order, share, 0, 1)
        if (first := piece.slots < count).any()
    ]
    columns = read_units(specs, make_units(replace(setup.data_plan, specs=tuple(specs)), share, pieces))
    order = np.argsort(columns[SLOT], kind="stable")
    return {key: values[order] for key, values in columns.items()}


def read_first_batch(setup: Setup, count: int = FIRST_SAMPLES) -> list[TrainedSample]:
    """Read samples of the first step, before and after augmentation, for the report."""
    rows = read_first_rows(setup, setup.specs, Share(0, 1), count)
    plain = {name: _newest(rows[name]).copy() for name, _ in setup.binding.cameras}
    rows = setup.augment(rows) if setup.augment else rows
    return [
        TrainedSample(
            int(rows["episode_index"][row]),
            int(rows["frame_index"][row]),
            str(rows[TASK][row]),
            {target: plain[name][row] for name, target in own},
            {target: _newest(rows[name])[row] for name, target in own if setup.augment},
        )
        for row, own in enumerate(_cameras_of(setup, number) for number in rows["dataset_index"].tolist())
    ]


def _cameras_of(setup: Setup, dataset: int) -> list[tuple[str, str]]:
    """Return (column, policy's name) of the cameras of a dataset."""
    absent = {camera.column for camera in setup.specs[dataset].absent}
    return [(name, target) for name, target in setup.binding.cameras if name not in absent]


def _newest(images: np.ndarray) -> np.ndarray:
    """Return the newest images (N, 3, H, W) if there are several observation steps."""
    return images[:, -1] if images.ndim == 5 else images
