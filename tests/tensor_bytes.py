"""A counter of the bytes that live tensors hold, by the device they are on; each memory counts once."""

from collections import Counter
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorBytes(TorchDispatchMode):
    """While active it sees every tensor that an operation makes; what was there before does not count."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, str, int]] = {}
        self.peak: Counter[str] = Counter()
        """Device type -> the most bytes at one time."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {_address(one) for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta" and _address(tensor) not in before:
                storage = tensor.untyped_storage()
                self._alive[_address(tensor)] = (StorageWeakRef(storage), tensor.device.type, storage.nbytes())
        for device, count in self.now().items():
            self.peak[device] = max(self.peak[device], count)
        return made

    def now(self) -> Counter[str]:
        self._alive = {address: one for address, one in self._alive.items() if not one[0].expired()}
        found: Counter[str] = Counter()
        for _, device, count in self._alive.values():
            found[device] += count
        return found


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
