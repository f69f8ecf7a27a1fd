"""How well a run's model does on episodes it never saw: validation loss and open-loop action error, and their text.

Deterministic: samples, noise and times are functions of the settings. Reads the held-out frames in this process, once,
through the same reader and transforms as training. Four figures say whether the model looks and listens: its error,
that of always predicting the mean action, and its own with the pictures or the sentence blanked. A variant is a
checkpoint with one kind of weights, trained or averaged; one command evaluates as many as are asked for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlatune.batch import ACTION, TASK, Columns, num_rows
from vlatune.checkpoint.local_store import folder_name
from vlatune.checkpoint.state import load_result
from vlatune.checkpoint.store import Store, choose, open_store
from vlatune.config import EvalConfig
from vlatune.config_checks import validate_eval
from vlatune.dataset.meta.stats import feature_stats
from vlatune.dataset.order.partition import pick
from vlatune.evaluate.held_out import by_robot, read_held_out
from vlatune.evaluate.predictions import BLANKS, OnBatch, Predictions, predict_all
from vlatune.outgoing import printable, warn
from vlatune.policies.base import ModuleOptions, trained_tensors
from vlatune.report.formatting import format_number, plural
from vlatune.report.html import EvalSample, save_eval_samples, write_report
from vlatune.report.run_folder import read_config, write_evaluation
from vlatune.report.run_places import places_of, require_trusted
from vlatune.report.verdict import eval_meaning
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
    require_trusted(run_dir, places_of(config), trust_run=options.trust_run)
    store = open_store(run_dir, config.storage_path)
    steps = _wanted_steps(store, options.checkpoint)
    setup = make_setup(config)
    if len(setup.held_out) == 0:
        raise ValueError(f"run '{run_dir}' holds no episodes out; train with --dataset.eval_split above 0 to evaluate")
    one_draw = replace(ModuleOptions.of(config.policy), flow_samples=1)
    module = setup.adapter.load_module(setup.policy, setup.binding, one_draw, device, stats=setup.stats).eval()
    rows = read_held_out(setup, options.max_samples)
    trainable = trained_tensors(module)
    groups = by_robot(setup, rows)
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


def _figures(setup: Setup, options: EvalConfig, found: Sequence[Evaluated], dataset: int | None) -> dict[str, Any]:
    """Those of the first variant, in full, and of each in short."""
    full = found[0].by_blank["none"]
    metas, names = setup.metas, setup.binding.action_names
    held_out = setup.held_out
    if dataset is not None:
        metas, names = metas[dataset : dataset + 1], setup.binding.parts[dataset].action_names
        held_out = pick(held_out, held_out.dataset == dataset)
    is_relative = setup.policy.relative_exclude is not None  # the dataset's own statistics may be relative, too
    mean_A = feature_stats(metas, ACTION, ["mean"], computed=is_relative)["mean"].astype(np.float32)
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


MAX_DIMS = 16
MAX_NAME = 40


def eval_text(figures: Mapping[str, Any], run: str) -> str:
    """All of it, with one line on what the figures mean."""
    parts = [[_basis(figures, run)], list(error_lines(figures))]
    if figures.get("datasets"):
        parts.append(list(_dataset_lines(figures["datasets"])))
    if len(figures["variants"]) > 1:
        parts.append(list(_variant_lines(figures["variants"])))
    parts.append(list(_dim_lines(figures["per_dim_error"])))
    parts.append([eval_meaning(dict(figures))])
    return "\n\n".join("\n".join(lines) for lines in parts)


def error_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """The model's error beside those that it must beat, and those without a part of its input."""
    error = figures["action_error"]
    lines = {
        "the fine-tuned model": error,
        "predicting the mean action": figures["mean_action_error"],
        "the model with its pictures blanked": figures.get("blank_images_error"),
        "the model with its sentence blanked": figures.get("blank_sentence_error"),
    }
    yield "open-loop action error on held-out episodes (mean absolute, lower is better):"
    for what, value in (
        (what, value) for what, value in lines.items() if value is not None
    ):  # not every policy has both
        times = f"   {value / error:5.2f} x" if error > 0 else ""
        yield f"  {what:<38} {value:.4f}{times}"


def _basis(figures: Mapping[str, Any], run: str) -> str:
    of = f"{plural(figures['num_samples'], 'sample')} of {plural(len(figures['episodes']), 'held-out episode')}"
    return (
        f"{run}: checkpoint {figures['checkpoint']}, {figures['weights']} weights, on {figures['device']}; {of}; "
        f"validation loss {format_number(figures['val_loss'])} (seed {figures['seed']})"
    )


def _dataset_lines(datasets: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "by dataset, each in its own units (above, means over all samples):"
    for one in datasets:
        yield (
            f"  {one['dataset']}: {printable(one['root'])[-MAX_NAME:]:<{MAX_NAME}} error {one['action_error']:.4f}, predicting the mean "
            f"{one['mean_action_error']:.4f}, validation loss {format_number(one['val_loss'])} ({plural(one['num_samples'], 'sample')})"
        )


def _variant_lines(variants: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    keys = {
        "checkpoint": "checkpoint",
        "weights": "weights",
        "val_loss": "validation loss",
        "action_error": "error",
        "blank_images_error": "pictures blanked",
        "blank_sentence_error": "sentence blanked",
    }
    keys = {key: title for key, title in keys.items() if key in variants[0]}
    rows = [list(keys.values()), *([_cell(variant[key]) for key in keys] for variant in variants)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    yield "variants:"
    for row in rows:
        yield "  " + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _dim_lines(per_dim_error: Mapping[str, float]) -> Iterator[str]:
    yield "error by action dimension:"
    for name, value in list(per_dim_error.items())[:MAX_DIMS]:
        yield f"  {printable(name)[:MAX_NAME]:<38} {value:.4f}"
    if len(per_dim_error) > MAX_DIMS:
        yield f"  and {len(per_dim_error) - MAX_DIMS} more, in eval.json"


def _cell(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.4f}"
