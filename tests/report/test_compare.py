"""Several runs on one page; a page that is written while a run goes on."""

import json
from functools import partial
from pathlib import Path

import pytest
from summaries import summary

from vlatune import cli
from vlatune.report.html import watch, write_report
from vlatune.report.summary import write_summary

HOSTILE = "<script>alert(1)</script>"


def make_run(folder: Path, *, lr: float = 1e-3, root: str = "/data/a", finished: bool = True) -> Path:
    folder.mkdir(parents=True)
    config = {"job_name": folder.name, "steps": 400, "dataset": {"root": [root]}, "optimizer": {"lr": lr}}
    (folder / "config.json").write_text(json.dumps(config))
    lines = [{"optimizer_step": step, "loss": 1.0 / step, "lr": lr, "samples_per_s": 30.0} for step in range(1, 20)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    looked = [{"optimizer_step": step, "val_loss": 0.5, "val_action_error": 0.3 / step} for step in (5, 10)]
    (folder / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in looked))
    if finished:
        write_summary(folder, summary(best_validation={"optimizer_step": 10, "action_error": 0.03}))
    return folder


def test_runs_are_drawn_over_each_other_and_what_differs_is_listed(tmp_path, capsys):
    first, second = make_run(tmp_path / "first"), make_run(tmp_path / "second", lr=2e-3, root=f"/data/{HOSTILE}")
    file = tmp_path / "both.html"
    assert cli.main(["report", str(first), str(second), f"--output={file}"]) == 0
    page = file.read_text()
    assert capsys.readouterr().out.strip() == str(file)
    assert page.count('class="run0"') >= 3  # loss, validation, speed, rate: a curve in each chart
    assert page.count('class="run1"') >= 3
    assert "optimizer.lr" in page
    assert "0.002" in page
    assert "0.03 at step 10" in page
    assert HOSTILE not in page
    assert ">steps<" not in page  # the same in both
    assert page.count("<script") == 1
    assert page.count("<li>") == 2  # the verdicts, first
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path, capsys):
    runs = [make_run(tmp_path / where / "fold", lr=lr) for where, lr in (("a", 1e-3), ("b", 2e-3))]
    file = tmp_path / "both.html"
    assert cli.main(["report", *map(str, runs), f"--output={file}"]) == 0
    assert "a/fold" in file.read_text()
    assert cli.main(["report", str(runs[0]), str(runs[0]), f"--output={file}"]) == 2
    assert "the same run folder is given twice" in capsys.readouterr().err


def test_more_runs_than_colours_are_refused(tmp_path, capsys):
    runs = [make_run(tmp_path / str(number)) for number in range(7)]
    assert cli.main(["report", *map(str, runs)]) == 2
    assert "7 runs: at most 6" in capsys.readouterr().err


def test_a_page_is_written_again_until_the_run_is_finished(tmp_path):
    run, said, slept = make_run(tmp_path / "run", finished=False), [], []

    def sleep(seconds: float) -> None:
        slept.append((run / "report.html").read_text())
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"optimizer_step": 20 + len(slept), "loss": 0.01}) + "\n")
        if len(slept) == 2:
            write_summary(run, summary())

    watch(lambda: write_report(run), [run], every_s=1.0, say=said.append, sleep=sleep)
    assert len(slept) == 2
    assert "not finished: 19 optimizer steps" in slept[0]
    assert "not finished: 21 optimizer steps" in slept[1]
    assert "not finished" not in (run / "report.html").read_text()
    assert "Ctrl-C" in said[0]


def test_a_wrong_pace_is_named(tmp_path):
    with pytest.raises(ValueError, match="--every_s=0"):
        watch(lambda: tmp_path, [make_run(tmp_path / "run")], every_s=0, say=lambda _: None)


def test_a_comparison_is_watched_until_all_runs_are_finished(tmp_path, monkeypatch, capsys):
    done, going = make_run(tmp_path / "done"), make_run(tmp_path / "going", finished=False)
    file, slept = tmp_path / "both.html", []

    def sleep(seconds: float) -> None:
        slept.append((seconds, file.read_text()))
        write_summary(going, summary())

    monkeypatch.setattr("vlatune.report.html.watch", partial(watch, sleep=sleep))
    assert cli.main(["report", str(done), str(going), f"--output={file}", "--watch=true", "--every_s=3"]) == 0
    ((seconds, page),) = slept
    assert seconds == 3.0
    assert 'http-equiv="refresh"' in page
    assert 'http-equiv="refresh"' not in file.read_text()
    assert "until all runs are finished" in capsys.readouterr().out


def test_one_run_can_be_written_elsewhere(tmp_path, capsys):
    run, file = make_run(tmp_path / "run"), tmp_path / "page.html"
    assert cli.main(["report", str(run), f"--output={file}"]) == 0
    assert file.exists()
    assert not (run / "report.html").exists()
