"""How well a run's model does on episodes it never saw: validation loss and open-loop action error.

Deterministic: samples, noise and times are functions of the settings. Reads the held-out frames in this process, once,
through the same reader and transforms as training. Four figures say whether the model looks and listens: its error,
that of always predicting the mean action, and its own with the pictures or the sentence blanked. A variant is a
checkpoint with one kind of weights, trained or averaged; one command evaluates as many as are asked for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlatune.batch import ACTION, TASK, Columns, num_rows
from vlatune.checkpoint.local_store import folder_name
from vlatune.checkpoint.state import load_result
from vlatune.checkpoint.store import Store, choose, open_store
from vlatune.config import EvalConfig, validate_eval
from vlatune.dataset.meta.stats import feature_stats
from vlatune.dataset.order.select import pick
from vlatune.dataset.reader import allocate, make_unit, read_into
from vlatune.evaluate.predictions import BLANKS, OnBatch, Predictions, predict_all
from vlatune.outgoing import warn
from vlatune.policies.base import ModuleOptions
from vlatune.report.html import EvalSample, save_eval_samples, write_report
from vlatune.report.run_folder import read_config, write_evaluation
from vlatune.run_setup import Setup, make_setup

SHOWN_SAMPLES = 6


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
        } | {f"blank_{what}_error": one.error() for what, one in self.by_blank.items() if what != "none"}


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
    module = setup.adapter.load_module(setup.policy, setup.binding, one_draw, device, stats=setup.stats).eval()
    rows = read_held_out(setup, options.max_samples)
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    groups = _by_robot(setup, rows)
    found: list[list[Evaluated]] = [[] for _ in groups]
    for step in steps:
        with store.opened(step) as folder:
            for wanted in ("ema", "trained") if options.weights == "both" else (options.weights,):
                weights = load_result(folder, trainable, wanted)
                for (dataset, part), variants in zip(groups, found, strict=True):
                    by_blank = predict_all(
                        setup, module, part, options, blanks=_blanks(setup), on_batch=on_batch, dataset=dataset
                    )
                    variants.append(Evaluated(step, weights, by_blank))
    each = [_figures(setup, options, one, dataset) for (dataset, _), one in zip(groups, found, strict=True)]
    result = (_joint_figures(setup, each) if setup.binding.parts else each[0]) | {"device": str(device)}
    write_evaluation(run_dir, result)
    shown = [
        _samples_to_show(setup, part, one[0].by_blank["none"], -(-SHOWN_SAMPLES // len(groups)), dataset)
        for (dataset, part), one in zip(groups, found, strict=True)
    ]
    save_eval_samples(run_dir, [sample for samples in shown for sample in samples])
    write_report(run_dir)
    return result


def _by_robot(setup: Setup, rows: Columns) -> list[tuple[int | None, Columns]]:
    """(dataset, its rows), of each robot by itself; all rows where there is one robot."""
    if not setup.binding.parts:
        return [(None, rows)]
    numbers = np.unique(rows["dataset_index"]).tolist()
    masks = [rows["dataset_index"] == number for number in numbers]
    return [
        (number, {name: values[mask] for name, values in rows.items()})
        for number, mask in zip(numbers, masks, strict=True)
    ]


def _blanks(setup: Setup) -> tuple[str, ...]:
    """Of what the policy looks at at all."""
    unused = {"images": not setup.binding.cameras, "sentence": not setup.policy.has_prompt}
    return tuple(blank for blank in BLANKS if not unused.get(blank))


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


def _figures(setup: Setup, options: EvalConfig, found: Sequence[Evaluated], dataset: int | None) -> dict[str, Any]:
    """Those of the first variant, in full, and of each in short."""
    full = found[0].by_blank["none"]
    metas, names = setup.metas, setup.binding.action_names
    held_out = setup.held_out
    if dataset is not None:
        metas, names = metas[dataset : dataset + 1], setup.binding.parts[dataset].action_names
        held_out = pick(held_out, held_out.dataset == dataset)
    mean_A = feature_stats(metas, ACTION, ["mean"])["mean"].astype(np.float32)
    mean_guess = replace(full, predicted_NTA=np.broadcast_to(mean_A, full.true_NTA.shape))
    error_NTA = np.where(full.valid_NT[..., None], np.abs(full.predicted_NTA - full.true_NTA), np.nan)
    return (
        found[0].to_json()
        | {
            "episodes": [
                int(setup.metas[int(d)].episodes.index[p])
                for d, p in zip(held_out.dataset, held_out.position, strict=True)
            ],
            "num_samples": len(full.true_NTA),
            "seed": options.seed,
            "mean_action_error": mean_guess.error(),
            "per_dim_error": dict(zip(names, np.nanmean(error_NTA, axis=(0, 1)).tolist(), strict=True)),
            "per_horizon_error": np.nanmean(error_NTA, axis=(0, 2)).tolist(),
            "action_names": list(names),
            "variants": [one.to_json() for one in found],
        }
        | ({} if dataset is None else {"dataset": dataset, "root": setup.metas[dataset].root.url})
    )


def _joint_figures(setup: Setup, each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of several robots: means over the samples of all, and each robot's own figures under `datasets`."""
    counts = [one["num_samples"] for one in each]
    variants = [_mean_figures(of_one, counts) for of_one in zip(*(one["variants"] for one in each), strict=True)]
    horizons = np.average([one["per_horizon_error"] for one in each], axis=0, weights=counts)
    return _mean_figures(each, counts) | {
        "episodes": [episode for one in each for episode in one["episodes"]],
        "num_samples": sum(counts),
        "per_dim_error": {
            f"dataset {one['dataset']}: {name}": error for one in each for name, error in one["per_dim_error"].items()
        },
        "per_horizon_error": horizons.tolist(),
        "action_names": list(setup.binding.action_names),
        "variants": variants,
        "datasets": [{key: value for key, value in one.items() if key != "variants"} for one in each],
    }


