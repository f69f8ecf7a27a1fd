"""`vlatune eval`: how well a policy does on episodes it never saw: validation loss, open-loop action error, whole episodes.

Deterministic: samples, noise and times are functions of the settings. Reads frames in this process, through the same reader and
transforms as training. Its error stands beside that of always predicting the mean action, and its own with all pictures, one
camera or the sentence blanked: those say whether the model looks and listens. A variant is a checkpoint with one kind of
weights, trained or averaged; one command evaluates as many as are asked for. What is evaluated on what is `subject.py`'s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlatune.batch import ACTION, TASK, Columns, num_rows
from vlatune.config import EvalConfig
from vlatune.config_checks import validate_eval
from vlatune.dataset.meta.stats import feature_stats
from vlatune.dataset.order.partition import pick
from vlatune.evaluate.held_out import by_robot, read_held_out
from vlatune.evaluate.predictions import CAMERA, OnBatch, Predictions, blanks_of, predict_all
from vlatune.evaluate.rollouts import (
    Rollout,
    joint_rollouts,
    mean_over,
    newest,
    roll_out,
    rollout_figures,
    rollouts_to_show,
)
from vlatune.evaluate.subject import Subject, Variant, open_subject
from vlatune.policies.base import trained_tensors
from vlatune.report.html import EvalSample, write_eval_page, write_report
from vlatune.report.kept_samples import save_eval_samples, save_rollouts
from vlatune.report.run_folder import EVAL_PAGE_FILE, REPORT_FILE, write_evaluation
from vlatune.run_setup import Setup

SHOWN_SAMPLES = 6


@dataclass(frozen=True)
class Evaluated:
    """A variant and what it predicts."""

    variant: Variant
    by_blank: Mapping[str, Predictions]

    def to_json(self) -> dict[str, Any]:
        full = self.by_blank["none"]
        errors = {what: one.error() for what, one in self.by_blank.items() if what != "none"}
        cameras = {what.removeprefix(CAMERA): error for what, error in errors.items() if what.startswith(CAMERA)}
        return {
            "checkpoint": self.variant.checkpoint,
            "weights": self.variant.weights,
            "val_loss": full.loss,
            "action_error": full.error(),
            **{f"blank_{what}_error": error for what, error in errors.items() if not what.startswith(CAMERA)},
            **({"blank_camera_errors": cameras} if cameras else {}),
        }


@dataclass(frozen=True)
class Group:
    """The rows of one robot, or all where there is one."""

    dataset: int | None
    rows: Columns
    found: list[Evaluated]
    """Variant by variant, the first one's figures in full."""


def evaluate_run(path: Path, options: EvalConfig, *, on_batch: OnBatch = lambda done, total: None) -> dict[str, Any]:
    """Evaluate a run's checkpoints or a LeRobot folder, and write eval.json, its samples and the page."""
    validate_eval(options)
    device = choose_device(options.device)
    subject = open_subject(path, options)
    setup = subject.setup
    module = setup.adapter.load_module(setup.policy, setup.binding, subject.options, device, stats=setup.stats).eval()
    groups = [Group(dataset, rows, []) for dataset, rows in by_robot(setup, read_held_out(setup, options.max_samples))]
    rollouts: list[Rollout] | None = None
    for variant in subject.variants(trained_tensors(module)):
        for group in groups:
            blanks = blanks_of(setup, group.dataset)
            by_blank = predict_all(
                setup, module, group.rows, options, blanks=blanks, on_batch=on_batch, dataset=group.dataset
            )
            group.found.append(Evaluated(variant, by_blank))
        rollouts = roll_out(setup, module, options, on_batch=on_batch) if rollouts is None else rollouts
    result = _all_figures(subject, options, groups, rollouts or []) | {"device": str(device)}
    _write(path, options, subject, result, groups, rollouts or [])
    return result


def output_folder(path: Path, options: EvalConfig, *, is_own: bool) -> Path:
    """Where figures and page go: what is not a run's own evaluation must not stand in its report."""
    if options.output_dir is not None:
        return Path(options.output_dir)
    real = path.resolve()  # of `.`, too
    return path if is_own else real.with_name(f"{real.name}-eval")


def page_of(path: Path, options: EvalConfig, figures: Mapping[str, Any]) -> Path:
    """Where the page of these figures is."""
    folder = output_folder(path, options, is_own="root" not in figures)
    return folder / (REPORT_FILE if folder == path else EVAL_PAGE_FILE)


