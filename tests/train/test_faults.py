"""Workers end at every named point, with Ray, and the run is to the last bit the one that nobody disturbed: `-m slow`.

Two workers, several restarts in one run: a start costs half a minute. In `make test` the points are met without Ray
(test_every_fault.py); with Ray a worker is stopped (test_two_workers_with_ray.py) and one is killed (test_driver.py).
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import faults as faults_module
import pytest
import ray
from checkpoint.upload_server import environment, running_upload_server
from dataset.storage.loopback_s3 import BUCKET
from driving import validation_curve
from faults import POINTS, SAVE_POINTS, Fault, worker_with
from train.two_workers_run import by_two
from without_ray import run_without_ray, threads_of

from vlatune.checkpoint.store import list_checkpoints
from vlatune.config import RunConfig, to_json
from vlatune.report.sinks import read_jsonl
from vlatune.train.driver import trainer
from vlatune.train.driver.launch import train

pytestmark = pytest.mark.ray
LONGER_STEPS, LONGER_SAVE_FREQ = 24, 4


@pytest.fixture(scope="module")
def longer(base_config) -> RunConfig:
    """With more checkpoints, so that each moment of a save has one of its own."""
    return replace(by_two(base_config), max_restarts=10, steps=LONGER_STEPS, save_freq=LONGER_SAVE_FREQ)


@pytest.fixture(scope="module")
def longer_clean(longer, tmp_path_factory) -> Path:
    return run(longer, tmp_path_factory.mktemp("clean"))


@pytest.fixture
def arm(monkeypatch, tmp_path):
    """Workers of this test's runs meet these faults."""
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(faults_module)
    marks = tmp_path / "faults"
    marks.mkdir()

    def arm(faults: Sequence[Fault], environment: Mapping[str, str] | None = None) -> Path:
        monkeypatch.setattr(trainer, "run_worker", worker_with(tuple(faults), marks, dict(environment or {})))
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
    assert validation_curve(run_dir) == validation_curve(clean) != []
    assert weights(run_dir) == weights(clean)


def assert_all_met(faults: Sequence[Fault], marks: Path, run_dir: Path) -> None:
    """A save goes on beside the next steps: two faults may end one attempt, but none may be missed."""
    assert [fault for fault in faults if not fault.file(marks).exists()] == []
    assert 1 <= summary(run_dir)["restarts"] <= len(faults)


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_while_uploading(longer, longer_clean, arm, tmp_path, monkeypatch):
    """Checkpoints in an object store: the manifest comes last, so what is there is whole."""
    faults = [Fault("save: uploading", 8), Fault("save: uploaded", 12), Fault("save: removing", 16)]
    with running_upload_server() as server:
        for name, value in environment(server).items():
            monkeypatch.setenv(name, value)
        marks = arm(faults, environment(server))
        run_dir = run(replace(longer, storage_path=f"s3://{BUCKET}/runs"), tmp_path)
    assert numbers(run_dir) == numbers(longer_clean)
    assert read_jsonl(run_dir / "samples.jsonl") == read_jsonl(longer_clean / "samples.jsonl")
    assert_all_met(faults, marks, run_dir)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_at_every_point(longer, longer_clean, arm, tmp_path, rank):
    """Each once, in one run: at different steps, so that each finds the others' checkpoints."""
    points = POINTS if rank else (*POINTS, *SAVE_POINTS)
    points = tuple(point for point in points if rank == 0 or point != "report")
    faults = [Fault(point, _step(place, point), rank) for place, point in enumerate(points)]
    marks = arm(faults)
    run_dir = run(replace(longer, max_restarts=len(faults)), tmp_path)
    assert_same(run_dir, longer_clean)
    assert_all_met(faults, marks, run_dir)


ENDS_ITS_DRIVER = """
import os, sys
from pathlib import Path
import ray.cloudpickle
import faults
from vlatune import cli
from vlatune.train.driver import trainer
marks, *words = sys.argv[1:]
ray.cloudpickle.register_pickle_by_value(faults)
ends = (faults.Fault("validation", 8, pid=os.getpid()),)
trainer.run_worker = faults.worker_with(ends, Path(marks), {})
sys.exit(cli.main(words))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_driver_is_killed_in_a_validation_and_the_same_command_goes_on(base_config, tmp_path):
    """`vlatune train` as its own process, whose worker has computed a part of the second validation when it is gone."""
    run_dir, marks = tmp_path / "run", tmp_path / "faults"
    marks.mkdir()
    file = tmp_path / "run.json"
    file.write_text(json.dumps(to_json(replace(base_config, output_dir=str(run_dir)))))
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "PYTHONPATH": paths}
    command = [sys.executable, "-c", ENDS_ITS_DRIVER, str(marks), "train", f"--config_path={file}"]
    ends = [subprocess.run(command, env=env, capture_output=True, text=True, check=False) for _ in range(2)]
    assert [one.returncode for one in ends] == [-signal.SIGKILL, 0], ends[-1].stderr
    assert "continuing from " in ends[1].stdout + ends[1].stderr
    clean = tmp_path / "clean"
    run_without_ray(replace(base_config, output_dir=str(clean)), threads_of(run_dir))
    assert validation_curve(run_dir) == validation_curve(clean)
    assert numbers(run_dir) == numbers(clean)
    assert (run_dir / "samples.jsonl").read_bytes() == (clean / "samples.jsonl").read_bytes()


def _step(place: int, point: str) -> int:
    """Points of a save at a step that saves and has a checkpoint before it."""
    return 8 + LONGER_SAVE_FREQ * (place % 4) if point.startswith("save") else 5 + place
