"""What this process may really use of its machine: CPUs, RAM, shared memory.

A container or a batch job sees all cores and all RAM of its machine and may use a part: its affinity, and the limits of its
control group and of all groups above it, v1 or v2. In a container the group's name in /proc may be the one that it
has outside, where no such folder is; then the root of the mounted tree is its own group, and is looked at, too.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

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
