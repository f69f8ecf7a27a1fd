"""Sizes for machines that people rent, as docs/sizing.md shows them, and properties for all others."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from repository_files import ROOT

from vlatune.dataset.order.sample_order import OrderSpec, choose_lanes, epoch_order
from vlatune.dataset.reader import Unit
from vlatune.pipeline.memory import STORE_SHARE
from vlatune.pipeline.plan import SEGMENT_TASKS, Share, plan_pieces
from vlatune.pipeline.sizing import (
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
    plan_on_host,
    plan_on_nodes,
)
from vlatune.pipeline.source import cut_tasks, staggered

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
"""With as much of their RAM as /dev/shm as Linux gives it: half."""
ROWS = {"3 x 224 x 224": 460_000, "the demo's": 16_000}
CASES = [(name, rows) for name in RENTED for rows in ROWS]


def size(name: str, rows: str) -> Sizing:
    host = RENTED[name]
    return plan_on_host(host, RunShape(max(1, host.gpus), ROWS[rows], RUN_ROWS))


# Machines that people rent


def table_lines() -> list[str]:
    """The table of docs/sizing.md."""
    head = (
        "machine | RAM | rows | workers | cores kept | readers | torch threads | store | rows per block | rows per task"
    )
    lines = [head, "|".join("---" for _ in head.split("|"))]
    for name, rows in CASES:
        sizing = size(name, rows)
        budget, store = sizing.budget, f"{sizing.store_bytes / GB:.2f} GB"
        cells = [name, f"{RENTED[name].ram_bytes // GB} GB", rows, sizing.run.num_workers, sizing.kept_cores]
        cells += [budget.readers, sizing.torch_threads, store, budget.block_rows, budget.task_rows]
        lines.append(" | ".join(map(str, cells)))
    return [f"| {line} |" if "---" not in line else f"|{line}|" for line in lines]


def test_the_table_in_the_docs_is_what_runs_get():
    text = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")
    expected = "\n".join(table_lines())
    assert expected in text, f"docs/sizing.md should hold this table:\n{expected}"


def plan_units(sizing: Sizing, *, seed: int) -> list[Unit]:
    """The units of an epoch of one worker, of episodes of all lengths, in the real order."""
    workers = sizing.run.num_workers
    global_batch = 16 * workers
    lengths = np.random.default_rng(seed).integers(20, 600, size=60 * workers)
    spec = OrderSpec(
        tuple(lengths.tolist()), seed, global_batch, choose_lanes(global_batch, workers), RUN_ROWS, window_rows=RUN_ROWS
    )
    pieces = plan_pieces(spec, epoch_order(spec, 0), Share(0, workers), begin_batch=0, end_batch=spec.batches_per_epoch)
    assert max(len(piece.frames) for piece in pieces) == RUN_ROWS
    return [Unit(0, one.episode, 600, 0, "", 0, (), frames=one.frames, slots=one.slots) for one in pieces]


@pytest.mark.parametrize(("name", "rows"), CASES)
def test_runs_of_frames_are_not_cut_into_more_than_two_tasks(name, rows):
    sizing = size(name, rows)
    budget, units = sizing.budget, plan_units(sizing, seed=1)
    tasks = list(cut_tasks(units, budget.block_rows, staggered(budget.task_blocks, budget.readers)))
    home = {int(slot): number for number, unit in enumerate(units) for slot in unit.slots}
    tasks_of_unit: dict[int, set[int]] = {}
    for task, blocks in enumerate(tasks):
        for part in itertools.chain(*blocks):
            tasks_of_unit.setdefault(home[int(part.slots[0])], set()).add(task)
    assert len(tasks_of_unit) == len(units)
    assert max(map(len, tasks_of_unit.values())) <= 2
    cut = [number for number, at in tasks_of_unit.items() if len(at) > 1]
    assert len(cut) <= budget.readers  # only in the shorter tasks at the beginning


@pytest.mark.parametrize(("name", "rows"), CASES)
def test_an_execution_lasts_for_several_tasks_of_every_reader(name, rows):
    """Starting one costs; half of the first tasks' rows are missing, as they are shorter."""
    assert 4 * size(name, rows).budget.readers <= SEGMENT_TASKS


@pytest.mark.parametrize(("name", "rows"), CASES)
def test_a_rented_machine_is_neither_overfilled_nor_warned_of(name, rows):
    sizing, host = size(name, rows), RENTED[name]
    assert sizing.warnings == ()
    assert USUAL_STORE_BYTES <= sizing.store_bytes <= RAM_SHARE * host.ram_bytes
    assert sizing.budget.block_rows >= RUN_ROWS // 2
    busy = sizing.run.num_workers * (sizing.kept_cores + sizing.budget.readers)
    assert busy == host.cpus


