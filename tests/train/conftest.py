"""Runs that several files look at, each made once; and a place of their own for what runs put among the temporary files."""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from vlatune.config import DatasetConfig, OptimizerConfig, PolicyConfig, RunConfig


@pytest.fixture(scope="session")
def base_config(ray_local, dataset_v3, small_base) -> RunConfig:
    """Over the end of an epoch, which is uneven and filled up, into the next."""
    return RunConfig(
        dataset=DatasetConfig(root=(str(dataset_v3),), eval_split=0.2, run_length=4, window_rows=8, drop_last=False),
        policy=PolicyConfig(path=str(small_base), train="full"),
        optimizer=OptimizerConfig(lr=1e-3),
        steps=12,
        batch_size=8,
        log_freq=1,
        save_freq=5,
        eval_freq=4,
        eval_samples=10,
        log_samples=True,
        max_restarts=0,
    )


@pytest.fixture(scope="session")
def two_workers_config(base_config) -> RunConfig:
    """The same global batches over two workers; averaged weights and one checkpoint are kept."""
    averaged = replace(base_config.optimizer, ema_decay=0.9)
    return replace(base_config, num_workers=2, batch_size=4, optimizer=averaged, save_every_s=0.0, keep_checkpoints=1)


@pytest.fixture(scope="session")
def two_workers_run(two_workers_config, tmp_path_factory) -> Path:
    """Two workers, undisturbed."""
    from vlatune.train.driver.launch import train

    folder = tmp_path_factory.mktemp("runs") / "two"
    train(replace(two_workers_config, output_dir=str(folder)))
    return folder


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
