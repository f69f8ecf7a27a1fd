"""Comparisons of several runs, and pages that are rewritten while a run trains."""

import json
from pathlib import Path

import pytest
from summaries import summary

from vlatune import cli
from vlatune.run.summary import write_summary

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


def test_curves_are_drawn_together_and_differing_settings_are_listed(tmp_path, capsys):
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
    assert page.count("<li>") == 2  # what limited the speed of each
    assert "trained on different datasets" in page
    assert page.index(">Best validation error<") < page.index(">Final loss<") < page.index(">Samples per second<")
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")


DATA = {"root": "/data/a", "episodes": 40, "held_out": 4, "frames": 800, "share": 1.0}
NOT_COMPARABLE = "are not directly comparable"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({}, None),
        ({"seed": 7}, "held out different episodes"),
        ({"frames": 801}, "trained on different datasets"),
        ({"tasks": ["other"]}, "trained on different datasets"),
    ],
)
def test_different_data_is_a_warning_and_names_are_no_difference(tmp_path, capsys, other, message):
    runs = [make_run(tmp_path / name) for name in ("first", "second")]
    for run, changes in zip(runs, ({}, other), strict=True):
        config = json.loads((run / "config.json").read_text())
        config |= {"output_dir": str(run), "seed": changes.get("seed", 0)}
        (run / "config.json").write_text(json.dumps(config))
        dataset = DATA | {"frames": changes.get("frames", 800)}
        data = {"datasets": [dataset], "tasks": changes.get("tasks", ["fold"]), "num_tasks": 1}
        (run / "data.json").write_text(json.dumps(data))
    file = tmp_path / "both.html"
    assert cli.main(["report", *map(str, runs), f"--output={file}"]) == 0
    page = file.read_text()
    assert (NOT_COMPARABLE in page) == (message is not None)
    assert message is None or message in page
    assert ("None: the runs have the same settings." in page) == ("seed" not in other)


def test_runs_of_the_same_name_are_distinguished_by_their_folders(tmp_path, capsys):
    runs = [make_run(tmp_path / where / "fold", lr=lr) for where, lr in (("a", 1e-3), ("b", 2e-3))]
    file = tmp_path / "both.html"
    assert cli.main(["report", *map(str, runs), f"--output={file}"]) == 0
    assert "a/fold" in file.read_text()
    assert cli.main(["report", str(runs[0]), str(runs[0]), f"--output={file}"]) == 2
    assert "the same run folder is given twice" in capsys.readouterr().err


def test_more_runs_than_colors_are_rejected(tmp_path, capsys):
    runs = [make_run(tmp_path / str(number)) for number in range(7)]
    assert cli.main(["report", *map(str, runs)]) == 2
    assert "7 runs: at most 6" in capsys.readouterr().err
