"""Load a base model into LeRobot's class, for policies too large to hold in memory twice.

The model is built on the meta device. Each tensor is then read, cast and moved to its device, so
the host holds only one tensor at a time.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any

import draccus
import torch
from safetensors import safe_open
from torch import nn

from vlatune.policies.processors import CONFIG
from vlatune.policies.weight_files import StoredTensor, check_tensors, stored_tensors
from vlatune.registry import get_adapter, get_policy_info
from vlatune.storage.files import read_file


def decode_config[C](folder: Path, config_class: type[C], overrides: Mapping[str, Any] | None = None) -> C:
    """Parse config.json as LeRobot does, with the run's overrides, but without its temporary file.

    Fields of other LeRobot versions are dropped: `checked_config` has rejected relevant ones.
    """
    stored = json.loads(read_file(folder, CONFIG))
    known = {field.name for field in fields(config_class)}  # pyright: ignore[reportArgumentType]
    given = {key: value for key, value in stored.items() if key in known}
    given |= overrides or {}
    try:
        return draccus.decode(config_class, given)
    except Exception as error:  # draccus' own types: LeRobot does not know the config
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise ValueError(
            f"policy '{folder}': the installed LeRobot does not understand config.json ({reason}); "
            f"was it written by another version?"
        ) from error


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Create modules with parameters on the meta device, and real buffers, which are in no file.

    Skips transformers' weight initialisation, which would have no effect. Patches process-wide
    state: build one model at a time.
    """
    from transformers import PreTrainedModel

    original, original_values = nn.Module.register_parameter, PreTrainedModel.initialize_weights

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        original(self, name, param)

    def initialize_weights(self: PreTrainedModel) -> None: ...

    nn.Module.register_parameter = register_parameter
    PreTrainedModel.initialize_weights = initialize_weights
    try:
        yield
    finally:
        nn.Module.register_parameter = original
        PreTrainedModel.initialize_weights = original_values


def find_tensors(folder: Path, policy: nn.Module, kind: str) -> dict[str, StoredTensor]:
    """Return the stored tensors by the model's names; raise unless names and shapes match."""
    stored_names, found = get_adapter(kind).stored_names, {}
    for stored in stored_tensors(folder):
        names = stored_names(stored.key)
        for name in names:
            if name not in found or name == names[0]:  # a separate table precedes the tied one
                found[name] = stored
    check_tensors(
        folder, {name: tuple(one.shape) for name, one in policy.named_parameters()}, found, get_policy_info(kind).title
    )
    return found


def train_only(policy: nn.Module, wanted: str, *, unused: str) -> None:
    """Freeze all parameters but those that match `wanted` at the start and `unused` nowhere."""
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(bool(re.match(wanted, name)) and not re.search(unused, name))


def fill(policy: nn.Module, tensors: Mapping[str, StoredTensor], device: torch.device) -> None:
    """Read every parameter in the model's dtype, and move buffers to the device."""
    for name, tensor in read_tensors(tensors, [name for name, _ in policy.named_parameters()]):
        # Copy: the stored tensor is memory-mapped, and the file may change.
        put(policy, name, tensor.to(device=device, dtype=policy.get_parameter(name).dtype, copy=True))
        del tensor  # before the next is read
    for module in policy.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def fill_all(policy: nn.Module, folder: Path, device: torch.device | str, title: str) -> None:
    """Fill a model that is entirely on the meta device; its buffers are read from the files, too.

    Raises unless names and shapes match exactly.
    """
    state, tensors = policy.state_dict(), {stored.key: stored for stored in stored_tensors(folder)}
    check_tensors(folder, {name: tuple(one.shape) for name, one in state.items()}, tensors, title)
    for name, tensor in read_tensors(tensors, state):
        put(policy, name, tensor.to(device=device, dtype=state[name].dtype, copy=True))
        del tensor


def read_tensors(tensors: Mapping[str, StoredTensor], names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the stored tensors one at a time, file by file."""
    wanted = {name: tensors[name] for name in names}
    by_file = sorted(wanted, key=lambda name: (wanted[name].file, wanted[name].key))
    for file, group in groupby(by_file, key=lambda name: wanted[name].file):
        with safe_open(file, framework="pt") as stored:
            for name in group:
                yield name, stored.get_tensor(wanted[name].key)


def put(policy: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replace a buffer or a parameter, keeping `requires_grad`."""
    owner, _, leaf = name.rpartition(".")
    module = policy.get_submodule(owner)
    if leaf in module._buffers:
        module.register_buffer(leaf, tensor)
        return
    module.register_parameter(leaf, nn.Parameter(tensor, requires_grad=policy.get_parameter(name).requires_grad))


def round_input(layer: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Forward pre-hook that casts the input to the dtype of the layer's weights."""
    first, *rest = inputs
    return (first.to(layer.weight.dtype), *rest)
