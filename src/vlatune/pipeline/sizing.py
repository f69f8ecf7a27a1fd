"""How a run is sized for the machines it runs on: cores kept for training, readers, threads, object store, blocks.

    machine + run -> plan_on_host  -> the store of our own cluster, and all the rest
    nodes + run   -> plan_on_nodes -> all the rest, for a cluster that others have started

Made once on the driver, before our own cluster starts, and handed on; pure, but for `read_host`. docs/sizing.md holds the
figures for machines that people rent, and the reasons.

What a process may really use: a container or a batch job sees all cores and all RAM of its machine and may use a part: its
affinity, and the limits of its control group and of all groups above it, v1 or v2. In a container the group's name in /proc
may be the one that it has outside, where no such folder is; then the root of the mounted tree is its own group, and is
looked at, too.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from vlatune.pipeline.memory import STORE_FLAG, Budget, plan_budget, plan_store_bytes
from vlatune.report.formatting import format_bytes

UNLIMITED = float("inf")


@dataclass(frozen=True)
class Host:
    """One machine, as far as a run may use it."""

    cpus: int
    ram_bytes: int
    """Free or freeable now, and allowed."""
    shm_bytes: int
    """Free in /dev/shm, where Ray's object store lives."""
    gpus: int = 0


def read_host(*, gpus: int, root: Path = Path("/")) -> Host:
    """This machine; `root` is another's file tree in tests."""
    return Host(usable_cpus(root), usable_ram_bytes(root), free_shm_bytes(root), gpus)


def usable_cpus(root: Path = Path("/")) -> int:
    """Whole CPUs, at least one: a quota of 3.5 keeps three busy."""
    return max(1, int(min(len(os.sched_getaffinity(0)), _quota_cpus(root))))


def usable_ram_bytes(root: Path = Path("/")) -> int:
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    available_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    limits = [_number(text) for text in _settings(root, "memory", "memory.max")]
    limits += [_number(text) for text in _settings(root, "memory", "memory.limit_in_bytes")]
    return int(min([available_bytes, *limits]))


def free_shm_bytes(root: Path = Path("/")) -> int:
    """None where there is no such folder."""
    try:
        found = os.statvfs(root / "dev/shm")
    except FileNotFoundError:
        return 0
    return found.f_bavail * found.f_frsize


def _quota_cpus(root: Path) -> float:
    quotas = [UNLIMITED]
    for text in _settings(root, "cpu", "cpu.max"):  # v2: "150000 100000" or "max 100000"
        quota_us, period_us = text.split()
        quotas.append(_number(quota_us) / int(period_us))
    periods = _settings(root, "cpu", "cpu.cfs_period_us")
    for quota_us, period_us in zip(_settings(root, "cpu", "cpu.cfs_quota_us"), periods, strict=True):
        if int(quota_us) > 0:  # v1: -1 is no limit
            quotas.append(int(quota_us) / int(period_us))
    return min(quotas)


def _settings(root: Path, controller: str, name: str) -> Iterator[str]:
    """What this setting says in our group and in those above it, wherever there is one."""
    for folder in _group_folders(root, controller):
        file = folder / name
        if file.is_file():
            yield file.read_text().strip()


def _group_folders(root: Path, controller: str) -> Iterator[Path]:
    mount = root / "sys/fs/cgroup"
    file = root / "proc/self/cgroup"
    for line in file.read_text().splitlines() if file.is_file() else ():
        _, controllers, group = line.split(":", 2)  # v1: "4:cpu,cpuacct:/job", v2: "0::/job"
        if controllers and controller not in controllers.split(","):
            continue
        tree = mount / (controllers and controller)
        path = PurePosixPath(group)
        yield from (tree / one.relative_to("/") for one in (path, *path.parents))


def _number(text: str) -> float:
    return UNLIMITED if text == "max" else float(text)


GPU_WORKER_CORES = 2
"""Kept for a worker with a GPU: one for the thread that launches kernels; one for the thread that copies rows and moves
batches, the process that runs its Dataset (a tenth of a core) and Ray's own."""
CPU_WORKER_CORES = 1
"""Kept for a worker without one, where three or more are left to read: what of a step is not parallel runs there. The rest
of it shares all cores with the readers, which stand still when they are ahead."""
CPU_WORKER_LEAVES = 3
TASK_ROWS = 256
"""Rows that a read task should hold: seconds of decoding, against some milliseconds between two tasks."""
MIN_STORE_BYTES = 80 * 1024 * 1024
"""Ray refuses to start a store below 75 MiB."""
USUAL_STORE_BYTES = 512 * 1024 * 1024
"""Small rows need less, but it costs nothing: pages of a store that were never written take no RAM."""
DISK_STORE_BYTES = 8 * 10**9
"""Where /dev/shm holds no store at all, Ray keeps one of up to 10 GB in a file."""
RAM_SHARE = 0.25
"""Of the RAM, at most: the model's weights and batches, the readers, and the cache of the videos' files need the rest."""
SHM_SHARE = 0.8
"""Of what is free in /dev/shm, at most: Ray puts a store that does not fit on disk without a word."""
CORE_FLOPS = 35e9
"""What a core computes in a second of training: 27 to 50e9 with one thread, by the width of the model."""
ROW_S, PIXEL_S = 0.5e-3, 10e-9
"""CPU seconds that a row costs to read, and a recorded pixel of it to decode and resize. Both as measured on one machine;
on a faster one, computing and reading are faster together, and only their ratio counts."""


