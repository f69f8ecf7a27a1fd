import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlatune.run.meters import STAGES, CpuTimes, StepMeter, read_cpu_times


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> float:
        self.now_s += seconds
        return seconds


def test_an_interval_divides_the_wall_clock_and_the_next_one_starts_at_zero():
    clock, cpu = Clock(), iter([CpuTimes(1.0, 10.0, 20.0), CpuTimes(3.0, 15.0, 30.0), None])
    meter = StepMeter(clock=clock, read_cpu=lambda: next(cpu))
    clock.pass_s(7.0)
    assert meter.first_batch() == 7.0
    for _ in range(2):
        meter.waited(clock.pass_s(0.5))
        clock.pass_s(1.5)
        meter.stepped(8)
    line = {"samples_per_s": 4.0, "wait_share": 0.25, "step_s": 2.0, "wait_s": 0.5, "other_process_share": 0.3}
    assert meter.take_interval() == line
    clock.pass_s(2.0)
    meter.stepped(8)
    idle = {"wait_share": 0.0, "wait_s": 0.0, "other_process_share": None}
    assert meter.take_interval() == line | idle


def test_time_before_the_first_batch_counts_in_no_rate():
    clock = Clock()
    meter = StepMeter(clock=clock)
    meter.waited(clock.pass_s(60.0))
    meter.first_batch()
    clock.pass_s(1.0)
    meter.stepped(8)
    totals = meter.totals()
    assert (totals["wait_share"], totals["samples_per_s"]) == (0.0, 8.0)
    wall_s = {"start": 60.0, "wait": 0.0, "compute": 1.0, "checkpoint": 0.0, "validation": 0.0, "total": 61.0}
    assert totals["time_s"] == wall_s | dict.fromkeys(STAGES, 0.0)


def test_the_longest_wait_is_reported_and_stages_are_summed_over_workers():
    clock = Clock()
    meter = StepMeter(clock=clock)
    clock.pass_s(5.0)
    meter.first_batch({"decode": 3.0, "transport": 0.0, "collate": 1.0, "copy": 0.0})
    for decoded_s, waits in ((7.0, (1.0, 3.0)), (9.0, (2.0, 0.5))):
        clock.pass_s(10.0)
        meter.waited(waits[0])
        meter.stepped(8)
        mine = meter.take_spent({"decode": decoded_s, "transport": 0.5, "collate": 1.5, "copy": 0.25})
        assert mine[0] == waits[0]
        line = meter.take_interval([mine, [waits[1], 10.0, 0.0, 0.0, 0.0]])
        assert (line["wait_share"], line["wait_s"]) == (max(waits) / 10, max(waits))
    totals = meter.totals()
    assert totals["wait_share"] == 3.5 / 20
    loop_s = {"wait": 3.5, "compute": 16.5, "checkpoint": 0.0, "validation": 0.0}
    stages_s = {"decode": 26.0, "transport": 0.5, "collate": 0.5, "copy": 0.25}
    assert totals["time_s"] == {"start": 5.0, **loop_s, "total": 25.0, **stages_s}


def test_a_run_that_failed_before_its_first_batch_has_no_rates():
    clock = Clock()
    meter = StepMeter(clock=clock)
    clock.pass_s(5.0)
    totals = meter.totals()
    assert totals["time_s"]["start"] == totals["time_s"]["total"] == 5.0
    assert (totals["samples_per_s"], totals["step_s"]) == (0.0, 0.0)


@given(st.lists(st.tuples(*[st.floats(0, 10)] * 3), max_size=20))
def test_the_parts_add_up_to_the_wall_clock(steps):
    clock = Clock()
    meter = StepMeter(clock=clock, read_cpu=lambda: None)
    clock.pass_s(1.0)
    meter.first_batch()
    for wait_s, compute_s, save_s in steps:
        meter.waited(clock.pass_s(wait_s))
        clock.pass_s(compute_s)
        meter.saved(clock.pass_s(save_s))
        meter.stepped(4)
    time_s = meter.totals()["time_s"]
    assert sum(time_s[part] for part in ("start", "wait", "compute", "checkpoint")) == pytest.approx(time_s["total"])
    assert time_s["compute"] == pytest.approx(sum(compute_s for _, compute_s, _ in steps), abs=1e-9)


def test_cpu_times_are_read_where_the_system_reports_them(tmp_path):
    assert read_cpu_times(tmp_path / "missing") is None
    now = read_cpu_times()
    assert now is not None
    assert now.process_s > 0
    assert 0 < now.busy_s < now.total_s
