"""`vlatune bench resume`: the arithmetic on a made-up run, the watch on made-up files, real processes; `-m slow` runs it all."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vlatune.bench.base_models import make_small_base
from vlatune.bench.options import ResumeBench, StepBench
from vlatune.bench.processes import Session, ends_in_order, processes_in
from vlatune.bench.resume import killed_run
from vlatune.bench.resume.killed_run import (
    FIRST_STEP,
    Comeback,
    Mark,
    MetricsFollower,
    RunFigures,
    RunWatch,
    count_kept,
    count_saves,
    stall_share,
)
from vlatune.bench.resume.resume_bench import figures, print_report, profile_rows
from vlatune.bench.resume.save_cost import OURS, TEMPLATE, TRAINED, Save, save_in_turns
from vlatune.cli import main

CONTRACT = {"checkpoint_bytes", "stall_share", "stall_share_measured", "stall_s", "restart_s", "redone_steps"}
CONTRACT |= {"driver_restart_s", "driver_redone_steps", "template_checkpoint_bytes", "template_stall_s"}
CONTRACT |= {"restart_profile_s", "driver_restart_profile_s", "commit", "versions", "hardware", "settings"}

TREE = """
import os, subprocess, sys, time
keep = [sys.executable, "-c", "import time; print('child', flush=True); time.sleep(600)"]
subprocess.Popen([*keep, "sits-below"])
orphan = f"import subprocess; subprocess.Popen({[*keep, 'lost-its-parent']!r})"
subprocess.run([sys.executable, "-c", orphan])
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def tree(tmp_path) -> Iterator[Session]:
    """A command with a child and with a grandchild whose parent is gone; all of them run."""
    output = tmp_path / "output.txt"
    with Session([sys.executable, "-c", TREE], output, env=os.environ) as session:
        while sorted(output.read_text().split()) != ["child", "child", "ready"]:
            assert session.exit_code() is None, session.tail()
            time.sleep(0.02)
        yield session


def test_a_session_holds_children_and_orphans(tree):
    titles = list(processes_in(tree.pid).values())
    assert len(titles) == 3
    assert sum(title.endswith("sits-below") for title in titles) == 1
    assert sum(title.endswith("lost-its-parent") for title in titles) == 1
    assert os.getpid() not in processes_in(tree.pid)
    assert len(tree.find(sys.executable)) == 3
    assert tree.find("ray::") == []


def test_a_killed_command_leaves_what_it_started_until_the_session_is_closed(tree):
    tree.kill_command()
    assert tree.exit_code() == -signal.SIGKILL
    assert len(processes_in(tree.pid)) == 2
    tree.close()
    assert processes_in(tree.pid) == {}
    tree.close()  # a second time there is nothing to do


def test_an_error_ends_the_session(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        Session(["sleep", "600"], tmp_path / "output.txt", env=os.environ) as session,
    ):
        raise KeyboardInterrupt
    assert processes_in(session.pid) == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_end_is_an_interrupt(number):
    def ask_this_process() -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)  # python sees it here

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), ends_in_order():
        ask_this_process()
    assert signal.getsignal(number) == before


def test_a_process_with_an_odd_name_is_read(tmp_path):
    script = tmp_path / "a) b (c"
    script.write_text("#!/bin/sh\nsleep 600\n")
    script.chmod(0o755)
    with Session([str(script)], tmp_path / "output.txt", env=os.environ) as session:
        assert session.pid in processes_in(session.pid)


def test_a_run_that_ends_too_early_is_told_with_its_last_words(tmp_path):
    words = [sys.executable, "-c", "print('the disk is full'); raise SystemExit(3)"]
    with Session(words, tmp_path / "output.txt", env=os.environ) as session:
        watch = RunWatch(session, tmp_path, timeout_s=60)
        with pytest.raises(RuntimeError, match=r"exit code 3.*\n.*the disk is full"):
            watch.wait_for_step(1)
        with pytest.raises(RuntimeError, match="exit code 3"):
            watch.wait_for_end()


def test_a_run_that_takes_too_long_is_told(tmp_path):
    with Session(["sleep", "600"], tmp_path / "output.txt", env=os.environ) as session:
        watch = RunWatch(session, tmp_path, timeout_s=0.1)
        with pytest.raises(RuntimeError, match=r"did not come to step 7 within --timeout_s=0.1"):
            watch.wait_for_step(7)


