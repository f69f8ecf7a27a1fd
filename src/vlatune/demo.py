"""The newcomer's command: a dataset, a small model, a run, an evaluation and a report, on any machine.

Goes through the same functions as a real run: the dataset lies on disk in LeRobot's format, the base model is a LeRobot
folder, `train` and `evaluate_run` are what `vlatune train` and `vlatune eval` call. What exists already is kept.
"""

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlatune.config import DemoConfig, EvalConfig, RunConfig
from vlatune.console import progress_bar, say
from vlatune.dataset.meta.dataset_meta import load_meta
from vlatune.dataset.synthetic.generate import SyntheticSpec, make_dataset
from vlatune.evaluate.eval_text import error_lines
from vlatune.flags import config_from_dict
from vlatune.policies.base import Fit
from vlatune.policies.registry import DEFAULT_TYPE, Policy, get_policy
from vlatune.recipes import get_recipe
from vlatune.report.run_folder import BESIDE, CONFIG_FILE, REPORT_FILE, RUN_ENTRIES, is_left_over, read_settings

JOB_NAME = "demo"
EPISODES, FRAMES, HORIZON, IMAGE_SIZE = 256, 20, 8, 48
RECORDED_SIDE = 64
"""Pixels on a side of the world with one task, and it has one camera: policies without a prompt look at pictures as they were
recorded, and the smallest of their backbones is a whole ResNet."""
STATE_NOISE = 0.05
"""Of that world: what is left of the way, guessed from two readings in a row, is off by more than the way itself."""


def run_demo(options: DemoConfig) -> None:
    """Make what is missing, train, evaluate, and print where the report is and what the model learnt."""
    policy, folder = get_policy(options.policy), options.run_dir
    begin = time.perf_counter()
    _clear_old_run(folder)
    dataset = ensure_dataset(folder / "dataset", options.seed, sentences=policy.has_prompt)
    base = ensure_base(folder / "base", dataset, options.seed, policy)
    _say(f"data and base model ready after {time.perf_counter() - begin:.0f} s; now training on the CPU")
    from vlatune.train.driver.launch import train

    begin = time.perf_counter()
    train(_demo_config(options, dataset, base))
    from vlatune.evaluate.evaluate_run import evaluate_run

    blanks = ["with pictures blanked", *(["with the sentence blanked"] if policy.has_prompt else [])]
    _say(f"evaluating on held-out episodes: as it is, {', '.join(blanks)}")
    with progress_bar("batches") as show:
        figures = evaluate_run(folder, EvalConfig(), on_batch=show)
    for line in error_lines(figures, each_camera=False):
        _say(line)
    _say(f"trained and evaluated in {time.perf_counter() - begin:.0f} s")
    _say(f"open {folder / REPORT_FILE}")


def _demo_config(options: DemoConfig, dataset: Path, base: Path) -> RunConfig:
    recipe = get_policy(options.policy).small_recipe
    values: dict[str, Any] = get_recipe(recipe)
    values |= {"recipe": recipe, "output_dir": str(options.run_dir), "job_name": JOB_NAME, "seed": options.seed}
    if options.steps is not None:
        values["steps"] = options.steps
    values["dataset"] = {**values.get("dataset", {}), "root": [str(dataset)]}
    values["policy"] = {**values["policy"], "path": str(base)}
    return config_from_dict(RunConfig, values, "the demo")


def _clear_old_run(folder: Path) -> None:
    """A demo is run again from the start; its dataset and base model stay. Nothing goes that a demo did not make."""
    settings = read_settings(folder)
    if settings is None:  # no run yet: `train` looks at what else is there
        return
    entries, ours = list(folder.iterdir()), (*RUN_ENTRIES, *BESIDE)
    strange = sorted(name for entry in entries if (name := entry.name) not in ours and not is_left_over(name))
    if strange or settings.get("job_name") != JOB_NAME:
        found = f"it holds '{strange[0]}'" if strange else f"its {CONFIG_FILE} is of another run"
        raise ValueError(
            f"'{folder}' is not the folder of a demo ({found}), and a demo empties it; choose another --output_dir"
        )
    for entry in entries:
        if entry.name not in BESIDE:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def ensure_dataset(folder: Path, seed: int, *, sentences: bool = True) -> Path:
    """A world whose sentence decides what to do, or one with a single task, which the pictures tell."""
    if not folder.exists():
        _say(f"making a dataset of {EPISODES} episodes in {folder}")
        spec = SyntheticSpec(episodes=EPISODES, frames=FRAMES, seed=seed)
        if not sentences:
            side = RECORDED_SIDE
            spec = replace(spec, one_task=True, state_noise=STATE_NOISE, cameras=1, height=side, width=side)
        with progress_bar("episodes") as show:
            make_dataset(folder, spec, on_episode=lambda index: show(index + 1, EPISODES))
    elif (len(load_meta(str(folder)).tasks) > 1) != sentences:
        kind = "one task" if sentences else "several tasks"
        raise ValueError(
            f"'{folder}' was made for the demo of another kind of policy: it has {kind}; choose another --output_dir"
        )
    return folder


def ensure_base(folder: Path, dataset: Path, seed: int, policy: Policy | None = None) -> Path:
    """The small twin of the policy, with random weights; the name stays free until it is whole."""
    if folder.exists():
        return folder
    policy = policy or get_policy(DEFAULT_TYPE)
    _say(f"making a small {policy.title} in {folder}")
    meta = load_meta(str(dataset))
    fit = Fit(
        cameras=tuple(meta.cameras),
        state_dim=meta.features["observation.state"].shape[0],
        action_dim=meta.features["action"].shape[0],
        horizon=HORIZON,
        image_size=IMAGE_SIZE,
        tasks=tuple(meta.tasks),
        seed=seed,
        recorded_hw=tuple(meta.features[camera].height_width for camera in meta.cameras),
        fps=meta.fps,
    )
    policy.adapter().make_base(folder, fit, small=True, place=folder)
    return folder


def _say(text: str) -> None:
    say(f"vlatune: {text}")
