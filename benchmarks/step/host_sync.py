"""Count the operations that would make the host wait for an accelerator, on any machine.

Given tensors (weights, batch) are marked as *resident* on the accelerator, and so are results of
operations on them and tensors created with an explicit device. Reading the value of a resident
tensor, blocking copies between host and device, and operations whose output shape depends on values
are counted with their location. On a real accelerator, tensors on it are resident, too.

Three hooks are used: Tensor methods that read or move data, torch functions for explicit devices,
and operators, including those inside torch functions and the backward pass.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = ("item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "__complex__")
READS += ("__repr__", "__format__", "__contains__")
MOVES = ("to", "cuda", "cpu")
MADE_FROM_HOST_DATA = ("tensor", "as_tensor", "asarray", "new_tensor")
SHAPE_FROM_VALUES = ("nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount")
MASKED = ("index", "index_put", "index_put_", "_index_put_impl_")
_INSIDE = (str(Path(torch.__file__).parent), __file__)


@dataclass(frozen=True)
class HostSync:
    what: str
    """Method or operator, e.g. item, cpu, to, nonzero."""
    place: str
    """File, line and function of the caller."""


class HostSyncSpy:
    """Record every host sync while active.

    with HostSyncSpy(resident=[*module.parameters(), *batch.values()]) as spy:
        step()
    spy.count, spy.table()
    """

    def __init__(self, resident: Iterable[Tensor]) -> None:
        self.found: list[HostSync] = []
        self.is_quiet = False
        self._stack = ExitStack()
        self.keep(list(resident))

    @property
    def count(self) -> int:
        return len(self.found)

    def table(self) -> list[tuple[HostSync, int]]:
        """Return all syncs with their counts, most frequent first."""
        return Counter(self.found).most_common()

    def __enter__(self) -> "HostSyncSpy":
        for eyes in (_methods(self), _Functions(self), _Operators(self)):
            self._stack.enter_context(eyes)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def keep(self, value: Any) -> None:
        """Mark tensors as resident; the mark is on the storage, which views share."""
        for tensor in _tensors(value):
            tensor.untyped_storage()._on_accelerator = True  # pyright: ignore[reportAttributeAccessIssue]

    def note(self, what: str) -> None:
        self.found.append(HostSync(what, _caller()))

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Disable recording inside a call that is already counted."""
        before, self.is_quiet = self.is_quiet, True
        try:
            yield
        finally:
            self.is_quiet = before


def is_resident(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu" or getattr(tensor.untyped_storage(), "_on_accelerator", False)


@contextmanager
def _methods(spy: HostSyncSpy) -> Iterator[None]:
    """Replace methods of Tensor by recording ones."""
    makers = dict.fromkeys(READS, _reading) | dict.fromkeys(MOVES, _moving) | {"__deepcopy__": _copying}
    own = {name: vars(Tensor)[name] for name in makers if name in vars(Tensor)}
    try:
        for name, make in makers.items():
            setattr(Tensor, name, make(spy, name, getattr(Tensor, name)))
        yield
    finally:
        for name in makers:
            if name in own:
                setattr(Tensor, name, own[name])
            else:
                delattr(Tensor, name)  # restores the base class's method


def _reading(spy: HostSyncSpy, name: str, method: Any) -> Any:
    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_resident(tensor) and not spy.is_quiet:
            spy.note(name)
        with spy.quiet():
            return method(tensor, *args, **kwargs)

    return read


def _moving(spy: HostSyncSpy, name: str, method: Any) -> Any:
    def move(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        to_device = _moves_to_device(name, tensor, args, kwargs)
        if spy.is_quiet or to_device is None or to_device == is_resident(tensor):
            return method(tensor, *args, **kwargs)
        if not _is_non_blocking(args, kwargs):
            spy.note(name)
        with spy.quiet():
            moved = method(tensor, *args, **kwargs)
            if moved.device == tensor.device:
                moved = moved.clone()  # a new tensor, as on an accelerator
        if to_device:
            spy.keep(moved)
        return moved

    return move


def _copying(spy: HostSyncSpy, name: str, method: Any) -> Any:
    def copy(tensor: Tensor, memo: Any) -> Any:
        with spy.quiet():  # a bytewise copy: operators do not see its source
            copied = method(tensor, memo)
        if is_resident(tensor):
            spy.keep(copied)
        return copied

    return copy


class _Functions(TorchFunctionMode):
    """Check functions for explicit devices and for data from the host."""

    def __init__(self, spy: HostSyncSpy) -> None:
        super().__init__()
        self._spy = spy

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        on_device = kwargs.get("device") is not None or (name == "new_tensor" and is_resident(args[0]))
        if on_device and not self._spy.is_quiet:
            if name in MADE_FROM_HOST_DATA and not any(map(is_resident, _tensors(args[-1:]))):
                self._spy.note(name)
            self._spy.keep(result)
        return result


class _Operators(TorchDispatchMode):
    """Check operators, and track the results of resident tensors."""

    def __init__(self, spy: HostSyncSpy) -> None:
        super().__init__()
        self._spy = spy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._spy.is_quiet and any(map(is_resident, _tensors((args, kwargs)))):
            what = _operator_sync(func, args, kwargs)
            if what:
                self._spy.note(what)
            self._spy.keep(result)
        return result


def _operator_sync(func: Any, args: Any, kwargs: Any) -> str | None:
    """Return the name of an operator that would wait, given a resident input."""
    name = func._schema.name.removeprefix("aten::")
    if name == "_local_scalar_dense":
        return "item"
    if name in (*SHAPE_FROM_VALUES, "equal"):
        return name
    if name in MASKED and any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1])):
        fills = name != "index" and args[2].numel() == 1  # torch converts these to masked_fill
        return None if fills else f"{name} with a mask"
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        return name
    # A scalar written into a tensor is a 0-d host tensor, passed with the kernel launch.
    if name == "copy_" and args[1].dim() and is_resident(args[0]) != is_resident(args[1]):
        return None if _is_non_blocking(args[1:], kwargs) else name
    return None


def _moves_to_device(name: str, tensor: Tensor, args: Any, kwargs: Any) -> bool | None:
    """Return True for moves to the accelerator, False to the host, None for no move. On a CPU a
    named device stands for the accelerator."""
    if name != "to":
        return name == "cuda"
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, Tensor):
        return is_resident(other)
    device = kwargs.get("device", other)
    if device is None or isinstance(device, torch.dtype):
        return None
    return torch.device(device).type != "cpu" or tensor.device.type == "cpu"


def _is_non_blocking(args: Any, kwargs: Any) -> bool:
    """True if `non_blocking` is passed by name, or by position as the first bool."""
    return bool(kwargs.get("non_blocking")) or next((arg for arg in args if isinstance(arg, bool)), False)


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.layout == torch.strided)


def _caller() -> str:
    """Return the nearest frame outside of torch and this file."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    file = Path(frame.f_code.co_filename)
    return f"{'/'.join(file.parts[-2:])}:{frame.f_lineno} {frame.f_code.co_name}"
