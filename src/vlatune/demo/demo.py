"""`vlatune demo`: a dataset, a tiny model, a run, an evaluation and a report, on any machine.

Uses the same functions as `vlatune train` and `vlatune eval`. An existing dataset is kept.
"""

import shutil
import time
from dataclasses import replace
from pathlib import Path

from vlatune.config.settings import DemoConfig, EvalConfig, RunConfig
from vlatune.console import progress_bar, say
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.demo.generate import SyntheticSpec, make_dataset
from vlatune.evaluate.eval_text import error_lines
from vlatune.registry import find_recipe, get_policy_info
from vlatune.run.run_folder import CONFIG_FILE, OWN_FOLDERS, REPORT_FILE, RUN_ENTRIES, is_left_over, read_settings

JOB_NAME = "demo"
EPISODES, FRAMES = 256, 20
ONE_TASK = {"one_task": True, "state_noise": 0.05, "cameras": 1, "height": 64, "width": 64}
"""Dataset for policies without a prompt: they train on unresized images, and the noise keeps them
from inferring the goal from the state."""


def run_demo(options: DemoConfig) -> None:
    """Create the dataset if needed, train, evaluate, and print the results."""
    policy, folder = get_policy_info(options.policy), options.run_dir
    _clear_old_run(folder)
    dataset = ensure_dataset(folder / "dataset", options.seed, has_prompt=policy.has_prompt)
    from vlatune.train.driver.launch import train

    begin = time.perf_counter()
    train(_demo_config(options, dataset))
    from vlatune.evaluate.evaluate_run import evaluate_run

    blanks = ["blank images", *(["a blank instruction"] if policy.has_prompt else [])]
    _say(f"evaluating on held-out episodes, also with {' and with '.join(blanks)}")
    with progress_bar("batches") as show:
        figures = evaluate_run(folder, EvalConfig(), on_batch=show)
    for line in error_lines(figures, each_camera=False):
        _say(line)
    _say(f"trained and evaluated in {time.perf_counter() - begin:.0f} s; open {folder / REPORT_FILE}")


def _demo_config(options: DemoConfig, dataset: Path) -> RunConfig:
    """Return the tiny recipe on the dataset; without a `policy.path`, `train` creates the base."""
    recipe = get_policy_info(options.policy).small_recipe
    config: RunConfig = find_recipe(recipe).config
    return replace(
        config,
        recipe=recipe,
        output_dir=str(options.run_dir),
        job_name=JOB_NAME,
        seed=options.seed,
        steps=options.steps or config.steps,
        dataset=replace(config.dataset, root=(str(dataset),)),
    )


def _clear_old_run(folder: Path) -> None:
    """Remove the previous demo run, except its dataset and base model; reject other folders."""
    settings = read_settings(folder)
    if settings is None:  # no run yet: `train` checks the other contents
        return
    entries, ours = list(folder.iterdir()), (*RUN_ENTRIES, *OWN_FOLDERS)
    foreign = sorted(name for entry in entries if (name := entry.name) not in ours and not is_left_over(name))
    if foreign or settings.get("job_name") != JOB_NAME:
        reason = f"it holds '{foreign[0]}'" if foreign else f"its {CONFIG_FILE} is of another run"
        raise ValueError(
            f"'{folder}' is not the folder of a demo ({reason}), and a demo empties it; choose another --output_dir"
        )
    for entry in entries:
        if entry.name not in OWN_FOLDERS:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def ensure_dataset(folder: Path, seed: int, *, has_prompt: bool = True) -> Path:
    """Create a dataset with several tasks, or with one task for policies without a prompt."""
    if not folder.exists():
        _say(f"making a dataset of {EPISODES} episodes in {folder}")
        spec = SyntheticSpec(episodes=EPISODES, frames=FRAMES, seed=seed)
        with progress_bar("episodes") as show:
            make_dataset(
                folder,
                spec if has_prompt else replace(spec, **ONE_TASK),
                on_episode=lambda index: show(index + 1, EPISODES),
            )
    elif (len(load_meta(str(folder)).tasks) > 1) != has_prompt:
        number = "one task" if has_prompt else "several tasks"
        raise ValueError(f"'{folder}' has {number}, but the policy needs other data; choose another --output_dir")
    return folder


def _say(text: str) -> None:
    say(f"vlatune: {text}")
