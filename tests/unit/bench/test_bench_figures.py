"""Figures of the train, resume and feed benchmarks, computed from given measurements."""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from waiting import wait_until

from benchmarks.__main__ import BENCHMARKS
from benchmarks.harness import Results
from benchmarks.options import ResumeBench, TrainBench
from benchmarks.processes import (
    OTHERS,
    READERS,
    TRAINING,
    CpuSeries,
    Mark,
    Program,
    Seen,
    Session,
    processes_in,
    watch,
)
from benchmarks.resume.killed_run import Comeback, MetricsFollower
from benchmarks.resume.killed_run import RunFigures as KilledRun
from benchmarks.resume.resume_bench import print_report as print_resume
from benchmarks.tables import COLUMNS
from benchmarks.train import train_programs as programs
from benchmarks.train.time_to_quality import Course, over_lerobot, wanted_error
from benchmarks.train.train_bench import CACHED, OURS, PEERS, Figures, print_report
from benchmarks.train.train_cases import TrainJob
from benchmarks.train.train_figures import (
    ErrorPoint,
    RunFigures,
    figures_of,
    first_step_at,
    seconds_to_error,
    steady_window,
)
from vlatune.cli import main
from vlatune.config.settings import DatasetConfig, PolicyConfig, RunConfig

ALWAYS = {"commit", "versions", "hardware", "settings"}


def series(readers: list[float]) -> CpuSeries:
    """Return one reading per second."""
    seconds = np.arange(float(len(readers)))
    return CpuSeries(seconds, {TRAINING: 1.5 * seconds, READERS: np.array(readers), OTHERS: 0.05 * seconds})


def marks_every(seconds: float, count: int, *, steps: int = 10) -> tuple[Mark, ...]:
    return tuple(Mark(steps * number, seconds * number) for number in range(1, count + 1))


@pytest.mark.parametrize(("busy_s", "last"), [(12.0, 120), (100.0, 200), (0.0, 200)])
def test_steady_state_is_from_a_quarter_of_the_run_until_the_readers_are_done(busy_s, last):
    window = steady_window(marks_every(1.0, 20), series(np.minimum(np.arange(21.0), busy_s).tolist()))
    assert (window.begin.optimizer_step, window.end.optimizer_step) == (50, last)


def test_rates_and_cpu_time_are_those_of_the_steady_state():
    seen = Seen(-10.0, 21.0, marks_every(2.0, 10), series(np.arange(21.0).tolist()))
    figures = figures_of(seen, batch_size=4, steps_per_epoch=40)
    assert figures.by_epoch == pytest.approx([20.0, 20.0])
    assert figures.samples_per_s == pytest.approx(20.0)
    assert figures.complete_samples_per_s == pytest.approx(400 / 30)
    assert figures.first_step_s == pytest.approx(10.2)
    assert figures.cpu_s == pytest.approx({TRAINING: 1.5 / 20, READERS: 1 / 20, OTHERS: 0.05 / 20})


def test_seconds_to_an_error_are_interpolated_between_checkpoints():
    marks = marks_every(10.0, 4)
    points = [ErrorPoint(0, 1.0), ErrorPoint(20, 0.5), ErrorPoint(40, 0.1)]
    assert seconds_to_error(points, marks, 0.3) == pytest.approx(30.0)
    assert seconds_to_error(points, marks, 2.0) == pytest.approx(first_step_at(marks))
    assert seconds_to_error(points, marks, 0.05) is None


def course(seconds: float, *errors: float) -> Course:
    points = tuple(ErrorPoint(20 * number, error) for number, error in enumerate(errors))
    return Course(points, Seen(0.0, 99.0, marks_every(seconds, 6), series([0.0, 1.0])))


COURSES = {
    "lerobot": course(10.0, 1.0, 0.7, 0.5, 0.4),
    "ours, 1 noise samples": course(2.0, 1.0, 0.7, 0.5, 0.4),
    "ours, 8 noise samples": course(1.0, 1.0, 0.9),
}


def test_the_target_error_is_slightly_above_lerobots_last():
    assert wanted_error(COURSES, None) == pytest.approx(0.44)
    assert wanted_error(COURSES, 0.45) == 0.45
    names = ["ours, 1 noise samples", "ours, 8 noise samples"]
    assert over_lerobot(COURSES, 0.5, names) == {names[0]: pytest.approx(5.0), names[1]: None}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train", "--config=expert-stop"], "did you mean expert-step"),
        (["train", "--policy.type=act", "--config=expert-step"], "there are demo"),
        (["train", "--policy.type=diffusion", "--width=64"], "--width=64"),
        (["train", "--peers=torch"], "lerobot, template"),
        (["train", "--output=nowhere/results.json"], "--output=nowhere/results.json"),
        (["train", "--checkpoints=0"], "--checkpoints=0"),
        (["resume", "--steps=100"], "--steps=100: must be 120 or more"),
        (["resume", "--interval=1"], "--interval=1"),
        (["step", "--train=everything"], "heads, expert, lora, full"),
        (["step", "--policy.type=smolvla", "--width=100"], "a multiple of 192"),
        (["step", "--codec=av1"], "--codec"),
        (["stpe"], "did you mean step?"),
    ],
)
def test_invalid_flags_are_rejected(words, named, capsys):
    assert main(words, BENCHMARKS) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policy", "train", "flags"),
    [
        ("pi05", "expert", {"--policy.train_expert_only=true", "--policy.dtype=float32"}),
        ("smolvla", "full", {"--policy.train_expert_only=false", "--policy.freeze_vision_encoder=false"}),
        ("act", "full", {"--policy.optimizer_lr_backbone=0.5"}),
    ],
)
def test_lerobot_gets_the_equivalent_flags(policy, train, flags, tmp_path):
    overrides = {"optimizer_lr_backbone": 0.5} if policy == "act" else {}
    settings = PolicyConfig(path="base", type=policy, train=train, overrides=overrides)
    config = RunConfig(dataset=DatasetConfig(root=("data",)), policy=settings, torch_threads=1)
    program = programs.lerobot(TrainJob(config, (0, 2), num_workers=2), tmp_path)
    assert program.env["OMP_NUM_THREADS"] == "1"
    assert flags | {"--dataset.episodes=[0, 2]", "--num_workers=2"} <= set(program.command)
    assert any("scheduler" in flag for flag in program.command) == (policy != "act")


