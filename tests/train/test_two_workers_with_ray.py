"""Two workers by `vlatune train`, one of which stops for good on the way: it is to the last bit the run that nobody disturbed, and learns
what one worker learns.

The undisturbed runs are made without Ray, fed with the rows that the order names: that Ray changes nothing of a run is shown in
test_end_to_end.py.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from driving import validation_curve
from train.two_workers_run import over_an_epoch
from without_ray import run_without_ray, threads_of

from vlatune.checkpoint.store import list_checkpoints
from vlatune.config import to_json
from vlatune.report.sinks import read_jsonl
from vlatune.report.summary import read_summary
from vlatune.run_setup import make_setup

pytestmark = [pytest.mark.early, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def clean(forked_pairs, two_workers_run, tmp_path_factory) -> Path:
    """Two workers, undisturbed."""
    folder = tmp_path_factory.mktemp("clean") / "run"
    config = replace(two_workers_run.config, output_dir=str(folder))
    job = {"config": to_json(config), "faults": [], "threads": threads_of(two_workers_run.folder)}
    forked_pairs([job])
    return folder


@pytest.fixture(scope="module")
def alone(two_workers_run, dataset_v3, small_base, tmp_path_factory) -> Path:
    """The same batches by one worker."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run_without_ray(
        replace(over_an_epoch(dataset_v3, small_base), output_dir=str(folder)), threads_of(two_workers_run.folder)
    )
    return folder


def weights(run_dir: Path) -> dict[str, bytes]:
    (newest,) = list_checkpoints(run_dir)
    return {file.name: file.read_bytes() for file in newest.glob("*.safetensors")}


def test_it_crosses_an_epoch_with_an_uneven_end_and_is_stopped_before_it(two_workers_run):
    config = two_workers_run.config
    order = make_setup(config).order
    assert order.num_samples % order.global_batch
    epoch = order.batches_per_epoch
    assert config.save_freq < two_workers_run.stopped.optimizer_step < epoch == 2 * config.save_freq
    lines = read_jsonl(two_workers_run.folder / "metrics.jsonl")
    assert [line["epoch"] for line in lines] == [(step - 1) // epoch for step in range(1, config.steps + 1)]


def test_a_stopped_worker_is_found_and_said(two_workers_run):
    """On a machine so slow that others seem to hang as well, it is among those that were found."""
    folder = two_workers_run.folder
    assert two_workers_run.stopped.file(folder.parent).exists()
    hangs = [file.read_text() for file in (folder / "logs").glob("hang-*.txt")]
    told = read_summary(folder)
    assert told is not None
    assert told.restarts == len(hangs)
    (stacks,) = [text for text in hangs if "rank 1: stopped by a signal" in text]
    assert "rank 0: running" in stacks
    assert "optimizer.py" in stacks  # where it stood
    assert re.search(r"rank 1 did nothing for .* its process was stopped by a signal", two_workers_run.printed)


def test_it_is_the_undisturbed_run_to_the_last_bit(two_workers_run, clean):
    ours, theirs = (read_jsonl(folder / "metrics.jsonl") for folder in (two_workers_run.folder, clean))
    for key in ("optimizer_step", "loss", "loss_by_task", "loss_by_dim", "grad_norm", "lr", "epoch", "samples_seen"):
        assert [line[key] for line in ours] == [line[key] for line in theirs], key
    assert read_jsonl(two_workers_run.folder / "samples.jsonl") == read_jsonl(clean / "samples.jsonl")
    assert validation_curve(two_workers_run.folder) == validation_curve(clean) != []
    assert weights(two_workers_run.folder) == weights(clean)


def test_two_workers_take_the_same_samples_and_learn_the_same_as_one(two_workers_run, alone):
    assert (two_workers_run.folder / "samples.jsonl").read_bytes() == (alone / "samples.jsonl").read_bytes()
    ours, theirs = (read_jsonl(folder / "metrics.jsonl") for folder in (two_workers_run.folder, alone))
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=1e-3)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss_by_dim"] == pytest.approx(other["loss_by_dim"], rel=1e-2)
        told = [
            {name: loss for name, loss in line["loss_by_task"].items() if loss is not None} for line in (mine, other)
        ]
        assert told[0] == pytest.approx(told[1], rel=1e-2)
    by_run = [read_summary(folder) for folder in (two_workers_run.folder, alone)]
    places = [{(one["dataset"], one["episode"]): one for one in run.loss_by_episode} for run in by_run if run]
    assert places[0].keys() == places[1].keys() != set()
    for place, one in places[0].items():
        assert one["samples"] == places[1][place]["samples"]
        assert one["loss"] == pytest.approx(places[1][place]["loss"], rel=1e-2)
