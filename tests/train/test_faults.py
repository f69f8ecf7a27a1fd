"""Workers end at any moment, for real, and the run is to the last bit the one that nobody disturbed.

Two workers, several restarts in one run: a start costs half a minute. `-m slow` goes through every named point.
"""

import json
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import faults as faults_module
import pytest
from checkpoint.upload_server import environment, running_upload_server
from dataset.storage.loopback_s3 import BUCKET
from faults import POINTS, SAVE_POINTS, Fault, worker_with

from vlatune.checkpoint.store import list_checkpoints
from vlatune.config import DatasetConfig, OptimizerConfig, PolicyConfig, RunConfig
from vlatune.report.sinks import read_jsonl
from vlatune.train.driver.launch import train
from vlatune.train.worker import loop

STEPS, SAVE_FREQ = 24, 4
EPOCH = 11
"""Steps of an epoch: 85 frames, the last of its batches uneven and filled up."""


@pytest.fixture(scope="module")
def config(ray_local, dataset_v3, small_base) -> RunConfig:
    return RunConfig(
        dataset=DatasetConfig(root=(str(dataset_v3),), eval_split=0.0, run_length=4, window_rows=8, drop_last=False),
        policy=PolicyConfig(path=str(small_base), train="expert"),
        optimizer=OptimizerConfig(lr=1e-3, ema_decay=0.9),
        num_workers=2,
        batch_size=4,
        steps=STEPS,
        log_freq=1,
        save_freq=SAVE_FREQ,
        save_every_s=0.0,
        keep_checkpoints=1,
        log_samples=True,
        max_restarts=2,
    )


@pytest.fixture(scope="module")
def clean(config, tmp_path_factory) -> Path:
    """The undisturbed run."""
    return run(config, tmp_path_factory.mktemp("clean"))


@pytest.fixture
def arm(monkeypatch, tmp_path):
    """Workers of this test's runs meet these faults."""
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(faults_module)
    marks = tmp_path / "faults"
    marks.mkdir()

    def arm(faults: Sequence[Fault], environment: Mapping[str, str] | None = None) -> Path:
        monkeypatch.setattr(loop, "run_worker", worker_with(tuple(faults), marks, dict(environment or {})))
        return marks

    yield arm
    ray.cloudpickle.unregister_pickle_by_value(faults_module)


def run(config: RunConfig, folder: Path) -> Path:
    train(replace(config, output_dir=str(folder / "run")))
    return folder / "run"


def numbers(run_dir: Path) -> list[tuple[int, float, float]]:
    return [(line["optimizer_step"], line["loss"], line["grad_norm"]) for line in read_jsonl(run_dir / "metrics.jsonl")]


def weights(run_dir: Path) -> dict[str, bytes]:
    (newest,) = list_checkpoints(run_dir)
    return {file.name: file.read_bytes() for file in newest.glob("*.safetensors")}


def assert_same(run_dir: Path, clean: Path) -> None:
    assert numbers(run_dir) == numbers(clean)
    assert read_jsonl(run_dir / "samples.jsonl") == read_jsonl(clean / "samples.jsonl")
    assert weights(run_dir) == weights(clean)


def assert_all_met(faults: Sequence[Fault], marks: Path, run_dir: Path) -> None:
    """A save goes on beside the next steps: two faults may end one attempt, but none may be missed."""
    assert [fault for fault in faults if not fault.file(marks).exists()] == []
    assert 1 <= summary(run_dir)["restarts"] <= len(faults)


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def test_the_undisturbed_run_crosses_an_epoch_with_an_uneven_end(clean):
    lines = read_jsonl(clean / "metrics.jsonl")
    assert [line["epoch"] for line in lines] == [(step - 1) // EPOCH for step in range(1, STEPS + 1)]
    assert summary(clean)["restarts"] == 0


@pytest.mark.timeout(900)
def test_killed_twice_and_stopped_in_an_epoch_and_killed_at_its_end(config, clean, arm, tmp_path, capsys):
    """The save at step 8 has ended before the one at 12 begins, so each fault ends an attempt of its own.

    On a machine so slow that others seem to hang as well, the stopped one is among those that were found.
    """
    stopped = Fault("forward", 14, rank=1, signal=signal.SIGSTOP)
    faults = [Fault("all-reduce", 6, rank=1), Fault("save: removing", 8), stopped]
    faults += [Fault("data wait", 2 * EPOCH + 1, rank=1)]
    marks = arm(faults)
    run_dir = run(replace(config, hang_timeout_s=20.0, max_restarts=10), tmp_path)
    assert_same(run_dir, clean)
    assert [fault for fault in faults if not fault.file(marks).exists()] == []
    hangs = [file.read_text() for file in (run_dir / "logs").glob("hang-*.txt")]
    assert summary(run_dir)["restarts"] == len(faults) - 1 + len(hangs)
    (stacks,) = [text for text in hangs if "rank 1: stopped by a signal" in text]
    assert "rank 0: running" in stacks
    assert "optimizer.py" in stacks  # where it stood
    assert re.search(r"rank 1 did nothing for .* its process was stopped by a signal", capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_while_uploading(config, clean, arm, tmp_path, monkeypatch):
    """Checkpoints in an object store: the manifest comes last, so what is there is whole."""
    faults = [Fault("save: uploading", 8), Fault("save: uploaded", 12), Fault("save: removing", 16)]
    with running_upload_server() as server:
        for name, value in environment(server).items():
            monkeypatch.setenv(name, value)
        marks = arm(faults, environment(server))
        run_dir = run(replace(config, storage_path=f"s3://{BUCKET}/runs"), tmp_path)
    assert numbers(run_dir) == numbers(clean)
    assert read_jsonl(run_dir / "samples.jsonl") == read_jsonl(clean / "samples.jsonl")
    assert_all_met(faults, marks, run_dir)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_at_every_point(config, clean, arm, tmp_path, rank):
    """Each once, in one run: at different steps, so that each finds the others' checkpoints."""
    points = POINTS if rank else (*POINTS, *SAVE_POINTS)
    points = tuple(point for point in points if rank == 0 or point != "report")
    faults = [Fault(point, _step(place, point), rank) for place, point in enumerate(points)]
    marks = arm(faults)
    run_dir = run(replace(config, max_restarts=len(faults)), tmp_path)
    assert_same(run_dir, clean)
    assert_all_met(faults, marks, run_dir)


def _step(place: int, point: str) -> int:
    """Points of a save at a step that saves and has a checkpoint before it."""
    return 8 + SAVE_FREQ * (place % 4) if point.startswith("save") else 5 + place
