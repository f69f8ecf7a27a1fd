"""An elastic run on several raylets of this machine: workers come and go with the nodes, the samples stay."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from driving import MANY_STEPS, exit_code, named, output, started, step_of, wait_until
from local_runs import RequestAfter, run_locally, train_flags
from ray.cluster_utils import Cluster
from test_lost_nodes import NODE, drain

from vlatune.config.flags import parse_flags
from vlatune.config.settings import RunConfig
from vlatune.ray_internals import TRAIN_WORKER_TITLE
from vlatune.run.sinks import read_jsonl
from vlatune.train.heartbeat import Request

SAVED = 20
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 * 1024 * 1024})
    for _ in range(4):
        cluster.add_node(**NODE)
    yield cluster
    cluster.shutdown()


def training_nodes(cluster: Cluster) -> list[Any]:
    parents = [psutil.Process(pid).ppid() for pid in named(os.getsid(0), TRAIN_WORKER_TITLE)]
    return [node for node in cluster.worker_nodes if node.all_processes["raylet"][0].process.pid in parents]


def starts(run_dir: Path) -> list[int]:
    """Return the steps from which worker groups have started."""
    return [line["optimizer_step"] for line in read_jsonl(run_dir / "events.jsonl") if line["event"] == "start"]


def groups(run_dir: Path) -> list[str]:
    return [line for line in output(run_dir).splitlines() if "training with" in line]


def test_workers_come_and_go_with_the_nodes(cluster, dataset_v3, small_base, tmp_path):
    common = (
        f"--steps={MANY_STEPS}",
        f"--save_freq={SAVED}",
        "--save_every_s=0",
        "--eval_freq=0",
        "--log_samples=true",
        "--max_restarts=3",
    )
    flags, run_dir = train_flags(dataset_v3, small_base, *common, "--torch_threads=1"), tmp_path / "run"
    workers = ("--num_workers=2:4", "--batch_size=2")
    with started(run_dir, *flags, *workers, environment={"RAY_ADDRESS": cluster.address}) as process:

        def wait_for_group(number: int, size: int) -> int:
            """Wait until a group of this size is some steps further than its start."""
            wait_until(lambda: len(groups(run_dir)) == number, process, run_dir)
            assert f"{size} of 4 workers: {4 // size} x 2 samples each" in groups(run_dir)[-1]
            wait_until(lambda: len(starts(run_dir)) == number, process, run_dir)
            wait_until(lambda: step_of(run_dir) > starts(run_dir)[-1] + 2 * SAVED, process, run_dir)
            return step_of(run_dir)

        reached = wait_for_group(1, 4)
        for node in training_nodes(cluster)[:2]:
            node.all_processes["raylet"][0].process.send_signal(signal.SIGKILL)
        wait_for_group(2, 2)
        assert starts(run_dir)[1] >= reached - 2 * SAVED  # the newest checkpoint may have been in progress
        for _ in range(2):
            cluster.add_node(**NODE)
        wait_for_group(3, 4)
        drain(cluster, training_nodes(cluster)[0].node_id)
        wait_for_group(4, 2)
        process.terminate()
        assert exit_code(process, run_dir) == 128 + signal.SIGTERM
    samples = read_jsonl(run_dir / "samples.jsonl")
    alone = parse_flags([*flags, "--batch_size=8", f"--output_dir={tmp_path / 'alone'}"], RunConfig)
    run_locally(alone, driver=RequestAfter(Request.STOP, len(samples) - 1))
    assert samples == read_jsonl(alone.run_dir / "samples.jsonl")
    ours, theirs = (read_jsonl(folder / "metrics.jsonl") for folder in (run_dir, alone.run_dir))
    assert [line["lr"] for line in ours] == [line["lr"] for line in theirs]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=1e-4)
