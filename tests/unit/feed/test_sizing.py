"""Sizing: the machines of docs/hardware.md, and properties for all others."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repository_files import ROOT

from vlatune.feed.memory import STORE_SHARE
from vlatune.feed.sizing import (
    DISK_STORE_BYTES,
    MIN_STORE_BYTES,
    RAM_SHARE,
    SHM_SHARE,
    USUAL_STORE_BYTES,
    Host,
    Node,
    RunShape,
    Sizing,
    compute_share,
    find_shortage,
    plan_on_host,
    plan_on_nodes,
)

MB, GB = 10**6, 10**9
RUN_ROWS = 32
RENTED = {
    "2 cores": Host(2, 8 * GB, 4 * GB),
    "8 cores": Host(8, 32 * GB, 16 * GB),
    "1 x L4, 8 CPUs": Host(8, 32 * GB, 16 * GB, gpus=1),
    "4 x L4, 48 CPUs": Host(48, 192 * GB, 96 * GB, gpus=4),
    "8 x A100, 96 CPUs": Host(96, 1000 * GB, 500 * GB, gpus=8),
    "8 x H100, 192 CPUs": Host(192, 2000 * GB, 1000 * GB, gpus=8),
}
"""/dev/shm has half of the RAM, as Linux sets it up."""
ROWS = {"3 x 224 x 224": 460_000, "the demo's": 16_000}
CASES = [(name, rows) for name in RENTED for rows in ROWS]


def size(name: str, rows: str) -> Sizing:
    host = RENTED[name]
    return plan_on_host(host, RunShape(max(1, host.gpus), ROWS[rows], RUN_ROWS))


def table_lines() -> list[str]:
    """The table of docs/hardware.md."""
    head = (
        "machine | RAM | rows | workers | cores kept | readers | torch threads | store | rows per block | rows per task"
    )
    lines = [head, "|".join("---" for _ in head.split("|"))]
    for name, rows in CASES:
        if RENTED[name].gpus and rows == "the demo's":
            continue
        sizing = size(name, rows)
        budget, store = sizing.budget, f"{sizing.store_bytes / GB:.2f} GB"
        cells = [name, f"{RENTED[name].ram_bytes // GB} GB", rows, sizing.run.num_workers, sizing.reserved_cores]
        cells += [budget.readers, sizing.torch_threads, store, budget.block_rows, budget.task_rows]
        lines.append(" | ".join(map(str, cells)))
    return [f"| {line} |" if "---" not in line else f"|{line}|" for line in lines]


def test_the_table_of_the_docs_is_up_to_date():
    text = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")
    expected = "\n".join(table_lines())
    assert expected in text, f"docs/hardware.md should hold this table:\n{expected}"


@pytest.mark.parametrize(("name", "rows"), CASES)
def test_typical_machines_are_used_fully_without_warnings(name, rows):
    sizing, host = size(name, rows), RENTED[name]
    assert sizing.warnings == ()
    assert USUAL_STORE_BYTES <= sizing.store_bytes <= RAM_SHARE * host.ram_bytes
    assert sizing.budget.block_rows >= RUN_ROWS // 2
    busy = sizing.run.num_workers * (sizing.reserved_cores + sizing.budget.readers)
    assert busy == host.cpus


@pytest.mark.parametrize(
    ("cores", "gflops", "pixels", "threads"),
    [
        (2, 0.036, 2 * 64 * 64, 1),
        (2, 0.33, 3 * 480 * 640, 1),
        (2, 3.1, 3 * 480 * 640, 2),
        (8, 0.33, 3 * 480 * 640, 4),
        (8, 3.1, 3 * 480 * 640, 7),
        (8, 1000.0, 3 * 480 * 640, 8),
        (8, 0.001, 3 * 480 * 640, 1),
    ],
)
def test_torch_threads_of_a_cpu_worker_follow_its_share_of_compute(cores, gflops, pixels, threads):
    share = compute_share(step_flops=gflops * 1e9, pixels=pixels)
    run = RunShape(1, ROWS["3 x 224 x 224"], RUN_ROWS, compute_share=share)
    host = Host(cores, 32 * GB, 16 * GB)
    assert plan_on_host(host, run).torch_threads == threads
    assert plan_on_host(host, replace(run, torch_threads=3)).torch_threads == 3


hosts = st.builds(
    Host,
    cpus=st.integers(1, 256),
    ram_bytes=st.integers(GB, 4000 * GB),
    shm_bytes=st.integers(0, 2000 * GB),
    gpus=st.integers(0, 8),
)
runs = st.builds(
    RunShape,
    num_workers=st.integers(1, 8),
    row_bytes=st.integers(1_000, 2_000_000),
    run_rows=st.integers(1, 128),
)


def plan_or_message(plan, *args, **options) -> Sizing | str:
    try:
        return plan(*args, **options)
    except ValueError as error:
        return str(error)


@given(hosts, runs)
def test_a_store_never_exceeds_its_share(host, run):
    sizing = plan_or_message(plan_on_host, host, run)
    if isinstance(sizing, str):
        return
    assert sizing.store_bytes >= MIN_STORE_BYTES
    assert sizing.store_bytes <= max(MIN_STORE_BYTES, RAM_SHARE * host.ram_bytes)
    if SHM_SHARE * host.shm_bytes >= MIN_STORE_BYTES:
        assert sizing.store_bytes <= SHM_SHARE * host.shm_bytes
    else:
        assert sizing.store_bytes <= DISK_STORE_BYTES
    on_disk = [text for text in sizing.warnings if "a file on disk" in text]
    assert bool(on_disk) == (sizing.store_bytes > host.shm_bytes)
    assert sizing.budget.max_blocks * sizing.budget.block_bytes * run.num_workers <= STORE_SHARE * sizing.store_bytes


@given(hosts, runs)
def test_reserved_cores_and_readers_fit_the_cpus(host, run):
    sizing = plan_or_message(plan_on_host, host, run)
    if isinstance(sizing, str):
        return
    budget, workers = sizing.budget, run.num_workers
    assert budget.readers >= 1
    assert workers * sizing.reserved_cores + max(workers, workers * budget.readers) <= max(host.cpus, workers)
    if host.gpus and host.cpus >= 3 * workers:
        assert sizing.reserved_cores == 2
    assert 1 <= sizing.torch_threads <= max(1, host.cpus // workers)


@given(hosts, runs, st.integers(MIN_STORE_BYTES, 100 * GB))
def test_a_store_size_set_by_the_user_is_used_or_rejected_with_one_that_works(host, run, store_bytes):
    host = replace(host, gpus=0)
    sizing = plan_or_message(plan_on_host, host, run, store_bytes=store_bytes)
    if isinstance(sizing, Sizing):
        assert sizing.store_bytes == store_bytes
        return
    if "does not fit the object store" in sizing:
        suggested = re.search(r"raise --ray.object_store_bytes to (\d+) or more", sizing)
        assert suggested
        roomy = replace(host, shm_bytes=2000 * GB)
        assert isinstance(plan_or_message(plan_on_host, roomy, run, store_bytes=int(suggested[1])), Sizing)
    else:
        assert store_bytes > host.shm_bytes


def test_more_workers_than_gpus_are_rejected():
    message = r"--num_workers=3: this machine has 2 GPUs and each worker takes one; use --num_workers=2"
    with pytest.raises(ValueError, match=message):
        plan_on_host(Host(8, 32 * GB, 16 * GB, gpus=2), RunShape(3, 1000, 32))


def test_little_shared_memory_gives_a_warning():
    """64 MiB, the default of docker and Kubernetes, is less than Ray's smallest store."""
    run = RunShape(1, 16_000, 32)
    (warning,) = plan_on_host(Host(2, 8 * GB, 64 * 1024 * 1024), run).warnings
    assert "docker run --shm-size=672m" in warning
    assert plan_on_host(Host(2, 8 * GB, 200 * MB), run).store_bytes == 160 * MB
    with pytest.raises(ValueError, match=r"lower --ray.object_store_bytes or enlarge /dev/shm"):
        plan_on_host(Host(2, 64 * GB, GB), run, store_bytes=20 * GB)


