"""The process beside a worker: it may die at any moment, and it rests while nothing is asked of it."""

import math
import os
import random
import time
from contextlib import suppress
from dataclasses import replace
from itertools import batched

import numpy as np
import psutil
import pytest
import ray
from feeding import assert_same, make_plan, on_thread, small_blocks
from ray.exceptions import ActorDiedError

from vlatune.batch import Columns, num_rows
from vlatune.pipeline import feed as feed_module
from vlatune.pipeline.coordinator import BlockStream, SegmentHead, end_coordinators, start_ahead
from vlatune.pipeline.feed import MAX_LOST, Feed
from vlatune.pipeline.memory import read_counters
from vlatune.pipeline.plan import Share
from vlatune.pipeline.source import IDLE_POLICY, READER_NICENESS

pytestmark = pytest.mark.ray
LOOK_S, LOOKS = 2.0, 10


def coordinators() -> list[psutil.Process]:
    """Of this test's cluster."""
    return [process for process in psutil.Process().children(recursive=True) if "ray::Coordinator" in cmdline(process)]


def cmdline(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""


def kill_all() -> None:
    for process in coordinators():
        with suppress(psutil.NoSuchProcess):  # one of a feed before
            process.kill()


def cpu_s(process: psutil.Process) -> float:
    """So far; NaN of one that has just ended."""
    try:
        return sum(process.cpu_times()[:2])
    except psutil.NoSuchProcess:
        return math.nan


def wait_until_full() -> None:
    """The store holds the same for a second."""
    used, since_s = -1, time.monotonic()
    while time.monotonic() < since_s + 1:
        time.sleep(0.1)
        if (now := read_counters().used_bytes) != used:
            used, since_s = now, time.monotonic()


def test_one_that_dies_is_replaced_at_the_next_batch(plan, expected, feeds):
    """Killed before its first block, and at three batches more: within segments, at their ends, over an epoch's end."""
    plan = replace(plan, segment_tasks=2)
    last = plan.order.batches_per_epoch + 3
    feed = Feed(plan, Share(0, 1), small_blocks(plan), first_step=1, last_step=last)
    feeds.append(feed)
    stream = on_thread(feed)
    deadline_s = time.monotonic() + 60
    while not coordinators() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    moments = {0, *random.Random(3).sample(range(1, last - 1), 3)}
    batches = []
    for number in range(last - 1):
        if number in moments:
            kill_all()
        batches.append(next(stream))
    assert_same(batches, expected(1, last))
    assert 1 <= feed.restarts <= len(moments)
    assert next(stream, None) is None


def test_half_an_update_is_not_taken_twice(expected, dataset_v3, small_base, feeds, monkeypatch):
    """Two micro-batches a step; the process dies between them, when the second one needs a block that is not here yet."""
    taken: list[Columns] = []
    died: list[int] = []

    class DiesOnce(BlockStream):
        def __next__(self) -> SegmentHead | Columns:
            if len(taken) % 2 and not died:
                died.append(len(taken))
                kill_all()
                ray.get(self._actor.take.remote())  # what lies ready does not count: the answer of the dead
            return super().__next__()

    monkeypatch.setattr(feed_module, "BlockStream", DiesOnce)
    plan = make_plan(dataset_v3, small_base, batch_size=4, grad_accum=2)
    feed = Feed(plan, Share(0, 1), small_blocks(plan), first_step=0, last_step=6)
    feeds.append(feed)
    while (batch := next(feed, None)) is not None:
        taken.append(batch)
    assert died
    assert feed.restarts == 1
    updates = [first["index"].tolist() + second["index"].tolist() for first, second in batched(taken, 2)]
    assert updates == [batch["index"].tolist() for batch in expected(0, 6)]


def test_none_that_lives_ends_the_feed(plan, feeds, monkeypatch):
    begun = []

    class Dead:
        def __init__(self, first_step: int) -> None:
            begun.append(first_step)

        def __iter__(self) -> "Dead":
            return self

        def __next__(self) -> None:
            raise ActorDiedError

        def stop(self) -> None: ...
        def close(self) -> None: ...

    monkeypatch.setattr(feed_module, "start_coordinator", lambda *_, first_step, last_step: first_step)
    monkeypatch.setattr(feed_module, "BlockStream", Dead)
    feed = Feed(plan, Share(0, 1), small_blocks(plan), first_step=2, last_step=4)
    feeds.append(feed)
    with pytest.raises(ActorDiedError):
        next(feed)
    assert begun == [2] * (MAX_LOST + 1)


def test_one_that_was_started_ahead_reads_before_it_is_asked(plan, expected, feeds):
    budget = small_blocks(plan)
    (ahead,) = start_ahead(plan, 1, budget, first_step=1, last_step=4)
    wait_until_full()
    feed = Feed(plan, Share(0, 1), budget, first_step=1, last_step=4, coordinator=ahead)
    feeds.append(feed)
    batches = list(feed)
    assert_same(batches, expected(1, 4))
    assert feed.restarts == 0
    end_coordinators([ahead])  # it is gone; that is no error


def test_what_one_met_that_was_started_ahead_is_told(plan, feeds):
    class Broken:
        def __call__(self, columns: Columns) -> Columns:
            raise ValueError("this row is not for training")

    broken, budget = replace(plan, transforms=(Broken(),)), small_blocks(plan)
    (ahead,) = start_ahead(broken, 1, budget, first_step=0, last_step=4)
    feed = Feed(broken, Share(0, 1), budget, first_step=0, last_step=4, coordinator=ahead)
    feeds.append(feed)
    with pytest.raises(Exception, match="this row is not for training"):
        next(feed)


def test_readers_give_way(plan, feeds):
    class Schedule:
        def __call__(self, columns: Columns) -> Columns:
            told = [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)]
            return columns | {"schedule": np.tile(told, (num_rows(columns), 1))}

    watched = replace(plan, transforms=(*plan.transforms, Schedule()))
    feed = Feed(watched, Share(0, 1), small_blocks(plan), first_step=0, last_step=2)
    feeds.append(feed)
    assert {tuple(row) for row in next(feed)["schedule"].tolist()} == {(READER_NICENESS, IDLE_POLICY)}


def shares_of_a_core() -> tuple[float, float]:
    """That this process takes, and all of the cluster's with it, while nobody takes a batch."""
    others = psutil.Process().children(recursive=True)
    began_s, here_s, before_s = time.monotonic(), time.process_time(), [cpu_s(process) for process in others]
    time.sleep(LOOK_S)
    here_s = time.process_time() - here_s
    beside_s = float(np.nansum([cpu_s(process) - then_s for process, then_s in zip(others, before_s, strict=True)]))
    watched_s = time.monotonic() - began_s
    return here_s / watched_s, (here_s + beside_s) / watched_s


def is_quiet(shares: tuple[float, float]) -> bool:
    here, everything = shares
    return here < 0.02 and everything < 0.10


def test_with_a_full_store_and_a_slow_consumer_nothing_spins(plan, feeds):
    """CPU seconds, in the quietest of a few looks: what spins does so in each of them, and whatever else happens in a
    process or on the machine does not. An executor in this process took three quarters of a core, and as much beside it.
    """
    feed = Feed(plan, Share(0, 1), small_blocks(plan), first_step=0, last_step=100_000)
    feeds.append(feed)
    batches = on_thread(feed)
    next(batches)
    wait_until_full()
    assert coordinators()
    looks = [shares_of_a_core()]
    while not is_quiet(looks[-1]) and len(looks) < LOOKS:
        looks.append(shares_of_a_core())
    assert is_quiet(looks[-1]), looks
    assert next(batches)  # it was full, not dead
