"""The settings of runs that several files look at; and a place of their own for what runs put among the temporary files."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from train.two_workers_run import over_an_epoch

from vlatune.config import RunConfig


@pytest.fixture(scope="session")
def base_config(ray_local, dataset_v3, small_base) -> RunConfig:
    """One worker on the session's cluster."""
    return over_an_epoch(dataset_v3, small_base)


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