def test_on_two_cores_training_and_reading_share_both():
    sizing = size("2 cores", "the demo's")
    assert (sizing.kept_cores, sizing.budget.readers, sizing.torch_threads) == (0, 2, 2)
    assert sizing.store_bytes == 512 * 1024 * 1024


@pytest.mark.parametrize(
    ("cores", "gflops", "pixels", "threads"),
    [
        (2, 0.036, 2 * 64 * 64, 1),  # the demo: 1.3 ms to compute, 0.7 to read
        (2, 0.33, 3 * 480 * 640, 1),  # bench train's expert-balanced
        (2, 3.1, 3 * 480 * 640, 2),  # expert-step: 62 ms and 10
        (8, 0.33, 3 * 480 * 640, 4),
        (8, 3.1, 3 * 480 * 640, 7),
        (8, 1000.0, 3 * 480 * 640, 8),
        (8, 0.001, 3 * 480 * 640, 1),
    ],
)
def test_a_worker_without_a_gpu_computes_with_its_part_of_the_cores(cores, gflops, pixels, threads):
    share = compute_share(step_flops=gflops * 1e9, pixels=pixels)
    run = RunShape(1, ROWS["3 x 224 x 224"], RUN_ROWS, compute_share=share)
    host = Host(cores, 32 * GB, 16 * GB)
    assert plan_on_host(host, run).torch_threads == threads
    assert plan_on_host(host, replace(run, torch_threads=3)).torch_threads == 3


# Any machine

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


def plan_or_message(host: Host, run: RunShape, **options: int) -> Sizing | str:
    try:
        return plan_on_host(host, run, **options)
    except ValueError as error:
        return str(error)


@given(hosts, runs)
def test_a_store_is_never_larger_than_its_share(host, run):
    sizing = plan_or_message(host, run)
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
    assert sizing.budget.limit_bytes * run.num_workers <= STORE_SHARE * sizing.store_bytes


