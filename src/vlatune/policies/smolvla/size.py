"""Size of a SmolVLA, known without the hub: a table of VLMs, and config.json for the expert.

LeRobot downloads config and processor of the vision-language model whenever it builds a policy.
Inside `building_at(size)`, its unchanged classes get both from here. Sizes are validated against
the weights' shapes.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlatune.policies.flow_matching import FlowSpec
from vlatune.policies.model_size import SIZE_FILE, ModelSize, read_size_file
from vlatune.storage.limits import check_limit


def use_size(lerobot: Any, size: dict[str, int]) -> None:
    """Make LeRobot's module build a SmolVLM of this size; only settings that are rejected use the tokens."""
    from types import SimpleNamespace

    from transformers import SmolVLMConfig

    sides = {"hidden_size": "width", "intermediate_size": "mlp_dim", "num_hidden_layers": "depth"}
    text, vision = ({name: size[f"{part}{key}"] for name, key in sides.items()} for part in ("", "vision_"))
    text |= {
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv_heads"],
        "head_dim": size["head_dim"],
    }
    text |= {"vocab_size": size["vocab_size"], "rms_norm_eps": 1e-5, "pad_token_id": 0}
    vision |= {"num_attention_heads": size["vision_heads"], "image_size": size["image_size"]}
    vision |= {"patch_size": size["patch_size"], "layer_norm_eps": 1e-6}
    vlm = {"text_config": text, "vision_config": vision, "scale_factor": size["shuffle"], "pad_token_id": 0}
    processor = SimpleNamespace(tokenizer=SimpleNamespace(fake_image_token_id=0, global_image_token_id=0))
    lerobot.AutoConfig = SimpleNamespace(from_pretrained=lambda *_, **__: SmolVLMConfig(**vlm))
    lerobot.AutoProcessor = SimpleNamespace(from_pretrained=lambda *_, **__: processor)


@dataclass(frozen=True)
class SmolVLMSize(ModelSize):
    """Size of the vision-language model; defaults to SmolVLM2-500M."""

    title = "SmolVLM"
    modules = ("lerobot.policies.smolvla.smolvlm_with_expert",)
    replaced = ("AutoConfig", "AutoProcessor")
    use_size = staticmethod(use_size)

    width: int = 960
    depth: int = 32
    """Layers of the language model; a policy uses the first `num_vlm_layers` of them."""
    mlp_dim: int = 2560
    head_dim: int = 64
    vision_width: int = 768
    vision_depth: int = 12
    vision_mlp_dim: int = 3072
    vision_heads: int = 12
    patch_size: int = 16
    vocab_size: int = 49_280
    heads: int = 15
    """Query heads of language model and action expert."""
    kv_heads: int = 5
    """Key/value heads of language model and action expert."""
    image_size: int = 512
    """Image side in pixels that the position embedding was made for."""
    shuffle: int = 4
    """Side of the square of patches that becomes one image token."""


KNOWN = {
    "HuggingFaceTB/SmolVLM2-500M-Video-Instruct": SmolVLMSize(),
    "HuggingFaceTB/SmolVLM2-256M-Video-Instruct": SmolVLMSize(width=576, depth=30, mlp_dim=1536, heads=9, kv_heads=3),
}
"""Maps `vlm_model_name` of config.json to the published size."""


@dataclass(frozen=True)
class SmolVLASize:
    """Size of a policy: the used part of the vision-language model, and the action expert."""

    vlm: SmolVLMSize
    depth: int
    """Layers of the vision-language model that are used."""
    expert_depth: int
    expert_width: int
    expert_mlp_dim: int
    self_attention_every: int
    """Every n-th layer of the expert has self-attention, others cross-attention to the prefix; 0:
    none."""
    state_dims: int
    action_dims: int

    @property
    def stride(self) -> int:
        """Layers of the vision-language model per layer of the expert."""
        return self.depth // self.expert_depth

    @property
    def last_used(self) -> int:
        """The last layer whose keys and values the expert attends to."""
        return (self.expert_depth - 1) * self.stride

    def has_self_attention(self, layer: int) -> bool:
        """True if the expert has self-attention in that layer, as LeRobot counts them."""
        return self.self_attention_every > 0 and layer % self.self_attention_every == 0


@dataclass(frozen=True, kw_only=True)
class SmolVLASpec(FlowSpec):
    """Spec of a SmolVLA with its size."""

    size: SmolVLASize


def read_size(folder: Path, config: Mapping[str, Any]) -> SmolVLASize:
    """Return the size that a validated config.json with defaults describes; raise if LeRobot cannot run it."""
    name = str(config["vlm_model_name"])
    vlm = read_size_file(folder, SmolVLMSize) or KNOWN.get(name)
    if vlm is None:
        fields = ", ".join(field.name for field in dataclasses.fields(SmolVLMSize))
        raise ValueError(
            f"policy '{folder}': config.json names the vision-language model '{name}' of unknown size; known are "
            f"{', '.join(KNOWN)}; for another, write its size to {folder / SIZE_FILE} ({fields})"
        )
    depth = int(config["num_vlm_layers"])
    depth = vlm.depth if depth <= 0 else min(depth, vlm.depth)
    expert_depth = int(config["num_expert_layers"])
    expert_depth = depth if expert_depth <= 0 else expert_depth
    width = int(vlm.width * float(config["expert_width_multiplier"]))
    is_cross = "cross" in str(config["attention_mode"])
    every = max(0, int(config["self_attn_every_n_layers"])) if is_cross else 1
    where = f"policy '{folder}': config.json:"
    check_limit("model_width", width, f"{where} the action expert's width:")
    if width < 2 or width % 2:
        raise ValueError(f"{where} an action expert of width {width}: must be even, from 2")
    if depth % expert_depth:
        raise ValueError(
            f"{where} num_expert_layers={expert_depth}: must divide the {depth} layers of the vision-language model"
        )
    return SmolVLASize(
        vlm=vlm,
        depth=depth,
        expert_depth=expert_depth,
        expert_width=width,
        expert_mlp_dim=-(-4 * int(2 * width / 3) // 256) * 256,  # as LeRobot rounds 8/3 of the width
        self_attention_every=every,
        state_dims=int(config["max_state_dim"]),
        action_dims=int(config["max_action_dim"]),
    )
