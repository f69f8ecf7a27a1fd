"""What the terminal shows: a pure function of a `View`; and what feeds it, over restarts, and when it breaks."""

import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vlatune.config import RunConfig
from vlatune.report.run_folder import RunFolder
from vlatune.report.sinks import MetricsFile
from vlatune.report.verdict import interval_verdict
from vlatune.train.driver import progress
from vlatune.train.driver.progress import Progress, View, lines, sparkline, to_renderable, what_starts

NO_WORKERS = SimpleNamespace(states=())
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def record(step: int) -> dict[str, Any]:
    numbers = {"loss": 1 / step, "grad_norm": 1.0, "lr": 1e-3, "samples_per_s": 9.0, "wait_share": 0.0, "step_s": 0.5}
    return {"optimizer_step": step, **numbers, "object_store_bytes": 0}


def shown(text: str) -> list[int]:
    return [int(line.split()[1].partition("/")[0]) for line in text.splitlines() if line.startswith("step")]


def view(**changes: Any) -> View:
    told = record(1200) | {"loss": 0.0312, "kept_share": 0.01, "kept_by": None, "object_store_bytes": 112_000_000}
    told |= {"loss_by_task": {"fold \x1b[2Jthe [bold]towel ▁": 0.25, "open": 0.125, "push": None}}
    given: dict[str, Any] = {
        "name": "fold",
        "total_steps": 3000,
        "elapsed_s": 130.0,
        "step": 1200,
        "newest": told,
        "to_go_s": 195.0,
        "losses": [1.0, 0.5, 0.25, 0.125],
        "errors": {1000: 0.0499, 1100: 0.0521},
        "restarts": 1,
        "checkpoints": [500, 1000],
        "store_bytes": 600_000_000,
    }
    return View(**given | changes)


def test_everything_is_told():
    told = dict(lines(view(), 78))
    assert told["fold"].startswith("step 1,200 of 3,000 ━")
    assert told["fold"].endswith(" 40%")
    assert told["loss"] == "0.0312  █▅▃▁  grad 1.00  rate 1.0e-03"
    assert told["hardest"] == "0.2500  fold ?[2Jthe [bold]towel ▁"
    assert told["held out"] == "0.0521 at 1,100, best 0.0499 at 1,000"
    assert told["speed"] == "9 samples/s, 500 ms a step, data wait 0 %"
    assert told["held up by"] == "nothing, it computes"
    assert told["store"] == "112 MB of 600 MB, 19 %"
    assert told["time"] == "2 min 10 s gone, about 3 min 15 s to go; 1 restart"
    assert told["saved"] == "2 checkpoints, the newest of step 1,000"


@pytest.mark.parametrize("width", [20, 59, 78, 300])
@pytest.mark.parametrize("state", [view(), view(newest={}, waits_for="workers" * 30), view(name="x" * 90, errors={})])
@pytest.mark.parametrize("plain", [False, True])
def test_no_line_is_wider_than_the_terminal(width, state, plain):
    made = lines(state, width, plain=plain)
    assert all(len(f"{what:<{progress.LABEL_CHARS}}{text}") <= width for what, text in made)
    assert not plain or "".join(what + text for what, text in made).isascii()
    drawn = to_renderable(state, width, plain=plain).plain.split("\n")
    assert len(drawn) == len(made)


def test_before_the_first_line_it_says_what_it_waits_for():
    told = dict(lines(view(newest={}, step=0, waits_for="the model", to_go_s=None, checkpoints=[], errors={}), 78))
    assert told.keys() == {"fold", "waits for", "time", "saved"}
    assert told["waits for"] == "the model"
    assert told["saved"] == "0 checkpoints"
    assert dict(lines(view(checkpoints=None), 78))["saved"] == "checkpoints elsewhere"
    again = dict(lines(view(waits_for="the model"), 78))  # after a restart what is known stays
    assert again.keys() >= {"loss", "waits for"}
    assert "speed" not in again