def compute_share(*, step_flops: float, pixels: int) -> float:
    """Share of a sample's CPU time that its step takes, the rest being its reading; roughly.

    >>> round(compute_share(step_flops=36e6, pixels=2 * 64 * 64), 1)  # the demo's
    0.6
    """
    step_s, read_s = step_flops / CORE_FLOPS, ROW_S + PIXEL_S * pixels
    return step_s / (step_s + read_s)


@dataclass(frozen=True)
class RunShape:
    """What of a run decides its sizes."""

    num_workers: int
    row_bytes: int
    """Of one sample as it travels through the store."""
    run_rows: int
    """Of the longest run of frames that is decoded in one go."""
    compute_share: float = 1.0
    """Of a sample's CPU time, that of its step; the rest is its reading."""
    torch_threads: int | None = None
    """What the user wants."""


@dataclass(frozen=True)
class Node:
    """One machine of a cluster, as Ray counts it."""

    cpus: int
    store_bytes: int
    gpus: int = 0
    trainers: int = 0
    """Places for workers without a GPU."""


@dataclass(frozen=True)
class Sizing:
    """All that was decided."""

    run: RunShape
    nodes: tuple[Node, ...]
    kept_cores: int
    """CPUs of the cluster that each worker takes, so that no reader gets them."""
    torch_threads: int
    store_bytes: int
    """Of the smallest store in which blocks may lie."""
    store_reason: str
    budget: Budget
    warnings: tuple[str, ...]

    def reasons(self) -> Iterator[str]:
        """Every number with its reason, in two lines."""
        cpus, workers = sum(node.cpus for node in self.nodes), self.run.num_workers
        kept = f"{self.kept_cores} kept for each to train with" if self.kept_cores else "shared by training and reading"
        yield (
            f"{workers} worker{'s' if workers > 1 else ''} on {cpus} CPUs, {kept}: "
            f"{self.budget.readers} readers and {self.torch_threads} torch threads each"
        )
        yield f"object store: {self.budget.reason(self.store_bytes, workers)}; the store's size: {self.store_reason}"