nodes = st.builds(
    Node,
    cpus=st.integers(0, 64),
    store_bytes=st.integers(GB, 200 * GB),
    gpus=st.integers(0, 8),
    trainers=st.integers(0, 2),
)


@given(st.lists(nodes, min_size=1, max_size=6), runs)
def test_all_blocks_in_flight_fit_any_node(cluster, run):
    sizing = plan_or_message(plan_on_nodes, cluster, run)
    if isinstance(sizing, str):
        assert re.search(r"add CPUs|ray start --object-store-memory", sizing)
        return
    used = [node for node in cluster if node.cpus or node.gpus or node.trainers]
    for node in used:
        assert sizing.budget.max_blocks * sizing.budget.block_bytes * run.num_workers <= STORE_SHARE * node.store_bytes
    cpus = sum(node.cpus for node in cluster)
    assert run.num_workers * sizing.reserved_cores < cpus


def test_workers_on_nodes_without_trainer_resources_take_a_cpu_each():
    sizing = plan_on_nodes([Node(4, GB), Node(4, 2 * GB)], RunShape(2, 1000, 32))
    assert (sizing.reserved_cores, sizing.budget.readers, sizing.torch_threads, sizing.store_bytes) == (1, 3, 2, GB)
    with pytest.raises(ValueError, match=r"has 2 CPUs and 2 workers reserve 2 of them.*lower --num_workers to 1"):
        plan_on_nodes([Node(1, GB), Node(1, GB)], RunShape(2, 1000, 32))


def test_readers_use_other_nodes_if_gpu_nodes_have_few_cpus():
    sizing = plan_on_nodes([Node(16, 20 * GB, gpus=8), Node(64, 20 * GB)], RunShape(8, 460_000, 32))
    assert (sizing.reserved_cores, sizing.budget.readers, sizing.torch_threads) == (2, 8, 2)


GPU_NODE, TRAINER_NODE, CPU_NODE = Node(8, GB, gpus=1), Node(2, GB, trainers=1), Node(2, GB)


@pytest.mark.parametrize(
    ("planned", "alive", "shortage"),
    [
        ([GPU_NODE] * 2, [GPU_NODE] * 2, None),
        ([GPU_NODE] * 2, [GPU_NODE], "1 of 2 GPUs"),
        ([GPU_NODE] * 2, [CPU_NODE] * 9, "2 of 2 GPUs"),  # not replaced by CPUs
        ([GPU_NODE] * 2, [GPU_NODE, Node(1, GB, gpus=1)], "1 of 2 GPUs"),  # without the CPUs of a worker
        ([GPU_NODE] * 2, [Node(4, GB, gpus=2)], "1 of 5 CPUs"),  # none is left for a reader
        ([TRAINER_NODE] * 4, [TRAINER_NODE, CPU_NODE], "1 of 2 places for workers"),
        ([CPU_NODE] * 2, [CPU_NODE], "1 of 3 CPUs"),
        ([CPU_NODE] * 2, [GPU_NODE], None),
        ([GPU_NODE] * 2, [], "2 of 2 GPUs"),
    ],
)
def test_shortage_is_that_of_the_first_plan(planned, alive, shortage):
    sizing = plan_on_nodes(planned, RunShape(2, ROWS["the demo's"], RUN_ROWS))
    assert find_shortage(alive, sizing) == shortage
