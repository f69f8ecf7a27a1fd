"""Trackers follow the run folder: every point once over restarts, their failures are nobody's, read back by their own libraries."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from vlatune.config import MlflowConfig, RunConfig, WandbConfig
from vlatune.report.run_folder import RunFolder
from vlatune.report.sinks import MetricsFile
from vlatune.train.driver.trackers import TrackerFeed, flat_settings, make_trackers, tracked


class Recorder:
    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []
        self.files: list[str] | None = None

    def send(self, optimizer_step: int, numbers: Mapping[str, float]) -> None:
        self.points.append((optimizer_step, dict(numbers)))

    def finish(self, files: list[Path]) -> None:
        self.files = [file.name for file in files]


def write_steps(folder: Path, begin: int, end: int) -> None:
    metrics = MetricsFile(RunFolder(folder).metrics)
    metrics.keep_until(begin - 1)
    for step in range(begin, end):
        metrics.append({"optimizer_step": step, "loss": 1.0 / step, "kept_by": "readers"})
    metrics.close()


def write_validation(folder: Path, step: int) -> None:
    file = MetricsFile(RunFolder(folder).validations)
    file.append({"optimizer_step": step, "val_loss": 0.5, "val_action_error": 0.25})
    file.close()


def follow(folder: Path, tracker: Any, run_ids: list[str | None] | None = None) -> None:
    def begin(run_id: str | None) -> tuple[Any, str]:
        if run_ids is not None:
            run_ids.append(run_id)
        return tracker, "the-run"

    TrackerFeed(folder, {"recorder": begin}).close()


def test_points_go_out_once_however_often_a_run_is_started_again(tmp_path):
    tracker, run_ids = Recorder(), []
    write_steps(tmp_path, 1, 6)
    write_validation(tmp_path, 4)
    follow(tmp_path, tracker, run_ids)
    write_steps(tmp_path, 4, 9)  # goes on from the checkpoint of step 3
    follow(tmp_path, tracker, run_ids)
    steps = [step for step, numbers in tracker.points if "loss" in numbers]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [(step, n) for step, n in tracker.points if "val_loss" in n] == [
        (4, {"val_loss": 0.5, "val_action_error": 0.25})
    ]
    assert run_ids == [None, "the-run"]
    assert all("kept_by" not in numbers for _, numbers in tracker.points)


def test_the_report_goes_along_at_the_end(tmp_path):
    tracker = Recorder()
    write_steps(tmp_path, 1, 2)
    (tmp_path / "report.html").write_text("<html>")
    follow(tmp_path, tracker)
    assert tracker.files == ["report.html"]


def test_a_tracker_that_fails_is_said_once_and_left_alone(tmp_path, capsys):
    class Failing(Recorder):
        def send(self, optimizer_step: int, numbers: Mapping[str, float]) -> None:
            raise RuntimeError("no network")

    write_steps(tmp_path, 1, 4)
    follow(tmp_path, Failing())
    assert capsys.readouterr().err.count("no network") == 1


def test_a_library_that_is_missing_does_not_end_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    write_steps(tmp_path, 1, 3)
    with tracked(RunConfig(output_dir=str(tmp_path), mlflow=MlflowConfig(enable=True))):
        pass
    assert "mlflow: it is not installed; `pip install 'mlflow-skinny'`" in capsys.readouterr().err


def test_settings_are_flags_without_secrets(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "abcd/efgh+secret")
    flat = flat_settings({"dataset": {"root": ["s3://b/abcd/efgh+secret"]}, "steps": 3, "rename_map": {}})
    assert flat["steps"] == "3"
    assert "efgh+secret" not in json.dumps(flat)


def test_nothing_is_started_without_being_asked_for():
    assert make_trackers(RunConfig()) == {}


@pytest.mark.early
def test_wandb_offline_has_every_point_once_after_a_killed_and_resumed_run(tmp_path, monkeypatch):
    """Read back by wandb's own reader of its files."""
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]
    from wandb.sdk.internal.datastore import DataStore

    monkeypatch.setenv("WANDB_MODE", "offline")
    config = RunConfig(output_dir=str(tmp_path), wandb=WandbConfig(enable=True, project="test"))
    write_steps(tmp_path, 1, 5)
    with tracked(config):
        pass
    write_steps(tmp_path, 3, 8)
    write_validation(tmp_path, 6)
    with tracked(config):
        pass
    steps: list[int] = []
    errors: list[float] = []
    ids = set()
    for file in sorted(tmp_path.rglob("*.wandb")):
        store = DataStore()
        store.open_for_scan(str(file))
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                if "loss" in row:
                    steps.append(row["optimizer_step"])
                if "val_action_error" in row:
                    errors.append(row["val_action_error"])
    assert steps == [1, 2, 3, 4, 5, 6, 7]
    assert errors == [0.25]
    assert len(ids) == 1


@pytest.mark.early
def test_mlflow_on_a_folder_has_every_point_once_after_a_killed_and_resumed_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    uri = str(tmp_path / "mlruns")
    config = RunConfig(output_dir=str(tmp_path / "run"), mlflow=MlflowConfig(enable=True, tracking_uri=uri))
    (tmp_path / "run").mkdir()
    write_steps(tmp_path / "run", 1, 5)
    with tracked(config):
        pass
    write_steps(tmp_path / "run", 3, 8)
    with tracked(config):
        pass
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("vlatune").experiment_id])
    assert [point.step for point in client.get_metric_history(run.info.run_id, "loss")] == [1, 2, 3, 4, 5, 6, 7]
    assert run.data.params["steps"] == "3000"
