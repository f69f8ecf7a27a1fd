"""The driver's own life, as a person's shell sees it: SIGTERM, SIGKILL, a raylet or a reader that dies, the same command again.

A run that is to be killed is given more steps than it could ever make, so that the signal finds it at work on any
machine; it is then taken to an end that is near, and the undisturbed run is made as long.
"""

import os
import random
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from driving import (
    ENDLESS,
    MOST_TO_LOSE,
    PATIENCE_S,
    POLICY_SAVE_FREQ,
    end_of,
    flags_of,
    left_behind,
    named,
    output,
    started,
    step_of,
    until,
)
from safetensors.numpy import load_file
from without_ray import run_without_ray, threads_of

from vlatune.checkpoint.store import list_checkpoints
from vlatune.config import RunConfig
from vlatune.flags import parse_flags
from vlatune.pipeline.feed import MAX_QUEUED
from vlatune.report.run_folder import read_config
from vlatune.report.sinks import read_jsonl
from vlatune.report.summary import read_summary
from vlatune.run_setup import load_metas
from vlatune.train.driver.tiny_base import with_base

pytestmark = [pytest.mark.early, pytest.mark.usefixtures("temporary")]

SAVE_FREQ, DECAY = 50, 80
COORDINATOR = "ray::Coordinator"
OPEN = "RAY_AUTH_MODE switches Ray's token authentication off"


@pytest.fixture(scope="module")
def flags(dataset_v3, small_base) -> list[str]:
    return [
        f"--dataset.root={dataset_v3}",
        "--dataset.run_length=4",
        "--dataset.window_rows=8",
        f"--policy.path={small_base}",
        "--policy.train=heads",
        "--batch_size=4",
        f"--steps={ENDLESS}",
        "--scheduler.num_warmup_steps=10",
        f"--scheduler.num_decay_steps={DECAY}",  # over before any run is, so the rate does not depend on --steps
        "--log_freq=1",
        f"--save_freq={SAVE_FREQ}",
        f"--keep_checkpoints={ENDLESS}",
        "--save_every_s=0",
        "--log_samples=true",
        "--ray.num_cpus=2",
        "--ray.object_store_bytes=100000000",
    ]


def finish(run_dir: Path, flags: list[str], patience_s: float = PATIENCE_S) -> None:
    with started(run_dir, *flags) as process:
        assert end_of(process, run_dir, patience_s) == 0, output(run_dir)


def finish_soon(run_dir: Path, flags: list[str]) -> int:
    """A few steps behind the last that was made; how many there are then."""
    steps = max(step_of(run_dir), DECAY) + 20
    finish(run_dir, [*flags, f"--steps={steps}"])
    return steps


def kill_at(step: int, part: str | None, run_dir: Path, flags: list[str], how: int = signal.SIGKILL) -> int:
    """Start, wait for the step, send the signal to the driver or to its process of this name; its exit code."""
    with started(run_dir, *flags) as process:
        until(lambda: step_of(run_dir) >= step, process, run_dir)
        os.kill(named(process.pid, part)[0] if part else process.pid, how)
        return process.wait(timeout=PATIENCE_S)


def kill_coordinator(process: subprocess.Popen[str], run_dir: Path, which: int = 0) -> None:
    """One that is there; another takes its place, and the batches that lay ready are used up."""
    until(lambda: named(process.pid, COORDINATOR), process, run_dir)
    before = named(process.pid, COORDINATOR)
    os.kill(before[which % len(before)], signal.SIGKILL)
    until(lambda: set(named(process.pid, COORDINATOR)) - set(before), process, run_dir)
    step = step_of(run_dir)
    until(lambda: step_of(run_dir) > step + 2 * MAX_QUEUED, process, run_dir)


def kill_worker(process: subprocess.Popen[str], run_dir: Path) -> None:
    """One that trains; the run goes on by itself, some steps beyond where it was."""
    os.kill(named(process.pid, "ray::RayTrainWorker")[0], signal.SIGKILL)
    until(lambda: "broken off" in output(run_dir), process, run_dir)
    reached = step_of(run_dir)
    until(lambda: step_of(run_dir) >= reached + 3, process, run_dir)


