"""Two nodes with separate addresses: host names that do not lead to them, and folders that one of them lacks."""

import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from driving import exit_code, output, started, step_of, wait_until
from local_runs import assert_same_run, train_flags
from namespaces import (
    ADDRESSES,
    can_make_namespaces,
    copy_inside,
    inside,
    namespaces,
    replace_second,
    run_inside,
    s3_inside,
    start_nodes,
    unplug,
)

from vlatune.run.summary import read_summary

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not can_make_namespaces(), reason="needs root and network namespaces"),
]


def command(dataset: Path, base: Path, run: Path) -> list[str]:
    words = [
        str(Path(sys.executable).with_name("vlatune")),
        "train",
        f"--dataset.root={dataset}",
        f"--policy.path={base}",
    ]
    words += [f"--output_dir={run}", "--policy.train=heads", "--num_workers=2", "--batch_size=4", "--steps=3"]
    return [*words, "--log_freq=1", "--eval_freq=0", "--dataset.cache=off", "--max_restarts=0"]


def train_on_two_nodes(words: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    with (
        tempfile.TemporaryDirectory(prefix="vla", dir="/tmp", ignore_cleanup_errors=True) as folder,
        namespaces() as names,
    ):
        address = start_nodes(names, Path(folder))
        return run_inside(names[0], words, RAY_ADDRESS=address, RAY_AUTH_MODE="disabled", **env)


def test_workers_connect_over_the_interface_of_the_node(dataset_v3, small_base, tmp_path):
    """The host name resolves to an address that does not lead to the other node."""
    done = train_on_two_nodes(command(dataset_v3, small_base, tmp_path / "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = read_summary(tmp_path / "run")
    assert summary is not None
    assert summary.optimizer_steps == 3


def test_what_only_the_driver_has_is_rejected_before_workers_start(dataset_v3, small_base, tmp_path):
    """The message has the address of the node and a remedy; nothing of a run is written."""
    own, shared = tmp_path / "own", tmp_path / "shared"
    dataset, base = own / "dataset", own / "base"
    shutil.copytree(dataset_v3, dataset)
    shutil.copytree(small_base, base)
    storage = f"--storage_path={shared / 'checkpoints'}"
    cases = {
        "dataset": (command(dataset, small_base, shared / "dataset"), f"dataset '{dataset}'"),
        "base": (command(dataset_v3, base, shared / "base"), f"base model '{base}'"),
        "tiny base": ([*command(dataset_v3, small_base, own / "tiny"), "--recipe=tiny", storage], "/own/tiny/base'"),
        "output": (command(dataset_v3, small_base, own / "run"), f"checkpoints in '{own / 'run'}"),
    }
    cases["tiny base"][0].remove(f"--policy.path={small_base}")
    with (
        tempfile.TemporaryDirectory(prefix="vla", dir="/tmp", ignore_cleanup_errors=True) as folder,
        namespaces() as names,
    ):
        address = start_nodes(names, Path(folder), hide_on_second=own)
        for name, (words, problem) in cases.items():
            done = run_inside(names[0], words, RAY_ADDRESS=address, RAY_AUTH_MODE="disabled")
            assert done.returncode == 2, done.stdout + done.stderr
            (line,) = [line for line in done.stderr.splitlines() if problem in line]
            assert f"node {ADDRESSES[1]}" in line, name
            assert "disk that all nodes share" in line, name
            run_dir = Path(next(word for word in words if word.startswith("--output_dir=")).split("=")[1])
            assert not (run_dir / "metrics.jsonl").exists()
            assert not list((run_dir / "logs").glob("failure-*"))


def test_workers_that_cannot_connect_fail_with_the_address(dataset_v3, small_base, tmp_path):
    """The user's choice of an interface reaches the workers; here it is one that does not lead to the other node."""
    words = command(dataset_v3, small_base, tmp_path / "run")
    done = train_on_two_nodes(words, GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 1, done.stdout + done.stderr
    assert any(f"rank {rank} on {address} " in done.stderr for rank in (0, 1) for address in ADDRESSES), done.stderr


def test_node_without_power_is_noticed_and_replaced(dataset_v3, small_base, tmp_path):
    """Ray itself takes a minute: until then it counts the node as alive."""
    flags = train_flags(dataset_v3, small_base, "--num_workers=2", "--steps=300", "--save_freq=100", "--max_restarts=1")
    flags += ["--save_every_s=0", "--keep_checkpoints=300", "--eval_freq=0", "--log_samples=true"]
    clean, run_dir = tmp_path / "clean" / "run", tmp_path / "run"
    with (
        tempfile.TemporaryDirectory(prefix="vla", dir="/tmp", ignore_cleanup_errors=True) as folder,
        namespaces() as names,
    ):
        address = start_nodes(names, Path(folder))
        environment = {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}
        start = partial(started, prefix=inside(names[0]), environment=environment)
        with start(clean, *flags) as process:
            assert exit_code(process, clean) == 0, output(clean)
        with start(run_dir, *flags) as process:
            wait_until(lambda: step_of(run_dir) >= 130, process, run_dir)
            unplug(names[1])
            wait_until(lambda: f"node {ADDRESSES[1]} with rank" in output(run_dir), process, run_dir)
            wait_until(lambda: "waiting for 1 of 2 places for workers" in output(run_dir), process, run_dir)
            replace_second(names[1], address)
            assert exit_code(process, run_dir) == 0, output(run_dir)
    assert_same_run(run_dir, clean)


def test_nodes_that_share_nothing_but_object_storage_train_as_one_machine(dataset_v3, small_base, tmp_path):
    """The base and the run folder are on the driver's node only, the workers on the other one; the dataset and the checkpoints are on S3."""
    common = ["--torch_threads=1", "--save_freq=2", "--eval_freq=2", "--eval_samples=4", "--log_samples=true"]
    alone = command(dataset_v3, small_base, tmp_path / "alone/run") + common
    done = subprocess.run(alone, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    own = tmp_path / "own"
    base, run = own / "base", own / "run"
    shutil.copytree(small_base, base)
    words = command(Path("DATASET"), base, run) + common
    words = [word.replace("DATASET", "s3://robots/data") for word in words] + ["--storage_path=s3://robots/runs"]
    with (
        tempfile.TemporaryDirectory(prefix="vla", dir="/tmp", ignore_cleanup_errors=True) as folder,
        namespaces() as names,
        s3_inside(names[0], "robots") as env,
    ):
        env |= {"XDG_CACHE_HOME": str(own / "cache")}
        copy_inside(names[0], f"{dataset_v3}/", "s3://robots/data/", **env)
        address = start_nodes(names, Path(folder), hide_on_second=own, trainers=(0, 2), **env)
        done = run_inside(names[0], words, RAY_ADDRESS=address, RAY_AUTH_MODE="disabled", **env)
        assert done.returncode == 0, done.stdout + done.stderr
        copy_inside(names[0], "s3://robots/runs/run/checkpoints/", f"{own}/fetched/checkpoints/", **env)
    for name in ("metrics.jsonl", "samples.jsonl", "validation.jsonl", "summary.json"):
        shutil.copy(run / name, own / "fetched" / name)
    assert_same_run(own / "fetched", tmp_path / "alone/run")
    summary = read_summary(run)
    assert summary is not None
    assert summary.spilled_bytes == 0
    assert not (run / "checkpoints").exists()
