"""Flags of torch are set where training runs, and reported as torch has them."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from vlatune.config.settings import PolicyConfig, RunConfig
from vlatune.evaluate.evaluate_run import choose_device
from vlatune.train.worker.device import (
    compiler_problem,
    deterministic_kernels,
    may_compile,
    set_performance_flags,
    uses_compiler,
)


@pytest.fixture(autouse=True)
def _restored_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_the_process_uses_the_given_number_of_threads():
    flags = set_performance_flags(torch.device("cpu"), 2)
    expected = {"device": "cpu", "threads": 2, "deterministic": False, "float32_matmul_precision": "highest"}
    assert flags == expected | {"keeps_freed_memory": True}
    assert torch.get_num_threads() == 2


def test_tf32_and_kernel_selection_are_on_with_cuda():
    flags = set_performance_flags(torch.device("cuda"), 1)
    assert flags["float32_matmul_precision"] == torch.get_float32_matmul_precision() == "high"
    assert flags["cudnn_tf32"] is torch.backends.cudnn.allow_tf32 is True
    assert flags["cudnn_benchmark"] is torch.backends.cudnn.benchmark is True


def test_deterministic_kernels_are_temporary(monkeypatch):
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


@pytest.mark.gpu
def test_evaluation_uses_the_kernels_of_training():
    torch.set_float32_matmul_precision("highest")
    assert choose_device(None).type == "cuda"
    assert torch.get_float32_matmul_precision() == "high"


def test_layers_are_compiled_where_a_compiler_exists(monkeypatch, tmp_path):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    (tmp_path / "g++").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    auto = RunConfig()
    always, never = (replace(auto, policy=PolicyConfig(compile=value)) for value in ("true", "false"))
    assert uses_compiler(always, cpu)
    assert not uses_compiler(auto, cpu)
    assert not uses_compiler(never, cuda)
    assert may_compile(auto)
    assert not may_compile(replace(auto, deterministic=True))
    assert not may_compile(replace(auto, fsdp=True))
    assert not may_compile(replace(auto, policy=PolicyConfig(type="act")))
    (tmp_path / "g++").unlink()
    assert compiler_problem("cpu")
    assert not uses_compiler(auto, cuda)  # no gcc either
    with pytest.raises(ValueError, match=r"--policy.compile=true: .*install.*--policy.compile=false"):
        uses_compiler(always, cpu)


@pytest.mark.gpu
def test_layers_are_compiled_on_cuda_by_default():
    assert uses_compiler(RunConfig(), torch.device("cuda"))
