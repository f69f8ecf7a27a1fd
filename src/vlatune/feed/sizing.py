"""Size a run for its machines: cores reserved for training, readers, threads, object store, blocks.

    machine + run -> plan_on_host  -> store of a local cluster, and everything else
    nodes + run   -> plan_on_nodes -> everything else, for an existing cluster

Computed once on the driver; pure, except for `read_host`. docs/hardware.md has examples and reasons.

A container or batch job sees all cores and RAM of its machine but may use only part of them, as
limited by CPU affinity and its control groups (v1 or v2). In a container, the group path in /proc
may not exist below the mount; then the root of the mounted tree is its group, so it is checked,
too.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from vlatune.feed.memory import STORE_FLAG, Budget, plan_budget, plan_store_bytes
from vlatune.formatting import format_bytes


@dataclass(frozen=True)
class Host:
    """Resources of one machine that a run may use."""

    cpus: int
    ram_bytes: int
    """Available RAM within the limits."""
    shm_bytes: int
    """Free space in /dev/shm, where Ray's object store lives."""
    gpus: int = 0


def read_host(*, gpus: int, root: Path = Path("/")) -> Host:
    """Read the resources of this machine from the file tree below `root`."""
    return Host(usable_cpus(root), usable_ram_bytes(root), free_shm_bytes(root), gpus)


def usable_cpus(root: Path = Path("/")) -> int:
    """Return the number of usable CPUs, rounded down, at least 1."""
    limits: list[float] = [len(os.sched_getaffinity(0))]
    for text in _settings(root, "cpu", "cpu.max"):  # v2: "150000 100000" or "max 100000"
        quota_us, period_us = text.split()
        limits.append(_number(quota_us) / int(period_us))
    periods = _settings(root, "cpu", "cpu.cfs_period_us")
    for quota_us, period_us in zip(_settings(root, "cpu", "cpu.cfs_quota_us"), periods, strict=True):
        if int(quota_us) > 0:  # v1: -1 means unlimited
            limits.append(int(quota_us) / int(period_us))
    return max(1, int(min(limits)))


def usable_ram_bytes(root: Path = Path("/")) -> int:
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    limits: list[float] = [int(fields["MemAvailable"].split()[0]) * 1024]
    for name in ("memory.max", "memory.limit_in_bytes"):
        limits += [_number(text) for text in _settings(root, "memory", name)]
    return int(min(limits))


def free_shm_bytes(root: Path = Path("/")) -> int:
    """Return the free bytes in /dev/shm; 0 if it does not exist."""
    try:
        found = os.statvfs(root / "dev/shm")
    except FileNotFoundError:
        return 0
    return found.f_bavail * found.f_frsize


def _settings(root: Path, controller: str, name: str) -> Iterator[str]:
    """Yield the values of a setting in this process's control group and its parents."""
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        _, controllers, group = line.split(":", 2)  # v1: "4:cpu,cpuacct:/job", v2: "0::/job"
        if controllers and controller not in controllers.split(","):
            continue
        tree, path = root / "sys/fs/cgroup" / (controllers and controller), PurePosixPath(group)
        for one in (path, *path.parents):
            file = tree / one.relative_to("/") / name
            if file.is_file():
                yield file.read_text().strip()


def _number(text: str) -> float:
    return math.inf if text == "max" else float(text)


