"""`vlatune eval`: validation loss, open-loop action error, and complete episodes.

Frames are read in this process with the reader and transforms of training. The error is compared
with always predicting the mean action, and with the model's error when all images, one camera or
the instruction are blanked, which shows whether the model uses them. A variant is a checkpoint with
trained or EMA weights; one command evaluates several. See subject.py for what can be
evaluated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlatune.batch import ACTION, TASK, Columns, num_rows
from vlatune.config.settings import EvalConfig
from vlatune.config.validate import validate_eval
from vlatune.data.meta.stats import feature_stats
from vlatune.data.order.partition import pick
from vlatune.evaluate.held_out import by_robot, read_held_out
from vlatune.evaluate.predictions import CAMERA, OnBatch, Predictions, blanks_of, predict_all, present_cameras
from vlatune.evaluate.rollouts import (
    Rollout,
    joint_rollouts,
    mean_over,
    newest,
    roll_out,
    rollout_figures,
    rollouts_to_show,
)
from vlatune.evaluate.subject import Subject, Variant, is_policy_folder, open_subject
from vlatune.policies.base import trained_tensors
from vlatune.report.html import write_eval_page, write_report
from vlatune.run.kept_samples import EVAL_SAMPLES_FILE, ROLLOUTS_FILE, EvalSample, save_samples
from vlatune.run.run_folder import EVAL_PAGE_FILE, EVALUATION_FILE, REPORT_FILE
from vlatune.run_setup import Inputs
from vlatune.storage.files import make_output_folder, reject_link, write_json

SHOWN_SAMPLES = 6


@dataclass(frozen=True)
class Evaluated:
    """Predictions of one variant."""

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
    """Rows of one robot, or all rows if there is one robot."""

    dataset: int | None
    rows: Columns
    found: list[Evaluated]
    """Results by variant; the first is reported in full."""


def evaluate_run(path: Path, options: EvalConfig, *, on_batch: OnBatch = lambda done, total: None) -> dict[str, Any]:
    """Evaluate checkpoints or a LeRobot folder, and write eval.json, samples and the page."""
    validate_eval(options)
    output_folder(path, options, is_own=options.dataset.root is None and not is_policy_folder(path))
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
    """Return the folder for figures and page: the run folder only for a run's own evaluation."""
    if options.output_dir is None and is_own:
        return path
    real = path.resolve()  # resolves `.`
    folder = Path(options.output_dir) if options.output_dir else real.with_name(f"{real.name}-eval")
    reject_link(folder)
    return folder


def page_of(path: Path, options: EvalConfig, figures: Mapping[str, Any]) -> Path:
    """Return the path of the page for these figures."""
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
    make_output_folder(folder)
    write_json(folder / EVALUATION_FILE, result)
    save_samples(folder, EVAL_SAMPLES_FILE, samples)
    save_samples(folder, ROLLOUTS_FILE, shown)
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
    joint |= {} if subject.action_fps is None else {"action_fps": subject.action_fps}
    return joint if subject.is_held_out else joint | {"root": subject.setup.metas[0].root.url}


def _figures(setup: Inputs, options: EvalConfig, group: Group, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return the first variant's figures in full, and a summary of each variant."""
    full, dataset = group.found[0].by_blank["none"], group.dataset
    metas, names = setup.metas, setup.binding.action_names
    held_out = setup.held_out
    if dataset is not None:
        metas, names = metas[dataset : dataset + 1], setup.binding.parts[dataset].action_names
        held_out = pick(held_out, held_out.dataset == dataset)
    is_relative = setup.policy.relative_exclude is not None  # the dataset's statistics may be of relative actions
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


def _joint_figures(setup: Inputs, each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Average the figures of several robots, with those of each robot under `datasets`."""
    counts = [one["num_samples"] for one in each]
    variants = [_mean_figures(one, counts) for one in zip(*(one["variants"] for one in each), strict=True)]
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
            "per_horizon_error": [_weighted(errors, counts) for errors in horizons],
            "action_names": list(setup.binding.action_names),
            "variants": variants,
            "datasets": [{key: value for key, value in one.items() if key != "variants"} for one in each],
        }
        | ({"rollouts": joint_rollouts(rolled)} if rolled else {})
    )


def _mean_figures(each: Sequence[dict[str, Any]], counts: Sequence[int]) -> dict[str, Any]:
    """Average losses and errors weighted by samples; other figures are those of the first."""
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
    """Return the weighted mean of the known values."""
    known = [(value, count) for value, count in zip(values, counts, strict=True) if value is not None]
    if not known:
        return None
    return float(np.average([value for value, _ in known], weights=[count for _, count in known]))


def _samples_to_show(setup: Inputs, group: Group, count: int) -> list[EvalSample]:
    rows, predictions = group.rows, group.found[0].by_blank["none"]
    chosen = np.unique(np.linspace(0, num_rows(rows) - 1, count).round().astype(int))
    return [
        EvalSample(
            episode_index=int(rows["episode_index"][row]),
            frame_index=int(rows["frame_index"][row]),
            task=str(rows[TASK][row]),
            images={name: newest(rows[name][row]) for name in present_cameras(setup, group.dataset)},
            true_TA=predictions.true_NTA[row],
            predicted_TA=predictions.predicted_NTA[row],
            valid_T=predictions.valid_NT[row],
        )
        for row in chosen
    ]


def choose_device(name: str | None) -> torch.device:
    """Return the device named by a flag; by default CUDA if available, else the CPU."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device={name}: not a torch device; give cpu, cuda or cuda:1") from None
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if here else 0
    if device.type != "cpu" and (here is None or here.type != device.type or (device.index or 0) >= count):
        found = f"{count} of type {here.type}" if here else "only the CPU"
        raise ValueError(f"--device={name}: this machine has no such device ({found}); leave the flag out, or give cpu")
    return device