def assert_same(run_dir: Path, clean: Path) -> None:
    ours, theirs = (read_jsonl(folder / "metrics.jsonl") for folder in (run_dir, clean))
    for key in ("optimizer_step", "loss", "grad_norm", "lr", "epoch"):
        assert [line[key] for line in ours] == [line[key] for line in theirs], key
    assert read_jsonl(run_dir / "samples.jsonl") == read_jsonl(clean / "samples.jsonl")
    ours, theirs = (list_checkpoints(folder)[-1] for folder in (run_dir, clean))
    for name in ("trainable.safetensors", "optimizer.safetensors"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    states = [load_file(folder / "rng.safetensors") for folder in (ours, theirs)]
    assert states[0].keys() == states[1].keys()
    assert [key for key in states[0] if not np.array_equal(states[0][key], states[1][key])] == []


def assert_undisturbed(run_dir: Path, flags: list[str]) -> None:
    """It is a run of as many steps to which nothing happened."""
    clean = run_dir.parent / "clean" / "run"
    clean.parent.mkdir()
    finish(clean, [*flags, f"--steps={step_of(run_dir)}"])
    assert_same(run_dir, clean)


@pytest.mark.timeout(900)
def test_killed_then_the_same_command_then_asked_to_end_then_on(dataset_v3, tmp_path):
    """And the process that runs its reading dies on the way, which nobody notices; in the second start a worker dies, and it is told that
    authentication is switched off. Of Diffusion Policy, which has most to lose.

    What SIGTERM leaves is continued as the driver would, but without Ray in this process, and so is the undisturbed run
    made: both are fed with the rows that the order names.
    """
    run_dir, flags = tmp_path / "run", flags_of(MOST_TO_LOSE, dataset_v3)
    config = parse_flags([*flags, f"--output_dir={run_dir}"], RunConfig)
    with_base(config, load_metas(config), say=print)  # here, where torch is imported already; the command finds it
    with started(run_dir, *flags) as process:
        kill_coordinator(process, run_dir)
        until(lambda: saved_in(run_dir) and step_of(run_dir) % POLICY_SAVE_FREQ >= 3, process, run_dir)
        process.kill()
        assert process.wait(timeout=PATIENCE_S) == -signal.SIGKILL
    reached = step_of(run_dir)
    assert left_behind()
    assert OPEN not in output(run_dir)
    assert "broken off" not in output(run_dir)
    with started(run_dir, *flags, environment={"RAY_AUTH_MODE": "disabled"}) as process:
        until(lambda: step_of(run_dir) > reached, process, run_dir)
        kill_worker(process, run_dir)
        reached = step_of(run_dir)
        process.terminate()
        assert end_of(process, run_dir) == 143, output(run_dir)
    assert output(run_dir).count("continuing from ") == 1
    assert output(run_dir).count("broken off") == 1
    assert OPEN in output(run_dir)
    assert "saving a checkpoint" in output(run_dir)
    assert left_behind() == []  # also what the killed one left is removed by the next
    asked = saved_in(run_dir)[-1]
    assert asked == step_of(run_dir) >= reached  # where it stopped, not where the plan had it save
    threads = threads_of(run_dir)
    config = replace(read_config(run_dir), output_dir=str(run_dir), steps=asked + 6)
    run_without_ray(config, threads)
    assert (saved_in(run_dir)[-1], step_of(run_dir)) == (config.steps, config.steps)
    clean = tmp_path / "clean"
    run_without_ray(replace(config, output_dir=str(clean)), threads)
    assert_same(run_dir, clean)
    assert_none_twice_an_epoch(run_dir)


def saved_in(run_dir: Path) -> list[int]:
    return [int(path.name) for path in list_checkpoints(run_dir)]


def assert_none_twice_an_epoch(run_dir: Path) -> None:
    used: dict[int, list[tuple[int, int]]] = {}
    lines = zip(read_jsonl(run_dir / "metrics.jsonl"), read_jsonl(run_dir / "samples.jsonl"), strict=True)
    for line, record in lines:
        used.setdefault(line["epoch"], []).extend(map(tuple, record["samples"]))
    assert len(used) > 1
    assert [epoch for epoch, samples in used.items() if len(set(samples)) < len(samples)] == []


@pytest.fixture(scope="module")
def some(flags) -> list[str]:
    """So many steps that a kill at the tenth part of them comes long before the end."""
    return [*flags, "--steps=1000"]


@pytest.fixture(scope="module")
def clean(some, tmp_path_factory) -> Path:
    """The undisturbed run."""
    run_dir = tmp_path_factory.mktemp("clean") / "run"
    finish(run_dir, some)
    return run_dir


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", ["raylet/raylet", "gcs/gcs_server", "ray::RayTrainWorker"])
def test_a_part_of_the_cluster_dies_and_the_run_goes_on_by_itself(some, clean, tmp_path, part):
    run_dir = tmp_path / "run"
    with started(run_dir, *some) as process:
        until(lambda: step_of(run_dir) >= 100, process, run_dir)
        os.kill(named(process.pid, part)[0], signal.SIGKILL)
        assert process.wait(timeout=PATIENCE_S) == 0, output(run_dir)
    assert_same(run_dir, clean)
    assert "restarted 1 time" in output(run_dir)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_in_a_terminal_saves_and_ends(flags, tmp_path):
    """A terminal sends it to all processes of the command, Ray's among them."""
    run_dir = tmp_path / "run"
    with started(run_dir, *flags) as process:
        until(lambda: step_of(run_dir) > SAVE_FREQ, process, run_dir)
        os.killpg(process.pid, signal.SIGINT)
        assert end_of(process, run_dir) == 130, output(run_dir)
    assert int(list_checkpoints(run_dir)[-1].name) == step_of(run_dir) > SAVE_FREQ
    assert "asked to end by Ctrl-C: saving a checkpoint, for at most 25 s; Ctrl-C again ends at once" in output(run_dir)
    assert "asked to end by Ctrl-C; all is saved, and the same command goes on from there" in output(run_dir)
    assert "Traceback" not in output(run_dir)
    assert left_behind() == []
    finish_soon(run_dir, flags)
    assert_undisturbed(run_dir, flags)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("hears_ctrl_c")
def test_a_second_ctrl_c_ends_at_once(flags, tmp_path):
    run_dir = tmp_path / "run"
    with started(run_dir, *flags, "--grace_s=300") as process:
        until(lambda: step_of(run_dir) > SAVE_FREQ, process, run_dir)
        for pid in named(process.pid, "ray::RayTrainWorker") + named(process.pid, "ray::execute"):
            os.kill(pid, signal.SIGSTOP)  # so that it cannot save
        os.killpg(process.pid, signal.SIGINT)
        until(lambda: "asked to end by Ctrl-C: saving" in output(run_dir), process, run_dir)
        os.killpg(process.pid, signal.SIGINT)
        assert end_of(process, run_dir) == 130, output(run_dir)
    assert output(run_dir).splitlines()[-1] == "vlatune: interrupted"
    assert left_behind() == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_asked_to_end_between_two_attempts(flags, tmp_path):
    run_dir = tmp_path / "run"
    with started(run_dir, *flags) as process:
        until(lambda: step_of(run_dir) >= SAVE_FREQ + 10, process, run_dir)
        os.kill(named(process.pid, "ray::RayTrainWorker")[0], signal.SIGKILL)
        until(lambda: "broken off" in output(run_dir), process, run_dir)
        process.terminate()
        assert end_of(process, run_dir) == 143, output(run_dir)
    assert "asked to end by SIGTERM before the workers began" in output(run_dir)
    assert list_checkpoints(run_dir)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_readers_die_and_nobody_notices(flags, tmp_path):
    """Ray runs a lost read task again; the order is ours."""
    run_dir = tmp_path / "run"
    with started(run_dir, *flags) as process:
        for step in (1, 100, 200):
            until(lambda step=step: step_of(run_dir) >= step, process, run_dir)
            until(lambda: named(process.pid, "ray::ReadLeRobot"), process, run_dir)
            os.kill(named(process.pid, "ray::ReadLeRobot")[0], signal.SIGKILL)
        step = step_of(run_dir)
        until(lambda: step_of(run_dir) >= step + 200, process, run_dir)
        process.terminate()
        assert end_of(process, run_dir) == 143, output(run_dir)
    assert "broken off" not in output(run_dir)
    finish_soon(run_dir, flags)
    assert_undisturbed(run_dir, flags)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_processes_that_run_the_reading_die_at_random_moments_and_nobody_notices(flags, tmp_path, num_workers):
    """Three times a run, the first time before the first step; a worker whose own dies keeps the other waiting."""
    run_dir, chance = tmp_path / "run", random.Random(num_workers)
    longer = [*flags, "--steps=1200", f"--num_workers={num_workers}", f"--batch_size={4 // num_workers}"]
    moments = [0, *sorted(chance.sample(range(1, 500), 2))]
    with started(run_dir, *longer) as process:
        for step in moments:
            until(lambda step=step: step_of(run_dir) >= step, process, run_dir)
            time.sleep(chance.uniform(0, 0.3))  # not always just after a line is written
            kill_coordinator(process, run_dir, which=chance.randrange(num_workers))
        assert end_of(process, run_dir) == 0, output(run_dir)
    said, told = output(run_dir), read_summary(run_dir)
    assert told is not None
    assert (told.reader_restarts, told.restarts) == (len(moments), 0)
    assert "broken off" not in said
    assert "continuing from" not in said
    assert_undisturbed(run_dir, longer)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_workers_then_one_then_four_take_the_same_samples(flags, tmp_path):
    """The global batch stays 8: 2 x 4, 1 x 8, 4 x 2."""
    run_dir, alone = tmp_path / "a" / "run", tmp_path / "b" / "run"
    for folder in (run_dir.parent, alone.parent):
        folder.mkdir()
    kill_at(70, None, run_dir, [*flags, "--num_workers=2", "--batch_size=4"])
    kill_at(step_of(run_dir) + 60, None, run_dir, [*flags, "--num_workers=1", "--batch_size=8"])
    steps = finish_soon(run_dir, [*flags, "--num_workers=4", "--batch_size=2"])
    finish(alone, [*flags, f"--steps={steps}", "--num_workers=1", "--batch_size=8"])
    assert read_jsonl(run_dir / "samples.jsonl") == read_jsonl(alone / "samples.jsonl")
    ours, theirs = (read_jsonl(folder / "metrics.jsonl") for folder in (run_dir, alone))
    assert [line["optimizer_step"] for line in ours] == list(range(1, steps + 1))
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=1e-3)
    assert "num_workers was 2, now 1" in output(run_dir)
