"""Build LeRobot's PI0.5 or PI0 for a folder, and decide what trains and in which dtype.

Trainable weights are float32, others have LeRobot's dtype. Only what training, validation and
sampling use is loaded: no vocabulary heads, and a frozen vision tower computes in bfloat16 if the
model does.

Parameters that cannot affect the loss are always frozen, so that DDP need not search for unused
ones: the prefix's output after its last keys and values is discarded.
"""

import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lerobot.policies.pi0 import PI0Config, PI0Policy
from lerobot.policies.pi05 import PI05Config, PI05Policy
from torch import nn

from vlatune.policies.base import ModuleOptions, PolicySpec
from vlatune.policies.base_folder import read_object
from vlatune.policies.loading import decode_config, parameters_on_meta, put, round_input
from vlatune.policies.model_size import building_at
from vlatune.policies.modeling import ADAPTER
from vlatune.policies.pi05.size import read_size

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
TOWER = r".*\.paligemma\.model\.(vision_tower|multi_modal_projector)\."


def set_dtypes(policy: PiPolicy, options: ModuleOptions) -> None:
    """Drop unused heads and round a frozen tower."""
    for owner in UNUSED_HEADS:
        getattr(policy.model.paligemma_with_expert, owner).lm_head = None
    for name, layer in (
        list(policy.named_modules()) if policy.config.dtype == "bfloat16" and options.train != "full" else ()
    ):
        if re.match(TOWER, name) and isinstance(layer, nn.Linear | nn.Conv2d):
            layer.to(torch.bfloat16).register_forward_pre_hook(round_input)
    for name, parameter in list(policy.named_parameters()):
        # Unused parameters in layers that train are float32, too: a layer has one dtype.
        if re.match(TRAINED[options.train], name):
            put(policy, name, parameter.detach().to(torch.float32))


def build_policy(spec: PolicySpec, dtype: str | None) -> PiPolicy:
    """Build LeRobot's class with parameters on the meta device."""
    folder = Path(spec.folder)
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


def unused(policy: Any, spec: object = None) -> str:
    """Match the parameters that cannot affect the loss."""
    last = len(policy.model.paligemma_with_expert.paligemma.model.language_model.layers) - 1
    return UNUSED.replace("{last}", str(last))
