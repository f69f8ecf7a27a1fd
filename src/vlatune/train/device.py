"""The device's side of training: performance flags, and the batches that arrive there, some ahead of need."""

from collections.abc import Iterator

import torch

from vlatune.batch import Columns
from vlatune.report.cpu_clocks import find_team
from vlatune.train.collate import DeviceBatch
from vlatune.train.prefetch import Prefetcher
from vlatune.train.transfer import HostTransfer, StreamTransfer, TorchMachine

__all__ = ["DeviceBatch", "choose_device", "device_batches", "find_compute_threads", "set_performance_flags"]


def choose_device(name: str | None) -> torch.device:
    """The device that a flag names, if it is here; without a name CUDA where there is some, else the CPU."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device={name}: torch knows no such device; give cpu, cuda or cuda:1") from None
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if here else 0
    if device.type != "cpu" and (here is None or here.type != device.type or (device.index or 0) >= count):
        there = f"{count} of type {here.type}" if here else "none but the CPU"
        raise ValueError(f"--device={name}: there is no such device here ({there}); leave the flag out, or give cpu")
    return device


def set_performance_flags(device: torch.device, num_threads: int) -> dict[str, bool | int | str]:
    """Flags for speed, set in the process that trains; returned as torch reports them, so that the run can say so."""
    torch.set_num_threads(num_threads)
    flags: dict[str, bool | int | str] = {"device": device.type, "threads": torch.get_num_threads()}
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True  # pictures are all of one size
        flags["cudnn_benchmark"] = torch.backends.cudnn.benchmark
        flags["cudnn_tf32"] = torch.backends.cudnn.allow_tf32
    return flags | {"float32_matmul_precision": torch.get_float32_matmul_precision()}


def find_compute_threads(device: torch.device) -> list[int] | None:
    """Native ids of the threads that share the operators of the calling one; call it after the flags are set."""
    others = torch.get_num_threads() - 1 if device.type == "cpu" else 0
    work = torch.ones(1 << 20)  # about 1 ms an operator: long enough to stand out
    return find_team(lambda: [work.exp() for _ in range(8)], others)


def device_batches(batches: Iterator[Columns], device: torch.device, *, depth: int = 1) -> Prefetcher:
    """Batches on the device, `depth` of them ready or under way while one is used."""
    if device.type == "cpu":
        return Prefetcher(batches, HostTransfer(), depth=depth)
    # One set of page-locked buffers for each batch ahead, and one that is written meanwhile.
    return Prefetcher(batches, StreamTransfer(TorchMachine(device), slots=depth + 1), depth=depth)
