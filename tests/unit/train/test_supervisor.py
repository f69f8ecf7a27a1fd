"""Detection of hanging workers, heartbeats and signals. Supervised runs are in tests/e2e."""

import asyncio
import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import wait_until

from vlatune.ray_internals import is_blocked
from vlatune.train import heartbeat
from vlatune.train.driver.ray_supervisor import (
    STARTUP_FACTOR,
    Termination,
    _run_on_thread,
    find_culprit,
    find_hung,
    handle_signals,
)
from vlatune.train.heartbeat import NO_REQUEST, HeartbeatMonitor, RankState, Reply, Request
from vlatune.train.records import Parcel


def state(rank: int, *, idle_s: float, events: int = 5) -> RankState:
    return RankState(rank, pid=100 + rank, node_id="node", events=events, last_event="batch", idle_s=idle_s)


@pytest.mark.parametrize(
    ("states", "timeout_s", "hung"),
    [
        ([state(0, idle_s=9.9), state(1, idle_s=0.0)], 10, False),
        ([state(0, idle_s=9.9), state(1, idle_s=10.1)], 10, True),
        ([state(0, idle_s=10.0 * STARTUP_FACTOR, events=0)], 10, False),
        ([state(0, idle_s=10.1 * STARTUP_FACTOR, events=0)], 10, True),
        ([state(0, idle_s=1e9)], 0, False),
        ([], 10, False),
    ],
)
def test_worker_hangs_after_the_timeout(states, timeout_s, hung):
    assert bool(find_hung(states, timeout_s)) == hung


def test_culprit_is_not_running_or_has_the_least_progress():
    states = [state(0, idle_s=11.0, events=7), state(1, idle_s=10.5, events=7), state(2, idle_s=10.8, events=6)]
    running = dict.fromkeys(range(3), "running")
    assert find_culprit(states, running).rank == 2
    assert find_culprit(states, running | {1: "stopped by a signal"}).rank == 1
    assert find_culprit(states[:2], running).rank == 0  # idle for longer


def poll(monitor: HeartbeatMonitor, attempt: int, *more: Any) -> tuple[list[RankState], Parcel]:
    return asyncio.run(monitor.poll(attempt, *more, wait_s=0))


def beat(monitor: HeartbeatMonitor, *words: Any) -> Reply:
    return asyncio.run(monitor.beat(*words))


def test_monitor_measures_the_time_since_the_last_progress(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now_s))
    monitor = HeartbeatMonitor()
    assert poll(monitor, 1)[0] == []
    assert beat(monitor, 1, 0, 4711, "a", 0, "start").requested == (0, Request.NOTHING)
    poll(monitor, 1, (1, Request.STOP))
    now_s = 103.0
    assert beat(monitor, 1, 0, 4711, "a", 0, "start").requested == (1, Request.STOP)
    assert poll(monitor, 1)[0] == [RankState(0, 4711, "a", 0, "start", idle_s=3.0, silent_s=0.0)]
    beat(monitor, 1, 0, 4711, "a", 1, "batch")
    assert poll(monitor, 1)[0] == [RankState(0, 4711, "a", 1, "batch", idle_s=0.0)]
    now_s = 105.0
    assert poll(monitor, 1)[0] == [RankState(0, 4711, "a", 1, "batch", idle_s=2.0, silent_s=2.0)]


def test_monitor_forgets_earlier_attempts():
    monitor, lines = HeartbeatMonitor(), [("metrics.jsonl", {"optimizer_step": 1})]
    poll(monitor, 0)
    beat(monitor, 0, 0, 1, "a", 7, "batch", (0, lines))
    assert poll(monitor, 0, (1, Request.STOP))[1] == (0, tuple(lines))
    assert poll(monitor, 1) == ([], (0, ()))
    assert beat(monitor, 0, 0, 1, "a", 8, "batch", (0, lines)) == Reply(NO_REQUEST)  # of the previous attempt
    beat(monitor, 1, 0, 2, "a", 1, "batch")
    monitor.leave(0, 0)
    states, parcel = poll(monitor, 1)
    assert [one.pid for one in states] == [2]
    assert parcel == (0, ())
    monitor.leave(1, 0)
    assert poll(monitor, 1)[0] == []


def test_thread_that_is_blocked_in_ray_is_detected():
    released = threading.Event()
    outcome = _run_on_thread(lambda: released.wait(60))
    assert is_blocked()
    released.set()
    assert outcome.exception(timeout=60) is None
    assert not is_blocked()


def test_first_ctrl_c_stops_the_second_is_urgent_the_third_raises():
    before, termination = signal.signal(signal.SIGINT, signal.default_int_handler), Termination()
    try:
        with handle_signals(termination):
            os.kill(os.getpid(), signal.SIGINT)
            assert termination.wait(60)
            os.kill(os.getpid(), signal.SIGTERM)
            assert not termination.is_urgent
            os.kill(os.getpid(), signal.SIGINT)
            wait_until(lambda: termination.is_urgent)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert termination.error("").number == signal.SIGINT
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts commands in the background
        with handle_signals(Termination()):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_earlier_handler_of_sigterm_is_restored():
    received, termination = [], Termination()
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    try:
        with handle_signals(termination):
            os.kill(os.getpid(), signal.SIGTERM)
            assert termination.wait(60)
            with handle_signals(termination):  # a new attempt of the run
                pass
            os.kill(os.getpid(), signal.SIGTERM)
        assert received == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [1]
    finally:
        signal.signal(signal.SIGTERM, before)
