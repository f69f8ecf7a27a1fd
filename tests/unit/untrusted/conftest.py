"""Copies of a valid dataset, policy and run for a test to damage, and a command runner that checks what must never happen."""

import json
import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import pytest
import ray.data  # noqa: F401 (registers the Arrow types that unpickle, as `from vlatune import read_lerobot` does)
from run_copies import copy_run
from unit.untrusted.run_without_training import make_run

from vlatune import cli

CANARY = "canary-4f1d-must-not-be-printed"


class Sandbox:
    """Folders are copied when they are first used."""

    def __init__(self, folder: Path, originals: dict[str, Path]) -> None:
        self.folder, self._originals = folder, originals
        self.out, self.outside, self.marker = folder / "out", folder / "outside", folder / "code-ran"
        (self.outside / "00000001").mkdir(parents=True)
        (self.outside / "00000001/precious").write_text(CANARY)
        (self.outside / "secret.json").write_text(json.dumps({"secret": CANARY}))

    @cached_property
    def dataset(self) -> Path:
        return Path(shutil.copytree(self._originals["dataset"], self.folder / "dataset"))

    @cached_property
    def dataset_v21(self) -> Path:
        return Path(shutil.copytree(self._originals["dataset_v21"], self.folder / "dataset_v21"))

    @cached_property
    def base(self) -> Path:
        return Path(shutil.copytree(self._originals["base"], self.folder / "base"))

    @cached_property
    def run(self) -> Path:
        return copy_run(self._originals["run"], self.folder / "run")

    def train_flags(self, **others: object) -> list[str]:
        """Return flags that would train; `dataset` and `base` replace the sandbox's."""
        dataset, base = others.get("dataset", self.dataset), others.get("base", self.base)
        return [f"--dataset.root={dataset}", f"--policy.path={base}", f"--output_dir={self.out}", "--batch_size=4"]

    def resume_flags(self) -> list[str]:
        flags = [f"--dataset.root={self.dataset}", f"--policy.path={self.base}", f"--output_dir={self.run}"]
        settings = ["--steps=20", "--dataset.run_length=4", "--dataset.window_rows=8", "--policy.train=heads"]
        return ["--resume=true", *flags, "--batch_size=4", *settings]


@pytest.fixture(scope="session")
def originals(dataset_v3, dataset_v21, small_base, tmp_path_factory) -> dict[str, Path]:
    run = tmp_path_factory.mktemp("original") / "run"
    make_run(dataset_v3, small_base, run)
    return {"dataset": dataset_v3, "dataset_v21": dataset_v21, "base": small_base, "run": run}


@pytest.fixture
def sandbox(originals: dict[str, Path], tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path, originals)


@pytest.fixture
def vlatune(sandbox: Sandbox, capsys, monkeypatch) -> Callable[..., str]:
    """Run a command in this process and return its output on one line.

    No payload runs, nothing outside is changed or printed, no output folder is created, and the
    output has neither a traceback nor control characters.
    """

    def not_rejected(*_: object) -> None:
        raise AssertionError("the input was accepted: Ray would have been started")

    monkeypatch.setattr("vlatune.train.driver.launch.local_ray", not_rejected)

    def run(*words: object, code: int, mentions: str) -> str:
        before = contents(sandbox.outside)
        found = cli.main([str(word) for word in words])
        captured = capsys.readouterr()
        output = captured.out + captured.err
        assert (found, mentions in " ".join(output.split())) == (code, True), output
        assert "Traceback" not in output
        assert "(traceback" not in output
        assert all(char.isprintable() or char == "\n" for char in output), repr(output)
        assert CANARY not in output
        assert contents(sandbox.outside) == before
        assert not sandbox.marker.exists()
        assert not sandbox.out.exists()
        return " ".join(output.split())

    return run


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
