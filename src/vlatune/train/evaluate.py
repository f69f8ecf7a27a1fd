"""How well a run's model does on episodes it never saw: validation loss and open-loop action error.

Deterministic: samples, noise and times are functions of the settings. Reads the held-out frames in this process, once,
through the same reader and transforms as training. Four figures say whether the model looks and listens: its error,
that of always predicting the mean action, and its own with the pictures or the sentence blanked. A variant is a
checkpoint with one kind of weights, trained or averaged; one command evaluates as many as are asked for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlatune.batch import ACTION, ACTION_IS_PAD, TASK, Columns, num_rows
from vlatune.checkpoint.local_store import folder_name
from vlatune.checkpoint.state import load_result
from vlatune.checkpoint.store import Store, choose, open_store
from vlatune.config import EvalConfig, validate_eval
from vlatune.dataset.reader import allocate, make_unit, read_into
from vlatune.dataset.stats import feature_stats
from vlatune.outgoing import warn
from vlatune.pipeline.transforms import Normalise, Transform, apply_all
from vlatune.policies.base import ModuleOptions
from vlatune.report.html import EvalSample, save_eval_samples, write_report
from vlatune.report.run_folder import read_config
from vlatune.report.sinks import write_json
from vlatune.train.device import choose_device
from vlatune.train.setup import Setup, make_setup

SHOWN_SAMPLES = 6
BLANKS = ("none", "images", "sentence")


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


@dataclass(frozen=True)
class Evaluated:
    """A variant and what it predicts."""

    checkpoint: int
    weights: str
    """`ema` or `trained`."""
    by_blank: Mapping[str, Predictions]

    def to_json(self) -> dict[str, Any]:
        full = self.by_blank["none"]
        return {
            "checkpoint": folder_name(self.checkpoint),
            "weights": self.weights,
            "val_loss": full.loss,
            "action_error": full.error(),
            "blank_images_error": self.by_blank["images"].error(),
            "blank_sentence_error": self.by_blank["sentence"].error(),
        }


OnBatch = Callable[[int, int], None]
"""Gets the batches done, and of how many, of the variant under way."""


def evaluate_run(run_dir: Path, options: EvalConfig, *, on_batch: OnBatch = lambda done, total: None) -> dict[str, Any]:
    """Evaluate a run's checkpoints, write eval.json and eval_samples, and renew the report."""
    validate_eval(options)
    device = choose_device(options.device)
    config = replace(read_config(run_dir), output_dir=str(run_dir))  # the folder may have been moved
    store = open_store(run_dir, config.storage_path)
    steps = _wanted_steps(store, options.checkpoint)
    setup = make_setup(config)
    if len(setup.held_out) == 0:
        raise ValueError(f"run '{run_dir}' holds no episodes out; train with --dataset.eval_split above 0 to evaluate")
    one_draw = replace(ModuleOptions.of(config.policy), flow_samples=1)
    module = setup.adapter.load_module(setup.policy, setup.binding, one_draw, device).eval()
    rows = read_held_out(setup, options.max_samples)
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    found = []
    for step in steps:
        with store.opened(step) as folder:
            for wanted in ("ema", "trained") if options.weights == "both" else (options.weights,):
                weights = load_result(folder, trainable, wanted)
                found.append(Evaluated(step, weights, predict_all(setup, module, rows, options, on_batch=on_batch)))
    result = _figures(setup, options, found) | {"device": str(device)}
    write_json(run_dir / "eval.json", result)
    save_eval_samples(run_dir, _samples_to_show(setup, rows, found[0].by_blank["none"]))
    write_report(run_dir)
    return result


def _wanted_steps(store: Store, names: Sequence[str]) -> list[int]:
    """The newest first: it gives the run's figures, the others stand beside it."""
    if "all" in names:
        names = [str(step) for step in store.steps()]
    steps = {choose(store, name, warn=_warn) for name in names or [None]}
    return sorted(steps, reverse=True)


def read_held_out(setup: Setup, max_samples: int) -> Columns:
    """Frames spread evenly over the held-out episodes, as the reader delivers them."""
    lengths = setup.held_out.length
    total = int(lengths.sum())
    chosen = np.unique(np.linspace(0, total - 1, min(max_samples, total)).round().astype(np.int64))
    starts = np.cumsum(lengths) - lengths
    columns = allocate(setup.specs[0], len(chosen))
    at = 0
    for episode, start in enumerate(starts):
        frames = chosen[(chosen >= start) & (chosen < start + lengths[episode])] - start
        if len(frames):
            dataset, position = int(setup.held_out.dataset[episode]), int(setup.held_out.position[episode])
            spec = setup.specs[dataset]
            read_into(
                spec, make_unit(setup.metas[dataset], spec, position, frames, at + np.arange(len(frames))), columns, at
            )
            at += len(frames)
    return columns


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
) -> dict[str, Predictions]:
    """Actions and loss for every blank, in one pass over the rows, on the module's device.

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
    return {
        blank: Predictions(
            rows[ACTION],
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
    return module(batch), module.predict(batch, noise_TP.expand_as(batch[ACTION]).contiguous()).float()


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


def _figures(setup: Setup, options: EvalConfig, found: Sequence[Evaluated]) -> dict[str, Any]:
    """Those of the first variant, in full, and of each in short."""
    full = found[0].by_blank["none"]
    mean_A = feature_stats(setup.metas, ACTION, ["mean"])["mean"].astype(np.float32)
    mean_guess = replace(full, predicted_NTA=np.broadcast_to(mean_A, full.true_NTA.shape))
    error_NTA = np.where(full.valid_NT[..., None], np.abs(full.predicted_NTA - full.true_NTA), np.nan)
    positions = setup.held_out.position
    return found[0].to_json() | {
        "episodes": [
            int(setup.metas[int(d)].episodes.index[p]) for d, p in zip(setup.held_out.dataset, positions, strict=True)
        ],
        "num_samples": len(full.true_NTA),
        "seed": options.seed,
        "mean_action_error": mean_guess.error(),
        "per_dim_error": dict(
            zip(setup.binding.action_names, np.nanmean(error_NTA, axis=(0, 1)).tolist(), strict=True)
        ),
        "per_horizon_error": np.nanmean(error_NTA, axis=(0, 2)).tolist(),
        "action_names": list(setup.binding.action_names),
        "variants": [one.to_json() for one in found],
    }


def _samples_to_show(setup: Setup, rows: Columns, predictions: Predictions) -> list[EvalSample]:
    chosen = np.unique(np.linspace(0, num_rows(rows) - 1, SHOWN_SAMPLES).round().astype(int))
    return [
        EvalSample(
            episode_index=int(rows["episode_index"][row]),
            frame_index=int(rows["frame_index"][row]),
            task=str(rows[TASK][row]),
            images={name: rows[name][row] for name, _ in setup.binding.cameras},
            true_TA=predictions.true_NTA[row],
            predicted_TA=predictions.predicted_NTA[row],
            valid_T=predictions.valid_NT[row],
        )
        for row in chosen
    ]


def _action_normaliser(transforms: Sequence[Transform]) -> Normalise | None:
    return next((t for t in transforms if isinstance(t, Normalise) and t.key == ACTION), None)


def _batches(rows: Columns, size: int) -> Iterator[Columns]:
    for begin in range(0, num_rows(rows), size):
        yield {key: values[begin : begin + size] for key, values in rows.items()}


def _warn(text: str) -> None:
    warn(f"vlatune: {text}")
