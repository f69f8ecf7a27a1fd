"""What a person gets wrong: one clear line on the terminal, exit code 2, no traceback, nothing started."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from summaries import summary

from vlatune import cli
from vlatune.report.summary import write_summary


@pytest.fixture
def refused(capsys, monkeypatch):
    """Words of a command -> the one line that it prints when it is refused."""
    monkeypatch.delenv("VLATUNE_TRACEBACK", raising=False)
    monkeypatch.setattr("vlatune.train.driver.launch.local_ray", not_refused)

    def refused(*words: str) -> str:
        code = cli.main([*words])
        return only_line(code, *capsys.readouterr())

    return refused


def not_refused(*_: object) -> None:
    raise AssertionError("Ray would have been started")


def only_line(code: int, out: str, err: str) -> str:
    lines = err.strip().splitlines()
    assert code == 2, err
    assert len(lines) == 1, err
    assert "Traceback" not in err + out
    return lines[0]


@pytest.fixture
def flags(dataset_v3, small_base, tmp_path) -> list[str]:
    return [f"--dataset.root={dataset_v3}", f"--policy.path={small_base}", f"--output_dir={tmp_path / 'run'}"]


def test_dataset_folder_that_does_not_exist(refused, flags):
    assert "there is no such folder" in refused("train", "--dataset.root=no/such/folder", *flags[1:])


def test_dataset_without_info(refused, flags, tmp_path):
    (tmp_path / "empty").mkdir()
    line = refused("train", f"--dataset.root={tmp_path / 'empty'}", *flags[1:])
    assert "no meta/info.json" in line
    assert "--dataset.root" in line


def test_unknown_recipe(refused, flags):
    assert "did you mean" in refused("train", "--recipe=pi05-head", *flags)


def test_misspelt_flag(refused, flags):
    assert "did you mean --batch_size" in refused("train", "--batchsize=4", *flags)


def test_batch_of_nothing(refused, flags):
    assert "--batch_size=0" in refused("train", "--batch_size=0", *flags)


def test_finished_run(refused, flags, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    write_summary(run, summary(optimizer_steps=7))
    assert "already holds a finished run of 7 steps" in refused("train", "--batch_size=4", *flags)


def test_batch_larger_than_the_dataset_as_a_shell_sees_it(flags):
    """A process of its own, refused as late as it can be: nothing that was imported by then has printed anything."""
    words = [sys.executable, "-m", "vlatune.cli", "train", "--batch_size=4096", *flags]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "less than one global batch of 4096" in only_line(done.returncode, done.stdout, done.stderr)


def test_camera_that_the_policy_does_not_know(refused, flags, small_base, tmp_path):
    config = json.loads((Path(small_base) / "config.json").read_text())
    features = config["input_features"]
    config["input_features"] = {name.replace("images.", "images.eye_"): value for name, value in features.items()}
    other = Path(shutil.copytree(small_base, tmp_path / "other"))
    (other / "config.json").write_text(json.dumps(config))
    line = refused("train", flags[0], f"--policy.path={other}", flags[2])
    assert "--rename_map" in line
    assert "observation.images.eye_top" in line


def test_nothing_is_left_behind(refused, flags, tmp_path):
    refused("train", "--batch_size=0", *flags)
    refused("train", "--dataset.episodes=[999]", *flags)
    assert not (tmp_path / "run").exists()


def test_eval_of_something_that_is_no_run(refused, tmp_path):
    assert "is not a run folder" in refused("eval", str(tmp_path))


def test_bad_episodes_are_failed_or_skipped_and_nothing_else(refused, flags):
    line = refused("train", "--dataset.on_bad_episode=ignore", *flags)
    assert "--dataset.on_bad_episode=ignore: expected one of fail, skip" in line


def test_a_secret_in_storage_options_is_refused_and_left_nowhere(refused, flags, tmp_path):
    line = refused("train", '--dataset.storage_options={"secret": "hunter2"}', *flags)
    assert "'secret' looks like a secret" in line
    assert "hunter2" not in line
    assert not (tmp_path / "run").exists()
