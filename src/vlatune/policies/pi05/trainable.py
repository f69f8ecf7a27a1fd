"""Which parameters of PI0.5 and PI0 train, by name, and the adapters of `lora`.

What cannot influence the loss is frozen whatever is asked for, so that DDP need not search for parameters without a
gradient: the output of the prefix after its last keys and values is thrown away.
"""

import re
from typing import Any

from torch import nn

from vlatune.policies import modeling
from vlatune.policies.modeling import ADAPTER

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
    """LoRA on every linear layer of language model and expert whose output is used."""
    modeling.add_adapters(policy, on=ADAPTED, but=_unused(policy), rank=rank, alpha=alpha)


def _unused(policy: Any) -> str:
    last = len(policy.model.paligemma_with_expert.paligemma.model.language_model.layers) - 1
    return UNUSED.replace("{last}", str(last))