GPU_WORKER_CORES = 2
"""Cores reserved per GPU worker: one launches kernels, one copies batches and runs Ray."""
CPU_WORKER_CORES = 1
"""Cores reserved per CPU worker, if CPU_WORKER_LEAVES or more remain for readers.

The serial part of a step runs there; the rest shares all cores with the readers.
"""
CPU_WORKER_LEAVES = 3
TASK_ROWS = 128
"""Minimum rows of a read task, to amortise the idle time between tasks."""
MIN_STORE_BYTES = 80 * 1024 * 1024
"""Ray rejects stores below 75 MiB."""
USUAL_STORE_BYTES = 512 * 1024 * 1024
"""Minimum store for small rows; unwritten pages of a store take no RAM."""
DISK_STORE_BYTES = 8 * 10**9
"""Maximum store on disk if /dev/shm is too small; Ray allows 10 GB."""
RAM_SHARE = 0.25
"""Maximum share of the RAM; the rest is for weights, batches, readers and the page cache."""
SHM_SHARE = 0.8
"""Maximum share of free /dev/shm; Ray silently puts a store that does not fit on disk."""
CORE_FLOPS = 35e9
"""Approximate FLOPS of a core in training with one thread."""
ROW_S, PIXEL_S = 0.5e-3, 10e-9
"""Approximate CPU seconds to read a row, and to decode and resize a pixel; only ratios matter."""


def compute_share(*, step_flops: float, pixels: int) -> float:
    """Return the approximate share of a sample's CPU time that is spent on training, not reading.

    >>> round(compute_share(step_flops=36e6, pixels=2 * 64 * 64), 1)  # the demo's
    0.6
    """
    step_s, read_s = step_flops / CORE_FLOPS, ROW_S + PIXEL_S * pixels
    return step_s / (step_s + read_s)


@dataclass(frozen=True)
class RunShape:
    """Properties of a run that determine its sizing."""

    num_workers: int
    row_bytes: int
    """Bytes of one sample in the object store."""
    run_rows: int
    """Length of the longest run of frames that is decoded at once."""
    compute_share: float = 1.0
    """Share of a sample's CPU time that is spent on training; the rest is reading."""
    torch_threads: int | None = None
    """User setting."""
    sizes: tuple[int, ...] = ()
    """Numbers of workers that an elastic run may have, largest first."""


@dataclass(frozen=True)
class Node:
    """Resources of one node of a Ray cluster."""

    cpus: int
    store_bytes: int
    gpus: int = 0
    trainers: int = 0
    """Number of CPU workers that fit."""


@dataclass(frozen=True)
class Sizing:
    """Resources and limits chosen for a run."""

    run: RunShape
    nodes: tuple[Node, ...]
    reserved_cores: int
    """CPUs that each worker reserves, so that no reader uses them."""
    torch_threads: int
    store_bytes: int
    """Size of the smallest object store."""
    store_reason: str
    budget: Budget
    warnings: tuple[str, ...]

    def for_workers(self, num_workers: int, nodes: "Sequence[Node]") -> "Sizing":
        """Return the plan with this number of workers and the readers and memory of these nodes.

        Device, threads and reserved CPUs stay.
        """
        store_bytes = min(node.store_bytes for node in nodes if node.cpus or node.gpus or node.trainers)
        budget = plan_budget(
            store_bytes=store_bytes,
            row_bytes=self.run.row_bytes,
            num_workers=num_workers,
            num_cpus=max(1, sum(node.cpus for node in nodes) - num_workers * self.reserved_cores),
        )
        run = replace(self.run, num_workers=num_workers)
        return replace(self, run=run, store_bytes=store_bytes, budget=budget)

    def reasons(self) -> Iterator[str]:
        """Yield the sizing with its reasons, in two lines."""
        cpus, workers = sum(node.cpus for node in self.nodes), self.run.num_workers
        cores = f"{self.reserved_cores} reserved for each" if self.reserved_cores else "shared by training and reading"
        yield (
            f"{workers} worker{'s' if workers > 1 else ''} on {cpus} CPUs, {cores}: "
            f"{self.budget.readers} readers and {self.torch_threads} torch threads each"
        )
        yield f"object store: {self.budget.reason(self.store_bytes, workers)}; store size: {self.store_reason}"