def test_the_phases_of_a_start():
    loading, reading = SimpleNamespace(moves=0), SimpleNamespace(moves=3)
    told = [what_starts(states, 2, 10) for states in ([], [loading, reading], [reading, reading])]
    assert told[0].startswith("2 workers: Ray starts them")
    assert told[1] == "the model to be loaded, the first batch to be read"
    assert told[2] == "step 10, whose line is the first"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"wait_share": 0.2, "kept_share": 0.01}, "data 20 %"),
        ({"wait_share": 0.1, "kept_share": 0.3, "kept_by": "readers"}, "readers 30 %, data 10 %"),
        ({"kept_share": 0.3, "kept_by": "own process"}, "own process 30 %"),
        ({"kept_share": 0.3, "kept_by": "other load", "idle_share": 0.1}, "other load 30 %"),
        ({"kept_share": 0.3, "kept_by": "other load", "idle_share": 0.5}, "a limit 30 %"),
        ({"kept_share": 0.04, "wait_share": 0.04, "kept_by": "readers"}, "nothing, it computes"),
        ({"wait_share": 0.0, "kept_share": None}, "not by data; more is not known here"),
        ({"spilled_bytes": 3_000_000, "wait_share": 0.5}, "the object store: 3 MB spilled"),
    ],
)
def test_what_holds_a_run_up_is_told_in_the_verdicts_words(line, words):
    assert interval_verdict(line) == words


def test_a_sparkline_is_no_wider_than_asked_and_knows_flat_and_negative_losses():
    assert sparkline([], 8) == ""
    assert sparkline([0.5] * 3, 8) == "▁▁▁"
    assert sparkline([1.0, -1.0], 8) == "█▁"
    assert len(sparkline([float(one) for one in range(1, 1000)], 24)) == 24


def make(tmp_path: Path, **changes: Any) -> Progress:
    return Progress(RunFolder(tmp_path), RunConfig(steps=20, output_dir=str(tmp_path), **changes))


@pytest.fixture
def by_hand(monkeypatch) -> None:
    monkeypatch.setattr(progress, "POLL_S", 3600.0)  # the test looks


@pytest.mark.usefixtures("by_hand")
def test_all_steps_are_shown_once_although_the_file_was_cut_and_grew_again_between_two_looks(tmp_path, capsys):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    following = make(tmp_path)
    following.begin(NO_WORKERS, from_step=0, restarts=0)
    for step in range(1, 8):
        metrics.append(record(step))
    following._look()
    following.begin(NO_WORKERS, from_step=4, restarts=1)
    assert following.view().waits_for is not None
    assert following.view().newest["optimizer_step"] == 7  # still told, though it is made again
    metrics.keep_until(4)
    following._look()
    assert following.view().waits_for is not None  # lines of before are no steps of this attempt
    assert following.view().step == 4
    for step in range(5, 13):  # longer than it was, with line ends at other places
        metrics.append(record(step) | {"note": "x" * step})
    following._look()
    assert following.view().losses == [1 / step for step in range(1, 13)]
    assert (following.view().step, following.view().restarts) == (12, 1)
    following.close()
    assert shown(capsys.readouterr().out) == list(range(1, 13))


@pytest.mark.usefixtures("by_hand")
def test_a_run_that_goes_on_knows_what_was_before_and_nothing_of_what_is_made_again(tmp_path, monkeypatch):
    make_terminal(monkeypatch)
    metrics, held_out = MetricsFile(tmp_path / "metrics.jsonl"), MetricsFile(tmp_path / "validation.jsonl")
    for step in range(1, 8):
        metrics.append(record(step))
        held_out.append({"optimizer_step": step, "val_loss": 1.0, "val_action_error": 1 / step})
    following = make(tmp_path)
    following._look()
    following.begin(NO_WORKERS, from_step=5, restarts=0)
    told = following.view()
    assert (told.step, len(told.losses), max(told.errors)) == (5, 5, 5)
    following.close()


