"""Load a folder of PI0.5 or PI0 into LeRobot's policy, one tensor at a time, and freeze it.

Trainable weights are float32, others have LeRobot's dtype. Only what training, validation and
sampling use is loaded: no vocabulary heads, and a frozen vision tower computes in bfloat16 if the
model does.

Parameters that cannot affect the loss are always frozen, so that DDP need not search for unused
ones: the prefix's output after its last keys and values is discarded.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lerobot.policies.pi0 import PI0Config, PI0Policy
from lerobot.policies.pi05 import PI05Config, PI05Policy
from torch import nn

from vlatune.policies import modeling
from vlatune.policies.base_folder import read_object
from vlatune.policies.loading import (
    decode_config,
    fill,
    find_tensors,
    parameters_on_meta,
    put,
    read_tensors,
    round_input,
    train_only,
)
from vlatune.policies.modeling import ADAPTER, multiply_large_patches
from vlatune.policies.pi05.size import building_at, read_size
from vlatune.policies.pi05.spec import KINDS, model_names
from vlatune.policies.weight_files import StoredTensor

type PiPolicy = PI05Policy | PI0Policy

CLASSES: Mapping[str, tuple[type[Any], type[PI05Policy | PI0Policy]]] = {
    "pi05": (PI05Config, PI05Policy),
    "pi0": (PI0Config, PI0Policy),
}
"""Maps the type in config.json to LeRobot's config and policy classes."""
UNUSED_HEADS = ("paligemma", "gemma_expert")
"""Owners of an `lm_head` over the vocabulary that no forward calls."""

HEADS = r"model\.(state_proj|action_in_proj|action_out_proj|(action_)?time_mlp_(in|out))\."
EXPERT = r"model\.paligemma_with_expert\.gemma_expert\.model\."
TRAINED = {
    "heads": HEADS,
    "expert": f"{HEADS}|{EXPERT}",
    "lora": rf"{HEADS}|.*\.lora_(A|B)\.{ADAPTER}\.",
    "full": r"model\.",
}
UNUSED = r"lm_head\.|language_model\.norm\.|language_model\.layers\.{last}\.(self_attn\.(q|o)_proj|mlp|post_attention_layernorm)\b"
ADAPTED = r".*\.(language_model|gemma_expert\.model)\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)"
TOWER = re.compile(r".*\.paligemma\.model\.(vision_tower|multi_modal_projector)\.")


def load_policy(folder: Path, *, train: str, dtype: str | None, device: torch.device | str = "cpu") -> PiPolicy:
    """Load a validated folder with `train` trainable; adapters are not added here.

    On the meta device no weight is read, but dtypes and `requires_grad` are final.
    """
    policy = build_policy(folder, dtype)
    tensors = None if torch.device(device).type == "meta" else _find_tensors(folder, policy)
    _prepare(policy, train)
    if tensors is not None:
        fill(policy, tensors, torch.device(device))
    return policy


def _prepare(policy: PiPolicy, train: str) -> None:
    """Drop unused heads, set dtypes and `requires_grad`."""
    for owner in UNUSED_HEADS:
        getattr(policy.model.paligemma_with_expert, owner).lm_head = None
    if policy.config.dtype == "bfloat16" and not trains_tower(train):
        for name, parameter in list(_tower_weights(policy)):
            put(policy, name, parameter.detach().to(torch.bfloat16))
        for layer in _tower_layers(policy).values():
            layer.register_forward_pre_hook(round_input)
    multiply_large_patches(policy)
    set_trainable(policy, train)
    for name, parameter in list(policy.named_parameters()):
        # Unused parameters in layers that train are float32, too: a layer has one dtype.
        if re.match(TRAINED[train], name):
            put(policy, name, parameter.detach().to(torch.float32))


def restore_unused(policy: PiPolicy, folder: Path) -> None:
    """Restore what `_prepare` dropped or rounded from the base model's files."""
    complete = build_policy(folder, policy.config.dtype)
    tensors = _find_tensors(folder, complete)
    joint, theirs = policy.model.paligemma_with_expert, complete.model.paligemma_with_expert
    for owner in UNUSED_HEADS:
        getattr(joint, owner).lm_head = getattr(theirs, owner).lm_head.requires_grad_(False)
    rounded = [name for name, _ in _tower_weights(complete) if policy.get_parameter(name).dtype == torch.bfloat16]
    heads = [f"model.paligemma_with_expert.{owner}.lm_head.weight" for owner in UNUSED_HEADS]
    device = policy.model.action_in_proj.weight.device
    for name, tensor in read_tensors(tensors, [*heads, *rounded]):
        put(policy, name, tensor.to(device=device, dtype=complete.get_parameter(name).dtype, copy=True))


def build_policy(folder: Path, dtype: str | None) -> PiPolicy:
    """Build LeRobot's class with parameters on the meta device."""
    config = parse_config(folder)
    config.gradient_checkpointing = config.compile_model = False  # decided by ModuleOptions
    config.freeze_vision_encoder = config.train_expert_only = False
    config.dtype = dtype or config.dtype
    config.device = None  # the constructor would move parameters on the meta device
    size = read_size(folder)
    with building_at(size) if size is not None else nullcontext(), parameters_on_meta():
        policy = CLASSES[config.type][1](config)
    config.device = "cpu"
    return policy


def parse_config(folder: Path) -> Any:
    """Parse config.json as LeRobot does."""
    return decode_config(folder, CLASSES[read_object(folder, "config.json")["type"]][0])


def _find_tensors(folder: Path, policy: PiPolicy) -> dict[str, StoredTensor]:
    kind = KINDS[policy.config.type]
    return find_tensors(folder, policy, kind.title, partial(model_names, kind=kind))


def set_trainable(policy: nn.Module, train: str) -> None:
    """Freeze all but the parameters of `train`."""
    train_only(policy, TRAINED[train], unused=_unused(policy))


def trains_tower(train: str) -> bool:
    return train == "full"


def add_adapters(policy: nn.Module, *, rank: int, alpha: float) -> None:
    """Add LoRA to every linear layer of language model and expert whose output is used."""
    modeling.add_adapters(policy, on=ADAPTED, but=_unused(policy), rank=rank, alpha=alpha)


def _unused(policy: Any) -> str:
    last = len(policy.model.paligemma_with_expert.paligemma.model.language_model.layers) - 1
    return UNUSED.replace("{last}", str(last))


def _tower_layers(policy: PiPolicy) -> dict[str, nn.Module]:
    """Return the linear and convolution layers of vision tower and projector by name."""
    layers = (nn.Linear, nn.Conv2d)
    return {name: one for name, one in policy.named_modules() if TOWER.match(name) and isinstance(one, layers)}


def _tower_weights(policy: PiPolicy) -> Iterator[tuple[str, nn.Parameter]]:
    for name, layer in _tower_layers(policy).items():
        for leaf, parameter in layer.named_parameters(recurse=False):
            yield f"{name}.{leaf}", parameter