def plan_on_host(host: Host, run: RunShape, *, store_bytes: int | None = None) -> Sizing:
    """Plan a local cluster on this machine; `store_bytes` is the user's setting."""
    run = _largest_that_fits(run, host.gpus or run.num_workers)
    if 0 < host.gpus < run.num_workers:
        raise ValueError(
            f"--num_workers={run.num_workers}: this machine has {host.gpus} GPUs and each worker takes one; "
            f"use --num_workers={host.gpus}"
        )
    bare = Node(host.cpus, 0, host.gpus, run.num_workers)
    if store_bytes is None:
        store_bytes, reason = _choose_store(
            host, run, readers=_reading_cpus((bare,), run.num_workers) // run.num_workers
        )
    else:
        reason = f"set by {STORE_FLAG}"
    warnings: tuple[str, ...] = ()
    if store_bytes > host.shm_bytes:
        text = (
            f"an object store of {format_bytes(store_bytes)} does not fit the {format_bytes(host.shm_bytes)} free in /dev/shm; lower "
            f"{STORE_FLAG} or enlarge /dev/shm (docker run --shm-size={-(-store_bytes * 5 // 4 // 10**6)}m)"
        )
        if store_bytes > DISK_STORE_BYTES:
            raise ValueError(text)
        warnings = (f"{text}: Ray keeps it in a file on disk, which is slower",)
    return _plan((replace(bare, store_bytes=store_bytes),), run, reason, STORE_FLAG, warnings)


def plan_on_nodes(nodes: Sequence[Node], run: RunShape) -> Sizing:
    """Plan for a cluster of several machines, where any node may read for any worker.

    Blocks wait on the node of their reader until fetched, so all blocks in flight may be on one
    node and must fit the smallest store.
    """
    usable = tuple(node for node in nodes if node.cpus or node.gpus or node.trainers)
    places = sum(node.gpus for node in usable) or sum(node.trainers for node in usable)
    run = _largest_that_fits(run, places or sum(node.cpus for node in usable) - 1)
    reason = f"the smallest of {len(usable)} nodes" if len(usable) > 1 else "the cluster's"
    return _plan(usable, run, reason, "`ray start --object-store-memory`", ())


def _plan(
    nodes: tuple[Node, ...], run: RunShape, store_reason: str, store_flag: str, warnings: tuple[str, ...]
) -> Sizing:
    reading_cpus = _reading_cpus(nodes, run.num_workers)  # raises if there are no nodes
    store_bytes = min(node.store_bytes for node in nodes)
    return Sizing(
        run=run,
        nodes=nodes,
        reserved_cores=_reserved_cores(nodes, run.num_workers),
        torch_threads=run.torch_threads or _torch_threads(nodes, run),
        store_bytes=store_bytes,
        store_reason=store_reason,
        budget=plan_budget(
            store_bytes=store_bytes,
            row_bytes=run.row_bytes,
            num_workers=run.num_workers,
            num_cpus=reading_cpus,
            store_flag=store_flag,
        ),
        warnings=warnings,
    )


def _largest_that_fits(run: RunShape, places: int) -> RunShape:
    """Return an elastic run with the largest number of workers for which there are places, else the smallest."""
    fitting = [size for size in run.sizes if size <= places] or run.sizes[-1:]
    return replace(run, num_workers=fitting[0]) if fitting else run


