"""Names from a dataset (tasks, cameras) reach trackers, the terminal and reports without control characters or markup."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from vlatune.run.trackers import TrackerFeed, begin_tensorboard

NAME = "<script>alert(1)</script>\n\x1b]0;owned\x07\x1b[2J\u202e"


class RecordingTracker:
    def __init__(self) -> None:
        self.names: list[str] = []

    def send(self, optimizer_step: int, numbers: Mapping[str, float]) -> None:
        self.names += numbers

    def finish(self, files: list[Path]) -> None: ...


@pytest.fixture
def run(sandbox) -> Path:
    record = {"optimizer_step": 3, "loss": 0.5, "loss_by_task": {NAME: 0.5}}
    with (sandbox.run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    return sandbox.run


def test_trackers_get_no_control_characters(run) -> None:
    tracker = RecordingTracker()
    TrackerFeed(run, {"recording": lambda _: (tracker, "1"), "tensorboard": lambda _: begin_tensorboard(run)}).close()
    (events,) = (run / "logs/tensorboard").glob("*tfevents*")
    tags = [value.tag for event in EventFileLoader(str(events)).Load() for value in event.summary.value]
    for names in (tracker.names, tags):
        assert any(name.startswith("loss_by_task/<script>") for name in names)
        assert all(name.isprintable() for name in names)
