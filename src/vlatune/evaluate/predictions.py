"""What a model predicts for held-out rows, and its loss on them: the one function of every validation.

A function of weights, rows and seed: noise and times are fixed by them. No checkpoint, no report, no Ray.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlatune.batch import ACTION, ACTION_IS_PAD, STATE, TASK, TOKEN_MASK, Columns, num_rows
from vlatune.config import EvalConfig
from vlatune.pipeline.transforms import Normalise, RelativeActions, Transform, apply_all, cut_prompts
from vlatune.run_setup import Setup

BLANKS = ("none", "images", "sentence")
CAMERA = "camera:"
"""Begins the blank of one camera, before its column's name."""
TRUTH = (ACTION, ACTION_IS_PAD, STATE)
OnBatch = Callable[[int, int], None]
"""Gets the batches done, and of how many, of the variant under way."""


@dataclass(frozen=True)
class Predictions:
    """Action chunks in the dataset's own units."""

    true_NTA: np.ndarray
    predicted_NTA: np.ndarray
    valid_NT: np.ndarray
    loss: float

    def error(self) -> float:
        """Mean absolute error over all actions that belong to their episode."""
        return float(np.abs(self.predicted_NTA - self.true_NTA)[self.valid_NT].mean())


def predict(setup: Setup, module: Any, rows: Columns, options: EvalConfig) -> Predictions:
    """Sampled actions and the flow-matching loss of the rows as they are."""
    return predict_all(setup, module, rows, options, blanks=("none",))["none"]


def predict_all(
    setup: Setup,
    module: Any,
    rows: Columns,
    options: EvalConfig,
    *,
    blanks: Sequence[str] = BLANKS,
    on_batch: OnBatch = lambda done, total: None,
    dataset: int | None = None,
) -> dict[str, Predictions]:
    """Actions and loss for every blank, in one pass over the rows, on the module's device. Of several robots the rows are
    those of one `dataset`.
    """
    batches = dict(enumerate(_batches(rows, options.batch_size)))
    prepared = ((number, prepare(setup, batch, options, blanks=blanks)) for number, batch in batches.items())
    results = predict_batches(module, prepared, options, on_batch=lambda done: on_batch(done, len(batches)))
    truth = {number: without_pictures(batch) for number, batch in batches.items()}
    return join_results(setup, options, truth, results, blanks=blanks, dataset=dataset)


def without_pictures(rows: Columns) -> Columns:
    """What predictions are held against."""
    return {key: rows[key] for key in TRUTH}


@dataclass(frozen=True)
class BatchResult:
    """Of one batch, a row for every blank; actions still normalised."""

    loss_K: np.ndarray
    chunk_KNTA: np.ndarray


def prepare(setup: Setup, rows: Columns, options: EvalConfig, *, blanks: Sequence[str]) -> tuple[Columns, ...]:
    """Rows as the module takes them, once for every blank; padding that no prompt of them uses is cut, as in training."""
    transforms = setup.eval_transforms(options.seed)
    made = (apply_all(transforms, _blank(rows, setup, blank)) for blank in blanks)
    return tuple(cut_prompts(columns) if TOKEN_MASK in columns else columns for columns in made)


def predict_batches(
    module: Any,
    batches: Iterable[tuple[int, Sequence[Columns]]],
    options: EvalConfig,
    *,
    on_batch: Callable[[int], None] = lambda done: None,
) -> dict[int, BatchResult]:
    """Number of a batch -> its result. What a batch gives depends on no other, so workers can share them out.

    The host reads nothing of what is computed before the end, so it prepares a batch while the one before computes.
    """
    device = next(module.parameters()).device
    numbers, losses, chunks = [], [], []
    for number, prepared in batches:
        of_blanks = [_run(module, columns, device, options) for columns in prepared]
        numbers.append(number)
        losses.append(torch.stack([loss for loss, _ in of_blanks]))
        chunks.append(torch.stack([chunk for _, chunk in of_blanks]))
        on_batch(len(numbers))
    if not numbers:
        return {}
    losses_BK = torch.stack(losses).cpu().double().numpy()  # device sync, after all batches: nothing is left to overlap
    chunks_KNTA = torch.cat(chunks, dim=1).cpu().numpy()  # the same, already waited for
    ends = np.cumsum([chunk.shape[1] for chunk in chunks])[:-1]
    parts = np.split(chunks_KNTA, ends, axis=1)
    return {n: BatchResult(loss_K, part) for n, loss_K, part in zip(numbers, losses_BK, parts, strict=True)}


