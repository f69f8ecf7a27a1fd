"""The supervisor's requests reach the workers although the monitor actor dies; a lost lease or a failed join ends the run."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
from waiting import wait_until

from vlatune.config.settings import RunConfig
from vlatune.errors import RunStoppedError, TerminatedError
from vlatune.feed.sizing import Node, RunShape, plan_on_nodes
from vlatune.storage.lease import Lease, open_lease_file
from vlatune.storage.root import Root
from vlatune.train.driver.ray_cluster import Cluster, read_nodes
from vlatune.train.driver.ray_supervisor import Supervisor, Termination
from vlatune.train.driver.ray_trainer import TorchGroup, TorchGroupBackend
from vlatune.train.heartbeat import Request
from vlatune.train.records import RunWriter
from vlatune.train.worker.ray_worker import Heartbeat


def make_supervisor(folder: Path, termination: Termination) -> Supervisor:
    (folder / "logs").mkdir()
    sizing = plan_on_nodes(read_nodes(), RunShape(num_workers=1, row_bytes=1000, run_rows=32))
    cluster = Cluster(sizing, None, is_local=False)
    return Supervisor(RunConfig(grace_s=60), folder, cluster, termination, say=lambda _: None)


def test_monitor_that_dies_loses_no_request(ray_local, tmp_path):
    assert read_nodes() == [Node(cpus=2, store_bytes=200 * 1024 * 1024, gpus=0, trainers=2)]
    termination = Termination()
    supervisor = make_supervisor(tmp_path, termination)
    received: list[Request] = []

    def fit() -> None:
        heartbeat = Heartbeat(supervisor._monitor, 3, 0)
        try:
            wait_until(lambda: supervisor._began)
            ray.kill(supervisor._monitor, no_restart=False)
            termination.set()
            wait_until(lambda: supervisor._requested[0] == 1)
            ray.kill(supervisor._monitor, no_restart=False)  # with the request
            wait_until(lambda: received.append(heartbeat.take_request()) or received[-1] is Request.STOP)
        finally:
            heartbeat.close()

    with pytest.raises(TerminatedError, match="a checkpoint is saved"):
        supervisor.watch(fit, 3, RunWriter(tmp_path, 0, log_samples=False))
    ray.kill(supervisor._monitor)


def test_lost_lease_ends_the_run_without_waiting_for_the_workers(ray_local, tmp_path):
    termination, end = Termination(), threading.Event()
    termination.lease = lease = Lease(open_lease_file(Root(str(tmp_path))))
    supervisor = make_supervisor(tmp_path, termination)

    def fit() -> None:
        lease.lost = RunStoppedError("taken over")
        end.wait(60)

    with pytest.raises(RunStoppedError, match="taken over"):
        supervisor.watch(fit, 0, RunWriter(tmp_path, 0, log_samples=False))
    end.set()
    ray.kill(supervisor._monitor)


@ray.remote(num_cpus=0)
class Gate:
    """Stands in for the network of a rank: it connects, or its packets are dropped."""

    def __init__(self) -> None:
        self._opened = threading.Event()

    def join(self, waits: bool) -> None:
        if waits:
            self._opened.wait(60)


class Group:
    """Two workers, of which the second one never connects."""

    def __init__(self, gates: Sequence[Any]) -> None:
        self._gates = gates

    def execute(self, *_: object) -> list[tuple[str, int]]:
        return [("192.0.2.1", 4000), ("192.0.2.2", 4001)]

    def execute_single_async(self, rank: int, *_: object) -> Any:
        return self._gates[rank].join.remote(rank == 1)


def test_worker_that_cannot_connect_ends_the_run_and_is_named(ray_local):
    gates = [Gate.remote() for _ in range(2)]  # pyright: ignore[reportAttributeAccessIssue]
    ray.get([gate.__ray_ready__.remote() for gate in gates])  # starting them is not part of the wait
    with pytest.raises(RunStoppedError) as raised:
        TorchGroupBackend().on_start(Group(gates), TorchGroup("gloo", deterministic=False, join_s=5))
    for gate in gates:
        ray.kill(gate)
    assert "rank 1 on 192.0.2.2" in str(raised.value)
    assert "192.0.2.1:4000" in str(raised.value)
    assert "rank 0" not in str(raised.value)