def test_the_last_line_of_the_train_benchmark_has_all_figures(capsys):
    def figures(samples_per_s: float, *by_epoch: float) -> RunFigures:
        cpu_s = {TRAINING: 0.008, READERS: 0.004, OTHERS: 0.001}
        return RunFigures(samples_per_s, samples_per_s / 2, 20.0, cpu_s, 0.7, by_epoch or (samples_per_s,))

    rates = {OURS: [100.0, 120.0], CACHED: [300.0, 360.0], PEERS["lerobot"]: [25.0, 24.0]}
    results = Results(rates, {PEERS["template"]: "it cannot"})
    runs = {OURS: [figures(100.0), figures(120.0)], PEERS["lerobot"]: [figures(25.0), figures(24.0)]}
    runs[CACHED] = [figures(300.0, 90.0, 300.0), figures(360.0, 108.0, 360.0)]
    config = RunConfig(dataset=DatasetConfig(root=("data",)), policy=PolicyConfig(path="base", type="pi05"))
    seen = Figures(results, runs, [0.8, 0.9], 0, {OURS: 0.1}, dict(COURSES))
    print_report(TrainBench(config="demo", quality=True), TrainJob(config, (0,), 2), seen)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last.keys() >= ALWAYS | {key for key, _ in COLUMNS["train"][1]}
    assert last["over_lerobot"] == pytest.approx(4.5)  # 4 in one round, 5 in the other
    assert last["share_of_ideal"] == pytest.approx(0.85)
    assert last["cached_over_uncached"] == pytest.approx(3.0)
    assert last["cached_over_lerobot"] == pytest.approx(13.5)
    assert last["first_epoch_over_uncached"] == pytest.approx(0.9)
    assert last["time_to_quality_over_lerobot"] == pytest.approx(5.0)
    assert (last["over_template"], last["not_run"]) == (None, {PEERS["template"]: "it cannot"})


def make_program(tmp_path: Path, code: str) -> Program:
    output = tmp_path / "output.txt"
    command = [sys.executable, "-c", code]
    return Program(command, os.environ, output, output, lambda line: line.startswith(b"step"), log_freq=5)


def test_a_program_is_watched_to_its_end(tmp_path):
    seen = watch(make_program(tmp_path, "print('step'); print('else'); print('step')"), timeout_s=60)
    assert [mark.optimizer_step for mark in seen.marks] == [5, 10]
    assert seen.begin_s <= seen.marks[0].at_s <= seen.marks[1].at_s <= seen.end_s
    with pytest.raises(RuntimeError, match=r"(?s)ended with code 3.*no such dataset"):
        watch(make_program(tmp_path, "import sys; print('no such dataset'); sys.exit(3)"), timeout_s=60)


def test_a_session_ends_all_processes_of_its_command(tmp_path):
    code = "import subprocess, time; subprocess.Popen(['sleep', '600']); print('ready', flush=True); time.sleep(600)"
    output = tmp_path / "output.txt"
    with Session([sys.executable, "-c", code], output, env=os.environ) as session:
        wait_until(lambda: "ready" in output.read_text() and session.find("sleep 600"), describe=session.tail)
        session.kill_command()
        assert session.exit_code() == -signal.SIGKILL
        assert len(processes_in(session.pid)) == 1
    assert processes_in(session.pid) == {}


def line(step: int, loss: float = 1.0) -> str:
    return json.dumps({"optimizer_step": step, "loss": loss}) + "\n"


def replace_file(file: Path, text: str) -> None:
    temporary = file.with_name("temporary")
    temporary.write_text(text)
    temporary.replace(file)


def test_the_first_step_after_a_restart_is_found_behind_the_kept_lines(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(line(step) for step in range(1, 8)))
    follower = MetricsFollower(file)
    with file.open("a") as more:
        more.write(line(8) + '{"optimizer_step": 9, ')  # killed while writing
    assert (follower.first_new_step(), follower.last_step()) == (None, 8)
    replace_file(file, "".join(line(step) for step in range(1, 6)))
    assert follower.first_new_step() is None
    with file.open("a") as more:
        more.write(line(6, loss=1.5) + line(7, loss=1.5))
    assert (follower.first_new_step(), follower.last_step()) == (6, 8)


def test_the_last_line_of_the_resume_benchmark_has_all_figures(capsys):
    worker, driver = (Comeback(100.0, 120.0, reached_step=30 + redone, resumed_step=30) for redone in (15, 16))
    killed = KilledRun(
        start_s=30.0, worker=worker, driver=driver, num_saves=6, stall_s=0.01, step_s=0.1, checkpoint_bytes=50
    )
    print_resume(ResumeBench(interval=30), killed)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last.keys() >= ALWAYS | {key for key, _ in COLUMNS["resume"][1]}
    assert (last["restart_s"], last["redone_steps"], last["driver_redone_steps"]) == (20.0, 15, 16)
    assert last["checkpoint_bytes"] == 50
    assert last["stall_share"] == pytest.approx(0.01 / 50.01)
