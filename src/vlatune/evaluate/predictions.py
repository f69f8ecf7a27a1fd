"""Predict actions and compute losses for held-out rows; used by every validation. The result
depends only on weights, rows and seed, which fixes noise and times."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlatune.batch import ACTION, ACTION_IS_PAD, STATE, STEP_ACTIONS, TASK, TOKEN_MASK, Columns, num_rows
from vlatune.config.settings import EvalConfig
from vlatune.data.transforms import Normalise, RelativeActions, Transform, apply_all, cut_prompts
from vlatune.run_setup import Inputs

BLANKS = ("none", "images", "instruction")
CAMERA = "camera:"
"""Prefix of a blank that names the column of a single camera."""
TRUTH = (ACTION, ACTION_IS_PAD, STATE)
OnBatch = Callable[[int, int], None]
"""Callback with the number of finished batches and of all batches of the current variant."""


@dataclass(frozen=True)
class Predictions:
    """Action chunks in the dataset's units."""

    true_NTA: np.ndarray
    predicted_NTA: np.ndarray
    valid_NT: np.ndarray
    loss: float

    def error(self) -> float:
        """Return the mean absolute error over valid actions."""
        return float(np.abs(self.predicted_NTA - self.true_NTA)[self.valid_NT].mean())


def predict_all(
    setup: Inputs,
    module: Any,
    rows: Columns,
    options: EvalConfig,
    *,
    blanks: Sequence[str] = ("none",),
    on_batch: OnBatch = lambda done, total: None,
    dataset: int | None = None,
) -> dict[str, Predictions]:
    """Return actions and loss for every blank; with several robots all rows belong to `dataset`."""
    batches = dict(enumerate(_batches(rows, options.batch_size)))
    mean_valid = (~rows[ACTION_IS_PAD]).sum(axis=1).mean()
    prepared = (
        (number, prepare(setup, batch, options, mean_valid, blanks=blanks)) for number, batch in batches.items()
    )
    results = predict_batches(module, prepared, options, on_batch=lambda done: on_batch(done, len(batches)))
    truth = {number: without_images(batch) for number, batch in batches.items()}
    return join_results(setup, options, truth, results, blanks=blanks, dataset=dataset)


def without_images(rows: Columns) -> Columns:
    """Return the columns that predictions are compared with."""
    return {key: rows[key] for key in TRUTH}


@dataclass(frozen=True)
class BatchResult:
    """Result of one batch with one entry per blank; actions are normalised."""

    loss_K: np.ndarray
    chunk_KNTA: np.ndarray


def prepare(
    setup: Inputs, rows: Columns, options: EvalConfig, mean_valid: float, *, blanks: Sequence[str]
) -> tuple[Columns, ...]:
    """Return the module's inputs for every blank, with unused padding of prompts removed.

    `mean_valid` is the mean number of valid actions per chunk over all batches: it makes the mean
    loss independent of the batch size.
    """
    transforms, count = setup.eval_transforms(options.seed), num_rows(rows)
    valid = {STEP_ACTIONS: np.full(count, mean_valid * count or 1.0, np.float32)}
    prepared = (apply_all(transforms, _blank(rows, setup, blank)) | valid for blank in blanks)
    return tuple(cut_prompts(columns) if TOKEN_MASK in columns else columns for columns in prepared)


def predict_batches(
    module: Any,
    batches: Iterable[tuple[int, Sequence[Columns]]],
    options: EvalConfig,
    *,
    on_batch: Callable[[int], None] = lambda done: None,
) -> dict[int, BatchResult]:
    """Return batch number -> result; batches are independent and can be distributed over workers.
    Results are copied to the host at the end, so that preparing batches overlaps with computing."""
    device = next(module.parameters()).device
    numbers, losses, chunks = [], [], []
    for number, prepared in batches:
        results = [_run(module, columns, device, options) for columns in prepared]
        numbers.append(number)
        losses.append(torch.stack([loss for loss, _ in results]))
        chunks.append(torch.stack([chunk for _, chunk in results]))
        on_batch(len(numbers))
    if not numbers:
        return {}
    losses_BK = torch.stack(losses).cpu().double().numpy()  # device sync, after all batches: nothing is left to overlap
    chunks_KNTA = torch.cat(chunks, dim=1).cpu().numpy()  # already synchronised by the line above
    ends = np.cumsum([chunk.shape[1] for chunk in chunks])[:-1]
    parts = np.split(chunks_KNTA, ends, axis=1)
    return {n: BatchResult(loss_K, part) for n, loss_K, part in zip(numbers, losses_BK, parts, strict=True)}


