"""Several nodes, as several raylets on this machine: one is about to be taken away, one dies, and the run goes on."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from driving import named, step_of
from ray.cluster_utils import Cluster

from vlatune.checkpoint.store import list_checkpoints
from vlatune.config import DatasetConfig, PolicyConfig, RayConfig, RunConfig
from vlatune.report.sinks import read_jsonl
from vlatune.train.driver.launch import train

STEPS = 300
NODE = {"num_cpus": 1, "resources": {"vlatune_trainer": 1}, "object_store_memory": 100 * 1024 * 1024}
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head for the driver, and three nodes for two workers: one to spare."""
    if ray.is_initialized():
        pytest.fail("run these tests by themselves: -m slow tests/train/test_nodes.py")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 * 1024 * 1024})
    for _ in range(3):
        cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def make_config(dataset: Path, base: Path, run_dir: Path) -> RunConfig:
    return RunConfig(
        dataset=DatasetConfig(root=(str(dataset),), run_length=4, window_rows=8),
        policy=PolicyConfig(path=str(base), train="heads"),
        output_dir=str(run_dir),
        num_workers=2,
        batch_size=4,
        steps=STEPS,
        log_freq=1,
        save_freq=100,
        save_every_s=0.0,
        log_samples=True,
        keep_checkpoints=STEPS,
        ray=RayConfig(num_cpus=3),
    )


def at_step(step: int, run_dir: Path, act: Callable[[], Any]) -> threading.Thread:
    def wait_and_act() -> None:
        while step_of(run_dir) < step:
            time.sleep(0.05)
        act()

    thread = threading.Thread(target=wait_and_act, daemon=True)
    thread.start()
    return thread


@dataclass(frozen=True)
class RayletOf:
    node_id: str
    process: subprocess.Popen[bytes]


def node_of_a_worker(cluster: Cluster) -> RayletOf:
    """A node on which a training worker runs: its raylet is the worker's parent."""
    (worker, *_) = named(os.getsid(0), "ray::RayTrainWorker")
    parent = psutil.Process(worker).ppid()
    for node in cluster.worker_nodes:
        process = node.all_processes["raylet"][0].process
        if process.pid == parent:
            return RayletOf(node.node_id, process)
    raise AssertionError(f"process {parent} is the raylet of no node")


def test_a_node_dies_another_takes_its_place_and_the_run_goes_on(cluster, dataset_v3, small_base, tmp_path, capsys):
    clean, run_dir = tmp_path / "clean", tmp_path / "run"
    train(make_config(dataset_v3, small_base, clean))

    thread = at_step(130, run_dir, lambda: node_of_a_worker(cluster).process.send_signal(signal.SIGKILL))
    train(make_config(dataset_v3, small_base, run_dir))
    thread.join()
    assert "restarted 1 time" in capsys.readouterr().out
    for name in ("metrics.jsonl", "samples.jsonl"):
        keys = ("optimizer_step", "loss", "samples")
        ours, theirs = ([{k: line.get(k) for k in keys} for line in read_jsonl(d / name)] for d in (run_dir, clean))
        assert ours == theirs
    ours, theirs = (list_checkpoints(d)[-1] / "trainable.safetensors" for d in (run_dir, clean))
    assert ours.read_bytes() == theirs.read_bytes()


def test_before_a_node_is_taken_away_a_checkpoint_is_saved(cluster, dataset_v3, small_base, tmp_path, capsys):
    run_dir = tmp_path / "run"

    def give_notice() -> None:
        """As a cloud does: this node will be gone in a while."""
        node_id = node_of_a_worker(cluster).node_id
        client = ray._raylet.GcsClient(address=cluster.address)
        deadline_ms = int((time.time() + 3600) * 1000)
        accepted, reason = client.drain_node(node_id, 2, "spot instance", deadline_ms)  # 2: preemption
        assert accepted, reason

    thread = at_step(30, run_dir, give_notice)
    train(make_config(dataset_v3, small_base, run_dir))
    thread.join()
    assert "1 of the workers' nodes will be taken away: saving a checkpoint" in capsys.readouterr().out
    saved = [int(path.name) for path in list_checkpoints(run_dir)]
    assert [step for step in saved if step % 100] == saved[:1]  # one that is not of the plan
