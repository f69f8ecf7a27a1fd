"""Silent nodes, the report of a wait, and a lost head."""

import signal
import socket
import threading

import pytest
from waiting import wait_until

from vlatune.errors import RunStoppedError, TerminatedError
from vlatune.ray_internals import HEAD_LOST, RECONNECT_VARIABLE
from vlatune.train.driver.ray_health import HeadWatch, WaitReport, answers, find_silent_nodes
from vlatune.train.driver.ray_supervisor import Termination
from vlatune.train.heartbeat import RankState


def state(rank: int, node_id: str, silent_s: float) -> RankState:
    return RankState(rank, 100 + rank, node_id, events=0, last_event="start", idle_s=99.0, silent_s=silent_s)


def test_node_is_silent_if_all_its_workers_are():
    states = [state(0, "a", 9.0), state(1, "a", 0.5), state(2, "b", 9.0), state(3, "b", 12.0), state(4, "c", 8.0)]
    assert find_silent_nodes(states, 8.0) == ["b"]


def test_wait_is_reported_at_first_when_it_changes_and_in_intervals():
    printed: list[str] = []
    report = WaitReport(printed.append)
    for second in range(200):
        report.update("1 of 2 GPUs" if second < 20 else "1 of 5 CPUs", second + 0.5)
    report.end(200.0)
    gpus, cpus = "waiting for 1 of 2 GPUs", "waiting for 1 of 5 CPUs"
    expected = [f"{gpus}, 00:02", f"{gpus}, 00:17", f"{cpus}, 00:20", f"{cpus}, 00:35", f"{cpus}, 00:50"]
    assert printed == [*expected, f"{cpus}, 01:50", f"{cpus}, 02:50", "waited 03:20; starting the workers"]


def test_signal_ends_a_wait():
    termination = Termination()
    termination.check()
    termination.number = signal.SIGINT
    termination.set()
    with pytest.raises(TerminatedError, match="Ctrl-C before the workers started"):
        termination.check()


def test_head_is_lost_when_it_has_not_answered_for_the_limit(monkeypatch, tmp_path):
    """The listener never reads, as the process of an overloaded machine: the kernel accepts connections."""
    monkeypatch.setenv(RECONNECT_VARIABLE, "0")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host, port = listening.getsockname()
        assert answers(host, port)
        watch = HeadWatch(f"{host}:{port}", tmp_path)
        wait_until(lambda: watch.is_answering)
        assert watch.lost is None
    try:
        wait_until(lambda: watch.lost)
        assert isinstance(watch.lost, RunStoppedError)
        assert f"{host}:{port}" in str(watch.lost)
        assert HEAD_LOST.is_set()
    finally:
        watch.close()
        HEAD_LOST.clear()
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "head-watch"])
