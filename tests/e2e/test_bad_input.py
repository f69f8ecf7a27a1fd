"""Usage errors of `vlatune train`: one line on stderr, exit code 2, no traceback, nothing started, nothing left behind."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from summaries import summary

from vlatune import cli
from vlatune.run.summary import write_summary


@pytest.fixture
def flags(dataset_v3, small_base, tmp_path) -> Callable[..., list[str]]:
    """Return a function that makes the flags of a run with changes."""
    (tmp_path / "empty").mkdir()
    given = {"dataset.root": dataset_v3, "policy.path": small_base, "output_dir": tmp_path / "run"}
    return lambda changes: [f"--{name}={value}" for name, value in (given | changes).items()]


def only_line(code: int, out: str, err: str) -> str:
    assert code == 2, err
    assert err.count("\n") == 1, err
    assert "Traceback" not in err + out
    return err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset.root": "no/such/folder"}, "there is no such folder"),
        ({"dataset.root": "empty"}, "no meta/info.json"),
        ({"dataset.episodes": "[999]"}, "999"),
        ({"dataset.on_bad_episode": "ignore"}, "--dataset.on_bad_episode=ignore: expected one of fail, skip"),
        ({"dataset.storage_options": '{"secret": "hunter2"}'}, "'secret' looks like a secret"),
        ({"batchsize": 4}, "did you mean --batch_size"),
    ],
)
def test_a_wrong_flag_is_rejected_before_ray_starts(changes, message, flags, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vlatune.train.driver.launch.local_ray", pytest.fail)
    line = only_line(cli.main(["train", *flags(changes)]), *capsys.readouterr())
    assert message in line
    assert "hunter2" not in line
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_not_overwritten(flags, tmp_path: Path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    write_summary(tmp_path / "run", summary(optimizer_steps=7))
    code = cli.main(["train", *flags({"batch_size": 4})])
    assert "already holds a finished run of 7 steps" in only_line(code, *capsys.readouterr())


def test_a_batch_larger_than_the_dataset_as_a_shell_sees_it(flags):
    """Rejected as late as possible, in a new process: nothing that was imported by then has printed anything."""
    words = [sys.executable, "-m", "vlatune.cli", "train", *flags({"batch_size": 4096})]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "less than one global batch of 4096" in only_line(done.returncode, done.stdout, done.stderr)