def plan_on_host(host: Host, run: RunShape, *, store_bytes: int | None = None) -> Sizing:
    """For a cluster of our own on this machine; `store_bytes` is what the user wants, if anything."""
    if 0 < host.gpus < run.num_workers:
        raise ValueError(
            f"--num_workers={run.num_workers}: this machine has {host.gpus} GPUs and each worker takes one; "
            f"use --num_workers={host.gpus}"
        )
    bare = Node(host.cpus, 0, host.gpus, run.num_workers)
    if store_bytes is None:
        store_bytes, reason = _choose_store(host, run, readers=_reading_cpus((bare,), run) // run.num_workers)
    else:
        reason = f"{STORE_FLAG} says so"
    warnings = _check_shared_memory(host, store_bytes)
    node = Node(host.cpus, store_bytes, host.gpus, run.num_workers)
    return _plan((node,), run, reason, STORE_FLAG, tuple(warnings))


def plan_on_nodes(nodes: Sequence[Node], run: RunShape) -> Sizing:
    """For a cluster of several machines, any of which may read for any worker.

    Readers run where a CPU is free and their blocks wait there, until the worker's node fetches them. So all that is in
    flight may lie on one node, and has to fit the smallest store, not the sum over the nodes.
    """
    usable = tuple(node for node in nodes if node.cpus or node.gpus or node.trainers)
    reason = f"the smallest of {len(usable)} nodes" if len(usable) > 1 else "the cluster's"
    return _plan(usable, run, reason, "`ray start --object-store-memory`", ())


def _plan(
    nodes: tuple[Node, ...], run: RunShape, store_reason: str, store_flag: str, warnings: tuple[str, ...]
) -> Sizing:
    reading_cpus = _reading_cpus(nodes, run)
    store_bytes = min(node.store_bytes for node in nodes)
    budget = plan_budget(
        store_bytes=store_bytes,
        row_bytes=run.row_bytes,
        num_workers=run.num_workers,
        num_cpus=reading_cpus,
        store_flag=store_flag,
    )
    return Sizing(
        run=run,
        nodes=nodes,
        kept_cores=_kept_cores(nodes, run.num_workers),
        torch_threads=run.torch_threads or _torch_threads(nodes, run),
        store_bytes=store_bytes,
        store_reason=store_reason,
        budget=budget,
        warnings=(*warnings, *_check_tasks(budget, run, store_flag)),
    )


def _reading_cpus(nodes: tuple[Node, ...], run: RunShape) -> int:
    """What the workers leave."""
    cpus, taken = sum(node.cpus for node in nodes), run.num_workers * _kept_cores(nodes, run.num_workers)
    if cpus - taken < 1:
        fewer = f" or lower --num_workers to {cpus - 1}" if cpus > 1 else ""
        raise ValueError(
            f"the cluster has {cpus} CPUs and {run.num_workers} workers take {taken} of them: none is left to decode; "
            f"add CPUs{fewer}"
        )
    return cpus - taken


def _kept_cores(nodes: tuple[Node, ...], num_workers: int) -> int:
    """CPUs that a worker takes: those it should have, or fewer where they are few."""
    cpus = sum(node.cpus for node in nodes)
    if any(node.gpus for node in nodes):
        wanted, left = GPU_WORKER_CORES, 1
    elif any(node.trainers for node in nodes):
        wanted, left = CPU_WORKER_CORES, CPU_WORKER_LEAVES
    else:
        return 1  # all that Ray could place it by
    for kept in range(wanted, 0, -1):
        fit = all(workers * kept <= node.cpus for node, workers in _hosting(nodes, num_workers))
        if fit and cpus >= num_workers * (kept + left):
            return kept
    return 0


def _hosting(nodes: tuple[Node, ...], num_workers: int) -> list[tuple[Node, int]]:
    """Nodes on which workers may be, with the most that each can get: Ray fills one before the next."""
    if any(node.gpus for node in nodes):
        places = [node.gpus for node in nodes]
    elif any(node.trainers for node in nodes):
        places = [node.trainers for node in nodes]
    else:
        places = [node.cpus for node in nodes]
    return [(node, min(most, num_workers)) for node, most in zip(nodes, places, strict=True) if most]


def _torch_threads(nodes: tuple[Node, ...], run: RunShape) -> int:
    """With a GPU those kept for a worker; without, its part of the cores by the work that its step is.

    More would cost: threads wait for each other at every operator, and the slowest shares its core with a reader. From
    the run and the machine alone, and not by trying: the last bits of a loss depend on the number.
    """
    cores = min(node.cpus // workers for node, workers in _hosting(nodes, run.num_workers))
    if any(node.gpus for node in nodes):
        return max(1, min(cores, GPU_WORKER_CORES))
    return max(1, round(cores * run.compute_share))


def _choose_store(host: Host, run: RunShape, *, readers: int) -> tuple[int, str]:
    """As large as is useful, if the machine has it; with the reason."""
    task_rows = max(TASK_ROWS, 2 * run.run_rows)
    useful_bytes = plan_store_bytes(
        row_bytes=run.row_bytes, num_workers=run.num_workers, readers=max(1, readers), task_rows=task_rows
    )
    shm_bytes = int(SHM_SHARE * host.shm_bytes)
    bounds = [(useful_bytes, f"room for {task_rows} rows of every reader")]
    if useful_bytes < USUAL_STORE_BYTES:
        bounds = [(USUAL_STORE_BYTES, "the usual for small rows")]
    bounds.append((int(RAM_SHARE * host.ram_bytes), f"{RAM_SHARE:.0%} of {format_bytes(host.ram_bytes)} of RAM"))
    if shm_bytes >= MIN_STORE_BYTES:
        bounds.append((shm_bytes, f"{SHM_SHARE:.0%} of what is free in /dev/shm"))
    else:
        bounds.append((DISK_STORE_BYTES, "the most that is kept on disk"))
    store_bytes, reason = min(bounds)
    return (store_bytes, reason) if store_bytes >= MIN_STORE_BYTES else (MIN_STORE_BYTES, "the least that Ray allows")


def _check_shared_memory(host: Host, store_bytes: int) -> Iterator[str]:
    if store_bytes <= host.shm_bytes:
        return
    lower = max(MIN_STORE_BYTES, int(SHM_SHARE * host.shm_bytes))
    remedy = f"lower {STORE_FLAG} to {lower} or " if lower <= host.shm_bytes else ""
    text = (
        f"an object store of {format_bytes(store_bytes)} does not fit the {format_bytes(host.shm_bytes)} free in /dev/shm; "
        f"{remedy}enlarge /dev/shm (docker run --shm-size={-(-store_bytes * 5 // 4 // 10**6)}m)"
    )
    if store_bytes > DISK_STORE_BYTES:
        raise ValueError(text)
    yield f"{text}: Ray keeps it in a file on disk, which is slower"


def _check_tasks(budget: Budget, run: RunShape, store_flag: str) -> Iterator[str]:
    """A run that does not fit one task is decoded by several, and each has to find its place in the videos."""
    if budget.task_rows >= run.run_rows:
        return
    enough = plan_store_bytes(
        row_bytes=run.row_bytes, num_workers=run.num_workers, readers=budget.readers, task_rows=run.run_rows
    )
    yield (
        f"read tasks hold {budget.task_rows} rows, less than a run of {run.run_rows} frames, which several of them must then "
        f"begin to decode; raise {store_flag} to {enough} or more"
    )
