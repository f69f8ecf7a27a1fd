"""The settings of runs that several files look at; and a place of their own for what runs put among the temporary files."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from train.two_workers_run import over_an_epoch

from vlatune.config import RunConfig


@pytest.fixture(scope="session")
def base_config(ray_local, dataset_v3, small_base) -> RunConfig:
    """One worker on the session's cluster."""
    return over_an_epoch(dataset_v3, small_base)


@pytest.fixture(scope="session")
def forked_pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Sequence[Any]], None]]:
    """Makes runs of two workers without Ray, by one process for all who ask (forked_runs.py)."""
    said = tmp_path_factory.mktemp("forked") / "stderr.txt"
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, str(Path(__file__).with_name("forked_runs.py"))]
    with (
        said.open("w") as errors,
        subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def make(jobs: Sequence[Any]) -> None:
            stdin.write(json.dumps(jobs) + "\n")
            stdin.flush()
            assert stdout.readline() == "\n", said.read_text()[-3000:]

        yield make
        stdin.close()


@pytest.fixture
def temporary(monkeypatch, tmp_path_factory) -> Iterator[Path]:
    """For this process and those it starts: other runs on the machine leave nothing here. Short, as Ray's sockets lie below."""
    folder = Path(tempfile.mkdtemp(prefix="vt", dir=Path(tmp_path_factory.getbasetemp().root) / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)  # a killed run's last processes may still write there


@pytest.fixture
def without_ray_train() -> Iterator[None]:
    from without_ray import worker_here

    with worker_here():
        yield
