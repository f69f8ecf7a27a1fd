"""`vlatune train` as a shell sees it: SIGTERM, Ctrl-C, killed drivers, workers, readers and Ray processes, and the same command again.

A run that is to be killed gets more steps than it can make in the test. It is then resumed for a few more steps and compared with
an undisturbed run of the same length.
"""

import os
import random
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from driving import (
    FAILED,
    MANY_STEPS,
    READER,
    TIMEOUT_S,
    exit_code,
    finish,
    kill,
    kill_worker,
    leftover_folders,
    named,
    output,
    saved_steps,
    started,
    step_of,
    wait_until,
)
from local_runs import assert_same_run, run_locally, threads_of, train_flags

from vlatune.feed.feed import MAX_QUEUED
from vlatune.ray_internals import RAYLET_TITLE, TRAIN_WORKER_TITLE
from vlatune.registry import PACKAGES, get_policy_info
from vlatune.run.run_folder import read_config
from vlatune.run.sinks import read_jsonl

pytestmark = [pytest.mark.usefixtures("temporary"), pytest.mark.timeout(1200)]

SAVE_FREQ, POLICY_SAVE_FREQ, DECAY = 50, 10, 80
POLICY_FLAGS = {
    "pi0": ["--policy.flow_samples=2"],
    "smolvla": ["--policy.train=expert", "--policy.flow_samples=2"],
    "act": ["--policy.dropout=0.3", "--policy.optimizer_lr_backbone=0.0001", "--optimizer.ema_decay=0.9"],
    "diffusion": ["--policy.use_group_norm=false", "--policy.crop_ratio=0.8", "--optimizer.ema_decay=0.9"],
}
"""Policy -> flags that give it the most state: history, crops, dropout, running statistics, averages."""


@pytest.fixture(scope="module")
def flags(dataset_v3, small_base) -> list[str]:
    return train_flags(
        dataset_v3,
        small_base,
        "--dataset.eval_split=0",
        f"--steps={MANY_STEPS}",
        "--scheduler.num_warmup_steps=10",
        f"--scheduler.num_decay_steps={DECAY}",  # ends before any run, so the rate does not depend on --steps
        f"--save_freq={SAVE_FREQ}",
        f"--keep_checkpoints={MANY_STEPS}",
        "--save_every_s=0",
        "--log_samples=true",
        "--max_restarts=3",
        "--ray.num_cpus=2",
        "--ray.object_store_bytes=100000000",
    )


def policy_flags(name: str, dataset: Path) -> list[str]:
    return [
        f"--recipe={get_policy_info(name).small_recipe}",
        f"--dataset.root={dataset}",
        "--dataset.run_length=4",
        "--dataset.window_rows=8",
        "--dataset.image_transforms.enable=true",
        "--batch_size=4",
        f"--steps={MANY_STEPS}",
        "--scheduler.type=constant_with_warmup",  # the rate does not depend on --steps
        "--scheduler.num_warmup_steps=4",
        "--log_freq=1",
        f"--save_freq={POLICY_SAVE_FREQ}",
        "--keep_checkpoints=2",  # a ResNet's are large
        "--save_every_s=0",
        "--eval_freq=0",
        "--log_samples=true",
        "--ray.num_cpus=2",
        "--ray.object_store_bytes=100000000",
        *POLICY_FLAGS[name],
    ]


def finish_soon(run_dir: Path, flags: list[str]) -> None:
    """Resume for a few more steps, and compare with an undisturbed run of as many steps."""
    steps = max(step_of(run_dir), DECAY) + 20
    finish(run_dir, [*flags, f"--steps={steps}"])
    clean = run_dir.parent / "clean" / "run"
    finish(clean, [*flags, f"--steps={steps}"])
    assert_same_run(run_dir, clean)


def kill_reader(process: subprocess.Popen[str], run_dir: Path, which: int = 0) -> None:
    """Kill a process that reads, and wait until the batches that were ready are used."""
    kill(process, run_dir, READER, which)
    step = step_of(run_dir)
    wait_until(lambda: step_of(run_dir) > step + 2 * MAX_QUEUED, process, run_dir)


