"""A folder of PI0.5 or PI0 -> LeRobot's own policy with every weight in place, held once and in the dtype it is used in.

The model is built without memory for its parameters; then each tensor is read from its file, rounded and put in place
on its device, one at a time: the host never holds more of the model than one tensor. What trains is float32; the rest
has the dtype that LeRobot gives it. A lean policy has all that training, validation and sampling use, and no more: no
output heads over the vocabulary, and a frozen vision tower that computes in bfloat16 where the model does.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any

import draccus
import torch
from lerobot.policies.pi0 import PI0Config, PI0Policy
from lerobot.policies.pi05 import PI05Config, PI05Policy
from safetensors import safe_open
from torch import nn

from vlatune.files import read_file
from vlatune.policies.pi05.size import building_at, read_size
from vlatune.policies.pi05.trainable import is_float32, set_trainable, trains_tower
from vlatune.policies.pi05.weights import StoredTensor, find_tensors

type PiPolicy = PI05Policy | PI0Policy

CLASSES: Mapping[str, tuple[type[Any], type[PI05Policy | PI0Policy]]] = {
    "pi05": (PI05Config, PI05Policy),
    "pi0": (PI0Config, PI0Policy),
}
"""config.json's type -> LeRobot's config and policy."""
UNUSED_HEADS = ("paligemma", "gemma_expert")
"""Owners of an `lm_head` over the vocabulary, which no forward of either policy calls: 1.6 GB in bfloat16."""


def load_policy(
    folder: Path, *, train: str, dtype: str | None, device: torch.device | str = "cpu", lean: bool = False
) -> PiPolicy:
    """With what `train` names trainable; adapters are not added here. The folder's files are checked first."""
    tensors = _find_tensors(folder)
    policy = plan_policy(folder, train=train, dtype=dtype, lean=lean)
    _fill(policy, tensors, torch.device(device))
    return policy


def plan_policy(folder: Path, *, train: str, dtype: str | None, lean: bool) -> PiPolicy:
    """The policy before it is filled, on the meta device: which tensors, in which dtypes, and what of them trains."""
    policy = build_policy(folder, dtype)
    if lean:
        _make_lean(policy, train)
    set_trainable(policy, train)
    for name, parameter in list(policy.named_parameters()):
        if is_float32(name, train):
            _put(policy, name, parameter.detach().to(torch.float32))
    return policy


def make_whole(policy: PiPolicy, folder: Path) -> None:
    """A lean policy as LeRobot has it: what was left out or rounded comes from the base's files again."""
    whole = build_policy(folder, policy.config.dtype)
    joint, theirs = policy.model.paligemma_with_expert, whole.model.paligemma_with_expert
    for owner in UNUSED_HEADS:
        getattr(joint, owner).lm_head = getattr(theirs, owner).lm_head.requires_grad_(False)
    rounded = [name for name, _ in _tower_weights(whole) if policy.get_parameter(name).dtype == torch.bfloat16]
    heads = [f"model.paligemma_with_expert.{owner}.lm_head.weight" for owner in UNUSED_HEADS]
    tensors, device = _find_tensors(folder), policy.model.action_in_proj.weight.device
    for name, tensor in _read(tensors, [*heads, *rounded]):
        _put(policy, name, tensor.to(device=device, dtype=whole.get_parameter(name).dtype, copy=True))


def _make_lean(policy: PiPolicy, train: str) -> None:
    for owner in UNUSED_HEADS:
        getattr(policy.model.paligemma_with_expert, owner).lm_head = None
    if policy.config.dtype == "bfloat16" and not trains_tower(train):
        for name, parameter in list(_tower_weights(policy)):
            _put(policy, name, parameter.detach().to(torch.bfloat16))
        for layer in _tower_layers(policy).values():
            layer.register_forward_pre_hook(_round_input)


