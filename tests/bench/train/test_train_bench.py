"""What `vlatune bench train` makes of what it sees; and the command itself on a small run of ours. LeRobot's own program is in
`test_lerobot_program.py`.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from summaries import summary

from vlatune import cli
from vlatune.bench.harness import Results
from vlatune.bench.options import PolicyBench, TrainBench
from vlatune.bench.processes import (
    OTHERS,
    READERS,
    TRAINING,
    Cores,
    CpuMeter,
    CpuSeries,
    Mark,
    NewLines,
    Program,
    Reading,
    Seen,
    part_of,
    split_cores,
    watch,
)
from vlatune.bench.results_table import BARS, rows_of
from vlatune.bench.train import train_programs as ways
from vlatune.bench.train.time_to_quality import Course, over_lerobot, wanted_error
from vlatune.bench.train.train_bench import OURS, PEERS, Figures, OurRound, print_report
from vlatune.bench.train.train_cases import CASES, TrainJob, choose_log_freq, find_case
from vlatune.bench.train.train_figures import (
    Alone,
    CpuPerSample,
    ErrorPoint,
    RunFigures,
    Window,
    break_even_epochs,
    figures_of,
    first_step_at,
    measured_checkpoints,
    seconds_to_error,
    share_of_ideal,
    share_of_predicted,
    sharing_explains,
    split_as_told,
    steady_window,
    step_in_run_s,
)
from vlatune.config import DatasetConfig, PolicyConfig, RunConfig
from vlatune.policies.registry import PACKAGES

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


def test_a_pinned_step_shares_its_core_with_nobody():
    alone, cpu = Alone(0.004, 0.004, 0.003), CpuPerSample(0.004, 0.0002, 0.003, 0.001)
    assert sharing_explains(alone, cpu, cores=2, pinned=True) == 1.0
    assert share_of_predicted(200.0, alone, cores=2, pinned=True) == pytest.approx(0.8)
    slow_reading = replace(alone, read_cpu_s=0.012)
    assert share_of_predicted(100.0, slow_reading, cores=4, pinned=True) == pytest.approx(0.4)  # three cores read
    assert share_of_predicted(100.0, slow_reading, cores=2, pinned=True) == pytest.approx(1.2)


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


def course(seconds: float, *errors: float) -> Course:
    points = tuple(ErrorPoint(20 * place, error) for place, error in enumerate(errors))
    return Course(points, Seen(0.0, 99.0, marks_every(seconds, 6), series([0.0, 1.0])))


COURSES = {
    "lerobot": course(10.0, 1.0, 0.7, 0.5, 0.4),
    "ours, 1 draws": course(2.0, 1.0, 0.7, 0.5, 0.4),
    "ours, 4 draws": course(1.0, 1.0, 0.4),
    "ours, 8 draws": course(1.0, 1.0, 0.9),
}


def test_the_error_to_reach_lies_a_little_above_lerobots_last():
    courses = COURSES | {"began there": course(1.0, 0.3, 0.2)}
    assert wanted_error(courses, None) == pytest.approx(0.44)
    assert wanted_error(courses, 0.45) == 0.45
    sooner = over_lerobot(courses, 0.5, ["ours, 1 draws", "ours, 8 draws", "began there"])
    assert sooner == {"ours, 1 draws": pytest.approx(5.0), "ours, 8 draws": None, "began there": None}


def test_one_lucky_checkpoint_has_not_reached_an_error():
    lucky = course(1.0, 1.0, 0.3, 0.7, 0.2)
    assert [point.error for point in lucky.curve] == pytest.approx([1.0, 0.5, 0.5, 0.2])
    assert lucky.seconds_to(0.35) == pytest.approx((5.0 - first_step_at(lucky.seen.marks), 5.0))  # at step 50
    assert course(1.0, 1.0, 0.3, 0.9, 0.6).seconds_to(0.5) is None


def test_an_error_that_was_reached_before_the_first_checkpoint_is_called_rough():
    assert not COURSES["lerobot"].is_rough(0.44)
    assert COURSES["ours, 4 draws"].is_rough(0.44)
    assert not COURSES["ours, 8 draws"].is_rough(0.44)  # never reached
    assert not COURSES["ours, 1 draws"].is_rough(0.6)


@pytest.mark.parametrize("count", [1, 2, 7, 16, 40])
def test_errors_are_measured_more_often_at_the_beginning_and_always_at_the_end(count):
    places = measured_checkpoints(count)
    assert (places[0], places[-1]) == (1, count)
    gaps = np.diff(places)[:-1]
    assert (np.diff(gaps) >= 0).all()
    assert len(places) <= 2 * np.log2(count) + 2


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
    assert find_case(TrainBench(config="expert-step")).width == CASES["pi05"]["expert-step"].width
    with pytest.raises(ValueError, match="did you mean expert-step"):
        find_case(TrainBench(config="expert-stop"))


@pytest.mark.parametrize("kind", PACKAGES)
def test_every_policy_has_a_configuration_by_its_type_alone(kind):
    options = TrainBench(policy=PolicyBench(kind))
    assert find_case(options) == CASES[kind]["demo" if kind == "pi05" else "video"]
    assert find_case(replace(options, config="video")).image_size > 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--policy.type=act", "--config=expert-step"], "--policy.type=act has no such configuration; there are demo"),
        (["--policy.type=acd"], "--policy.type=acd: must be one of"),
        (["--policy.type=diffusion", "--width=64"], "--width=64: --config=video trains a model of its own size"),
        (["--peers=torch"], "--peers=torch: must be one of lerobot, template, augmented"),
        (["--output=nowhere/results.jsonl"], "must be a file in a folder that exists"),
        (["--checkpoints=0"], "--checkpoints=0: must be 1 or more"),
    ],
)
def test_mistakes_are_named(flags, says, capsys):
    assert cli.main(["bench", "train", *flags]) == 2
    assert says in capsys.readouterr().err


def lerobot_flags(tmp_path: Path, kind: str, train: str, **settings: Any) -> set[str]:
    policy = PolicyConfig(path="base", type=kind, train=train, **settings)
    config = RunConfig(dataset=DatasetConfig(root=("data",)), policy=policy, torch_threads=1)
    program = ways.lerobot(TrainJob(config, (0, 2), num_workers=2), tmp_path)
    assert program.env["OMP_NUM_THREADS"] == "1"  # as many as ours, where the benchmark decides
    assert {"--dataset.episodes=[0, 2]", "--num_workers=2"} <= set(program.command)
    return set(program.command)


def test_what_is_trained_is_asked_of_lerobot_with_its_own_flags(tmp_path):
    assert {"--policy.train_expert_only=true", "--policy.dtype=float32"} <= lerobot_flags(tmp_path, "pi05", "expert")
    whole = lerobot_flags(tmp_path, "smolvla", "full")
    assert {"--policy.train_expert_only=false", "--policy.freeze_vision_encoder=false"} <= whole
    assert not any(flag.startswith("--policy.dtype") for flag in whole)  # it has none
    rates = lerobot_flags(tmp_path, "act", "full", overrides={"optimizer_lr_backbone": 0.5})
    assert "--policy.optimizer_lr_backbone=0.5" in rates
    assert not any("scheduler" in flag for flag in rates)


def recorded(*, steps: int = 40) -> Figures:
    """Two rounds of ours and one of LeRobot's, as they could have been seen."""

    def figures(samples_per_s: float) -> RunFigures:
        cpu = CpuPerSample(0.008, 0.0002, 0.004, 0.001)
        return RunFigures(samples_per_s, samples_per_s / 2, 20.0, cpu, 0.04, steady_share=0.7, slowest_over_fastest=0.9)

    ours = [OurRound(Alone(0.008, 0.008, 0.004), step_s=0.0088, summary=summary(optimizer_steps=steps))] * 2
    results = Results({OURS: [100.0, 120.0], PEERS["lerobot"]: [25.0, 24.0]}, {PEERS["template"]: "it cannot"})
    by_way = {OURS: [figures(100.0), figures(120.0)], PEERS["lerobot"]: [figures(25.0), figures(24.0)]}
    return Figures(results, by_way, ours, {OURS: 0.1, PEERS["lerobot"]: 0.2}, dict(COURSES))


