"""Every policy beside PI0.5 through `vlatune train` and Ray: killed at work and gone on with, it is a run to which nothing
happened, to the bit; one worker and two take the same samples. Each has its own ways to lose something: ACT draws dropout,
Diffusion Policy crops, looks back and learns running statistics, PI0 and SmolVLA take several draws.

PI0.5's runs are in test_driver.py. The small twins are made by the runs themselves, by their recipes.
"""

import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from driving import PATIENCE_S, named, output, started, step_of, until
from test_driver import assert_same, finish, saved_in
from without_ray import run_without_ray

from vlatune.policies.registry import PACKAGES, get_policy
from vlatune.report.run_folder import read_config
from vlatune.report.sinks import read_jsonl

pytestmark = [pytest.mark.early, pytest.mark.usefixtures("temporary"), pytest.mark.timeout(1200)]

ENDLESS = 100_000
SAVE_FREQ = 10
OWN = {
    "pi0": ["--policy.flow_samples=2"],
    "smolvla": ["--policy.train=expert", "--policy.flow_samples=2"],
    "act": ["--policy.dropout=0.3", "--policy.optimizer_lr_backbone=0.0001", "--optimizer.ema_decay=0.9"],
    "diffusion": ["--policy.use_group_norm=false", "--policy.crop_ratio=0.8", "--optimizer.ema_decay=0.9"],
}
"""What makes each lose something if it can."""
ALWAYS = "diffusion"
"""The one that has most to lose: history, crop, running statistics, averages."""


def test_none_is_forgotten():
    assert {*OWN} == {*PACKAGES} - {"pi05"}


def flags_of(name: str, dataset: Path, *more: str) -> list[str]:
    return [
        f"--recipe={get_policy(name).small_recipe}",
        f"--dataset.root={dataset}",
        "--dataset.run_length=4",
        "--dataset.window_rows=8",
        "--dataset.image_transforms.enable=true",
        "--batch_size=4",
        f"--steps={ENDLESS}",
        "--scheduler.type=constant_with_warmup",  # the rate does not depend on --steps
        "--scheduler.num_warmup_steps=4",
        "--log_freq=1",
        f"--save_freq={SAVE_FREQ}",
        "--keep_checkpoints=2",  # a ResNet's are large
        "--save_every_s=0",
        "--eval_freq=0",
        "--log_samples=true",
        "--ray.num_cpus=2",
        "--ray.object_store_bytes=100000000",
        *OWN[name],
        *more,
    ]


def kill_driver(run_dir: Path, flags: list[str], *, worker_first: bool) -> int:
    """After a checkpoint and some steps more; the step that was reached. `worker_first`: one that trains is killed before it,
    and the run goes on by itself.
    """
    with started(run_dir, *flags) as process:
        until(lambda: saved_in(run_dir) and step_of(run_dir) >= SAVE_FREQ + 3, process, run_dir)
        if worker_first:
            os.kill(named(process.pid, "ray::RayTrainWorker")[0], signal.SIGKILL)
            until(lambda: "broken off" in output(run_dir), process, run_dir)
            reached = step_of(run_dir)
            until(lambda: step_of(run_dir) >= reached + 3, process, run_dir)
        process.kill()
        assert process.wait(timeout=PATIENCE_S) == -signal.SIGKILL
    return step_of(run_dir)


def undisturbed(run_dir: Path, folder: Path, steps: int) -> Path:
    """The same run to which nothing happens, without Ray: fed with the rows that the order names."""
    threads = int(re.findall(r"\bthreads (\d+)", (run_dir / "logs" / "worker.log").read_text())[-1])
    run_without_ray(replace(read_config(run_dir), output_dir=str(folder), steps=steps), threads)
    return folder


def test_killed_it_goes_on_to_the_bit(dataset_v3, tmp_path):
    """What the killed run left is continued in this process, as the driver would: a second start of Ray shows nothing new."""
    run_dir = tmp_path / "run"
    steps = kill_driver(run_dir, flags_of(ALWAYS, dataset_v3), worker_first=False) + 6
    assert SAVE_FREQ <= saved_in(run_dir)[-1] < steps
    threads = int(re.findall(r"\bthreads (\d+)", (run_dir / "logs" / "worker.log").read_text())[-1])
    run_without_ray(replace(read_config(run_dir), output_dir=str(run_dir), steps=steps), threads)
    assert_same(run_dir, undisturbed(run_dir, tmp_path / "clean", steps))


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_worker_and_driver_killed_then_the_same_command(dataset_v3, tmp_path, name):
    """And two workers take the samples that one does."""
    run_dir, flags = tmp_path / "one" / "run", flags_of(name, dataset_v3)
    run_dir.parent.mkdir()
    steps = kill_driver(run_dir, flags, worker_first=True) + 6
    finish(run_dir, [*flags, f"--steps={steps}"])
    assert saved_in(run_dir)[-1] == step_of(run_dir) == steps
    assert_same(run_dir, undisturbed(run_dir, tmp_path / "clean", steps))
    both = tmp_path / "two" / "run"
    both.parent.mkdir()
    finish(both, [*flags, "--num_workers=2", "--batch_size=2", f"--steps={steps}"])
    assert read_jsonl(both / "samples.jsonl") == read_jsonl(run_dir / "samples.jsonl")
