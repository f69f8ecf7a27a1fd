"""CUDA tensors without a GPU: torch's FakeTensorMode, in which tensors have a device, a dtype and a shape but no values.

Inside `fake_cuda()` an operation between a CPU and a CUDA tensor is refused as on a GPU, and reading a value on the host
(`.item()`, `float(...)`, `.tolist()`, `.numpy()`, `if tensor:`) raises, where on a GPU it would only wait. What cannot
go through it: autograd's backward and fused optimizers (no kernels for such tensors), page-locked memory, streams and
events (CUDA's runtime), files (bytes have values), and threads: the mode belongs to the thread that entered it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from vlatune.policies import loading
from vlatune.policies.pi05 import load as pi05_load
from vlatune.policies.smolvla import smolvla_module

CUDA = torch.device("cuda", 0)


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Until the end of the block; files are read and LeRobot's classes are built outside of it."""
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True):
        for module in (pi05_load, smolvla_module):
            patch.setattr(module, "build_policy", _outside(module.build_policy))
        patch.setattr(loading, "safe_open", RealFile)
        patch.setattr(nn.Module, "_apply", _apply)
        yield


def is_fake_cuda(tensor: torch.Tensor) -> bool:
    return isinstance(tensor.detach(), FakeTensor) and tensor.device == CUDA


class RealFile:
    """`safe_open`, whose tensors are real ones until they are put somewhere."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._file = _SAFE_OPEN(*args, **kwargs)

    def __enter__(self) -> "RealFile":
        self._stored = self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stored, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        with unset_fake_temporarily():
            return self._stored.get_tensor(name)


_SAFE_OPEN = loading.safe_open


def _apply(module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """What `module.to` does, by putting new tensors in place: torch would swap their insides, which such cannot."""
    for child in module.children() if recurse else ():
        child._apply(convert)
    for name, parameter in module.named_parameters(recurse=False):
        module._parameters[name] = nn.Parameter(convert(parameter.detach()), parameter.requires_grad)
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = convert(buffer)
    return module


def _outside[**P, R](call: Callable[P, R]) -> Callable[P, R]:
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with unset_fake_temporarily():
            return call(*args, **kwargs)

    return run
