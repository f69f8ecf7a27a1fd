"""Resources of containers, jobs and bare machines, with both versions of control groups."""

import os
from pathlib import Path

import pytest

from vlatune.feed.sizing import free_shm_bytes, usable_cpus, usable_ram_bytes

GB = 10**9
MEMINFO = "MemTotal:       33554432 kB\nMemFree:         1048576 kB\nMemAvailable:   16777216 kB"
AVAILABLE_BYTES = 16 * 1024**3


@pytest.fixture
def make_machine(tmp_path, monkeypatch):
    """Return a function that makes the file tree of another machine with `cores` usable cores."""

    def make(files: dict[str, str], cores: int = 16) -> Path:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        for name, text in ({"proc/meminfo": MEMINFO} | files).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return tmp_path

    return make


def test_without_control_groups_affinity_and_free_ram_are_the_limits(make_machine):
    root = make_machine({}, cores=3)
    assert (usable_cpus(root), usable_ram_bytes(root), free_shm_bytes(root)) == (3, AVAILABLE_BYTES, 0)


@pytest.mark.parametrize(
    ("quota", "cpus"), [("400000 100000", 4), ("350000 100000", 3), ("50000 100000", 1), ("max 100000", 16)]
)
def test_v2_cpu_quota(make_machine, quota, cpus):
    assert usable_cpus(make_machine({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": quota})) == cpus


@pytest.mark.parametrize(("quota_us", "cpus"), [("-1", 16), ("250000", 2), ("9900000", 16)])
def test_v1_cpu_quota(make_machine, quota_us, cpus):
    group = "sys/fs/cgroup/cpu/docker/a1"
    root = make_machine(
        {
            "proc/self/cgroup": "5:memory:/docker/a1\n3:cpu,cpuacct:/docker/a1",
            f"{group}/cpu.cfs_quota_us": quota_us,
            f"{group}/cpu.cfs_period_us": "100000",
        }
    )
    assert usable_cpus(root) == cpus


@pytest.mark.parametrize(("outer", "inner", "cpus"), [("2", "8", 2), ("8", "2", 2)])
def test_the_lowest_limit_of_nested_groups_counts(make_machine, outer, inner, cpus):
    root = make_machine(
        {
            "proc/self/cgroup": "0::/slurm/job_1/step_0",
            "sys/fs/cgroup/slurm/cpu.max": f"{outer}00000 100000",
            "sys/fs/cgroup/slurm/job_1/step_0/cpu.max": f"{inner}00000 100000",
            "sys/fs/cgroup/slurm/job_1/memory.max": f"{4 * GB}",
            "sys/fs/cgroup/slurm/memory.max": "max",
        }
    )
    assert (usable_cpus(root), usable_ram_bytes(root)) == (cpus, 4 * GB)


def test_a_container_whose_group_path_is_not_mounted_uses_the_mounted_root(make_machine):
    root = make_machine(
        {
            "proc/self/cgroup": "4:memory:/docker/a1\n3:cpu:/docker/a1",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "600000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GB}",
        }
    )
    assert (usable_cpus(root), usable_ram_bytes(root)) == (6, 2 * GB)
