"""The device's side of training: performance flags, and the batches that arrive there, some ahead of need."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from vlatune.batch import Columns
from vlatune.report.cpu_clocks import find_team
from vlatune.train.worker.transfer import DeviceBatch, HostTransfer, Prefetcher, StreamTransfer, TorchMachine, Transfer
from vlatune.train.worker_job import DETERMINISTIC_ENVIRONMENT

__all__ = [
    "DeviceBatch",
    "deterministic_kernels",
    "device_batches",
    "find_compute_threads",
    "make_transfer",
    "set_performance_flags",
]


TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""glibc's numbers of what `mallopt` sets: from how many free bytes on memory goes back to the system, and from what size on a tensor
gets pages of its own, which go back when it is freed."""
LARGEST_KEPT_BYTES = (1 << 30, 32 << 20)
"""Of a tensor; the second where glibc takes no more."""


def set_performance_flags(device: torch.device, num_threads: int) -> dict[str, bool | int | str]:
    """Flags for speed, set in the process that trains; returned as torch reports them, so that the run can say so."""
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
        # Pictures are all of one size; but what is fastest may be another kernel each time.
        torch.backends.cudnn.benchmark = not flags["deterministic"]
        flags["cudnn_deterministic"] = torch.backends.cudnn.deterministic
        flags["cudnn_benchmark"] = torch.backends.cudnn.benchmark
        flags["cudnn_tf32"] = torch.backends.cudnn.allow_tf32
    return flags | {"float32_matmul_precision": torch.get_float32_matmul_precision()}


def _keep_freed_memory() -> bool:
    """What a step frees, the next one gets again. Left to itself, glibc gives it back to the system after every step, which then
    clears each page anew: 665 faults a sample and a sixth of the step of a model of width 128 with a frozen prefix. False where the C library is
    another one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return (
        mallopt is not None
        and bool(mallopt(TRIM_THRESHOLD, -1))  # never
        and any(mallopt(MMAP_THRESHOLD, size) for size in LARGEST_KEPT_BYTES)
    )


def find_compute_threads(device: torch.device) -> list[int] | None:
    """Native ids of the threads that share the operators of the calling one; call it after the flags are set."""
    others = torch.get_num_threads() - 1 if device.type == "cpu" else 0
    if not others:
        return []
    work = torch.ones(1 << 20)  # about 1 ms an operator: long enough to stand out
    return find_team(lambda: [work.exp() for _ in range(8)], others)


def make_transfer(device: torch.device) -> Transfer:
    return HostTransfer() if device.type == "cpu" else StreamTransfer(TorchMachine(device))


def device_batches(batches: Iterator[Columns], device: torch.device, *, depth: int = 1) -> Prefetcher:
    """Batches on the device, `depth` of them ready or under way while one is used."""
    return Prefetcher(batches, make_transfer(device), depth=depth)


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Operations give the same bits each time, or raise; afterwards all is as it was."""
    missing = {name: value for name, value in DETERMINISTIC_ENVIRONMENT.items() if name not in os.environ}
    kept = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    cudnn, fills = torch.backends.cudnn.deterministic, memory.fill_uninitialized_memory
    os.environ |= missing  # of a worker of a group it is there already, since before CUDA started
    try:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        # Nothing here reads memory before it was written, and a model is built in memory that is never touched.
        memory.fill_uninitialized_memory = False
        yield
    finally:
        torch.use_deterministic_algorithms(kept[0], warn_only=kept[1])
        torch.backends.cudnn.deterministic = cudnn
        memory.fill_uninitialized_memory = fills
        for name in missing:
            del os.environ[name]
