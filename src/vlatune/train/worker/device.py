"""Device settings: performance flags, deterministic kernels, and transfer of batches."""

import ctypes
import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from vlatune.batch import Columns
from vlatune.config.settings import RunConfig
from vlatune.policies.modeling import use_fast_kernels
from vlatune.registry import get_policy_info
from vlatune.train.worker.transfer import Accelerator, HostTransfer, Prefetcher, StreamTransfer, Transfer
from vlatune.train.worker_job import DETERMINISTIC_ENVIRONMENT

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""glibc's `mallopt` parameters: free bytes above which memory is returned to the system, and size
above which an allocation is mapped separately."""
OLDEST_CAPABILITY = (7, 0)
"""Compute capability of the oldest GPU that triton supports."""


def set_performance_flags(device: torch.device, num_threads: int) -> dict[str, bool | int | str]:
    """Set performance flags of this process; return them as reported by torch."""
    torch.set_num_threads(num_threads)
    flags: dict[str, bool | int | str] = {"device": device.type, "threads": torch.get_num_threads()}
    flags["deterministic"] = torch.are_deterministic_algorithms_enabled()
    if flags["deterministic"]:
        flags |= {name.lower(): os.environ.get(name, "") for name in DETERMINISTIC_ENVIRONMENT}
    if device.type == "cpu":
        flags["keeps_freed_memory"] = _keep_freed_memory()
    use_fast_kernels(device, deterministic=torch.are_deterministic_algorithms_enabled())
    if device.type == "cuda":
        flags["cudnn_deterministic"] = torch.backends.cudnn.deterministic
        flags["cudnn_benchmark"] = torch.backends.cudnn.benchmark
        flags["cudnn_tf32"] = torch.backends.cudnn.allow_tf32
    return flags | {"float32_matmul_precision": torch.get_float32_matmul_precision()}


def uses_compiler(config: RunConfig, device: torch.device) -> bool:
    """Decide whether the worker compiles its layers (--policy.compile); raise if it must and cannot."""
    wanted = config.policy.compile
    if wanted == "false" or (wanted == "auto" and (device.type != "cuda" or not may_compile(config))):
        return False
    problem = compiler_problem(device.type)
    if problem and wanted == "true":
        raise ValueError(f"--policy.compile=true: {problem}, or use --policy.compile=false")
    if problem is None and wanted == "auto":  # an error of the compiler must not end a run that did not ask for it
        from torch._dynamo import config as compiler_config

        compiler_config.suppress_errors = True
    return problem is None


def may_compile(config: RunConfig) -> bool:
    """True if --policy.compile=auto compiles where it can: kernels of a later start may round differently."""
    has_layers = "compile" in get_policy_info(config.policy.type).settings
    return has_layers and not (config.deterministic or config.fsdp)


def compiler_problem(device_type: str) -> str | None:
    """Return why torch.compile cannot work on this machine and what to do; None if it can."""
    named = os.environ.get("CXX" if device_type == "cpu" else "CC")
    compilers = (named,) if named else ("g++", "clang++") if device_type == "cpu" else ("gcc", "cc", "clang")
    if not any(map(shutil.which, compilers)):
        return f"torch.compile needs a C compiler ({' or '.join(compilers)}), and none is in PATH; install one"
    if device_type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "torch.compile needs triton on CUDA; install it with `pip install triton`"
        if torch.version.cuda and torch.cuda.get_device_capability() < OLDEST_CAPABILITY:
            return f"triton needs a GPU of compute capability {OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]}; use a newer GPU"
    return None


def _keep_freed_memory() -> bool:
    """Make glibc keep freed memory, which avoids page faults in every step; False if it does not."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    sizes = (1 << 30, 32 << 20)  # glibc may reject the first
    return bool(mallopt(M_TRIM_THRESHOLD, -1)) and any(mallopt(M_MMAP_THRESHOLD, size) for size in sizes)


def make_transfer(device: torch.device) -> Transfer:
    return HostTransfer() if device.type == "cpu" else StreamTransfer(Accelerator(device))


def device_batches(batches: Iterator[Columns], device: torch.device, *, depth: int = 1) -> Prefetcher:
    """Return an iterator over batches on the device that prefetches `depth` of them."""
    return Prefetcher(batches, make_transfer(device), depth=depth)


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Make operations deterministic or raise; restores the settings afterwards."""
    missing = {name: value for name, value in DETERMINISTIC_ENVIRONMENT.items() if name not in os.environ}
    kept = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    cudnn, fills = torch.backends.cudnn.deterministic, memory.fill_uninitialized_memory
    os.environ |= missing  # workers have it since before CUDA started
    try:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        # No uninitialised memory is read, and filling it would touch all pages of a new model.
        memory.fill_uninitialized_memory = False
        yield
    finally:
        torch.use_deterministic_algorithms(kept[0], warn_only=kept[1])
        torch.backends.cudnn.deterministic = cudnn
        memory.fill_uninitialized_memory = fills
        for name in missing:
            del os.environ[name]
