"""The progress lines follow metrics.jsonl, also when a restart puts a shorter file in its place."""

from pathlib import Path

from vlatune.report.sinks import MetricsFile
from vlatune.train.driver import progress
from vlatune.train.driver.progress import Progress


def record(step: int) -> dict[str, float]:
    numbers = {"loss": 1 / step, "grad_norm": 1.0, "lr": 1e-3, "samples_per_s": 9.0, "wait_share": 0.0}
    return {"optimizer_step": step, **numbers, "object_store_bytes": 0}


def shown(text: str) -> list[int]:
    return [int(line.split()[1].partition("/")[0]) for line in text.splitlines() if line.startswith("step")]


def test_all_steps_are_shown_once_although_the_file_was_cut_and_grew_again_between_two_looks(
    tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.setattr(progress, "POLL_S", 3600.0)  # the test looks
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    following = Progress(metrics.path, 20, from_step=0)
    for step in range(1, 8):
        metrics.append(record(step))
    following._show_new()
    metrics.keep_until(4)
    for step in range(5, 13):  # longer than it was, with line ends at other places
        metrics.append(record(step) | {"note": "x" * step})
    following._show_new()
    following.close()
    assert shown(capsys.readouterr().out) == list(range(1, 13))


def test_being_kept_from_computing_is_told_where_it_matters():
    hindered = record(1) | {"kept_share": 0.23, "kept_by": "readers"}
    assert "wait 0.0%  kept 23% (readers)  store" in progress.describe(hindered)
    for calm in ({}, {"kept_share": None, "kept_by": None}, {"kept_share": 0.04, "kept_by": "readers"}):
        assert "kept" not in progress.describe(record(1) | calm)


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "POLL_S", 3600.0)
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    following = Progress(metrics.path, 20, from_step=0)
    metrics.append(record(1))
    with metrics.path.open("a") as file:
        file.write('{"optimizer_step": 2, "lo')
    following._show_new()
    following.close()
    assert shown(capsys.readouterr().out) == [1]
