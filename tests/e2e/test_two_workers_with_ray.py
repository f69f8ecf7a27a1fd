"""Two workers by `vlatune train`, one of which is stopped by a signal: the run equals the undisturbed one to the last bit, and one worker's."""

import re
from dataclasses import replace

import pytest
from local_runs import assert_same_run, run_locally, run_pair, threads_of
from two_workers_run import over_an_epoch

from vlatune.run.sinks import read_jsonl
from vlatune.run.summary import read_summary
from vlatune.run_setup import make_setup

pytestmark = [pytest.mark.timeout(900)]


def test_stopped_worker_is_detected_and_its_stacks_are_recorded(two_workers_run):
    """On a slow machine other workers may seem to hang as well."""
    folder, config = two_workers_run.folder, two_workers_run.config
    order = make_setup(config).order
    assert order.num_samples % order.global_batch  # the run crosses an epoch with an incomplete last batch
    assert config.save_freq < two_workers_run.stopped.count < order.batches_per_epoch < config.steps
    hangs = [file.read_text() for file in (folder / "logs").glob("hang-*.txt")]
    summary = read_summary(folder)
    assert summary is not None
    assert summary.restarts == len(hangs)
    (stacks,) = [text for text in hangs if "rank 1: stopped by a signal" in text]
    assert "rank 0: running" in stacks
    assert "optimizer.py" in stacks  # where it was stopped
    assert re.search(r"rank 1 made no progress for \d+ s .*stopped by a signal", two_workers_run.printed)


def test_restarted_run_equals_the_undisturbed_one(two_workers_run, tmp_path):
    clean = replace(two_workers_run.config, output_dir=str(tmp_path / "run"))
    run_pair(clean, torch_threads=threads_of(two_workers_run.folder))
    assert_same_run(two_workers_run.folder, clean.run_dir)


def test_two_workers_use_the_samples_of_one_and_learn_the_same(two_workers_run, dataset_v3, small_base, tmp_path):
    config = replace(over_an_epoch(dataset_v3, small_base), output_dir=str(tmp_path / "run"))
    folders = (two_workers_run.folder, run_locally(config, threads_of(two_workers_run.folder)))
    assert (folders[0] / "samples.jsonl").read_bytes() == (folders[1] / "samples.jsonl").read_bytes()
    for ours, theirs in zip(*(read_jsonl(folder / "metrics.jsonl") for folder in folders), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
        assert ours["loss_by_dim"] == pytest.approx(theirs["loss_by_dim"], rel=1e-2)
    by_episode = [
        {(one["dataset"], one["episode"]): one for one in summary.loss_by_episode}
        for summary in map(read_summary, folders)
        if summary
    ]
    assert by_episode[0].keys() == by_episode[1].keys() != set()
    for key, one in by_episode[0].items():
        assert one["samples"] == by_episode[1][key]["samples"]
        assert one["loss"] == pytest.approx(by_episode[1][key]["loss"], rel=1e-2)
