"""The driver's own life, as a person's shell sees it: SIGTERM, SIGKILL, a raylet or a reader that dies, the same command again."""

import os
import signal
from pathlib import Path

import pytest
from driving import PATIENCE_S, left_behind, named, output, session, started, step_of, until

from vlatune.checkpoint.store import list_checkpoints
from vlatune.report.sinks import read_jsonl

pytestmark = pytest.mark.ray

STEPS, SAVE_FREQ = 600, 50
"""So many that a run which makes a hundred a second is not through before a signal has reached it."""


@pytest.fixture(scope="module")
def flags(dataset_v3, small_base) -> list[str]:
    return [
        f"--dataset.root={dataset_v3}",
        "--dataset.run_length=4",
        "--dataset.window_rows=8",
        f"--policy.path={small_base}",
        "--policy.train=heads",
        "--batch_size=4",
        f"--steps={STEPS}",
        "--log_freq=1",
        f"--save_freq={SAVE_FREQ}",
        "--keep_checkpoints=100",
        "--save_every_s=0",
        "--log_samples=true",
        "--ray.num_cpus=2",
        "--ray.object_store_bytes=100000000",
    ]


@pytest.fixture(scope="module")
def clean(flags, tmp_path_factory) -> Path:
    """The undisturbed run."""
    run_dir = tmp_path_factory.mktemp("clean") / "run"
    finish(run_dir, flags)
    return run_dir


def finish(
    run_dir: Path, flags: list[str], patience_s: float = PATIENCE_S, *, kill: tuple[int, str] | None = None
) -> None:
    """To the end; on the way its process of this name dies at this step, and nobody notices."""
    with started(run_dir, *flags) as process:
        if kill is not None:
            until(lambda: step_of(run_dir) >= kill[0], process, run_dir)
            os.kill(named(process.pid, kill[1])[0], signal.SIGKILL)
        until(lambda: (run_dir / "summary.json").exists(), process, run_dir, patience_s)
        assert process.wait(timeout=60) == 0, output(run_dir)
        assert session(process.pid) == []


def kill_at(step: int, part: str | None, run_dir: Path, flags: list[str], how: int = signal.SIGKILL) -> int:
    """Start, wait for the step, send the signal to the driver or to its process of this name; its exit code."""
    with started(run_dir, *flags) as process:
        until(lambda: step_of(run_dir) >= step, process, run_dir)
        os.kill(named(process.pid, part)[0] if part else process.pid, how)
        return process.wait(timeout=60)


def assert_same(run_dir: Path, clean: Path) -> None:
    ours, theirs = (read_jsonl(folder / "metrics.jsonl") for folder in (run_dir, clean))
    for key in ("optimizer_step", "loss", "grad_norm", "lr", "epoch"):
        assert [line[key] for line in ours] == [line[key] for line in theirs], key
    assert read_jsonl(run_dir / "samples.jsonl") == read_jsonl(clean / "samples.jsonl")
    ours, theirs = (list_checkpoints(folder)[-1] for folder in (run_dir, clean))
    for name in ("trainable.safetensors", "optimizer.safetensors", "rng.safetensors"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()


@pytest.mark.timeout(900)
def test_asked_to_end_then_killed_then_the_same_command(flags, clean, tmp_path):
    run_dir = tmp_path / "run"
    assert kill_at(60, None, run_dir, flags, signal.SIGTERM) == 143
    asked = [int(path.name) for path in list_checkpoints(run_dir)]
    assert asked[0] == SAVE_FREQ
    assert asked[-1] == step_of(run_dir) > 60  # where it stopped, not where the plan had it save
    assert "saving a checkpoint" in output(run_dir)
    assert left_behind() == []
    assert kill_at(asked[-1] + 40, None, run_dir, flags) == -signal.SIGKILL
    finish(run_dir, flags, kill=(step_of(run_dir) + 60, "ray::Coordinator"))
    assert output(run_dir).count("continuing from ") == 2
    assert "broken off" not in output(run_dir)
    assert_same(run_dir, clean)
    assert left_behind() == []  # what the killed one left is removed by the next


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", ["raylet/raylet", "gcs/gcs_server", "ray::RayTrainWorker"])
def test_a_part_of_the_cluster_dies_and_the_run_goes_on_by_itself(flags, clean, tmp_path, part):
    run_dir = tmp_path / "run"
    with started(run_dir, *flags) as process:
        until(lambda: step_of(run_dir) >= 170, process, run_dir)
        os.kill(named(process.pid, part)[0], signal.SIGKILL)
        until(lambda: (run_dir / "summary.json").exists(), process, run_dir)
        assert process.wait(timeout=60) == 0, output(run_dir)
    assert_same(run_dir, clean)
    assert "restarted 1 time" in output(run_dir)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_asked_to_end_between_two_attempts(flags, tmp_path):
    run_dir = tmp_path / "run"
    with started(run_dir, *flags) as process:
        until(lambda: step_of(run_dir) >= SAVE_FREQ + 10, process, run_dir)
        os.kill(named(process.pid, "ray::RayTrainWorker")[0], signal.SIGKILL)
        until(lambda: "broken off" in output(run_dir), process, run_dir)
        process.terminate()
        assert process.wait(timeout=60) == 143, output(run_dir)
        assert session(process.pid) == []
    assert "asked to end by SIGTERM before the workers began" in output(run_dir)
    assert list_checkpoints(run_dir)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_readers_die_and_nobody_notices(flags, tmp_path):
    """Ray runs a lost read task again; the order is ours."""
    longer = [*flags, "--steps=1200"]
    clean, run_dir = tmp_path / "clean" / "run", tmp_path / "disturbed" / "run"
    for folder in (clean.parent, run_dir.parent):
        folder.mkdir()
    finish(clean, longer)
    with started(run_dir, *longer) as process:
        for step in (1, 300, 600):
            until(lambda step=step: step_of(run_dir) >= step, process, run_dir)
            until(lambda: named(process.pid, "ray::ReadLeRobot"), process, run_dir)
            os.kill(named(process.pid, "ray::ReadLeRobot")[0], signal.SIGKILL)
        until(lambda: (run_dir / "summary.json").exists(), process, run_dir)
        assert process.wait(timeout=60) == 0, output(run_dir)
    assert_same(run_dir, clean)
    assert "broken off" not in output(run_dir)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_workers_then_one_then_four_take_the_same_samples(flags, tmp_path):
    """The global batch stays 8: 2 x 4, 1 x 8, 4 x 2."""
    run_dir, alone = tmp_path / "a" / "run", tmp_path / "b" / "run"
    for folder in (run_dir.parent, alone.parent):
        folder.mkdir()
    kill_at(70, None, run_dir, [*flags, "--num_workers=2", "--batch_size=4"])
    kill_at(170, None, run_dir, [*flags, "--num_workers=1", "--batch_size=8"])
    finish(run_dir, [*flags, "--num_workers=4", "--batch_size=2"])
    finish(alone, [*flags, "--num_workers=1", "--batch_size=8"])
    assert read_jsonl(run_dir / "samples.jsonl") == read_jsonl(alone / "samples.jsonl")
    ours, theirs = (read_jsonl(folder / "metrics.jsonl") for folder in (run_dir, alone))
    assert [line["optimizer_step"] for line in ours] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=1e-3)
    assert "num_workers was 2, now 1" in output(run_dir)
