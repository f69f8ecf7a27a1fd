"""How well a run's model does on episodes it never saw: validation loss and open-loop action error.

Deterministic: samples, noise and times are functions of the settings. Reads the held-out frames in this process,
through the same reader and transforms as training. Four figures say whether the model looks and listens: its error,
that of always predicting the mean action, and its own with the pictures or the sentence blanked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlatune.batch import ACTION, ACTION_IS_PAD, TASK, Columns, num_rows
from vlatune.checkpoint.local_store import folder_name
from vlatune.checkpoint.state import load_result
from vlatune.checkpoint.store import choose, open_store
from vlatune.config import EvalConfig, RunConfig
from vlatune.dataset.reader import allocate, make_unit, read_into
from vlatune.dataset.stats import feature_stats
from vlatune.files import read_json
from vlatune.flags import config_from_dict
from vlatune.outgoing import warn
from vlatune.pipeline.transforms import Normalise, Transform, apply_all
from vlatune.policies.base import ModuleOptions
from vlatune.report.html import EvalSample, save_eval_samples, write_report
from vlatune.report.sinks import write_json
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


def evaluate_run(run_dir: Path, options: EvalConfig) -> dict[str, Any]:
    """Evaluate a run's checkpoint, write eval.json and eval_samples, and renew the report."""
    config = replace(_stored_config(run_dir), output_dir=str(run_dir))  # the folder may have been moved
    setup = make_setup(config)
    if len(setup.held_out) == 0:
        raise ValueError(f"run '{run_dir}' holds no episodes out; train with --dataset.eval_split above 0 to evaluate")
    store = open_store(run_dir, config.storage_path)
    checkpoint = choose(store, options.checkpoint, warn=_warn)
    one_draw = replace(ModuleOptions.of(config.policy), flow_samples=1)
    module = setup.adapter.load_module(setup.policy, setup.binding, one_draw)
    with store.opened(checkpoint) as folder:
        load_result(folder, {name: p for name, p in module.named_parameters() if p.requires_grad})
    module.eval()
    rows = read_held_out(setup, options.max_samples)
    by_blank = {blank: predict(setup, module, _blank(rows, setup, blank), options) for blank in BLANKS}
    result = _figures(setup, options, checkpoint, by_blank)
    write_json(run_dir / "eval.json", result)
    save_eval_samples(run_dir, _samples_to_show(setup, rows, by_blank["none"]))
    write_report(run_dir)
    return result


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
    """Sampled actions and the flow-matching loss, batch by batch."""
    transforms = setup.eval_transforms(options.seed)
    unscale = _action_normaliser(transforms)
    predicted, losses = [], []
    for batch_rows in _batches(rows, options.batch_size):
        columns = apply_all(transforms, batch_rows)
        batch = {key: torch.from_numpy(values) for key, values in columns.items()}
        with torch.no_grad():
            # Device syncs, both here: evaluation wants the numbers at once, and no training step waits behind it.
            losses.append(float(module(batch)) * num_rows(columns))
            chunk = module.predict(batch, _start_noise(batch[ACTION], options.seed)).float().numpy()
        predicted.append(unscale.inverse(chunk) if unscale else chunk)
    loss = sum(losses) / num_rows(rows)
    return Predictions(rows[ACTION], np.concatenate(predicted), ~rows[ACTION_IS_PAD], loss)


def _start_noise(action_BTP: Tensor, seed: int) -> Tensor:
    """The same start of sampling for every sample and every blank: differences are the input's alone."""
    noise_TP = torch.randn(action_BTP.shape[1:], generator=torch.Generator().manual_seed(seed))
    return noise_TP.expand_as(action_BTP).contiguous()


def _blank(rows: Columns, setup: Setup, what: str) -> Columns:
    if what == "images":
        return rows | {name: np.zeros_like(rows[name]) for name, _ in setup.binding.cameras}
    if what == "sentence":
        return rows | {TASK: np.full(num_rows(rows), "", dtype=object)}
    return rows


def _figures(setup: Setup, options: EvalConfig, checkpoint: int, by_blank: dict[str, Predictions]) -> dict[str, Any]:
    full = by_blank["none"]
    mean_A = feature_stats(setup.metas, ACTION, ["mean"])["mean"].astype(np.float32)
    mean_guess = replace(full, predicted_NTA=np.broadcast_to(mean_A, full.true_NTA.shape))
    error_NTA = np.where(full.valid_NT[..., None], np.abs(full.predicted_NTA - full.true_NTA), np.nan)
    positions = setup.held_out.position
    return {
        "checkpoint": folder_name(checkpoint),
        "episodes": [
            int(setup.metas[int(d)].episodes.index[p]) for d, p in zip(setup.held_out.dataset, positions, strict=True)
        ],
        "num_samples": len(full.true_NTA),
        "seed": options.seed,
        "val_loss": full.loss,
        "action_error": full.error(),
        "mean_action_error": mean_guess.error(),
        "blank_images_error": by_blank["images"].error(),
        "blank_sentence_error": by_blank["sentence"].error(),
        "per_dim_error": dict(
            zip(setup.binding.action_names, np.nanmean(error_NTA, axis=(0, 1)).tolist(), strict=True)
        ),
        "per_horizon_error": np.nanmean(error_NTA, axis=(0, 2)).tolist(),
        "action_names": list(setup.binding.action_names),
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


def _stored_config(run_dir: Path) -> RunConfig:
    file = run_dir / "config.json"
    if not file.exists():
        raise ValueError(f"'{run_dir}' is not a run folder: there is no config.json in it")
    return config_from_dict(RunConfig, read_json(run_dir, "config.json"), str(file))


def _warn(text: str) -> None:
    warn(f"vlatune: {text}")
