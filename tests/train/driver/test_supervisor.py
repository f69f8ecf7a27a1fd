"""The driver's eye: who hangs, and what ends on the other thread. Runs of whole groups are in test_two_workers_with_ray.py and test_faults.py."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import ray

from vlatune.config import RunConfig
from vlatune.errors import TerminatedError
from vlatune.pipeline.sizing import Node, RunShape, plan_on_nodes
from vlatune.ray_internals import is_asked
from vlatune.report.run_folder import RunFolder
from vlatune.train.driver.cluster import Cluster, read_nodes
from vlatune.train.driver.supervisor import (
    RUNNING,
    STARTING,
    Ending,
    Supervisor,
    _on_thread,
    _poll,
    _what_is_saved,
    find_culprit,
    find_hung,
    signals_set,
)
from vlatune.train.heartbeat import Heartbeat, HeartbeatMonitor, RankState, Request


def state(rank: int, *, still_s: float, moves: int = 5) -> RankState:
    return RankState(rank, pid=100 + rank, node_id="node", moves=moves, still_s=still_s)


def test_nobody_hangs_who_moved_a_moment_ago():
    assert find_hung([state(0, still_s=9.9), state(1, still_s=0.0)], timeout_s=10) == []
    assert find_hung([], timeout_s=10) == []


def test_a_worker_that_starts_gets_more_time():
    assert find_hung([state(0, still_s=10.0 * STARTING, moves=0)], timeout_s=10) == []
    assert find_hung([state(0, still_s=10.1 * STARTING, moves=0)], timeout_s=10) != []


def test_zero_watches_for_nothing():
    assert find_hung([state(0, still_s=1e9)], timeout_s=0) == []


def test_the_one_for_whom_the_others_wait_is_named():
    states = [state(0, still_s=11.0, moves=7), state(1, still_s=10.5, moves=7), state(2, still_s=10.8, moves=6)]
    running = dict.fromkeys(range(3), "running")
    assert find_culprit(states, running).rank == 2  # has done least
    assert find_culprit(states, running | {1: "stopped by a signal"}).rank == 1
    assert find_culprit(states[:2], running).rank == 0  # stood first


def test_the_monitor_counts_from_the_last_thing_done(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr("vlatune.train.heartbeat.time.monotonic", lambda: now_s)
    monitor = HeartbeatMonitor()
    assert monitor.look(1) == []
    assert monitor.beat(1, 0, 4711, "a", 0) == (0, Request.NOTHING)
    monitor.look(1, (1, Request.STOP))
    now_s = 103.0
    assert monitor.beat(1, 0, 4711, "a", 0) == (1, Request.STOP)  # a beat, and nothing done
    assert monitor.look(1) == [RankState(0, 4711, "a", 0, still_s=3.0)]
    monitor.beat(1, 0, 4711, "a", 1)
    assert monitor.look(1) == [RankState(0, 4711, "a", 1, still_s=0.0)]


def test_the_monitor_forgets_a_group_that_is_gone():
    monitor = HeartbeatMonitor()
    monitor.look(0)
    monitor.beat(0, 0, 1, "a", 7)
    monitor.look(0, (1, Request.STOP))
    assert monitor.look(1) == []
    assert monitor.beat(0, 0, 1, "a", 8) == (0, Request.NOTHING)  # still alive somewhere
    assert monitor.beat(1, 0, 2, "a", 1) == (0, Request.NOTHING)
    monitor.leave(0, 0)
    assert [one.pid for one in monitor.look(1)] == [2]
    monitor.leave(1, 0)
    assert monitor.look(1) == []


def test_nodes_are_read_as_ray_counts_them(ray_local):
    assert read_nodes() == [Node(cpus=2, store_bytes=200 * 1024 * 1024, gpus=0, trainers=2)]


@pytest.fixture
def terminated() -> Ending:
    return Ending()


@pytest.fixture
def supervisor(ray_local, tmp_path, terminated) -> Iterator[Supervisor]:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    sizing = plan_on_nodes(read_nodes(), RunShape(num_workers=1, row_bytes=1000, run_rows=32))
    cluster = Cluster(sizing, None, ours=False)
    made = Supervisor(RunConfig(grace_s=60), folder, cluster, terminated, say=lambda _: None)
    yield made
    ray.kill(made.monitor)


def test_a_monitor_that_dies_keeps_no_request_from_the_workers(supervisor, terminated, tmp_path):
    """SIGTERM at the worst moment: nobody is left who knows that the workers began."""
    heard = []

    def fit() -> None:
        heartbeat = Heartbeat(supervisor.monitor, 3, 0, tmp_path)
        try:
            wait_until(lambda: supervisor._began)
            ray.kill(supervisor.monitor, no_restart=False)
            terminated.set()
            wait_until(lambda: supervisor._requested[0] == 1)
            ray.kill(supervisor.monitor, no_restart=False)  # and the request with it
            wait_until(lambda: heard.append(heartbeat.take_request()) or heard[-1] is Request.STOP)
        finally:
            heartbeat.close()

    with pytest.raises(TerminatedError, match="all is saved"):
        supervisor.run(fit, attempt=3, cancel=lambda: pytest.fail("it has ended by itself"))
    assert heard[-1] is Request.STOP


def test_whoever_ends_at_once_leaves_no_thread_behind_that_asks_ray(supervisor, terminated):
    """A second Ctrl-C: Ray is shut down next, and would end a process that asks it anything afterwards."""
    told, done = threading.Event(), []

    def fit() -> None:
        terminated.is_urgent = True
        assert told.wait(60)
        done.append(ray.cluster_resources())

    with pytest.raises(KeyboardInterrupt):
        supervisor.run(fit, attempt=1, cancel=told.set)
    assert len(done) == 1


def test_a_thread_that_ray_does_not_let_go_is_told_from_one_that_ends():
    goes_on = threading.Event()
    outcome = _on_thread(lambda: goes_on.wait(60))
    assert is_asked()
    goes_on.set()
    while _poll(outcome) is RUNNING:
        pass
    assert not is_asked()  # at once, although its last line may be to come


def wait_until(there: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60
    while not there():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_what_fails_on_the_thread_is_brought_here():
    def fail() -> None:
        raise ValueError("from the thread")

    outcome = _on_thread(fail)
    while (error := _poll(outcome)) is RUNNING:
        pass
    assert isinstance(error, ValueError)


def test_what_succeeds_returns_nothing():
    done = []
    outcome = _on_thread(lambda: done.append(1))
    while (error := _poll(outcome)) is RUNNING:
        pass
    assert error is None
    assert done == [1]


def test_what_is_said_after_sigterm_is_what_happened():
    assert _what_is_saved(None).startswith("all is saved")
    failed = _what_is_saved(RuntimeError("no disk"))
    assert "failed while they saved (no disk)" in failed
    assert "from the checkpoint before" in failed


def test_the_first_ctrl_c_asks_the_second_ends_soon_and_the_third_at_once():
    before, terminated = signal.signal(signal.SIGINT, signal.default_int_handler), Ending()
    try:
        with signals_set(terminated):
            os.kill(os.getpid(), signal.SIGINT)
            assert terminated.wait(60)
            os.kill(os.getpid(), signal.SIGTERM)  # it is asked already
            assert not terminated.is_urgent
            os.kill(os.getpid(), signal.SIGINT)
            wait_until(lambda: terminated.is_urgent)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts what runs in the background
    try:
        with signals_set(Ending()):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    error = terminated.error("; all is saved")
    assert (str(error), error.number) == ("asked to end by Ctrl-C; all is saved", signal.SIGINT)


def test_sigterm_is_heard_inside_and_left_to_others_outside():
    heard_outside, terminated = [], Ending()
    before = signal.signal(signal.SIGTERM, lambda *_: heard_outside.append(1))
    try:
        with signals_set(terminated):
            os.kill(os.getpid(), signal.SIGTERM)
            assert terminated.wait(60)
            with signals_set(terminated):  # a new attempt inside the run
                pass
            os.kill(os.getpid(), signal.SIGTERM)
        assert heard_outside == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard_outside == [1]
    finally:
        signal.signal(signal.SIGTERM, before)
