"""Usage errors: one line on stderr, exit code 2, no traceback, nothing started, nothing left behind.

A wrong path is reported before anything heavy is imported: that makes the answer quick on any machine.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vlatune import cli

HEAVY = ("torch", "lerobot", "ray", "transformers", "pyarrow", "cv2", "av", "fsspec")
PROGRAM = f"""
import sys
from vlatune import cli
code = cli.main(sys.argv[1:])
print([name for name in {HEAVY} if name in sys.modules], code)
"""


def run(*words: str, at: Path) -> tuple[list[str], str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], cwd=at, capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("eval", "runs/fold"), "'runs/fold' is not a run folder: there is no such folder; did you mean runs/folds?"),
        (("eval", "runs/folds"), "'runs/folds' is not a run folder: it has no config.json"),
        (("eval", "run", "--dataset.root=nowhere"), "dataset 'nowhere': there is no such folder"),
        (("export", "nowhere", "exported"), "'nowhere' is not a run folder: there is no such folder"),
        (("report", "nowhere"), "'nowhere' is not a run folder: there is no such folder"),
        (("report", "run", "nowhere"), "'nowhere' is not a run folder: there is no such folder"),
        (("doctor", "--config_path=nowhere.json"), "--config_path=nowhere.json: No such file"),
    ],
)
def test_a_wrong_path_is_a_usage_error_without_heavy_imports(words, message, tmp_path):
    (tmp_path / "runs/folds").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text("{}")
    lines, error = run(*words, at=tmp_path)
    assert lines == ["[] 2"]
    assert message in error


def test_doctor_reports_all_wrong_paths_at_once_without_heavy_imports(tmp_path):
    words = (
        "--recipe=tiny",
        "--dataset.root=nowhere",
        "--policy.path=./no_base",
        "--resume=true",
        "--output_dir=no_run",
    )
    lines, _ = run("doctor", *words, at=tmp_path)
    assert lines[-1] == "[] 1"
    assert [line.split()[:2] for line in lines if line.startswith("fail")] == [
        ["fail", name] for name in ("dataset", "base", "run")
    ]
    assert not [line for line in lines if line.startswith("skip")]
    lines, _ = run("doctor", *words, "--json=true", at=tmp_path)
    answer = json.loads(lines[0])
    assert (answer["status"], answer["page"]) == ("fail", None)
    assert [one["check"] for one in answer["findings"]] == ["dataset", "base", "run"]
    assert list(tmp_path.iterdir()) == []


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


def test_a_batch_larger_than_the_dataset_as_a_shell_sees_it(flags):
    """Rejected as late as possible, in a new process: nothing that was imported by then has printed anything."""
    words = [sys.executable, "-m", "vlatune.cli", "train", *flags({"batch_size": 4096})]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "less than one global batch of 4096" in only_line(done.returncode, done.stdout, done.stderr)
