"""Which parameters of PI0.5 and PI0 train, by name, and the adapters of `lora`.

What cannot influence the loss is frozen whatever is asked for, so that DDP need not search for parameters without a
gradient: the output of the prefix after its last keys and values is thrown away.
"""

import re
from typing import Any

import torch
from torch import nn

from vlatune.policies.pi05.layers import ADAPTER

HEADS = r"model\.(state_proj|action_in_proj|action_out_proj|(action_)?time_mlp_(in|out))\."
EXPERT = r"model\.paligemma_with_expert\.gemma_expert\.model\."
TRAINED = {
    "heads": HEADS,
    "expert": f"{HEADS}|{EXPERT}",
    "lora": rf"{HEADS}|.*\.lora_(A|B)\.{ADAPTER}\.",
    "full": r"model\.",
}
TRAIN_PREFIX = ("lora", "full")
"""Ways that train something of the prefix, which then needs gradients."""

UNUSED = r"lm_head\.|language_model\.norm\.|language_model\.layers\.{last}\.(self_attn\.(q|o)_proj|mlp|post_attention_layernorm)\b"
ADAPTED = r".*\.(language_model|gemma_expert\.model)\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)"


def set_trainable(policy: nn.Module, train: str) -> None:
    """Freeze all but what `train` names."""
    wanted, unused = re.compile(TRAINED[train]), re.compile(_unused(policy))
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(bool(wanted.match(name)) and not unused.search(name))


def is_float32(name: str, train: str) -> bool:
    """What trains, and what is unused in the same layers: LeRobot's sampling runs them, and a layer in one dtype."""
    return bool(re.match(TRAINED[train], name)) and "lm_head." not in name


def trains_tower(train: str) -> bool:
    """Does anything of the vision tower train?"""
    return train == "full"


def add_adapters(policy: nn.Module, *, rank: int, alpha: float) -> None:
    """LoRA of the peft library on every linear layer of language model and expert whose output is used.

    The adapters begin without effect, are drawn from torch's global generator, and are float32 whatever the base is.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # pyright: ignore[reportArgumentType]  (peft only divides it by the rank)
        target_modules=ADAPTED,
        exclude_modules=f".*({_unused(policy)}).*",
    )
    inject_adapter_in_model(config, policy, adapter_name=ADAPTER)
    for name, parameter in policy.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.to(torch.float32)


def merge_adapters(policy: nn.Module) -> None:
    """Fold every adapter into its layer, in float32: the policy is then LeRobot's own again, module by module."""
    adapted = [(name, module) for name, module in policy.named_modules() if hasattr(module, "lora_A")]
    for name, module in adapted:
        layer: Any = module
        a, b = (part[ADAPTER].weight.detach() for part in (layer.lora_A, layer.lora_B))
        merged = layer.base_layer.weight.detach().to(torch.float32) + layer.scaling[ADAPTER] * (b @ a)
        layer.base_layer.weight = nn.Parameter(merged, requires_grad=False)
        owner, _, leaf = name.rpartition(".")
        setattr(policy.get_submodule(owner), leaf, layer.base_layer)


def _unused(policy: Any) -> str:
    last = len(policy.model.paligemma_with_expert.paligemma.model.language_model.layers) - 1
    return UNUSED.replace("{last}", str(last))