def find_shortage(nodes: Sequence[Node], sizing: Sizing, num_workers: int | None = None) -> str | None:
    """Describe what the nodes lack for the workers and a reader of a plan; None if nothing."""
    wanted, cores = num_workers or sizing.run.num_workers, sizing.reserved_cores
    uses_gpus = any(node.gpus for node in sizing.nodes)
    if uses_gpus or any(node.trainers for node in sizing.nodes):
        places = [(node.gpus if uses_gpus else node.trainers, node.cpus) for node in nodes]
        fit = sum(min(one, cpus // cores) if cores else one for one, cpus in places)
        if fit < wanted:
            return f"{wanted - fit} of {wanted} {'GPUs' if uses_gpus else 'places for workers'}"
    cpus, needed = sum(node.cpus for node in nodes), wanted * cores + 1
    return f"{needed - cpus} of {needed} CPUs" if cpus < needed else None


def _reading_cpus(nodes: tuple[Node, ...], num_workers: int) -> int:
    """Return the CPUs that the workers leave for readers."""
    cpus, taken = sum(node.cpus for node in nodes), num_workers * _reserved_cores(nodes, num_workers)
    if cpus - taken < 1:
        fewer = f" or lower --num_workers to {cpus - 1}" if cpus > 1 else ""
        raise ValueError(
            f"the cluster has {cpus} CPUs and {num_workers} workers reserve {taken} of them, which leaves none for readers; "
            f"add CPUs{fewer}"
        )
    return cpus - taken


def _reserved_cores(nodes: tuple[Node, ...], num_workers: int) -> int:
    """Return the CPUs that a worker reserves, fewer if there are not enough."""
    if any(node.gpus for node in nodes):
        wanted, left = GPU_WORKER_CORES, 1
    elif any(node.trainers for node in nodes):
        wanted, left = CPU_WORKER_CORES, CPU_WORKER_LEAVES
    else:
        return 1  # Ray needs a resource to place workers by
    for cores in range(wanted, 0, -1):
        fit = all(workers * cores <= node.cpus for node, workers in _hosting(nodes, num_workers))
        if fit and sum(node.cpus for node in nodes) >= num_workers * (cores + left):
            return cores
    return 0


def _hosting(nodes: tuple[Node, ...], num_workers: int) -> list[tuple[Node, int]]:
    """Return (node, maximum workers) of nodes that may host workers; Ray fills nodes in order."""
    by_resource = ([node.gpus for node in nodes], [node.trainers for node in nodes], [node.cpus for node in nodes])
    most = next(filter(any, by_resource))
    return [(node, min(fit, num_workers)) for node, fit in zip(nodes, most, strict=True) if fit]


def _torch_threads(nodes: tuple[Node, ...], run: RunShape) -> int:
    """Return torch threads per worker: reserved cores with GPUs, else cores times `compute_share`.

    More threads are slower: they synchronise at every operator, and one may share its core with a
    reader. The number is not tuned at run time, because it affects the last bits of a loss.
    """
    cores = min(node.cpus // workers for node, workers in _hosting(nodes, run.num_workers))
    has_gpus = any(node.gpus for node in nodes)
    return max(1, min(cores, GPU_WORKER_CORES) if has_gpus else round(cores * run.compute_share))


def _choose_store(host: Host, run: RunShape, *, readers: int) -> tuple[int, str]:
    """Return the largest useful store size that the machine allows, with the reason."""
    task_rows = max(TASK_ROWS, 2 * run.run_rows)
    useful_bytes = plan_store_bytes(
        row_bytes=run.row_bytes, num_workers=run.num_workers, readers=max(1, readers), task_rows=task_rows
    )
    shm_bytes = int(SHM_SHARE * host.shm_bytes)
    bounds = [(useful_bytes, f"holds {task_rows} rows of every reader")]
    if useful_bytes < USUAL_STORE_BYTES:
        bounds = [(USUAL_STORE_BYTES, "default for small rows")]
    bounds.append((int(RAM_SHARE * host.ram_bytes), f"{RAM_SHARE:.0%} of {format_bytes(host.ram_bytes)} of RAM"))
    if shm_bytes >= MIN_STORE_BYTES:
        bounds.append((shm_bytes, f"{SHM_SHARE:.0%} of the free space in /dev/shm"))
    else:
        bounds.append((DISK_STORE_BYTES, "maximum for a store on disk"))
    store_bytes, reason = min(bounds)
    return (store_bytes, reason) if store_bytes >= MIN_STORE_BYTES else (MIN_STORE_BYTES, "minimum of Ray")
