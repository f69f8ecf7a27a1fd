"""A place of their own for what runs put among the temporary files; a run whose one worker is this process."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest


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
def without_ray_train(monkeypatch) -> Iterator[None]:
    """The one worker in this process, as Ray Train would call it in another: a start then costs no imports."""
    import torch

    from vlatune.train.driver import trainer
    from vlatune.train.worker import loop

    context = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 1)
    monkeypatch.setattr(loop.ray.train, "get_context", lambda: context)
    monkeypatch.setattr(loop, "get_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(trainer, "make_trainer", lambda work, job, **_: SimpleNamespace(fit=lambda: work({"job": job})))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
