"""Load a folder of SmolVLA into LeRobot's policy, one tensor at a time, and freeze it.

Trainable weights are float32, others have the requested dtype. The unused vocabulary head is not
loaded; an export reads it from the base.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lerobot.policies.smolvla import SmolVLAConfig, SmolVLAPolicy
from torch import nn

from vlatune.policies.base import ModuleOptions
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
from vlatune.policies.modeling import ADAPTER, add_adapters, checkpoint_tower, multiply_large_patches
from vlatune.policies.smolvla.size import SmolVLASize, SmolVLASpec, building_at
from vlatune.policies.weight_files import stored_tensors

STATE_PROJECTION = r"model\.state_proj\."
HEADS = r"model\.(state_proj|action_in_proj|action_out_proj|action_time_mlp_in|action_time_mlp_out)\."
EXPERT = r"model\.vlm_with_expert\.lm_expert\."
TOWER = r"model\.vlm_with_expert\.vlm\.model\.vision_model\."
TRAINED = {
    "heads": HEADS,
    "expert": f"{HEADS}|{EXPERT}",
    "lora": rf"{HEADS}|.*\.lora_(A|B)\.{ADAPTER}\.",
    "language": rf"(?!{TOWER})model\.",
    "full": r"model\.",
}
"""Parameters of each fine-tuning mode. LeRobot's flags: expert is train_expert_only, language is
freeze_vision_encoder without it, full is neither."""
ADAPTED = r".*\.(text_model|lm_expert)\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)"
LM_HEAD = "model.vlm_with_expert.vlm.lm_head.weight"


def load_policy(spec: SmolVLASpec, options: ModuleOptions, device: torch.device | str) -> SmolVLAPolicy:
    """Load a validated folder with `options.train` trainable, including new adapters."""
    policy = build_policy(spec)
    tensors = find_tensors(Path(spec.folder), policy, "SmolVLA")
    prepare(policy, spec, train=options.train, dtype=options.dtype)
    fill(policy, tensors, torch.device(device))
    if options.train == "lora":
        add_adapters(policy, on=ADAPTED, but=_unused(spec.size), rank=options.lora_rank, alpha=options.lora_alpha)
        set_trainable(policy, spec.size, options.train)
    if options.gradient_checkpointing and options.train == "full":
        checkpoint_tower(policy.model.vlm_with_expert.get_vlm_model().vision_model)
    return policy


def prepare(policy: SmolVLAPolicy, spec: SmolVLASpec, *, train: str, dtype: str | None) -> None:
    """Drop the unused head, set dtypes and `requires_grad`."""
    policy.model.vlm_with_expert.vlm.lm_head = None  # pyright: ignore[reportAttributeAccessIssue]
    multiply_large_patches(policy)
    set_trainable(policy, spec.size, train)
    for name, parameter in list(policy.named_parameters()):
        # Unused parameters in layers that train are float32, too: a layer has one dtype.
        if dtype == "bfloat16" and not re.match(f"{TRAINED[train]}|{HEADS}", name):
            put(policy, name, parameter.detach().to(torch.bfloat16))
    # The dtypes differ if the tower is frozen and the projection after it trains.
    policy.model.vlm_with_expert.get_vlm_model().connector.modality_projection.proj.register_forward_pre_hook(
        round_input
    )


def build_policy(spec: SmolVLASpec) -> SmolVLAPolicy:
    """Build LeRobot's class with parameters on the meta device."""
    config = decode_config(Path(spec.folder), SmolVLAConfig)
    vars(config).update(spec.overrides)  # none of them changes a weight
    config.compile_model = False  # decided by ModuleOptions
    building = {
        "num_vlm_layers": 0,  # build only the layers that are used
        "load_vlm_weights": False,
        "train_expert_only": False,  # decided by `set_trainable`
        "freeze_vision_encoder": False,
        "device": None,  # the constructor would move parameters on the meta device
    }
    stored = {name: getattr(config, name) for name in building} | {"device": "cpu"}
    vars(config).update(building)
    with building_at(replace(spec.size.vlm, depth=spec.size.depth)), parameters_on_meta():
        policy = SmolVLAPolicy(config)
    vars(config).update(stored)
    return policy


def set_trainable(policy: SmolVLAPolicy, size: SmolVLASize, train: str) -> None:
    """Make the parameters of `train` trainable, except those that `_unused` matches."""
    unused = _unused(size) if policy.config.train_state_proj else f"{_unused(size)}|{STATE_PROJECTION}"
    train_only(policy, TRAINED[train], unused=unused)


def restore_unused(policy: SmolVLAPolicy, folder: Path, size: SmolVLASize) -> None:
    """Restore the vocabulary head from the base model's files."""
    vlm: Any = policy.model.vlm_with_expert.vlm
    device = policy.model.action_in_proj.weight.device
    ((_, tensor),) = read_tensors({stored.key: stored for stored in stored_tensors(folder)}, [LM_HEAD])
    vlm.lm_head = nn.Linear(size.vlm.width, size.vlm.vocab_size, bias=False, device="meta").requires_grad_(False)
    put(policy, LM_HEAD, tensor.to(device=device, copy=True))


def _unused(size: SmolVLASize) -> str:
    """Match the last layer the expert attends to and those after it, which LeRobot freezes, too."""
    last = "|".join(str(layer) for layer in range(size.last_used, size.depth))
    return rf"\.lm_head\.|\.text_model\.norm\.|\.text_model\.layers\.({last})\."
