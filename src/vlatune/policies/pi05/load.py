"""A folder of PI0.5 or PI0 -> LeRobot's own policy with every weight in place, held once and in the dtype it is used in.

By the parts of `policies/loading.py`, one tensor at a time. What trains is float32; the rest has the dtype that LeRobot gives it. A lean policy has all that training, validation and sampling use, and no more: no
output heads over the vocabulary, and a frozen vision tower that computes in bfloat16 where the model does.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lerobot.policies.pi0 import PI0Config, PI0Policy
from lerobot.policies.pi05 import PI05Config, PI05Policy
from torch import nn

from vlatune.files import read_file
from vlatune.policies.loading import decode_config, fill, parameters_on_meta, put, read_tensors, round_input
from vlatune.policies.modeling import multiply_large_patches
from vlatune.policies.pi05.size import building_at, read_size
from vlatune.policies.pi05.trainable import is_float32, set_trainable, trains_tower
from vlatune.policies.pi05.weights import find_tensors
from vlatune.policies.weight_files import StoredTensor

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
    fill(policy, tensors, torch.device(device))
    return policy


def plan_policy(folder: Path, *, train: str, dtype: str | None, lean: bool) -> PiPolicy:
    """The policy before it is filled, on the meta device: which tensors, in which dtypes, and what of them trains."""
    policy = build_policy(folder, dtype)
    if lean:
        _make_lean(policy, train)
        multiply_large_patches(policy)
    set_trainable(policy, train)
    for name, parameter in list(policy.named_parameters()):
        if is_float32(name, train):
            put(policy, name, parameter.detach().to(torch.float32))
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
    for name, tensor in read_tensors(tensors, [*heads, *rounded]):
        put(policy, name, tensor.to(device=device, dtype=whole.get_parameter(name).dtype, copy=True))


def _make_lean(policy: PiPolicy, train: str) -> None:
    for owner in UNUSED_HEADS:
        getattr(policy.model.paligemma_with_expert, owner).lm_head = None
    if policy.config.dtype == "bfloat16" and not trains_tower(train):
        for name, parameter in list(_tower_weights(policy)):
            put(policy, name, parameter.detach().to(torch.bfloat16))
        for layer in _tower_layers(policy).values():
            layer.register_forward_pre_hook(round_input)


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
    config = parse_config(folder)
    config.gradient_checkpointing = config.compile_model = False  # ours to decide, see ModuleOptions
    config.freeze_vision_encoder = config.train_expert_only = False
    return config


def parse_config(folder: Path) -> Any:
    """config.json as LeRobot parses it."""
    config_class, _ = CLASSES[json.loads(read_file(folder, "config.json"))["type"]]
    return decode_config(folder, config_class)
