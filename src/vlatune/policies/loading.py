"""A base model's folder -> LeRobot's own class with every weight in place, for policies that are too large to be held twice.

The model is built without memory for its parameters; then each tensor is read from its file, rounded and put in place
on its device, one at a time: the host never holds more of the model than one tensor.
"""

import json
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

from vlatune.files import read_file
from vlatune.policies.processors import CONFIG
from vlatune.policies.weight_files import StoredTensor, check_tensors, stored_tensors


def decode_config[C](folder: Path, config_class: type[C], overrides: Mapping[str, Any] | None = None) -> C:
    """config.json as LeRobot parses it, with values of a run's own; LeRobot's way leaves a file behind in the folder for
    temporary files.

    An option of another version of LeRobot that is off has nothing to do here; one that is on is refused by its name.
    """
    stored = json.loads(read_file(folder, CONFIG))
    known = {field.name for field in fields(config_class)}  # pyright: ignore[reportArgumentType]
    given = {key: value for key, value in stored.items() if key in known or (value and key != "type")}
    given |= overrides or {}
    try:
        return draccus.decode(config_class, given)
    except Exception as error:  # draccus raises kinds of its own; each means: this LeRobot does not know this config
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise ValueError(
            f"policy '{folder}': the installed LeRobot does not understand config.json ({reason}); "
            f"was it written by another version?"
        ) from error


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are made inside have parameters without memory, and real buffers: those are in no file.

    Transformers gives no parameter a first value meanwhile, which costs more than all else here and leaves nothing behind;
    buffers have theirs from their constructors. Holds for the whole process: build one model at a time.
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


def fill(policy: nn.Module, tensors: Mapping[str, StoredTensor], device: torch.device) -> None:
    """Every parameter from its file, in the dtype that the model has it in; buffers to the device."""
    for name, tensor in read_tensors(tensors, [name for name, _ in policy.named_parameters()]):
        # A copy: the stored tensor is a window onto the file, which may change.
        put(policy, name, tensor.to(device=device, dtype=policy.get_parameter(name).dtype, copy=True))
        del tensor  # before the next is read
    for module in policy.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def fill_whole(policy: nn.Module, folder: Path, device: torch.device | str, title: str) -> None:
    """The same for a model that is all on the meta device: its buffers are in the files, too, and both are held to each other."""
    state, tensors = policy.state_dict(), {stored.key: stored for stored in stored_tensors(folder)}
    check_tensors(folder, {name: tuple(one.shape) for name, one in state.items()}, tensors, title)
    for name, tensor in read_tensors(tensors, state):
        put(policy, name, tensor.to(device=device, dtype=state[name].dtype, copy=True))
        del tensor


def read_tensors(tensors: Mapping[str, StoredTensor], names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The stored tensors, one at a time, file by file."""
    wanted = {name: tensors[name] for name in names}
    by_file = sorted(wanted, key=lambda name: (wanted[name].file, wanted[name].key))
    for file, group in groupby(by_file, key=lambda name: wanted[name].file):
        with safe_open(file, framework="pt") as stored:
            for name in group:
                yield name, stored.get_tensor(wanted[name].key)


def put(policy: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """In place of a buffer, or of a parameter: whether that trains stays."""
    owner, _, leaf = name.rpartition(".")
    module = policy.get_submodule(owner)
    if leaf in module._buffers:
        module.register_buffer(leaf, tensor)
        return
    module.register_parameter(leaf, nn.Parameter(tensor, requires_grad=policy.get_parameter(name).requires_grad))


def round_input(layer: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A hook before the forward of a layer whose weights have another dtype than what it is given."""
    first, *rest = inputs
    return (first.to(layer.weight.dtype), *rest)
