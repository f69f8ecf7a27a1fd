"""Trackers follow the run folder: every point is sent once, and their failures do not affect the run."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from vlatune.config.settings import RunConfig, WandbConfig
from vlatune.run import trackers
from vlatune.run.sinks import MetricsFile
from vlatune.run.trackers import TrackerFeed, begin_wandb, make_trackers, tracked, tracked_settings


class Recorder:
    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []
        self.files: list[str] | None = None

    def send(self, optimizer_step: int, numbers: Mapping[str, float]) -> None:
        self.points.append((optimizer_step, dict(numbers)))

    def finish(self, files: list[Path]) -> None:
        self.files = [file.name for file in files]


def write_steps(folder: Path, begin: int, end: int) -> None:
    metrics = MetricsFile(folder / "metrics.jsonl")
    metrics.keep_until(begin - 1)
    for step in range(begin, end):
        by_task = {"fold, it": 0.5, "open": None}
        metrics.append({"optimizer_step": step, "loss": 1.0 / step, "loss_by_task": by_task, "note": "text"})
    metrics.close()


def write_validation(folder: Path, step: int) -> None:
    file = MetricsFile(folder / "validation.jsonl")
    file.append({"optimizer_step": step, "val_loss": 0.5, "val_action_error": 0.25})
    file.close()


def follow(folder: Path, tracker: Any, run_ids: list[str | None] | None = None) -> None:
    def begin(run_id: str | None) -> tuple[Any, str]:
        if run_ids is not None:
            run_ids.append(run_id)
        return tracker, "the-run"

    TrackerFeed(folder, {"recorder": begin}).close()


def test_points_are_sent_once_over_restarts(tmp_path):
    tracker, run_ids = Recorder(), []
    write_steps(tmp_path, 1, 6)
    write_validation(tmp_path, 4)
    follow(tmp_path, tracker, run_ids)
    write_steps(tmp_path, 4, 9)  # resumed from the checkpoint of step 3
    follow(tmp_path, tracker, run_ids)
    steps = [step for step, numbers in tracker.points if "loss" in numbers]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [(step, n) for step, n in tracker.points if "val_loss" in n] == [
        (4, {"val_loss": 0.5, "val_action_error": 0.25})
    ]
    assert run_ids == [None, "the-run"]
    assert tracker.points[0][1] == {"loss": 1.0, "loss_by_task/fold, it": 0.5}
    (tmp_path / "report.html").write_text("<html>")
    follow(tmp_path, tracker)
    assert tracker.files == ["report.html"]


def test_a_failing_tracker_is_reported_once_and_disabled(tmp_path, capsys):
    class Failing(Recorder):
        def send(self, optimizer_step: int, numbers: Mapping[str, float]) -> None:
            raise RuntimeError("no network")

    write_steps(tmp_path, 1, 4)
    follow(tmp_path, Failing())
    assert capsys.readouterr().err.count("no network") == 1


def test_a_missing_library_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    write_steps(tmp_path, 1, 3)
    with tracked(RunConfig(output_dir=str(tmp_path), wandb=WandbConfig(enable=True))):
        pass
    assert "pip install wandb" in capsys.readouterr().err


def test_settings_are_flags_without_secrets(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "abcd/efgh+secret")
    flat = tracked_settings(RunConfig(steps=3, storage_path="s3://b/abcd/efgh+secret"))
    assert flat["steps"] == "3"
    assert "efgh+secret" not in json.dumps(flat)


def test_only_tensorboard_is_enabled_by_default():
    assert make_trackers(RunConfig()).keys() == {"tensorboard"}


def test_a_hanging_tracker_delays_neither_the_others_nor_the_end_of_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "FINISH_S", 0.1)
    let_go, hangs, good = threading.Event(), threading.Event(), Recorder()

    class Hanging(Recorder):
        def send(self, optimizer_step: int, numbers: Mapping[str, float]) -> None:
            hangs.set()
            let_go.wait(60)

    class AfterIt(Recorder):
        def send(self, optimizer_step: int, numbers: Mapping[str, float]) -> None:
            hangs.wait(60)
            good.send(optimizer_step, numbers)

        def finish(self, files: list[Path]) -> None:
            done.set()

    done = threading.Event()
    monkeypatch.setattr(trackers, "POLL_S", 0.0)
    write_steps(tmp_path, 1, 4)
    feed = TrackerFeed(tmp_path, {"hanging": lambda _: (Hanging(), "1"), "other": lambda _: (AfterIt(), "2")})
    feed.close()
    assert done.wait(30)
    let_go.set()
    assert [step for step, _ in good.points] == [1, 2, 3]
    assert "hanging: " in capsys.readouterr().err
    assert json.loads((tmp_path / "logs/trackers.json").read_text())["other"]["sent"]["metrics"] == 3


def test_a_failed_tracker_continues_after_the_last_point_it_sent(tmp_path, capsys):
    class FailsAtThree(Recorder):
        def send(self, optimizer_step: int, numbers: Mapping[str, float]) -> None:
            if optimizer_step == 3:
                raise OSError("disk full")
            super().send(optimizer_step, numbers)

    first, second = FailsAtThree(), Recorder()
    write_steps(tmp_path, 1, 5)
    follow(tmp_path, first)
    assert "recorder: disk full" in capsys.readouterr().err
    follow(tmp_path, second)
    assert [step for step, _ in first.points + second.points] == [1, 2, 3, 4]


def test_tensorboard_has_every_point_once_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = RunConfig(output_dir=str(tmp_path))
    write_steps(tmp_path, 1, 5)
    with tracked(config):
        pass
    write_steps(tmp_path, 3, 8)
    write_validation(tmp_path, 6)
    with tracked(config):
        pass
    events = EventAccumulator(str(tmp_path / "logs/tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["loss", "loss_by_task/fold, it", "val_action_error", "val_loss"]
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6, 7]
    assert [(event.step, event.value) for event in events.Scalars("val_action_error")] == [(6, 0.25)]


FOLLOWED_BY_WANDB = """
import sys
from vlatune.config.settings import RunConfig, WandbConfig
from vlatune.run.trackers import tracked
with tracked(RunConfig(output_dir=sys.argv[1], wandb=WandbConfig(enable=True, project="test"))):
    pass
"""


def test_wandb_has_every_point_once_after_a_resume(tmp_path):
    """Each start is a program, because wandb's process writes its files until the program ends."""
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]
    from wandb.sdk.internal.datastore import DataStore

    def follow_in_a_program() -> None:
        words = [sys.executable, "-c", FOLLOWED_BY_WANDB, str(tmp_path)]
        subprocess.run(words, env=os.environ | {"WANDB_MODE": "offline"}, check=True, timeout=300)

    write_steps(tmp_path, 1, 5)
    follow_in_a_program()
    write_steps(tmp_path, 3, 8)
    write_validation(tmp_path, 6)
    follow_in_a_program()
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


@pytest.mark.parametrize("folder", ["wandb", ".wandb"])
def test_wandb_settings_in_the_working_directory_are_rejected(tmp_path, monkeypatch, folder):
    """They could choose the server that gets the API key."""
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "settings").write_text("[default]\nbase_url = http://127.0.0.1:9\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="WANDB_BASE_URL"):
        begin_wandb(WandbConfig(enable=True, mode="offline"), "job", tmp_path / "run", {}, None)
