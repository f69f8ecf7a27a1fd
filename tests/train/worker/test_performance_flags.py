"""Flags are set where training runs, and what is reported is what torch says of them."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from vlatune.report.cpu_clocks import thread_cpu_s
from vlatune.train.worker.device import deterministic_kernels, find_compute_threads, set_performance_flags


@pytest.fixture(autouse=True)
def _restored_flags() -> Iterator[None]:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    tf32, benchmark = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = tf32, benchmark


def test_the_process_uses_as_many_threads_as_it_is_told():
    flags = set_performance_flags(torch.device("cpu"), 2)
    expected = {"device": "cpu", "threads": 2, "deterministic": False, "float32_matmul_precision": "highest"}
    assert flags == expected | {"keeps_freed_memory": True}
    assert torch.get_num_threads() == 2


def test_on_cuda_tf32_and_the_choice_of_kernels_are_on():
    flags = set_performance_flags(torch.device("cuda"), 1)
    assert flags["float32_matmul_precision"] == torch.get_float32_matmul_precision() == "high"
    assert flags["cudnn_tf32"] is torch.backends.cudnn.allow_tf32 is True
    assert flags["cudnn_benchmark"] is torch.backends.cudnn.benchmark is True


def test_deterministic_kernels_are_on_inside_and_all_is_as_before_afterwards(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    cudnn = torch.backends.cudnn.deterministic
    with deterministic_kernels():
        flags = set_performance_flags(torch.device("cuda"), 1)
        assert flags["deterministic"] is torch.are_deterministic_algorithms_enabled() is True
        assert flags["cudnn_deterministic"] is torch.backends.cudnn.deterministic is True
        assert flags["cudnn_benchmark"] is torch.backends.cudnn.benchmark is False
        assert flags["cublas_workspace_config"] == os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic == cudnn
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_a_users_own_workspace_stays(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with deterministic_kernels():
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_the_threads_that_share_an_operator_are_found():
    torch.set_num_threads(3)
    team = find_compute_threads(torch.device("cpu"))
    assert team is not None
    assert len(team) == 2
    before_s = [thread_cpu_s(thread) for thread in team]
    work = torch.ones(1 << 20)
    for _ in range(20):
        work.exp()
    assert all(thread_cpu_s(thread) > cpu_s for thread, cpu_s in zip(team, before_s, strict=True))


def test_one_thread_computes_alone_and_so_does_one_that_launches():
    torch.set_num_threads(1)
    assert find_compute_threads(torch.device("cpu")) == []
    torch.set_num_threads(2)
    assert find_compute_threads(torch.device("cuda")) == []


FAULTS = """
import resource, torch
from vlatune.train.worker.device import set_performance_flags

def faults():
    for _ in range(6):
        kept = [torch.ones(size << 18) for size in (1, 4, 8, 20, 33, 50)]  # MiB
        begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        del kept
    kept = [torch.ones(size << 18) for size in (1, 4, 8, 20, 33, 50)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin

print(faults())
set_performance_flags(torch.device("cpu"), 1)
print(faults())
"""


def test_memory_that_a_step_frees_is_there_for_the_next():
    """116 MiB are 29,696 pages; how many are fetched anew is counted by the system."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before > 10_000
    assert after < 1000
