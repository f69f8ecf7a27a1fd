"""Size of a SmolVLA, known without the hub: a table of VLMs, and config.json for the expert.

LeRobot downloads config and processor of the vision-language model whenever it builds a policy.
Inside `building_at(size)`, its unchanged classes get both from here. A folder of another size
stores it in SIZE_FILE beside config.json. Sizes are validated against the weights' shapes. LeRobot
and torch are only imported to build a model.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vlatune.policies.flow_matching import FlowSpec
from vlatune.policies.model_size import SIZE_FILE, ModelSize, read_size_file, replaced_names
from vlatune.storage.limits import check_limit

VISION_EPS, TEXT_EPS = 1e-6, 1e-5
"""Epsilon of the norms in vision tower and language model of every SmolVLM."""

CONFIG_DEFAULTS: Mapping[str, Any] = {
    "vlm_model_name": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
    "chunk_size": 50,
    "max_state_dim": 32,
    "max_action_dim": 32,
    "tokenizer_max_length": 48,
    "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
    "empty_cameras": 0,
    "input_features": {},
    "attention_mode": "cross_attn",
    "num_expert_layers": -1,
    "num_vlm_layers": 16,
    "self_attn_every_n_layers": 2,
    "expert_width_multiplier": 0.75,
    "train_state_proj": True,
}
"""LeRobot's defaults for keys missing from config.json."""


@dataclass(frozen=True)
class SmolVLMSize(ModelSize):
    """Size of the vision-language model; defaults to SmolVLM2-500M."""

    title = "SmolVLM"

    width: int = 960
    """Hidden size of the language model; a multiple of heads."""
    depth: int = 32
    """Layers of the language model; a policy uses the first `num_vlm_layers` of them."""
    mlp_dim: int = 2560
    """Hidden size of the language model's MLP."""
    heads: int = 15
    """Query heads of language model and action expert."""
    kv_heads: int = 5
    """Key/value heads of language model and action expert."""
    head_dim: int = 64
    """Attention head size of language model and action expert."""
    vision_width: int = 768
    """Hidden size of the vision tower; a multiple of vision_heads."""
    vision_depth: int = 12
    """Layers of the vision tower."""
    vision_mlp_dim: int = 3072
    """Hidden size of the vision tower's MLP."""
    vision_heads: int = 12
    """Attention heads of the vision tower."""
    image_size: int = 512
    """Image side in pixels that the position embedding was made for."""
    patch_size: int = 16
    """Patch side in pixels."""
    shuffle: int = 4
    """Side of the square of patches that becomes one image token."""
    vocab_size: int = 49_280
    """Rows of the token embedding."""


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
    """Return the size that a validated config.json describes; raise if LeRobot cannot run it."""
    given = {**CONFIG_DEFAULTS, **config}
    name = str(given["vlm_model_name"])
    vlm = read_size_file(folder, SmolVLMSize) or KNOWN.get(name)
    if vlm is None:
        fields = ", ".join(field.name for field in dataclasses.fields(SmolVLMSize))
        raise ValueError(
            f"policy '{folder}': config.json names the vision-language model '{name}' of unknown size; known are "
            f"{', '.join(KNOWN)}; for another, write its size to {folder / SIZE_FILE} ({fields})"
        )
    depth = int(given["num_vlm_layers"])
    depth = vlm.depth if depth <= 0 else min(depth, vlm.depth)
    expert_depth = int(given["num_expert_layers"])
    expert_depth = depth if expert_depth <= 0 else expert_depth
    width = int(vlm.width * float(given["expert_width_multiplier"]))
    is_cross = "cross" in str(given["attention_mode"])
    every = max(0, int(given["self_attn_every_n_layers"])) if is_cross else 1
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
        expert_mlp_dim=_mlp_dim(width),
        self_attention_every=every,
        state_dims=int(given["max_state_dim"]),
        action_dims=int(given["max_action_dim"]),
    )


@contextmanager
def building_at(size: SmolVLMSize) -> Iterator[None]:
    """Construct LeRobot's SmolVLAPolicy with a VLM of this size and without the hub.

    Also applies to from_pretrained. Other threads that enter wait; threads that build outside of it
    are affected.
    """
    from lerobot.policies.smolvla import smolvlm_with_expert

    tokens = SimpleNamespace(fake_image_token_id=0, global_image_token_id=0)  # used only by settings that are rejected
    replaced = {
        "AutoConfig": SimpleNamespace(from_pretrained=lambda *_, **__: vlm_config(size)),
        "AutoProcessor": SimpleNamespace(from_pretrained=lambda *_, **__: SimpleNamespace(tokenizer=tokens)),
    }
    with replaced_names({(smolvlm_with_expert, name): answer for name, answer in replaced.items()}):
        yield


def loading_code(size: SmolVLMSize) -> str:
    """Return Python code that applies `building_at` to LeRobot; for a model card."""
    return f"""\
from types import SimpleNamespace
from lerobot.policies.smolvla import smolvlm_with_expert as lerobot
from transformers import SmolVLMConfig

vlm = SmolVLMConfig(**{_vlm_fields(size)})
tokens = SimpleNamespace(fake_image_token_id=0, global_image_token_id=0)
lerobot.AutoConfig = SimpleNamespace(from_pretrained=lambda *_, **__: vlm)
lerobot.AutoProcessor = SimpleNamespace(from_pretrained=lambda *_, **__: SimpleNamespace(tokenizer=tokens))"""


def vlm_config(size: SmolVLMSize) -> Any:
    """Return transformers' config of the vision-language model."""
    from transformers import SmolVLMConfig

    return SmolVLMConfig(**_vlm_fields(size))


def _vlm_fields(size: SmolVLMSize) -> dict[str, Any]:
    text = {
        "hidden_size": size.width,
        "intermediate_size": size.mlp_dim,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "vocab_size": size.vocab_size,
        "rms_norm_eps": TEXT_EPS,
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": size.vision_width,
        "intermediate_size": size.vision_mlp_dim,
        "num_hidden_layers": size.vision_depth,
        "num_attention_heads": size.vision_heads,
        "image_size": size.image_size,
        "patch_size": size.patch_size,
        "layer_norm_eps": VISION_EPS,
    }
    return {"text_config": text, "vision_config": vision, "scale_factor": size.shuffle, "pad_token_id": 0}


def _mlp_dim(width: int) -> int:
    """Return LeRobot's MLP width: 8/3 of the hidden size, rounded up to 256."""
    inner = 4 * int(2 * width / 3)
    return -(-inner // 256) * 256
