"""Every policy beside PI0.5 through `vlatune train` and Ray: killed at work and gone on with, it is a run to which nothing
happened, to the bit; one worker and two take the same samples. Each has its own ways to lose something: ACT draws dropout,
Diffusion Policy crops, looks back and learns running statistics, PI0 and SmolVLA take several draws.

`-m slow` makes these runs; `make test` has Diffusion Policy's in test_driver.py, whose other runs are PI0.5's.
"""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from driving import OWN, PATIENCE_S, POLICY_SAVE_FREQ, flags_of, started, step_of, until
from test_driver import assert_same, finish, kill_worker, saved_in
from without_ray import run_without_ray, threads_of

from vlatune.policies.registry import PACKAGES
from vlatune.report.run_folder import read_config
from vlatune.report.sinks import read_jsonl

pytestmark = [pytest.mark.usefixtures("temporary"), pytest.mark.timeout(1200)]


def test_none_is_forgotten():
    assert {*OWN} == {*PACKAGES} - {"pi05"}


def kill_worker_and_driver(run_dir: Path, flags: list[str]) -> int:
    """After a checkpoint and some steps more one that trains is killed, and the run goes on by itself; then the driver is. The
    step that was reached.
    """
    with started(run_dir, *flags) as process:
        until(lambda: saved_in(run_dir) and step_of(run_dir) >= POLICY_SAVE_FREQ + 3, process, run_dir)
        kill_worker(process, run_dir)
        process.kill()
        assert process.wait(timeout=PATIENCE_S) == -signal.SIGKILL
    return step_of(run_dir)


def undisturbed(run_dir: Path, folder: Path, steps: int) -> Path:
    """The same run to which nothing happens, without Ray: fed with the rows that the order names."""
    run_without_ray(replace(read_config(run_dir), output_dir=str(folder), steps=steps), threads_of(run_dir))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_worker_and_driver_killed_then_the_same_command(dataset_v3, tmp_path, name):
    """And two workers take the samples that one does."""
    run_dir, flags = tmp_path / "one" / "run", flags_of(name, dataset_v3)
    run_dir.parent.mkdir()
    steps = kill_worker_and_driver(run_dir, flags) + 6
    finish(run_dir, [*flags, f"--steps={steps}"])
    assert saved_in(run_dir)[-1] == step_of(run_dir) == steps
    assert_same(run_dir, undisturbed(run_dir, tmp_path / "clean", steps))
    both = tmp_path / "two" / "run"
    both.parent.mkdir()
    finish(both, [*flags, "--num_workers=2", "--batch_size=2", f"--steps={steps}"])
    assert read_jsonl(both / "samples.jsonl") == read_jsonl(run_dir / "samples.jsonl")
