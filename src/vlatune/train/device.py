"""The device's side of a batch: performance flags, and host columns -> tensors, one batch ahead.

On CUDA the next batch is copied from page-locked memory on a stream of its own while the current one computes; the
compute stream waits on the device for the copy's event, the host never does. On the CPU a batch is wrapped, not copied.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vlatune.batch import IDS, SLOT, Columns


@dataclass(frozen=True)
class DeviceBatch:
    tensors: dict[str, Tensor]
    samples: np.ndarray
    """(B, 2): dataset_index and index of every row, on the host."""


def set_performance_flags(device: torch.device, num_workers_here: int) -> dict[str, object]:
    """Flags that change speed and not meaning, set in the worker; returned so that the run can report them."""
    threads = max(1, (os.cpu_count() or 1) // num_workers_here)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("high")  # TF32 on CUDA, no effect on the CPU
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
    return {"threads": threads, "matmul_precision": "high", "cudnn_benchmark": device.type == "cuda"}


def device_batches(batches: Iterator[Columns], device: torch.device) -> Iterator[DeviceBatch]:
    """Batches on the device, the next one under way while one is used."""
    if device.type != "cuda":
        yield from (_wrap(columns) for columns in batches)
        return
    stream = torch.cuda.Stream(device)
    ahead = _start_copy(next(batches, None), device, stream)
    while ahead is not None:
        batch, copied = ahead
        ahead = _start_copy(next(batches, None), device, stream)
        torch.cuda.current_stream(device).wait_event(copied)
        for tensor in batch.tensors.values():
            tensor.record_stream(torch.cuda.current_stream(device))
        yield batch


def _wrap(columns: Columns) -> DeviceBatch:
    tensors = {key: torch.from_numpy(values) for key, values in columns.items() if key not in (*IDS, SLOT)}
    return DeviceBatch(tensors, np.stack([columns["dataset_index"], columns["index"]], axis=1))


def _start_copy(
    columns: Columns | None, device: torch.device, stream: torch.cuda.Stream
) -> tuple[DeviceBatch, torch.cuda.Event] | None:
    if columns is None:
        return None
    host = _wrap(columns)
    copied = torch.cuda.Event()
    with torch.cuda.stream(stream):
        tensors = {key: value.pin_memory().to(device, non_blocking=True) for key, value in host.tensors.items()}
        copied.record(stream)
    return DeviceBatch(tensors, host.samples), copied