def test_killed_reader_driver_worker_and_sigterm_then_resumed(dataset_v3, tmp_path):
    """Diffusion Policy, which has most state. The end is computed without Ray, and so is the undisturbed run."""
    run_dir, flags = tmp_path / "run", policy_flags("diffusion", dataset_v3)
    with started(run_dir, *flags) as process:
        kill_reader(process, run_dir)
        wait_until(lambda: saved_steps(run_dir) and step_of(run_dir) % POLICY_SAVE_FREQ >= 3, process, run_dir)
        process.kill()
        assert process.wait(timeout=TIMEOUT_S) == -signal.SIGKILL
    reached = step_of(run_dir)
    assert leftover_folders()
    assert "RAY_AUTH_MODE" not in output(run_dir)
    assert FAILED not in output(run_dir)  # Ray repeats the lost read task
    with started(run_dir, *flags, environment={"RAY_AUTH_MODE": "disabled"}) as process:
        wait_until(lambda: step_of(run_dir) > reached, process, run_dir)
        kill_worker(process, run_dir)
        reached = step_of(run_dir)
        process.terminate()
        assert exit_code(process, run_dir) == 143, output(run_dir)
    assert output(run_dir).count("resuming from ") == output(run_dir).count(FAILED) == 1
    assert "RAY_AUTH_MODE" in output(run_dir)  # the warning that authentication is disabled
    assert leftover_folders() == []  # the killed run's folder is removed by the next run
    stopped = saved_steps(run_dir)[-1]
    assert stopped == step_of(run_dir) >= reached
    config, threads = read_config(run_dir), threads_of(run_dir)
    config = replace(config, output_dir=str(run_dir), steps=stopped + 6)
    run_locally(config, threads)
    assert_same_run(run_dir, run_locally(replace(config, output_dir=str(tmp_path / "clean")), threads))
    used: dict[int, list[tuple[int, int]]] = {}
    for line, record in zip(*(read_jsonl(run_dir / f"{one}.jsonl") for one in ("metrics", "samples")), strict=True):
        used.setdefault(line["epoch"], []).extend(map(tuple, record["samples"]))
    assert len(used) > 1
    assert all(len(set(samples)) == len(samples) for samples in used.values())


@pytest.mark.slow
@pytest.mark.parametrize("part", [RAYLET_TITLE, "gcs/gcs_server", TRAIN_WORKER_TITLE])
def test_run_continues_after_the_death_of_a_process(flags, tmp_path, part):
    run_dir, some = tmp_path / "run", [*flags, "--steps=500"]
    with started(run_dir, *some) as process:
        wait_until(lambda: step_of(run_dir) >= 100, process, run_dir)
        kill(process, run_dir, part)
        assert process.wait(timeout=TIMEOUT_S) == 0, output(run_dir)
    assert output(run_dir).count(FAILED) == 1
    finish(tmp_path / "clean" / "run", some)
    assert_same_run(run_dir, tmp_path / "clean" / "run")


@pytest.mark.slow
@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_in_a_terminal_saves_and_ends(flags, tmp_path):
    """A terminal sends the signal to all processes of the command, Ray's included."""
    run_dir = tmp_path / "run"
    with started(run_dir, *flags) as process:
        wait_until(lambda: step_of(run_dir) > SAVE_FREQ, process, run_dir)
        os.killpg(process.pid, signal.SIGINT)
        assert exit_code(process, run_dir) == 130, output(run_dir)
    assert saved_steps(run_dir)[-1] == step_of(run_dir) > SAVE_FREQ
    assert "Traceback" not in output(run_dir)
    assert leftover_folders() == []
    finish_soon(run_dir, flags)


@pytest.mark.slow
@pytest.mark.usefixtures("hears_ctrl_c")
def test_second_ctrl_c_ends_at_once(flags, tmp_path):
    run_dir = tmp_path / "run"
    with started(run_dir, *flags, "--grace_s=300") as process:
        wait_until(lambda: step_of(run_dir) > SAVE_FREQ, process, run_dir)
        for pid in named(process.pid, TRAIN_WORKER_TITLE) + named(process.pid, "ray::execute"):
            os.kill(pid, signal.SIGSTOP)  # so that it cannot save
        os.killpg(process.pid, signal.SIGINT)
        wait_until(lambda: "saving a checkpoint" in output(run_dir), process, run_dir)
        os.killpg(process.pid, signal.SIGINT)
        assert exit_code(process, run_dir) == 130, output(run_dir)
    assert output(run_dir).splitlines()[-1] == "vlatune: interrupted"
    assert leftover_folders() == []