def join_results(
    setup: Inputs,
    options: EvalConfig,
    truth: Mapping[int, Columns],
    results: Mapping[int, BatchResult],
    *,
    blanks: Sequence[str],
    dataset: int | None = None,
) -> dict[str, Predictions]:
    """Join the batches by number; `truth` has their rows as returned by `without_images`. With
    several robots all rows belong to `dataset` and get its dims and scale."""
    transforms, numbers = setup.eval_transforms(options.seed), sorted(truth)
    rows = {key: np.concatenate([truth[number][key] for number in numbers]) for key in TRUTH}
    counts = np.array([num_rows(truth[number]) for number in numbers])
    loss_K = counts @ np.stack([results[number].loss_K for number in numbers]) / counts.sum()
    chunks_KNTA = np.concatenate([results[number].chunk_KNTA for number in numbers], axis=1)
    dims = rows[ACTION].shape[-1]
    if dataset is not None:
        dims = setup.binding.parts[dataset].action_dim
        transforms = [
            one.of_dataset(dataset, dims)
            for one in transforms
            if isinstance(one, RelativeActions) or (isinstance(one, Normalise) and one.key == ACTION)
        ]
        chunks_KNTA = chunks_KNTA[..., :dims]
    return {
        blank: Predictions(
            rows[ACTION][..., :dims],
            in_own_units(transforms, chunks_KNTA[k], rows[STATE]),
            ~rows[ACTION_IS_PAD],
            float(loss_K[k]),
        )
        for k, blank in enumerate(blanks)
    }


@torch.no_grad()
def _run(module: Any, columns: Columns, device: torch.device, options: EvalConfig) -> tuple[Tensor, Tensor]:
    """Return loss and action chunks of a batch, on the device."""
    batch = to_device(columns, device)
    generator = torch.Generator().manual_seed(options.seed)  # the same noise for all samples: only inputs differ
    noise_TP = _to_device(torch.randn(*batch[ACTION].shape[1:], generator=generator), device)
    return module(batch).loss, module.predict(batch, noise_TP.expand_as(batch[ACTION]).contiguous()).float()


def to_device(columns: Columns, device: torch.device) -> dict[str, Tensor]:
    """Return a prepared batch on the device."""
    return {key: _to_device(torch.from_numpy(values), device) for key, values in columns.items()}


def _to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy via pinned memory, so that the host does not wait."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _blank(rows: Columns, setup: Inputs, what: str) -> Columns:
    if what == "images":
        return rows | {name: np.zeros_like(rows[name]) for name, _ in setup.binding.cameras}
    if what == "instruction":
        return rows | {TASK: np.full(num_rows(rows), "", dtype=object)}
    if what.startswith(CAMERA):
        name = what.removeprefix(CAMERA)
        return rows | {name: np.zeros_like(rows[name])}
    return rows


def blanks_of(setup: Inputs, dataset: int | None = None) -> tuple[str, ...]:
    """Return the blanks of the inputs that the policy uses, single cameras if there are several."""
    unused = {"images": not setup.binding.cameras, "instruction": not setup.policy.has_prompt}
    cameras = present_cameras(setup, dataset)
    each = [f"{CAMERA}{name}" for name in cameras] if len(cameras) > 1 else []
    return (*(blank for blank in BLANKS if not unused.get(blank)), *each)


def present_cameras(setup: Inputs, dataset: int | None = None) -> list[str]:
    """Return the cameras that the dataset has."""
    absent = {camera.column for camera in setup.specs[dataset or 0].absent}
    return [name for name, _ in setup.binding.cameras if name not in absent]


def in_own_units(transforms: Sequence[Transform], predicted_NTA: np.ndarray, state_NS: np.ndarray) -> np.ndarray:
    """Convert predicted actions to absolute actions in the dataset's units."""
    for transform in reversed(transforms):
        if isinstance(transform, Normalise) and transform.key == ACTION:
            predicted_NTA = transform.inverse(predicted_NTA)
        elif isinstance(transform, RelativeActions):
            predicted_NTA = transform.inverse(predicted_NTA, state_NS)
    return predicted_NTA


def _batches(rows: Columns, size: int) -> Iterator[Columns]:
    for begin in range(0, num_rows(rows), size):
        yield {key: values[begin : begin + size] for key, values in rows.items()}