def test_being_kept_from_computing_is_told_where_it_matters():
    hindered = record(1) | {"kept_share": 0.23, "kept_by": "readers"}
    assert "wait 0.0%  kept 23% (readers)  store" in progress.describe(hindered)
    for calm in ({}, {"kept_share": None, "kept_by": None}, {"kept_share": 0.04, "kept_by": "readers"}):
        assert "kept" not in progress.describe(record(1) | calm)


@pytest.mark.usefixtures("by_hand")
def test_a_line_that_is_being_written_is_left_for_later(tmp_path, capsys):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    following = make(tmp_path)
    metrics.append(record(1))
    with metrics.path.open("a") as file:
        file.write('{"optimizer_step": 2, "lo')
    following._look()
    following.close()
    assert shown(capsys.readouterr().out) == [1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        """All that was drawn, also what was drawn over, line by line."""
        return ESCAPES.sub("", self.getvalue()).replace("\r", "\n")


def make_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """In a test's body: between a fixture and the test pytest puts its own stdout there."""
    monkeypatch.setattr(sys, "stdout", made := Terminal())
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("TERM", "xterm-256color")
    return made


@pytest.mark.usefixtures("by_hand")
def test_a_view_goes_and_leaves_two_plain_lines_and_the_cursor(tmp_path, monkeypatch):
    terminal = make_terminal(monkeypatch)
    metrics, before = MetricsFile(tmp_path / "metrics.jsonl"), sys.stdout
    following = make(tmp_path)
    following.begin(NO_WORKERS, from_step=0, restarts=0)
    following._look()
    assert "Ray starts them" in terminal.text()
    metrics.append(record(20) | {"loss_by_task": {"a\x1b]0;title\x07": 2.0, "b": 1.0}})
    following._look()
    following.close()
    assert sys.stdout is before
    assert "\x1b]0;" not in terminal.getvalue()
    assert "2.0000  a?]0;title?" in terminal.text()
    assert all(len(line) <= 60 for line in terminal.text().splitlines()[:-2])
    assert "\x1b[?25h" in terminal.getvalue()  # the cursor is there again
    last = terminal.text().splitlines()[-2:]
    assert last[0] == ("step 20/20  loss 0.0500  grad 1.00  lr 1.0e-03  9 samples/s  wait 0.0%  store 0 MB")
    assert re.search(r"; 0 checkpoints; 0 restarts$", last[1])


@pytest.mark.usefixtures("by_hand")
def test_a_view_that_breaks_is_said_once_and_plain_lines_go_on(tmp_path, monkeypatch, capsys):
    terminal = make_terminal(monkeypatch)

    def breaks(*_: Any, **__: Any) -> None:
        raise ValueError("no such glyph")

    monkeypatch.setattr(progress, "to_renderable", breaks)
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    following = make(tmp_path)
    for step in (1, 2, 3):
        metrics.append(record(step))
        following._look_guarded()
    following.close()
    assert capsys.readouterr().err.count("the view of the run broke (no such glyph)") == 1
    assert shown(terminal.text()) == [2, 3]


@pytest.mark.usefixtures("by_hand")
def test_a_terminal_that_is_gone_ends_nothing(tmp_path, monkeypatch):
    terminal = make_terminal(monkeypatch)
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    following = make(tmp_path)

    def gone(_: str) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(terminal, "write", gone)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=gone, flush=lambda: None, isatty=lambda: True))
    metrics.append(record(1))
    following._look_guarded()
    following.close()


@pytest.mark.usefixtures("by_hand")
def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(tmp_path, monkeypatch):
    terminal = make_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    following = make(tmp_path)
    metrics.append(record(1))
    following.close()
    assert shown(terminal.getvalue()) == [1]
    assert "\x1b" not in terminal.getvalue()