def line(step: int, loss: float = 1.0) -> str:
    return json.dumps({"optimizer_step": step, "loss": loss}) + "\n"


def replace_file(file: Path, text: str) -> None:
    aside = file.with_name("aside")
    aside.write_text(text)
    aside.replace(file)


def test_the_first_new_step_is_found_behind_what_was_kept(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(line(step) for step in range(1, 8)))
    follower = MetricsFollower(file)
    with file.open("a") as more:
        more.write(line(8) + '{"optimizer_step": 9, ')  # the old worker made a step more, and died in a line
    assert follower.first_new_step() is None
    assert follower.last_step() == 8
    replace_file(file, "".join(line(step) for step in range(1, 6)))
    assert follower.first_new_step() is None
    with file.open("a") as more:
        more.write(line(6, loss=1.5) + line(7, loss=1.5))
    assert follower.first_new_step() == 6
    assert follower.last_step() == 8


def test_nothing_redone_is_found_too(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(line(1) + line(2))
    follower = MetricsFollower(file)
    replace_file(file, line(1) + line(2))
    assert follower.first_new_step() is None
    replace_file(file, line(1) + line(2) + line(3))
    assert follower.first_new_step() == 3


def test_begun_anew_is_found_too(tmp_path):
    file = tmp_path / "metrics.jsonl"
    assert MetricsFollower(file).last_step() == 0
    follower = MetricsFollower(file)
    file.write_text(line(1))
    assert follower.first_new_step() == 1


@pytest.mark.parametrize(
    ("before", "now", "kept"), [("abc", "abx", 2), ("abc", "ab", 2), ("abc", "xbc", 0), ("ab", "abcd", 2), ("", "a", 0)]
)
def test_kept_lines(before, now, kept):
    assert count_kept([one.encode() for one in before], [one.encode() for one in now]) == kept


def test_a_comeback_is_seen_from_outside(tmp_path, monkeypatch):
    """The files of a restart appear one with each look."""
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(line(1) + line(2))
    (tmp_path / "failure-0.txt").touch()
    os.utime(tmp_path / "failure-0.txt", (1.0, 1.0))  # an older one
    acts = [
        lambda: (tmp_path / "failure-1.txt").touch(),
        lambda: replace_file(metrics, line(1)),
        lambda: ((tmp_path / "opened").touch(), metrics.write_text(line(1) + line(2, loss=3.0))),
    ]
    monkeypatch.setattr(RunWatch, "_pause", lambda *_: acts.pop(0)())
    files = {"noticed": "failure-*.txt", "never": "nowhere", "with the step": "opened"}
    marks = [*(Mark(name, file=glob) for name, glob in files.items()), Mark("process", title="sleep 600")]
    with Session(["sleep", "600"], tmp_path / "output.txt", env=os.environ) as session:
        while not session.find("sleep 600"):  # python's copy until it is replaced
            pass
        watch = RunWatch(session, tmp_path, timeout_s=60)
        begin_s = time.time() - 1.0
        found = watch.wait_for_comeback(marks, begin_s, metrics=watch.follow_metrics())
    assert (found.reached_step, found.resumed_step, found.redone_steps) == (2, 1, 1)
    assert found.seen_s["never"] is None
    for name in ("noticed", "with the step", "process"):
        at_s = found.seen_s[name]
        assert at_s is not None
        assert begin_s < at_s <= found.first_step_s


def comeback(redone: int, begin_s: float = 100.0) -> Comeback:
    seen = {"noticed": begin_s + 2.0, "never": None, "loaded": begin_s + 12.5}
    return Comeback(begin_s, seen, begin_s + 20.0, reached_step=30 + redone, resumed_step=30)


RUN = RunFigures(start_s=30.0, worker=comeback(15), driver=comeback(16), num_saves=6, stall_s=0.01, step_s=0.1)
SAVES = {
    train: {OURS: [Save(0.5, 1.0, 50), Save(0.1, 1.1, 50)], TEMPLATE: [Save(5.0, 0.0, 900), Save(3.0, 0.0, 900)]}
    for train in TRAINED
}


def test_what_a_restart_waits_for():
    profile = comeback(15).profile()
    assert profile == {"noticed": 2.0, "never": None, "loaded": 12.5, FIRST_STEP: 20.0}
    assert profile_rows(profile) == [
        ["noticed", "2.0", "2.0"],
        ["never", "not seen", ""],
        ["loaded", "12.5", "10.5"],
        [FIRST_STEP, "20.0", "7.5"],
    ]


def test_figures_of_a_made_up_run():
    found = figures(ResumeBench(interval=30), RUN, SAVES)
    assert (found["restart_s"], found["redone_steps"], found["driver_redone_steps"]) == (20.0, 15, 16)
    assert (found["checkpoint_bytes"], found["template_checkpoint_bytes"]) == (50, 900)
    assert (found["stall_s"], found["template_stall_s"]) == (pytest.approx(0.3), 4.0)
    assert found["template_stall_over_ours"] == pytest.approx(20.0)  # 10 in one round, 30 in the other
    assert found["stall_share_measured"] == pytest.approx(0.01 / 3.01)
    assert found["stall_share"] == pytest.approx(0.01 / 50.01)


def test_the_last_line_holds_every_figure(capsys):
    print_report(ResumeBench(), RUN, SAVES)
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1]).keys() >= CONTRACT
    assert any("15 after the worker's kill, 16 after the driver's, of 30" in one for one in lines)