def join_results(
    setup: Setup,
    options: EvalConfig,
    truth: Mapping[int, Columns],
    results: Mapping[int, BatchResult],
    *,
    blanks: Sequence[str],
    dataset: int | None = None,
) -> dict[str, Predictions]:
    """All batches in the order of their numbers; `truth` has the rows of each, as `without_pictures` leaves them.

    Of several robots all are of one `dataset`: its own dims, on its own scale.
    """
    transforms, numbers = setup.eval_transforms(options.seed), sorted(truth)
    rows = {key: np.concatenate([truth[number][key] for number in numbers]) for key in TRUTH}
    counts = np.array([num_rows(truth[number]) for number in numbers])
    loss_K = counts @ np.stack([results[number].loss_K for number in numbers]) / counts.sum()
    chunks_KNTA = np.concatenate([results[number].chunk_KNTA for number in numbers], axis=1)
    dims = rows[ACTION].shape[-1]
    if dataset is not None:
        dims = setup.binding.parts[dataset].action_dim
        transforms = [
            one.of_dataset(dataset, dims) if isinstance(one, Normalise) and one.key == ACTION else one
            for one in transforms
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
    """Loss and action chunks of a batch, still on the device."""
    batch = {key: _to_device(torch.from_numpy(values), device) for key, values in columns.items()}
    noise_TP = _to_device(_start_noise(batch[ACTION].shape[1:], options.seed), device)
    return module(batch).mean(), module.predict(batch, noise_TP.expand_as(batch[ACTION]).contiguous()).float()


def _to_device(host: Tensor, device: torch.device) -> Tensor:
    """Out of page-locked memory, so that the host does not wait for the copy; torch keeps that memory until it is done."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _start_noise(shape_TP: Sequence[int], seed: int) -> Tensor:
    """The same start of sampling for every sample and every blank: differences are the input's alone."""
    return torch.randn(*shape_TP, generator=torch.Generator().manual_seed(seed))


def _blank(rows: Columns, setup: Setup, what: str) -> Columns:
    if what == "images":
        return rows | {name: np.zeros_like(rows[name]) for name, _ in setup.binding.cameras}
    if what == "sentence":
        return rows | {TASK: np.full(num_rows(rows), "", dtype=object)}
    if what.startswith(CAMERA):
        name = what.removeprefix(CAMERA)
        return rows | {name: np.zeros_like(rows[name])}
    return rows


def blanks_of(setup: Setup, dataset: int | None = None) -> tuple[str, ...]:
    """Of what the policy looks at at all; single cameras where there are several. Of several robots, what `dataset` has."""
    unused = {"images": not setup.binding.cameras, "sentence": not setup.policy.has_prompt}
    absent = {camera.column for camera in setup.specs[dataset or 0].absent}
    cameras = [name for name, _ in setup.binding.cameras if name not in absent]
    each = [f"{CAMERA}{name}" for name in cameras] if len(cameras) > 1 else []
    return (*(blank for blank in BLANKS if not unused.get(blank)), *each)


def in_own_units(transforms: Sequence[Transform], predicted_NTA: np.ndarray, state_NS: np.ndarray) -> np.ndarray:
    """What a policy predicts as the dataset's own actions: off its scale, and absolute; the state is as recorded."""
    for transform in reversed(transforms):
        if isinstance(transform, Normalise) and transform.key == ACTION:
            predicted_NTA = transform.inverse(predicted_NTA)
        elif isinstance(transform, RelativeActions):
            predicted_NTA = transform.inverse(predicted_NTA, state_NS)
    return predicted_NTA


def _batches(rows: Columns, size: int) -> Iterator[Columns]:
    for begin in range(0, num_rows(rows), size):
        yield {key: values[begin : begin + size] for key, values in rows.items()}
