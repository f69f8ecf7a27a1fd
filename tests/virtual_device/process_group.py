"""A process group for tensors of the virtual device, over gloo; like NCCL, it accepts no others and works on a stream of its own."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from virtual_device.backend import NAME, VirtualDevice

sent_bytes: Counter[str] = Counter()
"""Collective -> bytes of its tensors, in this process."""


def register(virtual: VirtualDevice) -> None:
    def make(store: Any, rank: int, size: int, timeout: Any) -> "DeviceGroup":
        return DeviceGroup(virtual, dist.ProcessGroupGloo(store, rank, size, timeout))  # pyright: ignore

    dist.Backend.register_backend(NAME, make, devices=[NAME])


class Done(dist._Work):  # pyright: ignore
    """A collective whose results are complete on the device after an event."""

    def __init__(self, results: Any, device: torch.device, stream: torch.Stream) -> None:
        super().__init__()
        self._done, self._device = torch.Event(device), device
        self._done.record(stream)
        self._future: Future = Future(devices=[device])
        with stream:
            self._future.set_result(results)

    def wait(self, timeout: Any = None) -> bool:
        torch.accelerator.current_stream(self._device).wait_event(self._done)
        return True

    def get_future(self) -> Future:
        return self._future


class DeviceGroup(dist.ProcessGroup):  # pyright: ignore
    def __init__(self, virtual: VirtualDevice, gloo: Any) -> None:
        super().__init__(gloo.rank(), gloo.size())
        self._virtual, self._gloo = virtual, gloo
        self._stream: torch.Stream | None = None

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]  # pyright: ignore

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Done:
        return self._run("allreduce", tensors, tensors, lambda host: self._gloo.allreduce(host, options))

    def broadcast(self, tensors: list[Tensor], options: Any) -> Done:
        return self._run("broadcast", tensors, tensors, lambda host: self._gloo.broadcast(host, options))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Done:
        def gather(host: list[Tensor]) -> Any:
            return self._gloo.allgather([host[1:]], host[:1])

        return self._run("allgather", [*inputs, *outputs[0]], outputs[0], gather)

    def _allgather_base(self, output: Tensor, given: Tensor, options: Any = None) -> Done:
        return self._run("allgather", [given, output], [output], lambda host: self._gloo._allgather_base(*host[::-1]))

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None) -> Done:
        (output,), (given,) = outputs, inputs
        return self._allgather_base(output, given)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, options: Any) -> Done:
        def scatter(host: list[Tensor]) -> Any:
            return self._gloo._reduce_scatter_base(host[1], host[0], options)

        return self._run("reduce_scatter", [given, output], [output], scatter)

    def _run(self, name: str, tensors: list[Tensor], results: list[Tensor], exchange: Any) -> Done:
        if any(one.device.type != NAME for one in tensors):
            raise ValueError("the process group has tensors of the virtual device only")
        sent_bytes[name] += sum(one.nbytes for one in tensors)
        device = tensors[0].device
        self._stream = self._stream or torch.Stream(device)
        ready = torch.Event(device)
        ready.record(torch.accelerator.current_stream(device))
        self._stream.wait_event(ready)
        with self._stream, self._virtual.unobserved():
            host = [one.cpu() for one in tensors]
            exchange(host).wait()
            for one, values in zip(tensors, host, strict=True):
                one.record_stream(self._stream)
                if any(one is result for result in results):
                    one.copy_(values.pin_memory(), non_blocking=True)
        return Done(results, device, self._stream)