@given(hosts, runs)
def test_cores_kept_and_readers_fit_the_cpus(host, run):
    sizing = plan_or_message(host, run)
    if isinstance(sizing, str):
        return
    budget, workers = sizing.budget, run.num_workers
    assert budget.readers >= 1
    assert workers * (sizing.kept_cores + budget.readers * budget.reader_cpus) <= host.cpus
    assert (budget.reader_cpus == 1) == (host.cpus >= workers)
    if host.gpus and host.cpus >= 3 * workers:
        assert sizing.kept_cores == 2
    assert 1 <= sizing.torch_threads <= max(1, host.cpus // workers)


@given(hosts, runs)
def test_more_cpus_mean_no_fewer_readers(host, run):
    few, many = (plan_or_message(one, run) for one in (host, replace(host, cpus=host.cpus + 1)))
    if isinstance(few, str) or isinstance(many, str):
        return
    assert many.budget.readers >= few.budget.readers
    assert many.kept_cores >= few.kept_cores
    assert many.torch_threads >= few.torch_threads


@given(hosts, runs, st.integers(1, 4))
def test_more_ram_means_no_smaller_store(host, run, times):
    small, large = (plan_or_message(one, run) for one in (host, replace(host, ram_bytes=times * host.ram_bytes)))
    if isinstance(small, str):
        return
    assert isinstance(large, Sizing)
    assert large.store_bytes >= small.store_bytes
    assert large.budget.task_rows >= min(small.budget.task_rows, run.run_rows)


@given(hosts, runs, st.integers(MIN_STORE_BYTES, 100 * GB))
def test_the_store_that_the_user_wants_is_taken_or_refused_with_one_that_works(host, run, store_bytes):
    host = replace(host, gpus=0)
    sizing = plan_or_message(host, run, store_bytes=store_bytes)
    if isinstance(sizing, Sizing):
        assert sizing.store_bytes == store_bytes
        return
    if "does not fit the object store" in sizing:
        asked = re.search(r"raise --ray.object_store_bytes to (\d+) or more", sizing)
        assert asked
        roomy = replace(host, shm_bytes=2000 * GB)
        assert isinstance(plan_or_message(roomy, run, store_bytes=int(asked[1])), Sizing)
    else:
        assert store_bytes > host.shm_bytes
        asked = re.search(r"lower --ray.object_store_bytes to (\d+) or enlarge /dev/shm", sizing)
        assert asked is None or int(asked[1]) <= host.shm_bytes


@given(hosts, runs)
def test_the_store_that_a_warning_asks_for_ends_it(host, run):
    tight = plan_or_message(host, run, store_bytes=MIN_STORE_BYTES)
    if isinstance(tight, str):
        return
    asked = [re.search(r"begin to decode; raise --ray.object_store_bytes to (\d+)", text) for text in tight.warnings]
    for found in filter(None, asked):
        roomy = plan_on_host(replace(host, shm_bytes=2000 * GB), run, store_bytes=int(found[1]))
        assert roomy.budget.task_rows >= run.run_rows or roomy.budget.task_blocks == 32


def test_more_workers_than_gpus_are_refused():
    message = r"--num_workers=3: this machine has 2 GPUs and each worker takes one; use --num_workers=2"
    with pytest.raises(ValueError, match=message):
        plan_on_host(Host(8, 32 * GB, 16 * GB, gpus=2), RunShape(3, 1000, 32))


def test_a_container_with_little_shared_memory_is_told_so():
    """As docker and Kubernetes start them: 64 MiB, less than Ray's smallest store."""
    run = RunShape(1, 16_000, 32)
    (warning,) = plan_on_host(Host(2, 8 * GB, 64 * 1024 * 1024), run).warnings
    assert warning == (
        "an object store of 537 MB does not fit the 67.1 MB free in /dev/shm; enlarge /dev/shm "
        "(docker run --shm-size=672m): Ray keeps it in a file on disk, which is slower"
    )
    assert plan_on_host(Host(2, 8 * GB, 200 * MB), run).store_bytes == 160 * MB
    with pytest.raises(ValueError, match=r"lower --ray.object_store_bytes to 800000000 or enlarge /dev/shm"):
        plan_on_host(Host(2, 64 * GB, GB), run, store_bytes=20 * GB)


def test_every_number_comes_with_its_reason():
    assert list(size("4 x L4, 48 CPUs", "3 x 224 x 224").reasons()) == [
        "4 workers on 48 CPUs, 2 kept for each to train with: 10 readers and 2 torch threads each",
        "object store: blocks of 27 rows (12.4 MB), 10 per read task, 10 readers and at most 1317 MB in flight per worker: "
        "45% of a store of 11702 MB over 4 workers; the store's size: room for 256 rows of every reader",
    ]


# Clusters that others have started

nodes = st.builds(
    Node,
    cpus=st.integers(0, 64),
    store_bytes=st.integers(GB, 200 * GB),
    gpus=st.integers(0, 8),
    trainers=st.integers(0, 2),
)


def nodes_or_message(cluster: list[Node], run: RunShape) -> Sizing | str:
    try:
        return plan_on_nodes(cluster, run)
    except ValueError as error:
        return str(error)


@given(st.lists(nodes, min_size=1, max_size=6), runs)
def test_all_that_is_in_flight_fits_any_one_node(cluster, run):
    sizing = nodes_or_message(cluster, run)
    if isinstance(sizing, str):
        assert re.search(r"add CPUs|ray start --object-store-memory", sizing)
        return
    used = [node for node in cluster if node.cpus or node.gpus or node.trainers]
    for node in used:
        assert sizing.budget.limit_bytes * run.num_workers <= STORE_SHARE * node.store_bytes
    cpus = sum(node.cpus for node in cluster)
    assert run.num_workers * (sizing.kept_cores + sizing.budget.readers * sizing.budget.reader_cpus) <= cpus


def test_workers_without_a_place_of_their_own_take_a_cpu_each():
    sizing = plan_on_nodes([Node(4, GB), Node(4, 2 * GB)], RunShape(2, 1000, 32))
    assert (sizing.kept_cores, sizing.budget.readers, sizing.torch_threads, sizing.store_bytes) == (1, 3, 2, GB)
    with pytest.raises(ValueError, match=r"has 2 CPUs and 2 workers take 2 of them.*lower --num_workers to 1"):
        plan_on_nodes([Node(1, GB), Node(1, GB)], RunShape(2, 1000, 32))


def test_gpu_nodes_of_few_cpus_keep_them_for_their_workers():
    """Readers are on the nodes beside them."""
    sizing = plan_on_nodes([Node(16, 20 * GB, gpus=8), Node(64, 20 * GB)], RunShape(8, 460_000, 32))
    assert (sizing.kept_cores, sizing.budget.readers, sizing.torch_threads) == (2, 8, 2)
