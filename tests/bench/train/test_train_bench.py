"""What `vlatune bench train` makes of what it sees; and the command itself, with LeRobot's own program, on a small run."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from vlatune import cli
from vlatune.bench.options import TrainBench
from vlatune.bench.train import train_programs as ways
from vlatune.bench.train.time_to_quality import Course, over_lerobot, wanted_error
from vlatune.bench.train.train_figures import (
    Alone,
    CpuPerSample,
    ErrorPoint,
    RunFigures,
    Window,
    figures_of,
    first_step_at,
    seconds_to_error,
    share_of_ideal,
    sharing_explains,
    split_as_told,
    steady_window,
    step_in_run_s,
)
from vlatune.bench.train.train_programs import CASES, TrainJob, choose_log_freq, find_case
from vlatune.bench.train.watched_program import (
    OTHERS,
    READERS,
    TRAINING,
    CpuMeter,
    CpuSeries,
    Mark,
    NewLines,
    Program,
    Reading,
    Seen,
    part_of,
    watch,
)
from vlatune.config import DatasetConfig, PolicyConfig, RunConfig

pytestmark = pytest.mark.early

LOG = (
    b"Training:  25%|##        | 10/40 [00:11<00:13,  2.18step/s]INFO 2026-11-16 22:07:56 ot_train.py:641 step:10 smpl:320 "
    b"ep:16 epch:1.60 loss:1.108 grdn:11.667 lr:2.7e-03 updt_s:0.170 data_s:0.990 smp/s:28"
)


def series(readers: list[float], *, threads: dict[int, list[float]] | None = None) -> CpuSeries:
    """A reading a second; the training process takes what its threads take."""
    of_threads = {tid: np.array(spent) for tid, spent in (threads or {1: [0.0] * len(readers)}).items()}
    parts = {
        TRAINING: np.sum(list(of_threads.values()), axis=0),
        READERS: np.array(readers),
        OTHERS: np.linspace(0.0, 1.0, len(readers)),
    }
    return CpuSeries(np.arange(float(len(readers))), parts, of_threads)


def marks_every(seconds: float, count: int, *, steps: int = 10) -> tuple[Mark, ...]:
    return tuple(Mark(steps * number, seconds * number) for number in range(1, count + 1))


def test_steady_state_begins_after_a_quarter_and_ends_with_the_readers():
    marks = marks_every(1.0, 20)
    readers = np.minimum(np.arange(21.0), 12.0).tolist()  # busy for 12 s, then idle
    window = steady_window(marks, series(readers))
    assert (window.begin.optimizer_step, window.end.optimizer_step) == (50, 120)


def test_readers_that_never_end_leave_the_window_open_to_the_last_step():
    window = steady_window(marks_every(1.0, 20), series(np.arange(21.0).tolist()))
    assert window.end.optimizer_step == 200


def test_a_run_whose_readers_were_done_at_once_is_still_measured():
    window = steady_window(marks_every(1.0, 3), series([5.0, 5.0, 5.0, 5.0]))
    assert window.optimizer_steps > 0


def test_figures_count_what_lies_in_the_window_alone():
    marks = marks_every(2.0, 10)
    cpu = series(
        np.arange(21.0).tolist(),
        threads={1: np.arange(21.0).tolist(), 2: (0.5 * np.arange(21.0)).tolist(), 3: (0.1 * np.arange(21.0)).tolist()},
    )
    figures = figures_of(Seen(-10.0, 21.0, marks, cpu), batch_size=4, compute_threads=2)
    assert figures.samples_per_s == pytest.approx(20.0)
    assert figures.whole_samples_per_s == pytest.approx(400 / 30)
    assert figures.first_step_s == pytest.approx(10.2)
    assert figures.cpu.compute_s == pytest.approx(1.5 / 20)
    assert figures.cpu.other_threads_s == pytest.approx(0.1 / 20)
    assert figures.cpu.readers_s == pytest.approx(1 / 20)
    assert figures.cpu.others_s == pytest.approx(0.05 / 20)
    assert figures.other_threads_share == pytest.approx(0.1)


def test_a_run_that_tells_its_threads_apart_is_believed():
    seen = RunFigures(
        100.0,
        50.0,
        9.0,
        CpuPerSample(0.008, 0.002, 0.001, 0.001),
        other_threads_share=0.2,
        steady_share=0.7,
        slowest_over_fastest=0.9,
    )
    told = {"train_thread_s": 30.0, "compute_threads_s": 30.0, "other_threads_s": 20.0, "loop_s": 50.0}
    split = split_as_told(seen, told)
    assert (split.cpu.compute_s, split.cpu.other_threads_s) == (pytest.approx(0.0075), pytest.approx(0.0025))
    assert split.other_threads_share == pytest.approx(0.4)
    assert (split.cpu.readers_s, split.samples_per_s) == (0.001, 100.0)


def test_the_first_step_lies_one_interval_before_the_first_mark_but_one_step():
    assert first_step_at([Mark(10, 21.0), Mark(20, 31.0)]) == pytest.approx(12.0)
    assert first_step_at([Mark(1, 3.0), Mark(2, 5.0)]) == pytest.approx(3.0)


def test_the_ideal_is_all_cores_at_the_cost_that_the_parts_have_alone():
    alone = Alone(step_wall_s=0.004, step_cpu_s=0.006, read_cpu_s=0.002)
    assert share_of_ideal(200.0, alone, cores=2) == pytest.approx(0.8)
    assert sharing_explains(alone, CpuPerSample(0.006, 0.0, 0.003, 0.001), cores=2) == pytest.approx(1.25)
    assert sharing_explains(alone, CpuPerSample(0.006, 0.0, 0.0, 0.0), cores=2) == 1.0  # never faster than alone


def test_the_step_in_the_run_is_without_its_wait():
    metrics = [{"optimizer_step": n, "step_s": 1.0 + n, "wait_s": 1.0} for n in (10, 20, 30, 40)]
    assert step_in_run_s(metrics, Window(Mark(10, 0.0), Mark(40, 9.0))) == pytest.approx(30.0)


def test_seconds_to_an_error_lie_between_the_checkpoints():
    marks = marks_every(10.0, 4)
    points = [ErrorPoint(0, 1.0), ErrorPoint(20, 0.5), ErrorPoint(40, 0.1)]
    assert seconds_to_error(points, marks, 0.3) == pytest.approx(30.0)
    assert seconds_to_error(points, marks, 0.5) == pytest.approx(20.0)
    assert seconds_to_error(points, marks, 2.0) == pytest.approx(first_step_at(marks))
    assert seconds_to_error(points, marks, 0.05) is None


def test_the_error_to_reach_lies_a_little_above_lerobots_last():
    def course(seconds: float, *errors: float) -> Course:
        points = tuple(ErrorPoint(20 * place, error) for place, error in enumerate(errors))
        return Course(points, Seen(0.0, 99.0, marks_every(seconds, 4), series([0.0, 1.0])))

    courses = {
        "lerobot": course(10.0, 1.0, 0.5, 0.4),
        "ours": course(2.0, 1.0, 0.5, 0.4),
        "never": course(1.0, 1.0, 0.9),
    }
    courses["began there"] = course(1.0, 0.3, 0.2)
    assert wanted_error(courses, None) == pytest.approx(0.5)
    assert wanted_error(courses, 0.45) == 0.45
    sooner = over_lerobot(courses, 0.5, ["ours", "never", "began there"])
    assert sooner == {"ours": pytest.approx(5.0), "never": None, "began there": None}


def test_a_process_is_a_reader_if_it_ever_read():
    assert part_of({"ray::IDLE", "ray::ReadLeRobot"}) == READERS
    assert part_of({'python -c "from multiprocessing.spawn import spawn_main" --multiprocessing-fork'}) == READERS
    assert part_of({"ray::Coordinator"}) == part_of({"/raylet/raylet --x"}) == part_of({"ray::IDLE"}) == OTHERS


def test_what_an_ended_process_had_taken_stays_counted():
    meter = CpuMeter(session=1, trainer="Trainer")
    meter.titles = {1: {"driver"}, 2: {"ray::ReadLeRobot"}, 3: {"ray::Trainer"}}
    meter.readings = [Reading(0.0, {1: 1.0, 2: 4.0, 3: 2.0}, {7: 1.0}), Reading(1.0, {1: 1.5, 3: 3.0}, {7: 1.5})]
    cpu = meter.cpu()
    assert cpu.parts[READERS].tolist() == [4.0, 4.0]
    assert cpu.spent_s(TRAINING, 0.0, 1.0) == 1.0
    assert cpu.spent_s(OTHERS, 0.0, 0.5) == pytest.approx(0.25)
    assert cpu.threads_spent_s(0.0, 1.0) == [0.5]


def test_lines_of_lerobots_log_are_told_from_its_other_words():
    assert ways.is_lerobot_line(LOG)
    assert not ways.is_lerobot_line(b"INFO 2026-11-16 22:07:58 ot_train.py:687 Checkpoint policy after step 20")
    assert not ways.is_lerobot_line(b"Training:  28%|##8       | 11/40 [00:11<00:11,  2.49step/s]")


def test_a_line_that_is_half_written_is_taken_when_it_is_whole(tmp_path):
    file = tmp_path / "log"
    lines = NewLines(file)
    assert lines.take() == []
    file.write_bytes(b"one\ntw")
    assert lines.take() == [b"one"]
    with file.open("ab") as opened:
        opened.write(b"o\n")
    assert lines.take() == [b"two"]


@pytest.mark.parametrize("steps", [1, 7, 40, 97, 130, 800])
def test_the_last_log_line_is_that_of_the_last_step(steps):
    assert steps % choose_log_freq(steps) == 0


def test_options_change_a_configuration_and_a_misspelt_one_is_told():
    assert find_case(TrainBench(config="expert-step", steps=9)).steps == 9
    assert find_case(TrainBench(config="expert-step")).width == CASES["expert-step"].width
    with pytest.raises(ValueError, match="did you mean expert-step"):
        find_case(TrainBench(config="expert-stop"))


def test_a_frozen_prefix_is_asked_of_lerobot_with_its_own_flag(tmp_path):
    config = RunConfig(dataset=DatasetConfig(root=("data",)), policy=PolicyConfig(path="base", train="expert"))
    program = ways.lerobot(TrainJob(config, (0, 2), num_workers=2), tmp_path)
    assert {"--policy.train_expert_only=true", "--dataset.episodes=[0, 2]", "--num_workers=2"} <= set(program.command)


def program(tmp_path: Path, code: str) -> Program:
    output = tmp_path / "output.txt"
    command = [sys.executable, "-c", code]
    return Program(command, os.environ, output, output, lambda line: line.startswith(b"step"), log_freq=5)


def test_a_program_is_watched_to_its_end(tmp_path):
    seen = watch(program(tmp_path, "print('step'); print('else'); print('step')"), timeout_s=60)
    assert [mark.optimizer_step for mark in seen.marks] == [5, 10]
    assert seen.begin_s < seen.marks[0].at_s < seen.marks[1].at_s <= seen.end_s  # both lines were seen in one look


def test_a_program_that_fails_is_told_with_its_last_words(tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)ended with code 3 after 0 lines.*no such dataset"):
        watch(program(tmp_path, "import sys; print('no such dataset'); sys.exit(3)"), timeout_s=60)


@pytest.mark.timeout(600)
def test_the_whole_command_with_lerobots_own_program(dataset_v3, tmp_path, capsys):
    """All that is measured has processes of its own; the command itself needs none."""
    small = ["--steps=6", "--batch_size=4", "--rounds=1", "--store_bytes=90000000", "--eval_split=0.2", "--alone_s=0.2"]
    few = ["--peers=lerobot", "--num_workers=1", "--eval_samples=4"]
    flags = [f"--root={dataset_v3}", f"--folder={tmp_path}", *small, *few]
    assert cli.main(["bench", "train", *flags]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    above_zero = ("samples_per_s", "over_lerobot", "share_of_ideal", "step_in_run_over_alone", "time_to_first_step_s")
    assert all(figures[name] > 0 for name in above_zero)
    assert figures["other_threads_cpu_share"] >= 0
    assert figures["over_template"] is None
    assert set(figures["held_out_error"]) == set(figures["rounds"]) == {"vlatune train", "lerobot-train"}
    assert figures["settings"]["steps"] == 6
    assert not (tmp_path / "runs").exists()