@pytest.mark.slow
def test_sigterm_between_two_attempts(flags, tmp_path):
    run_dir = tmp_path / "run"
    with started(run_dir, *flags) as process:
        wait_until(lambda: step_of(run_dir) >= SAVE_FREQ + 10, process, run_dir)
        kill(process, run_dir, TRAIN_WORKER_TITLE)
        wait_until(lambda: FAILED in output(run_dir), process, run_dir)
        process.terminate()
        assert exit_code(process, run_dir) == 143, output(run_dir)
    assert saved_steps(run_dir)


@pytest.mark.slow
def test_two_workers_then_one_then_four_use_the_same_samples(flags, tmp_path):
    """The global batch stays 8."""
    run_dir, other, reached = tmp_path / "run", tmp_path / "other" / "run", 70
    for workers in (2, 1):
        with started(run_dir, *flags, f"--num_workers={workers}", f"--batch_size={8 // workers}") as process:
            wait_until(lambda reached=reached: step_of(run_dir) >= reached, process, run_dir)
            process.kill()
        reached = step_of(run_dir) + 60
    steps = max(step_of(run_dir), DECAY) + 20
    finish(run_dir, [*flags, f"--steps={steps}", "--num_workers=4", "--batch_size=2"])
    finish(other, [*flags, f"--steps={steps}", "--num_workers=1", "--batch_size=8"])
    assert read_jsonl(run_dir / "samples.jsonl") == read_jsonl(other / "samples.jsonl")
    ours, theirs = (read_jsonl(folder / "metrics.jsonl") for folder in (run_dir, other))
    assert [line["optimizer_step"] for line in ours] == list(range(1, steps + 1))
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=1e-3)
    assert "num_workers was 2, now 1" in output(run_dir)


def test_every_policy_is_covered():
    assert {*POLICY_FLAGS} == {*PACKAGES} - {"pi05"}


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICY_FLAGS)
def test_killed_worker_and_driver_of_every_policy(dataset_v3, tmp_path, name):
    """PI0.5 is killed in the tests above. Two workers use the samples of one."""
    run_dir, both, flags = tmp_path / "one" / "run", tmp_path / "two" / "run", policy_flags(name, dataset_v3)
    with started(run_dir, *flags) as process:
        wait_until(lambda: saved_steps(run_dir) and step_of(run_dir) >= POLICY_SAVE_FREQ + 3, process, run_dir)
        kill_worker(process, run_dir)
        process.kill()
        assert process.wait(timeout=TIMEOUT_S) == -signal.SIGKILL
    steps = step_of(run_dir) + 6
    finish(run_dir, [*flags, f"--steps={steps}"])
    assert saved_steps(run_dir)[-1] == step_of(run_dir) == steps
    config = replace(read_config(run_dir), output_dir=str(tmp_path / "clean"))
    assert_same_run(run_dir, run_locally(config, threads_of(run_dir)))
    finish(both, [*flags, "--num_workers=2", "--batch_size=2", f"--steps={steps}"])
    assert read_jsonl(both / "samples.jsonl") == read_jsonl(run_dir / "samples.jsonl")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_kills_of_workers_and_driver(flags, tmp_path):
    """Six kills at random steps, each of a random process; two workers."""
    run_dir, chance, reached = tmp_path / "run", random.Random(20), 0
    longer = [*flags, "--steps=600", "--save_freq=20", "--num_workers=2", "--max_restarts=1000"]
    for _ in range(3):
        with started(run_dir, *longer) as process:
            for part in (chance.choice([TRAIN_WORKER_TITLE, READER, RAYLET_TITLE]), "vlatune.cli"):
                reached += chance.randrange(20, 80)
                wait_until(lambda reached=reached: step_of(run_dir) >= reached, process, run_dir)
                kill(process, run_dir, part, which=chance.randrange(10))
            assert process.wait(timeout=TIMEOUT_S) == -signal.SIGKILL
    finish(run_dir, longer, 2 * TIMEOUT_S)
    finish(tmp_path / "clean" / "run", longer, 2 * TIMEOUT_S)
    assert_same_run(run_dir, tmp_path / "clean" / "run")
    assert [path.name for path in (run_dir / "checkpoints").glob(".*")] == []
