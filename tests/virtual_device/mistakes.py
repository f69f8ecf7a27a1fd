"""Make each mistake on the virtual device, and do the same correctly: `python -m virtual_device.mistakes LIBRARY`.

Prints a line of JSON: case -> [outcome of the correct code, outcome with the mistake]. An outcome is `violation`, the name of an
exception, `wrong` for a wrong number, or `fine`.
"""

import ctypes
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from virtual_device.backend import VirtualDevice
from virtual_device.process_group import register
from vlatune.checkpoint.snapshot import Staging, TorchHost
from vlatune.train.worker.transfer import Accelerator, DeviceBatch, HostBatch, StreamTransfer

DEVICE, OTHER = torch.device("privateuseone", 0), torch.device("privateuseone", 1)
BATCHES, ROWS = 6, 3000
Case = Callable[[bool], bool]
"""Runs correctly or, if True is given, with the mistake; returns whether the numbers are right."""


class Wrapped:
    """A stream or an event, with some methods replaced."""

    def __init__(self, one: Any, **replaced: Any) -> None:
        self.one = one
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.one, name)


class NoWait(Accelerator):
    """The compute stream does not wait for copies."""

    def compute_stream(self) -> Any:
        return Wrapped(super().compute_stream(), wait_event=lambda event: None)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        super().record_stream(tensor, stream.one)


class NoRecord(Accelerator):
    """Memory of the copy stream is not kept for the compute stream."""

    def record_stream(self, tensor: Tensor, stream: Any) -> None: ...


class NoSync(Accelerator):
    """Host memory is reused before its copy is done."""

    def event(self) -> Any:
        return Wrapped(super().event(), query=lambda: True, synchronize=lambda: None, elapsed_time=lambda end: 0.0)

    def compute_stream(self) -> Any:
        stream = super().compute_stream()
        return Wrapped(stream, wait_event=lambda event: stream.wait_event(event.one))

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        super().record_stream(tensor, stream.one)


def transfer(accelerator: Accelerator) -> bool:
    """Send batches ahead as the prefetching thread does, and compute with them."""
    transfer, sums = StreamTransfer(accelerator), []

    def send(number: int) -> Any:
        values = transfer.empty((ROWS,), np.float32)
        values[:] = number
        return transfer.send(transfer.stage(HostBatch({"x": values}, np.zeros((1, 2), np.int64))))

    sent = send(0)
    for number in range(BATCHES):
        following = send(number + 1)
        batch: DeviceBatch = transfer.receive(sent, None)
        sums.append(batch.tensors["x"].sum())
        sent = following
        del batch
    return torch.stack(sums).tolist() == [ROWS * number for number in range(BATCHES)]


class NoMark(TorchHost):
    """The writer does not wait for copies from the device."""

    def mark(self) -> None:
        return None


def save(host: TorchHost) -> bool:
    weights = torch.arange(ROWS, device=DEVICE, dtype=torch.float32)
    snapshot = Staging(host, most_bytes=4 * ROWS).begin({"weights": {"w": weights}})
    snapshot.copy()
    with tempfile.TemporaryDirectory() as folder:
        snapshot.write("weights", Path(folder) / "weights")
        stored = (Path(folder) / "weights").read_bytes()[-4 * ROWS :]
    return np.array_equal(np.frombuffer(stored, np.float32), np.arange(ROWS))


class ReadInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * grads[0].sum().item()


def main(library: Path) -> None:
    virtual = VirtualDevice(library)
    register(virtual)
    dist.init_process_group("virtual", store=dist.HashStore(), rank=0, world_size=1)
    ones = torch.ones(ROWS, device=DEVICE)

    def host_sync(wrong: bool) -> bool:
        with virtual.no_host_syncs():
            loss = nn.functional.mse_loss(ones * 2, ones)
            return bool(loss.item() == 1.0 if wrong else loss.isfinite() is not None)

    def host_sync_in_backward(wrong: bool) -> bool:
        x = ones.clone().requires_grad_()
        with virtual.no_host_syncs():
            (ReadInBackward.apply(x) if wrong else x.clone()).sum().backward()
        return True

    def pageable_copy(wrong: bool) -> bool:
        host = torch.ones(ROWS, pin_memory=not wrong)
        with virtual.no_host_syncs():
            sent = host.to(DEVICE, non_blocking=True)
        return bool(sent.sum() == ROWS)

    def host_touches(wrong: bool) -> bool:
        one = ones + 1 if wrong else (ones + 1).cpu()
        return ctypes.string_at(one.data_ptr(), 4) == np.float32(2).tobytes()

    def read_after_free(wrong: bool) -> bool:
        one = ones + 1
        place = one.data_ptr()
        kept = None if wrong else one
        del one
        again = torch.empty(ROWS, device=DEVICE)
        assert (again.data_ptr() == place) == wrong
        return bool((again if wrong else kept).sum() == 2 * ROWS)  # pyright: ignore

    def host_reads_too_early(wrong: bool) -> bool:
        host = torch.zeros(ROWS, pin_memory=True)
        host.copy_(ones, non_blocking=True)
        if not wrong:
            torch.accelerator.synchronize(DEVICE)
        return float(host[0]) == 1.0

    def collective(wrong: bool) -> bool:
        one = ones + 1
        work = dist.all_reduce(one, async_op=True)
        if not wrong:
            work.wait()  # pyright: ignore
        return (one + 1).sum().item() == 3 * ROWS

    def host_collective(wrong: bool) -> bool:
        dist.all_reduce(torch.ones(1) if wrong else torch.ones(1, device=DEVICE))
        return True

    def too_much(wrong: bool) -> bool:
        free, _ = torch.accelerator.get_memory_info(0)
        virtual.set_cap(torch.accelerator.memory_allocated(0) + 8 * ROWS)
        try:
            return len(torch.empty((4 if wrong else 1) * ROWS, device=DEVICE)) > 0
        finally:
            virtual.set_cap(free)

    cases: dict[str, Case] = {
        "wait_event": lambda wrong: transfer((NoWait if wrong else Accelerator)(DEVICE)),
        "record_stream": lambda wrong: transfer((NoRecord if wrong else Accelerator)(DEVICE)),
        "host buffer": lambda wrong: transfer((NoSync if wrong else Accelerator)(DEVICE)),
        "save": lambda wrong: save((NoMark if wrong else TorchHost)(DEVICE)),
        "host touches device memory": host_touches,
        "host reads too early": host_reads_too_early,
        "collective": collective,
        "collective of the host": host_collective,
        "host sync": host_sync,
        "host sync in backward": host_sync_in_backward,
        "pageable copy": pageable_copy,
        "host tensor": lambda wrong: bool((ones + (torch.ones(ROWS) if wrong else 1)).sum() == 2 * ROWS),
        "other device": lambda wrong: bool(
            (ones + torch.ones(ROWS, device=OTHER if wrong else DEVICE)).sum() == 2 * ROWS
        ),
        "uninitialised": lambda wrong: bool((torch.empty if wrong else torch.zeros)(ROWS, device=DEVICE).sum() == 0),
        "freed": read_after_free,
        "out of memory": too_much,
    }

    def outcome(case: Case, wrong: bool) -> str:
        virtual.clear()
        try:
            is_right = case(wrong)
        except Exception as error:
            return type(error).__name__
        return "violation" if virtual.violations else "fine" if is_right else "wrong"

    sys.stdout.write(
        json.dumps({name: [outcome(case, wrong) for wrong in (False, True)] for name, case in cases.items()})
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
