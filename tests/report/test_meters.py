import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlatune.report.cpu_clocks import SPENT_CPU
from vlatune.report.meters import SPENT, STAGES, StepMeter


class Clock:
    """Time that passes when told."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> float:
        self.now_s += seconds
        return seconds


def test_an_interval_divides_the_wall_clock():
    clock = Clock()
    meter = StepMeter(clock=clock)
    clock.pass_s(7.0)
    assert meter.first_batch() == 7.0
    for _ in range(2):
        meter.waited(clock.pass_s(0.5))
        clock.pass_s(1.5)
        meter.stepped(8)
    assert meter.take_interval() == {"samples_per_s": 4.0, "wait_share": 0.25, "step_s": 2.0, "wait_s": 0.5}


def test_the_next_interval_starts_from_nothing():
    clock = Clock()
    meter = StepMeter(clock=clock)
    meter.first_batch()
    meter.waited(clock.pass_s(3.0))
    meter.stepped(8)
    meter.take_interval()
    clock.pass_s(2.0)
    meter.stepped(8)
    assert meter.take_interval() == {"samples_per_s": 4.0, "wait_share": 0.0, "step_s": 2.0, "wait_s": 0.0}


def test_the_start_counts_in_no_rate():
    clock = Clock()
    meter = StepMeter(clock=clock)
    meter.waited(clock.pass_s(60.0))  # for the first batch
    meter.first_batch()
    clock.pass_s(1.0)
    meter.stepped(8)
    totals = meter.totals()
    assert (totals["wait_share"], totals["samples_per_s"]) == (0.0, 8.0)
    wall_s = {"start": 60.0, "wait": 0.0, "compute": 1.0, "checkpoint": 0.0, "validation": 0.0, "total": 61.0}
    assert totals["time_s"] == wall_s | dict.fromkeys(STAGES, 0.0)


def test_the_worker_that_waits_longest_is_reported_and_stages_are_added_up():
    clock = Clock()
    meter = StepMeter(clock=clock)
    clock.pass_s(5.0)
    meter.first_batch({"decode": 3.0, "transport": 0.0, "collate": 1.0, "copy": 0.0})
    for decoded_s, waits, restarts in ((7.0, (1.0, 3.0), 2), (9.0, (2.0, 0.5), 3)):
        clock.pass_s(10.0)
        meter.waited(waits[0])
        meter.stepped(8)
        mine = meter.take_spent({"decode": decoded_s, "transport": 0.5, "collate": 1.5, "copy": 0.25}, restarts)
        assert mine[0] == waits[0]
        other = [waits[1], 10.0, 0.0, 0.0, 0.0, *[math.nan] * len(SPENT_CPU), 1.0]
        line = meter.take_interval([mine, other])
        assert line["wait_share"] == max(waits) / 10
        assert line["wait_s"] == max(waits)
    totals = meter.totals()
    assert totals["wait_s_by_worker"] == [3.0, 3.5]
    assert totals["wait_share"] == 3.5 / 20
    assert totals["reader_restarts"] == 3 + 2  # of this worker, which counts all of its own, and of the other
    assert totals["time_s"] == {
        "start": 5.0,
        "wait": 3.5,
        "compute": 16.5,
        "checkpoint": 0.0,
        "validation": 0.0,
        "total": 25.0,
        "decode": 26.0,
        "transport": 0.5,
        "collate": 0.5,
        "copy": 0.25,
    }


def worker(**spent_s: float) -> list[float]:
    """A worker's ten seconds, nothing in them but what is given."""
    unhindered = dict.fromkeys(SPENT, 0.0) | {"loop": 10.0, "all_cpu": 20.0, "idle_cpu": 4.0}
    return list((unhindered | spent_s).values())


def test_the_worker_that_is_kept_most_is_reported():
    clock = Clock()
    meter = StepMeter(clock=clock, readers_here=True)
    meter.first_batch()
    for first, second in (
        ({"wait": 1.0}, {"kept_others": 4.0, "decode": 12.0}),
        ({"kept_own": 1.0, "other_threads": 1.0}, {}),
    ):
        clock.pass_s(10.0)
        meter.stepped(8)
        line = meter.take_interval([worker(**first), worker(**second)])
        assert line["kept_share"] == (0.4 if second else 0.1)
        assert line["kept_by"] == ("readers" if second else "own process")
        assert line["idle_share"] == 0.2
    totals = meter.totals()
    kept_s = {name: totals["time_s"][name] for name in ("wait", "compute", "kept_own", "kept_others")}
    assert kept_s == {"wait": 1.0, "compute": 15.0, "kept_own": 0.0, "kept_others": 4.0}
    assert totals["kept_by"] == "other load"  # of 32 s of others, readers explain 12


def test_computing_gives_way_where_one_worker_waits_and_another_is_kept():
    clock = Clock()
    meter = StepMeter(clock=clock)
    meter.first_batch()
    clock.pass_s(10.0)
    meter.take_interval([worker(wait=6.0), worker(kept_own=6.0, kept_others=2.0)])
    time_s = meter.totals()["time_s"]
    assert (time_s["compute"], time_s["kept_own"], time_s["kept_others"]) == (0.0, 3.0, 1.0)


def test_a_run_that_died_before_its_first_batch_was_all_start():
    clock = Clock()
    meter = StepMeter(clock=clock)
    clock.pass_s(5.0)
    totals = meter.totals()
    assert totals["time_s"]["start"] == totals["time_s"]["total"] == 5.0
    assert (totals["optimizer_steps"], totals["samples_per_s"], totals["step_s"]) == (0, 0.0, 0.0)


step_parts = st.tuples(*[st.floats(0, 10)] * 3)


@given(st.lists(step_parts, max_size=20))
def test_the_parts_add_up_to_the_whole(steps):
    clock = Clock()
    meter = StepMeter(clock=clock)
    clock.pass_s(1.0)
    meter.first_batch()
    for wait_s, compute_s, save_s in steps:
        meter.waited(clock.pass_s(wait_s))
        clock.pass_s(compute_s)
        meter.saved(clock.pass_s(save_s))
        meter.stepped(4)
    totals = meter.totals()
    time_s = totals["time_s"]
    assert sum(time_s[part] for part in ("start", "wait", "compute", "checkpoint")) == pytest.approx(time_s["total"])
    assert time_s["compute"] == pytest.approx(sum(compute_s for _, compute_s, _ in steps), abs=1e-9)
    assert totals["samples"] == 4 * len(steps)
