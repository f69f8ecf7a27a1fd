"""Differences of clocks in, seconds by who had them out."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlatune.report.cpu_clocks import (
    HANDOVER_S,
    SPENT_CPU,
    UNKNOWN,
    Reading,
    ThreadTimes,
    cpu_rates,
    cpu_summary,
    keeper,
    split,
)

ALONE = Reading(
    wall_s=10.0,
    process_s=20.0,
    training=ThreadTimes(10.0),
    turn_takers=ThreadTimes(),
    team=(ThreadTimes(10.0),),
    idle_cpu_s=20.0,
    all_cpu_s=40.0,
)
"""Ten seconds of two threads on two of four cores."""


def kept(spent: Reading, wait_s: float = 0.0, checkpoint_s: float = 0.0) -> tuple[float, float]:
    found = split(spent, wait_s, checkpoint_s)
    return found["kept_own"], found["kept_others"]


def test_a_step_that_has_its_cores_is_kept_by_nobody():
    found = split(ALONE, 0.0, 0.0)
    assert tuple(found) == SPENT_CPU
    assert (found["train_thread"], found["compute_threads"], found["other_threads"]) == (10.0, 10.0, 0.0)
    assert kept(ALONE) == (0.0, 0.0)


def test_the_lock_is_charged_to_other_threads_up_to_what_they_took():
    asleep = replace(ALONE, process_s=8.0, training=ThreadTimes(2.0), team=())  # others took 6 s, asleep for 8
    assert kept(asleep) == (pytest.approx(5.5), pytest.approx(0.0))  # half a second moved batches
    waiting = kept(asleep, wait_s=5.0, checkpoint_s=1.0)
    assert waiting == (2.0, 0.0)  # of the sleep, 6 s have a name already
    barrier = replace(asleep, process_s=2.5)  # nobody took what it slept for
    assert kept(barrier) == (0.0, 0.0)


def test_a_team_goes_on_only_while_all_of_it_runs():
    queued = ThreadTimes(5.0, 5.0)
    both = replace(ALONE, process_s=10.0, training=queued, team=(queued,), idle_cpu_s=0.0)
    assert kept(both) == (0.0, pytest.approx(7.5))
    alone = replace(both, process_s=5.0, team=())
    assert kept(alone) == (0.0, pytest.approx(5.0))


def test_those_who_took_the_cores_share_the_blame():
    queued = replace(ALONE, process_s=15.0, training=ThreadTimes(5.0, 5.0), team=(), idle_cpu_s=0.0, all_cpu_s=20.0)
    assert kept(queued) == (pytest.approx(5.0 * 10 / 15), pytest.approx(5.0 * 5 / 15))


def test_waking_up_is_not_queueing():
    woken = ThreadTimes(9.0, 10_000 * HANDOVER_S / 2, 10_000)
    assert kept(replace(ALONE, process_s=18.0, training=woken, team=(woken,))) == (0.0, 0.0)


def test_autograds_threads_have_their_turn_while_the_training_thread_sleeps():
    turns = replace(ALONE, process_s=10.5, training=ThreadTimes(4.0), turn_takers=ThreadTimes(6.0), team=())
    found = split(turns, 0.0, 0.0)
    assert (found["compute_threads"], found["other_threads"]) == (6.0, 0.5)
    assert kept(turns) == (0.0, 0.0)


@pytest.mark.parametrize(
    "unknown",
    [
        {"training": ThreadTimes(10.0, UNKNOWN, UNKNOWN)},
        {"team": (ThreadTimes(UNKNOWN, UNKNOWN, UNKNOWN),)},
        {"idle_cpu_s": UNKNOWN, "all_cpu_s": UNKNOWN},
    ],
)
def test_what_is_not_known_is_none_and_never_zero(unknown):
    spent = split(replace(ALONE, **unknown), 0.0, 0.0)
    assert math.isnan(spent["kept_own"] + spent["kept_others"])
    rates = cpu_rates(spent, 0.0, readers_here=True)
    assert (rates["kept_share"], rates["kept_by"]) == (None, None)
    assert cpu_summary(spent, 4)["kept_own_s"] is None


def test_names_of_summary_and_metrics():
    spent = split(ALONE, 0.0, 0.0)
    summary = cpu_summary(spent, 4)
    assert summary == {
        "train_thread_s": 10.0,
        "compute_threads_s": 10.0,
        "other_threads_s": 0.0,
        "run_queue_wait_s": 0.0,
        "kept_own_s": 0.0,
        "kept_others_s": 0.0,
        "loop_s": 10.0,
        "idle_share": 0.5,
        "cores": 4,
    }
    rates = {"other_threads_share": 0.0, "kept_share": 0.0, "kept_by": None, "idle_share": 0.5}
    assert cpu_rates(spent, 0.0, readers_here=True) == rates


@pytest.mark.parametrize(
    ("own_s", "others_s", "decode_s", "readers_here", "by"),
    [
        (0.0, 0.0, 9.0, True, None),
        (3.0, 2.0, 9.0, True, "own process"),
        (1.0, 2.0, 9.0, True, "readers"),
        (1.0, 2.0, 2.0, True, "other load"),  # others took 10 s of the cores
        (1.0, 2.0, 9.0, False, "other load"),
        (UNKNOWN, UNKNOWN, 9.0, True, None),
    ],
)
def test_who_kept_it(own_s, others_s, decode_s, readers_here, by):
    spent = dict.fromkeys(SPENT_CPU, 0.0) | {"all_cpu": 20.0, "idle_cpu": 2.0, "train_thread": 8.0}
    spent |= {"kept_own": own_s, "kept_others": others_s}
    assert keeper(spent, decode_s, readers_here=readers_here) == by


seconds = st.floats(0, 100)
times = st.builds(ThreadTimes, seconds, seconds, st.integers(0, 10**6))
readings = st.builds(Reading, seconds, seconds, times, times, st.lists(times, max_size=3).map(tuple), seconds, seconds)


@given(readings, seconds, seconds)
def test_nobody_is_kept_longer_than_it_wanted_to_compute(spent, wait_s, checkpoint_s):
    own_s, others_s = kept(spent, wait_s, checkpoint_s)
    assert own_s >= 0
    assert others_s >= 0
    assert own_s + others_s <= max(0.0, spent.wall_s - wait_s - checkpoint_s) + 1e-9