def _write(
    path: Path,
    options: EvalConfig,
    subject: Subject,
    result: dict[str, Any],
    groups: Sequence[Group],
    rollouts: Sequence[Rollout],
) -> None:
    count = -(-SHOWN_SAMPLES // len(groups))
    samples = [sample for group in groups for sample in _samples_to_show(subject.setup, group, count)]
    shown = rollouts_to_show(subject.setup, rollouts)
    folder = output_folder(path, options, is_own=subject.is_held_out)
    folder.mkdir(parents=True, exist_ok=True)
    write_evaluation(folder, result)
    save_eval_samples(folder, samples)
    save_rollouts(folder, shown)
    if folder == path:
        write_report(folder)
    else:
        write_eval_page(folder, path.resolve().name)


def _all_figures(
    subject: Subject, options: EvalConfig, groups: Sequence[Group], rollouts: Sequence[Rollout]
) -> dict[str, Any]:
    each = [
        _figures(subject.setup, options, group, [one for one in rollouts if one.dataset == group.dataset])
        for group in groups
    ]
    joint = _joint_figures(subject.setup, each) if subject.setup.binding.parts else each[0]
    return joint if subject.is_held_out else joint | {"root": subject.setup.metas[0].root.url}


def _figures(setup: Setup, options: EvalConfig, group: Group, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Those of the first variant, in full, and of each in short."""
    full, dataset = group.found[0].by_blank["none"], group.dataset
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
        group.found[0].to_json()
        | {
            "episodes": [
                int(setup.metas[int(d)].episodes.index[p])
                for d, p in zip(held_out.dataset, held_out.position, strict=True)
            ],
            "num_samples": len(full.true_NTA),
            "seed": options.seed,
            "mean_action_error": mean_guess.error(),
            "per_dim_error": dict(zip(names, np.nanmean(error_NTA, axis=(0, 1)).tolist(), strict=True)),
            "per_horizon_error": mean_over(error_NTA, (0, 2)),
            "action_names": list(names),
            "variants": [one.to_json() for one in group.found],
        }
        | ({"rollouts": rollout_figures(rollouts, names)} if rollouts else {})
        | ({} if dataset is None else {"dataset": dataset, "root": setup.metas[dataset].root.url})
    )


def _joint_figures(setup: Setup, each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of several robots: means over the samples of all, and each robot's own figures under `datasets`."""
    counts = [one["num_samples"] for one in each]
    variants = [_mean_figures(of_one, counts) for of_one in zip(*(one["variants"] for one in each), strict=True)]
    horizons = zip(*(one["per_horizon_error"] for one in each), strict=True)
    rolled = [one["rollouts"] for one in each if "rollouts" in one]
    return (
        _mean_figures(each, counts)
        | {
            "episodes": [episode for one in each for episode in one["episodes"]],
            "num_samples": sum(counts),
            "per_dim_error": {
                f"dataset {one['dataset']}: {name}": error
                for one in each
                for name, error in one["per_dim_error"].items()
            },
            "per_horizon_error": [_weighted(of_all, counts) for of_all in horizons],
            "action_names": list(setup.binding.action_names),
            "variants": variants,
            "datasets": [{key: value for key, value in one.items() if key != "variants"} for one in each],
        }
        | ({"rollouts": joint_rollouts(rolled)} if rolled else {})
    )


def _mean_figures(each: Sequence[dict[str, Any]], counts: Sequence[int]) -> dict[str, Any]:
    """The first one's, with losses and errors averaged by the number of samples; a camera's over those that blanked it."""
    keys = [key for key in each[0] if key == "val_loss" or key.endswith("_error")]
    numbers = [key for key in keys if isinstance(each[0][key], float)]
    own = ("dataset", "root", "rollouts", "blank_camera_errors")
    plain = {key: value for key, value in each[0].items() if key not in own}
    cameras = dict.fromkeys(name for one in each for name in one.get("blank_camera_errors", {}))
    by_camera = {
        name: _weighted([one.get("blank_camera_errors", {}).get(name) for one in each], counts) for name in cameras
    }
    return (
        plain
        | {key: _weighted([one[key] for one in each], counts) for key in numbers}
        | ({"blank_camera_errors": by_camera} if by_camera else {})
    )


def _weighted(values: Sequence[float | None], counts: Sequence[int]) -> float | None:
    """The mean of those that are known."""
    known = [(value, count) for value, count in zip(values, counts, strict=True) if value is not None]
    if not known:
        return None
    return float(np.average([value for value, _ in known], weights=[count for _, count in known]))


def _samples_to_show(setup: Setup, group: Group, count: int) -> list[EvalSample]:
    rows, predictions = group.rows, group.found[0].by_blank["none"]
    chosen = np.unique(np.linspace(0, num_rows(rows) - 1, count).round().astype(int))
    absent = {camera.column for camera in setup.specs[group.dataset or 0].absent}
    return [
        EvalSample(
            episode_index=int(rows["episode_index"][row]),
            frame_index=int(rows["frame_index"][row]),
            task=str(rows[TASK][row]),
            images={name: newest(rows[name][row]) for name, _ in setup.binding.cameras if name not in absent},
            true_TA=predictions.true_NTA[row],
            predicted_TA=predictions.predicted_NTA[row],
            valid_T=predictions.valid_NT[row],
        )
        for row in chosen
    ]


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