def test_the_default_interval_is_whichever_comes_first():
    usual = {"save_freq": 500, "save_every_s": 600.0}
    assert stall_share(1.0, 0.998, **usual) == pytest.approx(1 / 500)
    assert stall_share(1.0, 60.0, **usual) == pytest.approx(1 / 600)
    assert stall_share(1.0, 3.0, save_freq=3) == pytest.approx(1 / 10)


@pytest.mark.parametrize(
    ("after", "last", "saves"), [(60, 240, 6), (60, 250, 7), (0, 29, 1), (60, 90, 1), (75, 100, 2)]
)
def test_saves_of_a_start(after, last, saves):
    assert count_saves(after, last, 30) == saves
    assert saves == sum(step % 30 == 0 or step == last for step in range(after + 1, last + 1))


def test_ours_saves_what_trains_and_the_template_the_whole_model(tmp_path):
    base = make_small_base(tmp_path / "base", StepBench())
    said: list[str] = []
    by_train = {train: save_in_turns(base, train, tmp_path, rounds=2, say=said.append) for train in TRAINED}
    for train, saves in by_train.items():
        assert {way: len(of) for way, of in saves.items()} == {OURS: 2, TEMPLATE: 2}
        assert saves[OURS][0].num_bytes < saves[TEMPLATE][0].num_bytes
        assert all(one.stall_s > 0 and one.background_s > 0 for one in saves[OURS])
        assert len(list((tmp_path / train / "checkpoints").iterdir())) == 1
    heads, expert = by_train["heads"], by_train["expert"]
    assert heads[OURS][0].num_bytes < expert[OURS][0].num_bytes
    weights = sum(path.stat().st_size for path in (tmp_path / "base").glob("*.safetensors"))
    assert heads[TEMPLATE][0].num_bytes > weights / 2  # frozen ones have half the bytes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "expert", "heads"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--steps=100"], "--steps=100: must be 120 or more, four times --interval=30"),
        (["--interval=1"], "--interval=1: must be 2 or more"),
        (["--num_workers=0"], "--num_workers=0: must be 1 or more"),
        (["--rounds=0"], "--rounds=0: must be 1 or more"),
        (["--step=9"], "unknown flag --step"),
    ],
)
def test_mistakes_are_named(flags, says, capsys):
    assert main(["bench", "resume", *flags]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_real_run_is_killed_twice_and_measured(capsys, monkeypatch):
    sessions: list[int] = []

    class Noted(Session):
        def __enter__(self) -> Session:
            sessions.append(self.pid)
            return super().__enter__()

    monkeypatch.setattr(killed_run, "Session", Noted)
    code = main(["bench", "resume", "--interval=10", "--steps=200", "--width=64", "--depth=2", "--vision_depth=1"])
    out, err = capsys.readouterr()
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert found.keys() >= CONTRACT
    for prefix in ("", "driver_"):
        assert found[f"{prefix}resumed_step"] >= 10
        assert 1 <= found[f"{prefix}redone_steps"] <= 20
        seconds = list(found[f"{prefix}restart_profile_s"].values())
        assert None not in seconds
        assert seconds == sorted(seconds)
        assert seconds[-1] == found[f"{prefix}restart_s"]
    assert 0 < found["stall_share"] < found["stall_share_measured"] < 1
    assert found["checkpoint_bytes"] < found["template_checkpoint_bytes"]
    assert len(sessions) == 2
    assert [processes_in(session) for session in sessions] == [{}, {}]
