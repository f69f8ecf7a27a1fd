"""What `vlatune bench feed` counts; the command itself, with its clusters, is `slow`."""

import itertools
import json
import subprocess
import sys
import time

import numpy as np
import pytest

from vlatune.bench.feed.feed_bench import cost_by_length
from vlatune.bench.feed.feed_consumers import WARM_UP_BATCHES, consume, read_spec
from vlatune.dataset.meta.dataset_meta import load_meta
from vlatune.pipeline.feed import MAX_QUEUED, MIN_QUEUED, QUEUED_BYTES, queued_batches

pytestmark = pytest.mark.ray


def batches(*, late_from: int, late_s: float):
    for number in itertools.count():
        if number >= late_from:
            time.sleep(late_s)
        yield {"index": np.arange(4)}


def test_waits_of_the_first_batches_do_not_count():
    done = consume(batches(late_from=0, late_s=0.02), 0.0, WARM_UP_BATCHES)
    assert (done.samples, done.waited_s, done.steady_samples) == (4 * WARM_UP_BATCHES, 0.0, 0)
    assert done.first_batch_s >= 0.02


def test_a_consumer_that_waits_as_long_as_it_computes_says_so():
    done = consume(batches(late_from=0, late_s=0.02), 0.02, WARM_UP_BATCHES + 20)
    assert done.steady_samples == 80
    assert done.waited_s >= 20 * 0.02
    assert done.busy_s >= 20 * 0.04
    assert done.waited_s < done.busy_s


def test_a_stream_that_ends_is_taken_to_its_end():
    done = consume(itertools.islice(batches(late_from=99, late_s=0.0), 5), 0.0, 1000)
    assert done.samples == 20


def test_the_cost_of_a_run_is_measured_for_every_length_below_an_episodes(dataset_v3):
    meta = load_meta(str(dataset_v3))
    costs = cost_by_length(meta, read_spec(meta))
    longest = int(meta.episodes.length.max())
    assert list(costs) == [length for length in (1, 2, 4, 8, 16, 32, 64) if length < longest]
    assert all(cost > 0 for cost in costs.values())


def test_many_small_batches_wait_for_the_trainer_and_few_large_ones():
    assert queued_batches(1) == MAX_QUEUED
    assert queued_batches(QUEUED_BYTES // 4) == 4
    assert queued_batches(10 * QUEUED_BYTES) == MIN_QUEUED


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_whole_command_on_a_small_dataset():
    small = ["--episodes=4", "--frames=40", "--height=96", "--width=128", "--rows=80", "--step_s=0.2", "--rounds=1"]
    command = [sys.executable, "-m", "vlatune.cli", "bench", "feed", *small, "--peers=false"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["spilled_bytes"] == figures["fallback_bytes"] == 0
    assert figures["fast_over_reader"] > 0
    assert len(figures["runs"]) == 9
    assert list(figures["cost_by_run_length"]) == ["1", "2", "4", "8", "16", "32"]
