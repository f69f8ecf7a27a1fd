"""`vlatune eval`: validation loss, open-loop action error, and complete episodes.

Frames are read in this process with the reader and transforms of training. The error is compared
with always predicting the mean action, and with the model's error when all images, one camera or
the instruction are blanked, which shows whether the model uses them. See subject.py for what can be
evaluated.
"""

from collections.abc import Collection, Mapping, Sequence
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
from vlatune.evaluate.subject import Subject, is_policy_folder, open_subject
from vlatune.policies.base import trained_tensors
from vlatune.policies.modeling import use_fast_kernels
from vlatune.report.html import write_eval_page, write_report
from vlatune.run.kept_samples import EVAL_SAMPLES_FILE, ROLLOUTS_FILE, EvalSample, save_samples
from vlatune.run.run_folder import EVAL_PAGE_FILE, EVALUATION_FILE, REPORT_FILE
from vlatune.run_setup import Inputs
from vlatune.storage.files import make_output_folder, reject_link, write_json

SHOWN_SAMPLES = 6


@dataclass(frozen=True)
class Group:
    """Predictions for the rows of one robot, or for all rows if there is one robot."""

    dataset: int | None
    rows: Columns
    by_blank: Mapping[str, Predictions]


def evaluate_run(
    path: Path,
    options: EvalConfig,
    *,
    on_batch: OnBatch = lambda done, total: None,
    allowed: Collection[str] = (),
) -> dict[str, Any]:
    """Evaluate a checkpoint or a LeRobot folder, and write eval.json, samples and the page.

    `allowed` are paths of the run's settings that the command line has named.
    """
    validate_eval(options)
    output_folder(path, options, is_own=options.dataset.root is None and not is_policy_folder(path))
    device = choose_device(options.device)
    subject = open_subject(path, options, allowed)
    setup = subject.setup
    module = setup.adapter.load_module(setup.policy, setup.binding, subject.options, device, stats=setup.stats).eval()
    checkpoint, weights = subject.load(trained_tensors(module))
    groups = []
    for dataset, rows in by_robot(setup, read_held_out(setup, options.max_samples)):
        blanks = blanks_of(setup, dataset)
        by_blank = predict_all(setup, module, rows, options, blanks=blanks, on_batch=on_batch, dataset=dataset)
        groups.append(Group(dataset, rows, by_blank))
    rollouts = roll_out(setup, module, options, on_batch=on_batch)
    basis = {"checkpoint": checkpoint, "weights": weights, "seed": options.seed, "device": str(device)}
    result = basis | _all_figures(subject, groups, rollouts)
    _write(path, options, subject, result, groups, rollouts)
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


def _all_figures(subject: Subject, groups: Sequence[Group], rollouts: Sequence[Rollout]) -> dict[str, Any]:
    each = [
        _figures(subject.setup, group, [one for one in rollouts if one.dataset == group.dataset]) for group in groups
    ]
    joint = _joint_figures(subject.setup, each) if subject.setup.binding.parts else each[0]
    joint |= {} if subject.action_fps is None else {"action_fps": subject.action_fps}
    return joint if subject.is_held_out else joint | {"root": subject.setup.metas[0].root.url}


def _figures(setup: Inputs, group: Group, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    full, dataset = group.by_blank["none"], group.dataset
    metas, names = setup.metas, setup.binding.action_names
    held_out = setup.held_out
    if dataset is not None:
        metas, names = metas[dataset : dataset + 1], setup.binding.parts[dataset].action_names
        held_out = pick(held_out, held_out.dataset == dataset)
    is_relative = setup.policy.relative_exclude is not None  # the dataset's statistics may be of relative actions
    mean_A = feature_stats(metas, ACTION, ["mean"], computed=is_relative)["mean"].astype(np.float32)
    mean_guess = replace(full, predicted_NTA=np.broadcast_to(mean_A, full.true_NTA.shape))
    error_NTA = np.where(full.valid_NT[..., None], np.abs(full.predicted_NTA - full.true_NTA), np.nan)
    errors = {what: one.error() for what, one in group.by_blank.items() if what != "none"}
    cameras = {what.removeprefix(CAMERA): error for what, error in errors.items() if what.startswith(CAMERA)}
    return (
        {
            "val_loss": full.loss,
            "action_error": full.error(),
            **{f"blank_{what}_error": error for what, error in errors.items() if not what.startswith(CAMERA)},
            "episodes": [
                int(setup.metas[int(d)].episodes.index[p])
                for d, p in zip(held_out.dataset, held_out.position, strict=True)
            ],
            "num_samples": len(full.true_NTA),
            "mean_action_error": mean_guess.error(),
            "per_dim_error": dict(zip(names, np.nanmean(error_NTA, axis=(0, 1)).tolist(), strict=True)),
            "per_horizon_error": mean_over(error_NTA, (0, 2)),
            "action_names": list(names),
        }
        | ({"blank_camera_errors": cameras} if cameras else {})
        | ({"rollouts": rollout_figures(rollouts, names)} if rollouts else {})
        | ({} if dataset is None else {"dataset": dataset, "root": setup.metas[dataset].root.url})
    )


def _joint_figures(setup: Inputs, each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Average losses and errors of several robots by samples; `datasets` has each dataset's."""
    counts = [one["num_samples"] for one in each]
    averaged = [key for key, value in each[0].items() if isinstance(value, float)]
    rolled = [one["rollouts"] for one in each if "rollouts" in one]
    return {
        **{key: float(np.average([one[key] for one in each], weights=counts)) for key in averaged},
        "episodes": [episode for one in each for episode in one["episodes"]],
        "num_samples": sum(counts),
        "per_dim_error": {
            f"dataset {one['dataset']}: {name}": error for one in each for name, error in one["per_dim_error"].items()
        },
        "action_names": list(setup.binding.action_names),
        "datasets": list(each),
    } | ({"rollouts": joint_rollouts(rolled)} if rolled else {})


def _samples_to_show(setup: Inputs, group: Group, count: int) -> list[EvalSample]:
    rows, predictions = group.rows, group.by_blank["none"]
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
    """Return the device named by a flag, by default CUDA if available; sets its flags as training does."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError):
        raise ValueError(f"--device={name}: torch cannot use it here; give cpu, cuda or cuda:1") from None
    use_fast_kernels(device)
    return device
