"""Several nodes, as several raylets on this machine: lost nodes, a lost head, and resources that are missing."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import waiting
from driving import FAILED, exit_code, named, output, saved_steps, started, step_of, wait_until
from local_runs import assert_same_run, train_flags
from ray.cluster_utils import Cluster

from vlatune.ray_internals import TRAIN_WORKER_TITLE
from vlatune.run.summary import read_summary

NODE = {"num_cpus": 1, "resources": {"vlatune_trainer": 1}, "object_store_memory": 100 * 1024 * 1024}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Start a head for the driver, and three nodes for two workers."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 * 1024 * 1024})
    for _ in range(3):
        cluster.add_node(**NODE)
    yield cluster
    cluster.shutdown()


@pytest.fixture
def flags(dataset_v3, small_base) -> list[str]:
    own = ("--num_workers=2", "--steps=400", "--save_freq=100", "--save_every_s=0", "--keep_checkpoints=400")
    more = ("--max_restarts=3", "--eval_freq=0", "--log_samples=true", "--ray.num_cpus=3")
    return train_flags(dataset_v3, small_base, *own, *more)


def train(cluster: Cluster, run_dir: Path, flags: list[str], *faults: tuple[int, Callable[[], Any]]) -> Path:
    """Train in a process that joins the cluster, and cause each fault when its step is reached."""
    with started(run_dir, *flags, environment={"RAY_ADDRESS": cluster.address}) as process:
        for step, cause in faults:
            wait_until(lambda step=step: step_of(run_dir) >= step, process, run_dir)
            cause()
        assert exit_code(process, run_dir) == 0, output(run_dir)
    return run_dir


def find_node(cluster: Cluster, *, trains: bool = True) -> tuple[str, Any]:
    """Return id and raylet of a node with or without a training worker, which is the raylet's child."""
    parents = [psutil.Process(pid).ppid() for pid in named(os.getsid(0), TRAIN_WORKER_TITLE)]
    raylets = {node.node_id: node.all_processes["raylet"][0].process for node in cluster.worker_nodes}
    return next((node_id, raylet) for node_id, raylet in raylets.items() if (raylet.pid in parents) == trains)


def test_run_continues_on_a_spare_node_then_waits_for_a_replacement(cluster, flags, tmp_path):
    clean, run_dir = train(cluster, tmp_path / "clean" / "run", flags), tmp_path / "run"

    def kill() -> None:
        find_node(cluster)[1].send_signal(signal.SIGKILL)

    def kill_and_replace() -> None:
        kill()
        waiting.wait_until(lambda: "waiting for 1 of 2 places for workers" in output(run_dir), 120)
        cluster.add_node(**NODE)

    train(cluster, run_dir, flags, (30, kill), (230, kill_and_replace))
    summary = read_summary(run_dir)
    assert summary is not None
    assert summary.restarts == 2
    assert_same_run(run_dir, clean)


def test_wait_for_resources_is_reported_and_ends_with_sigterm(cluster, flags, tmp_path):
    environment = {"RAY_ADDRESS": cluster.address}
    with started(tmp_path / "run", *flags, "--num_workers=4", environment=environment) as process:
        wait_until(lambda: "waiting for 1 of 4 places for workers, 00:0" in output(tmp_path / "run"), process, tmp_path)
        process.terminate()
        assert exit_code(process, tmp_path / "run") == 128 + signal.SIGTERM
    assert not ray_groups(cluster)


def ray_groups(cluster: Cluster) -> list[str]:
    """Return the states of the placement groups that are left."""
    ray.init(address=cluster.address, namespace="test")
    try:
        table = ray.util.placement_group_table()
        return [group["state"] for group in table.values() if group["state"] != "REMOVED"]
    finally:
        ray.shutdown()


def test_lost_reader_node_costs_no_restart_and_lost_head_ends_the_run_with_a_report(cluster, flags, tmp_path):
    run_dir = tmp_path / "run"
    with started(run_dir, *flags, "--steps=100000", environment={"RAY_ADDRESS": cluster.address}) as process:
        wait_until(lambda: step_of(run_dir) >= 30, process, run_dir)
        find_node(cluster, trains=False)[1].send_signal(signal.SIGKILL)
        wait_until(lambda: step_of(run_dir) >= 300, process, run_dir)
        assert FAILED not in output(run_dir)
        (run_dir / "report.html").unlink(missing_ok=True)
        cluster.head_node.all_processes["gcs_server"][0].process.kill()
        assert exit_code(process, run_dir) == 1
    assert "the same command resumes from the newest checkpoint" in output(run_dir)
    assert (run_dir / "report.html").exists()


def drain(cluster: Cluster, node_id: str) -> None:
    """Announce that a node will be removed, as a cloud does for spot instances."""
    client, deadline_ms = ray._raylet.GcsClient(address=cluster.address), int((time.time() + 3600) * 1000)
    preemption = 2
    accepted, reason = client.drain_node(node_id, preemption, "spot instance", deadline_ms)
    assert accepted, reason


def test_checkpoint_is_saved_before_a_node_is_removed(cluster, flags, tmp_path):
    run_dir = train(cluster, tmp_path / "run", flags, (30, lambda: drain(cluster, find_node(cluster)[0])))
    assert [step for step in saved_steps(run_dir) if step % 100] == saved_steps(run_dir)[:1]
