"""A run records its data, its first batch, its starts and its checkpoints for the report."""

import json
from pathlib import Path

import numpy as np
import pytest
from local_runs import no_ray, train_flags

from vlatune import cli
from vlatune.run.kept_samples import FIRST_BATCH_FILE, TrainedSample, load_samples
from vlatune.run.sinks import read_jsonl


@pytest.fixture
def train(dataset_v3, small_base, tmp_path, capsys):
    def train(*more: str) -> Path:
        flags = train_flags(dataset_v3, small_base, f"--output_dir={tmp_path / 'run'}", *more)
        with no_ray():
            assert cli.main(["train", *flags]) == 0, capsys.readouterr().err
        return tmp_path / "run"

    return train


def test_starts_and_checkpoints_of_a_resumed_run_are_recorded(train):
    train("--steps=2", "--save_freq=1")
    run = train("--steps=3", "--save_freq=1", "--resume=true")
    events = read_jsonl(run / "events.jsonl")
    reported = [(event["event"], event["optimizer_step"]) for event in events]
    first = [("start", 0), ("checkpoint", 1), ("checkpoint", 2), ("end", 2)]
    assert reported == [*first, ("start", 2), ("checkpoint", 3), ("end", 3)]
    assert [event["time_s"] for event in events] == sorted(event["time_s"] for event in events)
    page = (run / "report.html").read_text()
    assert "Started 2 times" in page
    assert "restarted after optimizer step 2." in page


def test_the_data_and_the_first_batch_are_those_of_the_run(train, dataset_v3):
    run = train("--steps=2", "--log_samples=true")
    data = json.loads((run / "data.json").read_text())
    (dataset,) = data["datasets"]
    assert dataset["root"] == str(dataset_v3)
    assert dataset["share"] == 1.0
    assert data["num_tasks"] == len(data["tasks"]) == len(data["task_episodes"]) > 0
    assert sum(data["task_episodes"]) == dataset["episodes"], "each has one task"
    (first, *_) = read_jsonl(run / "samples.jsonl")
    shown = load_samples(run, FIRST_BATCH_FILE, TrainedSample)
    assert len(shown) == len(first["samples"]) == 4
    assert {sample.task for sample in shown} <= set(data["tasks"])
    assert all(sample.images and not sample.trained for sample in shown)
    page = (run / "report.html").read_text()
    assert f"of the {dataset['frames']:,} frames" in page
    assert f"episode {shown[0].episode_index}, frame {shown[0].frame_index}" in page


def test_augmented_images_are_in_the_first_batch(train):
    run = train("--steps=1", "--dataset.image_transforms.enable=true")
    shown = load_samples(run, FIRST_BATCH_FILE, TrainedSample)
    assert all(sample.trained.keys() == sample.images.keys() for sample in shown)
    pairs = [(sample.images[camera], sample.trained[camera]) for sample in shown for camera in sample.images]
    assert any(not np.array_equal(read, trained) for read, trained in pairs)
    assert ", augmented" in (run / "report.html").read_text()
