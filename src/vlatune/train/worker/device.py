"""Device settings: performance flags, deterministic kernels, and transfer of batches."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from vlatune.batch import Columns
from vlatune.train.worker.transfer import Accelerator, HostTransfer, Prefetcher, StreamTransfer, Transfer
from vlatune.train.worker_job import DETERMINISTIC_ENVIRONMENT

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""glibc's `mallopt` parameters: free bytes above which memory is returned to the system, and size
above which an allocation is mapped separately."""


def set_performance_flags(device: torch.device, num_threads: int) -> dict[str, bool | int | str]:
    """Set performance flags of this process; return them as reported by torch."""
    torch.set_num_threads(num_threads)
    flags: dict[str, bool | int | str] = {"device": device.type, "threads": torch.get_num_threads()}
    flags["deterministic"] = torch.are_deterministic_algorithms_enabled()
    if flags["deterministic"]:
        flags |= {name.lower(): os.environ.get(name, "") for name in DETERMINISTIC_ENVIRONMENT}
    if device.type == "cpu":
        flags["keeps_freed_memory"] = _keep_freed_memory()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
        torch.backends.cudnn.allow_tf32 = True
        # Images have one size, but benchmarking may choose different kernels each time.
        torch.backends.cudnn.benchmark = not flags["deterministic"]
        flags["cudnn_deterministic"] = torch.backends.cudnn.deterministic
        flags["cudnn_benchmark"] = torch.backends.cudnn.benchmark
        flags["cudnn_tf32"] = torch.backends.cudnn.allow_tf32
    return flags | {"float32_matmul_precision": torch.get_float32_matmul_precision()}


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