def _round_input(layer: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """As autocast does it: the layer's product in bfloat16, norms and the sum of the layers in float32."""
    first, *rest = inputs
    return (first.to(layer.weight.dtype), *rest)


def _tower_layers(policy: PiPolicy) -> dict[str, nn.Module]:
    """The layers of vision tower and projector that multiply by a matrix, by name."""
    tower = re.compile(r".*\.paligemma\.model\.(vision_tower|multi_modal_projector)\.")
    layers = (nn.Linear, nn.Conv2d)
    return {name: one for name, one in policy.named_modules() if tower.match(name) and isinstance(one, layers)}


def _tower_weights(policy: PiPolicy) -> Iterator[tuple[str, nn.Parameter]]:
    for name, layer in _tower_layers(policy).items():
        for leaf, parameter in layer.named_parameters(recurse=False):
            yield f"{name}.{leaf}", parameter


def _find_tensors(folder: Path) -> Mapping[str, StoredTensor]:
    return find_tensors(folder, json.loads(read_file(folder, "config.json")))


def build_policy(folder: Path, dtype: str | None) -> PiPolicy:
    """LeRobot's own class, its parameters on the meta device: names, shapes and dtypes without memory."""
    config = read_config(folder)
    config.dtype = dtype or config.dtype
    size = read_size(folder)
    config.device = None  # the constructor would move parameters that are not there yet
    with building_at(size) if size is not None else nullcontext(), parameters_on_meta():
        policy = CLASSES[config.type][1](config)
    config.device = "cpu"
    return policy


def read_config(folder: Path) -> Any:
    try:
        config = parse_config(folder)
    except Exception as error:  # draccus raises kinds of its own; each means: this LeRobot does not know this config
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise ValueError(
            f"policy '{folder}': the installed LeRobot does not understand config.json ({reason}); "
            f"was it written by another version?"
        ) from error
    config.gradient_checkpointing = config.compile_model = False  # ours to decide, see ModuleOptions
    config.freeze_vision_encoder = config.train_expert_only = False
    return config


def parse_config(folder: Path) -> Any:
    """config.json as LeRobot parses it, whose own way leaves a file behind in the folder for temporary files.

    An option of another version of LeRobot that is off has nothing to do here; one that is on is refused by its name.
    """
    stored = json.loads(read_file(folder, "config.json"))
    config_class, _ = CLASSES[stored["type"]]
    known = {field.name for field in fields(config_class)}
    given = {key: value for key, value in stored.items() if key in known or (value and key != "type")}
    return draccus.decode(config_class, given)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are made inside have parameters without memory, and real buffers: those are in no file.

    Holds for the whole process, as `building_at` does: build one model at a time.
    """
    original = nn.Module.register_parameter

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        original(self, name, param)

    nn.Module.register_parameter = register_parameter
    try:
        yield
    finally:
        nn.Module.register_parameter = original


def _fill(policy: PiPolicy, tensors: Mapping[str, StoredTensor], device: torch.device) -> None:
    for name, tensor in _read(tensors, [name for name, _ in policy.named_parameters()]):
        # A copy: the stored tensor is a window onto the file, which may change.
        _put(policy, name, tensor.to(device=device, dtype=policy.get_parameter(name).dtype, copy=True))
        del tensor  # before the next is read
    for module in policy.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _read(tensors: Mapping[str, StoredTensor], names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The stored tensors, one at a time, file by file."""
    wanted = {name: tensors[name] for name in names}
    by_file = sorted(wanted, key=lambda name: (wanted[name].file, wanted[name].key))
    for file, group in groupby(by_file, key=lambda name: wanted[name].file):
        with safe_open(file, framework="pt") as stored:
            for name in group:
                yield name, stored.get_tensor(wanted[name].key)


def _put(policy: PiPolicy, name: str, tensor: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    filled = nn.Parameter(tensor, requires_grad=policy.get_parameter(name).requires_grad)
    policy.get_submodule(owner).register_parameter(leaf, filled)