def printed(capsys, options: TrainBench, figures: Figures) -> tuple[str, dict[str, Any]]:
    config = RunConfig(
        dataset=DatasetConfig(root=("data",)), policy=PolicyConfig(path="base", type=options.policy.type)
    )
    print_report(options, TrainJob(config, (0,), 2, epoch_samples=1000), figures)
    text = capsys.readouterr().out
    return text, json.loads(text.splitlines()[-1])


CONTRACT = {"samples_per_s", "over_lerobot", "over_template", "share_of_ideal", "step_in_run_over_alone"}
CONTRACT |= {"other_threads_cpu_share", "time_to_first_step_s", "time_to_quality_over_lerobot"}
CONTRACT |= {"commit", "versions", "hardware", "settings"}


def test_the_last_line_of_what_was_seen(capsys):
    text, last = printed(capsys, TrainBench(config="demo", quality=True), recorded())
    assert last.keys() >= CONTRACT
    assert last["over_lerobot"] == pytest.approx(4.5)  # 4 in one round, 5 in the other
    assert last["step_in_run_over_alone"] == pytest.approx(1.1)
    assert last["share_of_predicted"] == pytest.approx(0.88)  # of 125 samples a second, which the step alone makes
    assert last["over_template"] is None
    assert last["not_run"] == {PEERS["template"]: "it cannot"}
    assert last["held_out_error"] == {OURS: 0.1, PEERS["lerobot"]: 0.2}
    assert "4.50 x" in text
    assert "sharing the cores explains" in text


