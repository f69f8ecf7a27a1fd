"""Terminal output of a run: a progress bar, or log lines; over restarts, and after errors."""

import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vlatune.config.settings import RunConfig
from vlatune.run.sinks import MetricsFile
from vlatune.train.driver.progress import Progress


def record(step: int) -> dict[str, Any]:
    numbers = {"loss": 1 / step, "grad_norm": 1.0, "lr": 1e-3, "samples_per_s": 9.0, "wait_share": 0.0, "step_s": 0.5}
    return {"optimizer_step": step, **numbers, "object_store_bytes": 0}


def shown(text: str) -> list[int]:
    return [int(line.split()[1].partition("/")[0]) for line in text.splitlines() if line.startswith("step")]


@pytest.fixture
def metrics(tmp_path) -> MetricsFile:
    return MetricsFile(tmp_path / "metrics.jsonl")


def begun(folder: Path, steps: int = 20) -> Progress:
    progress = Progress(folder, RunConfig(steps=steps, output_dir=str(folder)))
    progress.begin(from_step=0, restarts=0)
    return progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        """Return everything that was drawn, without escape sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue()).replace("\r", "\n")


def make_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    for name, value in {"COLUMNS": "90", "LINES": "24", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    return terminal


def test_each_step_is_printed_once_over_a_restart(tmp_path, metrics, capsys):
    progress = begun(tmp_path)
    for step in range(1, 8):
        metrics.append(record(step))
    progress.update()
    progress.begin(from_step=4, restarts=1)
    metrics.keep_until(4)
    progress.update()
    for step in range(5, 13):
        metrics.append(record(step) | {"note": "x" * step})
    progress.close()
    assert shown(capsys.readouterr().out) == list(range(1, 13))


def test_about_twenty_lines_are_printed_with_the_time_left(tmp_path, metrics, capsys):
    progress = begun(tmp_path, steps=1000)
    with metrics.path.open("a") as file:
        file.write('{"optimizer_step": 5, "lo')  # incomplete: read later
    progress.update()
    metrics.path.write_text("")
    for step in (10, 20, 50, 1000):
        metrics.append(record(step))
    progress.close()
    lines = capsys.readouterr().out.splitlines()
    assert shown("\n".join(lines)) == [10, 50, 1000]
    assert [bool(re.search(r"about \d+ min \d+ s left", line)) for line in lines] == [True, True, False]


def test_progress_bar_is_replaced_by_the_last_line(tmp_path, metrics, monkeypatch):
    terminal = make_terminal(monkeypatch)
    validations, stdout = MetricsFile(tmp_path / "validation.jsonl"), sys.stdout
    progress = begun(tmp_path)
    progress.update()
    assert "0/20" in terminal.text()
    validations.append({"optimizer_step": 10, "val_loss": 1.0, "val_action_error": 0.25})
    metrics.append(record(20))
    progress.close()
    assert sys.stdout is stdout
    assert "20/20" in terminal.text()
    assert "\x1b[?25h" in terminal.getvalue()  # the cursor is visible again
    assert terminal.text().splitlines()[-1].strip().startswith("step 20/20  loss 0.0500  held out 0.2500  grad 1.00")


def test_lost_terminal_stops_nothing(tmp_path, metrics, monkeypatch):
    terminal = make_terminal(monkeypatch)
    progress = begun(tmp_path)

    def fail(_: str) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(terminal, "write", fail)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=fail, flush=lambda: None, isatty=lambda: True))
    metrics.append(record(1))
    progress.update()
    progress.close()


def test_terminal_without_cursor_movement_gets_log_lines(tmp_path, metrics, monkeypatch):
    terminal = make_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    progress = begun(tmp_path)
    metrics.append(record(1))
    progress.close()
    assert shown(terminal.getvalue()) == [1]
    assert "\x1b" not in terminal.getvalue()
