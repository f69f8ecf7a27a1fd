"""Tensors on the host as they were at one moment: the only part of a save that the training loop pays for.

The copies go into buffers that are kept and used again, page-locked where the tensors are on a GPU. There they are
queued on the stream that computes, before anything that could change the tensors, and the host does not wait for them;
who writes them does.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vlatune.checkpoint.state import Tensors


@dataclass(frozen=True)
class Snapshot:
    files: Mapping[str, Tensors]
    """File name -> tensors on the host; whole after `wait`."""
    copied: torch.cuda.Event | None

    def wait(self) -> None:
        """Device sync, on the thread that writes."""
        if self.copied is not None:
            self.copied.synchronize()


class Snapshots:
    """Takes one snapshot at a time: the next overwrites the one before."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def take(self, files: Mapping[str, Tensors]) -> Snapshot:
        on_host = {
            file: {name: self._copy((file, name), tensor) for name, tensor in tensors.items()}
            for file, tensors in files.items()
        }
        cuda = next((one.device for tensors in files.values() for one in tensors.values() if one.is_cuda), None)
        if cuda is None:
            return Snapshot(on_host, None)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(cuda))
        return Snapshot(on_host, copied)

    def _copy(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        buffer.copy_(tensor.detach(), non_blocking=True)
        return buffer