def test_kept_features_are_told_with_their_start_and_when_they_pay(capsys):
    figures = recorded()
    later = [replace(run, samples_per_s=4 * run.samples_per_s, first_step_s=50.0) for run in figures.by_way[OURS]]
    figures.by_way = {**figures.by_way, PEERS["kept"]: later}
    figures.results = Results({**figures.results.rounds, PEERS["kept"]: [400.0, 480.0]}, {})
    text, last = printed(capsys, TrainBench(config="demo"), figures)
    assert last["kept_over_plain"] == pytest.approx(4.0)
    assert (last["time_to_first_step_s"], last["kept_first_step_s"]) == (20.0, 50.0)
    saved_s = 1000 * 0.75 * np.mean([1 / 100, 1 / 120])  # an epoch
    assert last["kept_break_even_epochs"] == pytest.approx(30 / saved_s)
    assert "4.00 x the samples/s; the first step after 50.0 s, without them 20.0 s: it pays from" in text
    assert break_even_epochs(later, figures.by_way[OURS], 1000) is None


def test_seconds_to_an_error_that_are_rough_say_so(capsys):
    text, last = printed(capsys, TrainBench(config="demo", quality=True), recorded())
    assert last["time_to_quality_over_lerobot"] == pytest.approx(5.0)
    assert last["time_to_quality_is_rough"] is False  # neither LeRobot's nor ours with one draw
    assert last["quality"]["rough"] == ["ours, 4 draws"]
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("ours, 4 draws")] == ["rough"]
    assert "reached before the first checkpoint" in text
    figures = recorded()
    del figures.courses["ours, 4 draws"]
    text, last = printed(capsys, TrainBench(config="demo", quality=True), figures)
    assert last["quality"]["rough"] == []
    assert "reached before the first checkpoint" not in text
    figures.courses["lerobot"] = course(10.0, 1.0, 0.4)
    assert printed(capsys, TrainBench(config="demo", quality=True), figures)[1]["time_to_quality_is_rough"] is True


def test_every_bar_is_a_figure_of_the_last_line(capsys):
    _, last = printed(capsys, TrainBench(config="demo"), recorded())
    for bar in BARS["train"]:
        assert all(name in last for name in bar.figure.split("/"))
    _, pinned = printed(capsys, TrainBench(policy=PolicyBench("act"), config="video", pin=True), recorded())
    (row,) = rows_of(pinned)
    assert (row.of, row.figure, row.is_met) == ("act, video, pinned", "step_in_run_over_alone", False)


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


PINNED = """
import os, subprocess, sys, threading, time
training, rest = ({int(core)} for core in sys.argv[1:])
ends = threading.Event()
thread = threading.Thread(target=ends.wait)
thread.start()
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print("step", flush=True)
until = time.monotonic() + 60
where = lambda: [os.sched_getaffinity(one) for one in (0, thread.native_id, child.pid)]
while where() != [training, rest, rest] and time.monotonic() < until:
    time.sleep(0.01)
print("step", flush=True)
child.communicate(b"x")
ends.set()
sys.exit(0 if time.monotonic() < until else 4)
"""


def test_the_thread_that_trains_gets_a_core_and_all_others_the_rest(tmp_path):
    usable = sorted(os.sched_getaffinity(0))
    training, rest = usable[0], usable[-1]
    watched = program(tmp_path, PINNED)
    watched = replace(watched, command=[*watched.command, str(training), str(rest)])
    seen = watch(watched, timeout_s=120, cores=Cores(frozenset([training]), frozenset([rest])))
    assert len(seen.marks) == 2
    assert sorted(os.sched_getaffinity(0)) == usable


def test_pinning_needs_a_second_core():
    assert split_cores([1, 0]) == Cores(frozenset([0]), frozenset([1]))
    with pytest.raises(ValueError, match="--pin=true: this process may use one core alone"):
        split_cores([3])


@pytest.mark.timeout(600)
def test_the_whole_command(dataset_v3, tmp_path, capsys):
    """All that is measured has processes of its own; the command itself needs none. What it appends to a file, `bench table` reads."""
    small = [
        "--steps=2",
        "--batch_size=2",
        "--rounds=1",
        "--store_bytes=90000000",
        "--eval_split=0.2",
        "--alone_s=0.05",
    ]
    results = tmp_path / "results.jsonl"
    few = ["--peers=[]", "--eval_samples=2", f"--output={results}"]
    flags = [f"--root={dataset_v3}", f"--folder={tmp_path}", *small, *few]
    assert cli.main(["bench", "train", *flags]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert results.read_text() == last + "\n"
    figures = json.loads(last)
    above_zero = ("samples_per_s", "share_of_ideal", "step_in_run_over_alone", "time_to_first_step_s")
    assert all(figures[name] > 0 for name in above_zero)
    assert figures["other_threads_cpu_share"] >= 0
    assert figures["over_lerobot"] is figures["over_template"] is None
    assert set(figures["held_out_error"]) == set(figures["rounds"]) == {OURS}
    assert (figures["settings"]["steps"], figures["settings"]["config"]) == (2, "demo")
    assert not (tmp_path / "runs").exists()
    assert cli.main(["bench", "table", str(results)]) == 0
    assert "| train | pi05, demo | over_lerobot | not measured | >= 2.3 |" in capsys.readouterr().out
