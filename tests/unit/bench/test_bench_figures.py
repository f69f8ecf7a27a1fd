"""Figures of the train, resume and feed benchmarks, computed from given measurements."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import wait_until

from benchmarks.__main__ import BENCHMARKS
from benchmarks.harness import Results
from benchmarks.options import PolicyBench, ResumeBench, TrainBench
from benchmarks.processes import Mark, Program, Seen, Session, processes_in, watch
from benchmarks.resume import killed_run
from benchmarks.resume.resume_bench import print_report as print_resume
from benchmarks.resume.save_cost import Save
from benchmarks.tables import COLUMNS
from benchmarks.train import train_programs as programs
from benchmarks.train.time_to_quality import Course, over_lerobot, wanted_error
from benchmarks.train.train_bench import OURS, PEERS, Figures, print_report
from benchmarks.train.train_cases import CASES, TrainJob, find_case
from benchmarks.train.train_figures import ErrorPoint, RunFigures, figures_of, first_step_at, seconds_to_error
from vlatune.cli import main
from vlatune.config.settings import DatasetConfig, PolicyConfig, RunConfig
from vlatune.registry import PACKAGES

ALWAYS = {"commit", "versions", "hardware", "settings"}


def marks_every(seconds: float, count: int, *, steps: int = 10) -> tuple[Mark, ...]:
    return tuple(Mark(steps * number, seconds * number) for number in range(1, count + 1))


def test_rates_are_those_of_the_steady_state():
    marks = (*marks_every(4.0, 5), *(Mark(50 + 10 * number, 20 + 2.0 * number) for number in range(1, 16)))
    figures = figures_of(Seen(-10.0, 51.0, marks), batch_size=4)
    assert figures.samples_per_s == pytest.approx(4 * 150 / 30)  # from step 50 of 200
    assert figures.complete_samples_per_s == pytest.approx(800 / 60)
    assert figures.first_step_s == pytest.approx(10.4)


def test_seconds_to_an_error_are_interpolated_between_checkpoints():
    marks = marks_every(10.0, 4)
    points = [ErrorPoint(0, 1.0), ErrorPoint(20, 0.5), ErrorPoint(40, 0.1)]
    assert seconds_to_error(points, marks, 0.3) == pytest.approx(30.0)
    assert seconds_to_error(points, marks, 2.0) == pytest.approx(first_step_at(marks))
    assert seconds_to_error(points, marks, 0.05) is None


def course(seconds: float, *errors: float) -> Course:
    points = tuple(ErrorPoint(20 * number, error) for number, error in enumerate(errors))
    return Course(points, Seen(0.0, 99.0, marks_every(seconds, 6)))


COURSES = {"lerobot": course(10.0, 1.0, 0.7, 0.5, 0.4), "ours": course(2.0, 1.0, 0.7, 0.5, 0.4)}


def test_the_target_error_is_slightly_above_lerobots_last():
    assert wanted_error(COURSES) == pytest.approx(0.44)
    assert over_lerobot(COURSES, 0.5) == pytest.approx(5.0)
    assert over_lerobot(COURSES, 0.3) is None
    assert over_lerobot({"ours": COURSES["ours"]}, 0.5) is None


@pytest.mark.parametrize("policy", PACKAGES)
def test_every_policy_has_a_default_configuration(policy):
    options = TrainBench(policy=PolicyBench(policy))
    assert find_case(options) == CASES[policy]["demo" if policy == "pi05" else "video"]
    assert find_case(replace(options, config="video", steps=9)).steps == 9


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train", "--config=expert-stop"], "did you mean expert-step"),
        (["train", "--policy.type=act", "--config=expert-step"], "there are demo"),
        (["train", "--peers=torch"], "lerobot, template"),
        (["train", "--output=nowhere/results.json"], "--output=nowhere/results.json"),
        (["train", "--eval_samples=0"], "--eval_samples=0"),
        (["resume", "--steps=80"], "--steps=80: must be 90 or more"),
        (["resume", "--interval=1"], "--interval=1"),
        (["step", "--train=everything"], "heads, expert, lora, full"),
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
    rates = {OURS: [100.0, 120.0], PEERS["lerobot"]: [25.0, 24.0]}
    runs = {name: [RunFigures(rate, rate / 2, 20.0) for rate in each] for name, each in rates.items()}
    config = RunConfig(dataset=DatasetConfig(root=("data",)), policy=PolicyConfig(path="base", type="pi05"))
    results = Results(rates, {PEERS["template"]: "it cannot"})
    seen = Figures(results, runs, [0.8, 0.9], 0, {OURS: 0.1}, dict(COURSES))
    print_report(TrainBench(config="demo", quality=True), TrainJob(config, (0,), 2), seen)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last.keys() >= ALWAYS | {key for key, _ in COLUMNS["train"][1]}
    assert last["over_lerobot"] == pytest.approx(4.5)  # 4 in one round, 5 in the other
    assert last["share_of_ideal"] == pytest.approx(0.85)
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


def test_the_last_complete_line_of_the_metrics_counts(tmp_path):
    file = tmp_path / "metrics.jsonl"
    assert killed_run.last_step(file) == (0, 0)
    file.write_text('{"optimizer_step": 7}\n{"optimizer_step": 8, ')  # killed while writing
    assert killed_run.last_step(file) == (file.stat().st_ino, 7)


@pytest.mark.parametrize(
    ("code", "timeout_s", "message"),
    [
        ("print('the disk is full'); raise SystemExit(3)", 60, r"exit code 3.*\n.*the disk is full"),
        ("import time; time.sleep(600)", 0.1, "no step 7 within --timeout_s=0.1"),
    ],
)
def test_a_run_that_ends_early_or_takes_too_long_raises_with_its_output(code, timeout_s, message, tmp_path):
    with (
        Session([sys.executable, "-c", code], tmp_path / "output.txt", env=os.environ) as session,
        pytest.raises(RuntimeError, match=message),
    ):
        killed_run.wait_until(session, lambda: False, "step 7", timeout_s)


def test_the_last_line_of_the_resume_benchmark_has_all_figures(capsys):
    killed = killed_run.RunFigures(30.0, restart_s=20.0, redone_steps=15, num_saves=6, stall_s=0.01, step_s=0.1)
    print_resume(ResumeBench(interval=30), killed, [Save(0.5, 1.0, 50), Save(0.1, 1.1, 50)])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last.keys() >= ALWAYS | {key for key, _ in COLUMNS["resume"][1]}
    assert (last["restart_s"], last["redone_steps"], last["checkpoint_bytes"]) == (20.0, 15, 50)
    assert last["stall_share"] == pytest.approx(0.01 / 50.01)
