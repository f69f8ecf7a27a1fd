"""What a model predicts for held-out rows, and its loss on them: the one function of every validation.

A function of weights, rows and seed: noise and times are fixed by them. No checkpoint, no report, no Ray.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlatune.batch import ACTION, ACTION_IS_PAD, TASK, Columns, num_rows
from vlatune.config import EvalConfig
from vlatune.pipeline.transforms import Normalise, Transform, apply_all
from vlatune.run_setup import Setup

BLANKS = ("none", "images", "sentence")
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

    The host reads nothing of what is computed before the end, so it prepares a batch while the one before computes.
    """
    transforms = setup.eval_transforms(options.seed)
    device = next(module.parameters()).device
    num_batches = -(-num_rows(rows) // options.batch_size)
    counts, losses, chunks = [], [], []
    for number, batch_rows in enumerate(_batches(rows, options.batch_size)):
        counts.append(num_rows(batch_rows))
        of_blanks = [_run(module, apply_all(transforms, _blank(batch_rows, setup, b)), device, options) for b in blanks]
        losses.append(torch.stack([loss for loss, _ in of_blanks]))
        chunks.append(torch.stack([chunk for _, chunk in of_blanks]))
        on_batch(number + 1, num_batches)
    losses_BK = torch.stack(losses).cpu().double().numpy()  # device sync, after all batches: nothing is left to overlap
    chunks_KNTA = torch.cat(chunks, dim=1).cpu().numpy()  # the same, already waited for
    unscale, loss_K = _action_normaliser(transforms), np.array(counts) @ losses_BK / sum(counts)
    dims = rows[ACTION].shape[-1]
    if dataset is not None:
        dims = setup.binding.parts[dataset].action_dim
        unscale = unscale.of_dataset(dataset, dims) if unscale else None
        chunks_KNTA = chunks_KNTA[..., :dims]
    return {
        blank: Predictions(
            rows[ACTION][..., :dims],
            unscale.inverse(chunks_KNTA[k]) if unscale else chunks_KNTA[k],
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
    return rows


def _action_normaliser(transforms: Sequence[Transform]) -> Normalise | None:
    return next((t for t in transforms if isinstance(t, Normalise) and t.key == ACTION), None)


def _batches(rows: Columns, size: int) -> Iterator[Columns]:
    for begin in range(0, num_rows(rows), size):
        yield {key: values[begin : begin + size] for key, values in rows.items()}