def _mean_figures(each: Sequence[dict[str, Any]], counts: Sequence[int]) -> dict[str, Any]:
    """The first one's, with losses and errors averaged by the number of samples."""
    keys = [key for key in each[0] if key == "val_loss" or key.endswith("_error")]
    numbers = [key for key in keys if isinstance(each[0][key], float)]
    plain = {key: value for key, value in each[0].items() if key not in ("dataset", "root")}
    return plain | {key: float(np.average([one[key] for one in each], weights=counts)) for key in numbers}


def _samples_to_show(
    setup: Setup, rows: Columns, predictions: Predictions, count: int, dataset: int | None
) -> list[EvalSample]:
    chosen = np.unique(np.linspace(0, num_rows(rows) - 1, count).round().astype(int))
    absent = {camera.column for camera in setup.specs[dataset or 0].absent}
    return [
        EvalSample(
            episode_index=int(rows["episode_index"][row]),
            frame_index=int(rows["frame_index"][row]),
            task=str(rows[TASK][row]),
            images={name: _newest(rows[name][row]) for name, _ in setup.binding.cameras if name not in absent},
            true_TA=predictions.true_NTA[row],
            predicted_TA=predictions.predicted_NTA[row],
            valid_T=predictions.valid_NT[row],
        )
        for row in chosen
    ]


def _newest(pictures: np.ndarray) -> np.ndarray:
    """(3, H, W), where a policy looks at several observations, too."""
    return pictures[-1] if pictures.ndim == 4 else pictures


def _warn(text: str) -> None:
    warn(f"vlatune: {text}")


def choose_device(name: str | None) -> torch.device:
    """The device that a flag names, if it is here; without a name CUDA where there is some, else the CPU."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device={name}: torch knows no such device; give cpu, cuda or cuda:1") from None
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if here else 0
    if device.type != "cpu" and (here is None or here.type != device.type or (device.index or 0) >= count):
        there = f"{count} of type {here.type}" if here else "none but the CPU"
        raise ValueError(f"--device={name}: there is no such device here ({there}); leave the flag out, or give cpu")
    return device
