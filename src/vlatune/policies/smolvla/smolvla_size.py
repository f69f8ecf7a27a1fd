"""How large a SmolVLA is, known without a hub: its vision-language model by a closed table, the action expert by config.json.

LeRobot asks a hub for the config and the processor of the vision-language model that config.json names, each time it
builds a policy. Nothing here does: inside `building_at(size)` LeRobot's unchanged classes get both from here. A folder of
another size than the table's carries it in SIZE_FILE beside config.json. What a size says is held against the shapes of
the weights. LeRobot and torch are imported where a model is built: sizes alone are read without.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from vlatune.limits import check_limit
from vlatune.policies.flow_matching import FlowSpec
from vlatune.policies.model_size import SIZE_FILE, ModelSize, read_size_file, replaced_names
from vlatune.policies.weight_files import (
    Shapes,
    StoredTensor,
    check_tensors,
    linear_shapes,
    norm_shapes,
    stored_tensors,
    tower_layer_shapes,
)

VLM, EXPERT = "model.vlm_with_expert.vlm.", "model.vlm_with_expert.lm_expert."
TEXT = f"{VLM}model.text_model."
TOWER_PART, CONNECTOR_PART = "vision_model", "connector"
KEPT_PART = dict.fromkeys(("heads", "expert", "lora"), CONNECTOR_PART) | {"language": TOWER_PART}
"""Way to train -> the last of the frozen parts that a picture goes through, whose output can be kept."""
VISION_EPS, TEXT_EPS = 1e-6, 1e-5
"""Of the norms of vision tower and language model, in every SmolVLM."""

CONFIG_DEFAULTS: Mapping[str, Any] = {
    "vlm_model_name": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
    "resize_imgs_with_padding": (512, 512),
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
"""What LeRobot takes where config.json leaves a key out (a test holds it to the real one)."""


@dataclass(frozen=True)
class SmolVLMSize(ModelSize):
    """Of the vision-language model alone; the defaults are SmolVLM2-500M's."""

    title = "SmolVLM"
    multiples: ClassVar[Mapping[str, str]] = {
        "width": "heads",
        "vision_width": "vision_heads",
        "heads": "kv_heads",
        "image_size": "patch_size",
    }
    even = ("head_dim",)

    width: int = 960
    """Hidden size of the language model, and what the vision tower is projected to; a multiple of heads."""
    depth: int = 32
    """Layers of the language model; a policy uses the first `num_vlm_layers` of them."""
    mlp_dim: int = 2560
    """Hidden size of the language model's MLP."""
    heads: int = 15
    """Query heads, of the language model and of the action expert."""
    kv_heads: int = 5
    """Key/value heads, likewise."""
    head_dim: int = 64
    """Size of one attention head, likewise."""
    vision_width: int = 768
    """Hidden size of the vision tower; a multiple of vision_heads."""
    vision_depth: int = 12
    """Layers of the vision tower."""
    vision_mlp_dim: int = 3072
    """Hidden size of the vision tower's MLP."""
    vision_heads: int = 12
    """Attention heads of the vision tower."""
    image_size: int = 512
    """Pixels on a side that the tower has places for; pictures of other sizes share or skip places."""
    patch_size: int = 16
    """Pixels on a side of one patch."""
    shuffle: int = 4
    """So many patches in a row and in a column become one image token."""
    vocab_size: int = 49_280
    """Rows of the token embedding."""


KNOWN = {
    "HuggingFaceTB/SmolVLM2-500M-Video-Instruct": SmolVLMSize(),
    "HuggingFaceTB/SmolVLM2-256M-Video-Instruct": SmolVLMSize(width=576, depth=30, mlp_dim=1536, heads=9, kv_heads=3),
}
"""`vlm_model_name` of config.json -> its size, as published."""


@dataclass(frozen=True)
class SmolVLASize:
    """A whole policy's: the vision-language model as far as it is used, and the action expert."""

    vlm: SmolVLMSize
    depth: int
    """Layers of the vision-language model that are used."""
    expert_depth: int
    expert_width: int
    expert_mlp_dim: int
    self_attention_every: int
    """Every so many layers the expert looks at itself, too, beside what was seen; in the others at what was seen alone;
    1: in each layer, 0: in none."""
    state_dims: int
    action_dims: int

    @property
    def stride(self) -> int:
        """Layers of the vision-language model per layer of the expert."""
        return self.depth // self.expert_depth

    @property
    def last_seen(self) -> int:
        """The last layer whose keys and values the expert looks at."""
        return (self.expert_depth - 1) * self.stride

    def looks_at_itself(self, layer: int) -> bool:
        """Whether the expert does in that layer, as LeRobot counts them."""
        return self.self_attention_every > 0 and layer % self.self_attention_every == 0

    @property
    def vision_weights(self) -> int:
        """Of the vision tower's layers."""
        width, mlp_dim = self.vlm.vision_width, self.vlm.vision_mlp_dim
        return self.vlm.vision_depth * (4 * width**2 + 2 * width * mlp_dim)

    @property
    def language_weights(self) -> int:
        """Of the language model's layers that are used, without its embedding."""
        return self.depth * self._decoder_weights(self.vlm.width, self.vlm.mlp_dim)

    @property
    def expert_weights(self) -> int:
        """Of the action expert's layers."""
        return self.expert_depth * self._decoder_weights(self.expert_width, self.expert_mlp_dim)

    def _decoder_weights(self, width: int, mlp_dim: int) -> int:
        return 2 * width * self.vlm.head_dim * (self.vlm.heads + self.vlm.kv_heads) + 3 * width * mlp_dim


@dataclass(frozen=True, kw_only=True)
class SmolVLASpec(FlowSpec):
    """What its folder says, with its size."""

    size: SmolVLASize


def read_size(folder: Path, config: Mapping[str, Any]) -> SmolVLASize:
    """Of the policy that `config` (config.json, checked) describes; one that LeRobot could not run is refused."""
    given = {**CONFIG_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    vlm = _read_vlm(folder, str(given["vlm_model_name"]))
    depth = int(given["num_vlm_layers"])
    depth = vlm.depth if depth <= 0 else min(depth, vlm.depth)
    expert_depth = int(given["num_expert_layers"])
    expert_depth = depth if expert_depth <= 0 else expert_depth
    width = int(vlm.width * float(given["expert_width_multiplier"]))
    is_cross = "cross" in str(given["attention_mode"])
    every = max(0, int(given["self_attn_every_n_layers"])) if is_cross else 1
    where = f"policy '{folder}': config.json:"
    _require(width >= 2 and width % 2 == 0, f"an action expert of width {width}: must be even, from 2", where)
    check_limit("model_width", width, f"{where} the action expert's width:")
    _require(
        depth % expert_depth == 0,
        f"num_expert_layers={expert_depth}: must divide the {depth} layers of the vision-language model",
        where,
    )
    size = SmolVLASize(
        vlm=vlm,
        depth=depth,
        expert_depth=expert_depth,
        expert_width=width,
        expert_mlp_dim=_mlp_dim(width),
        self_attention_every=every,
        state_dims=int(given["max_state_dim"]),
        action_dims=int(given["max_action_dim"]),
    )
    odd = [
        layer for layer in range(expert_depth) if _is_cross(size, layer) is size.looks_at_itself(layer * size.stride)
    ]
    _require(
        not odd,
        f"num_expert_layers={expert_depth} of {depth} with self_attn_every_n_layers={every}: layer {odd[:1]} of the expert would "
        f"look at itself with projections made for what was seen; LeRobot cannot run it either",
        where,
    )
    return size


def find_tensors(folder: Path, size: SmolVLASize) -> dict[str, StoredTensor]:
    """Every tensor of a policy of that size, by its name; whatever is missing, left over or of another shape is an error."""
    found = {stored.key: stored for stored in stored_tensors(folder)}
    check_tensors(folder, expected_shapes(size), found, "SmolVLA")
    return found


def expected_shapes(size: SmolVLASize) -> Shapes:
    """LeRobot's SmolVLAPolicy at a size: the name and shape of every tensor (a test holds it to the real one)."""
    vlm, width = size.vlm, size.expert_width
    shapes = _vision(vlm) | {
        f"{VLM}model.connector.modality_projection.proj.weight": (vlm.width, vlm.vision_width * vlm.shuffle**2),
        f"{TEXT}embed_tokens.weight": (vlm.vocab_size, vlm.width),
        f"{TEXT}norm.weight": (vlm.width,),
        f"{VLM}lm_head.weight": (vlm.vocab_size, vlm.width),
        f"{EXPERT}norm.weight": (width,),
        **linear_shapes("model.state_proj", vlm.width, size.state_dims),
        **linear_shapes("model.action_in_proj", width, size.action_dims),
        **linear_shapes("model.action_out_proj", size.action_dims, width),
        **linear_shapes("model.action_time_mlp_in", width, 2 * width),
        **linear_shapes("model.action_time_mlp_out", width, width),
    }
    for layer in range(size.depth):
        shapes |= _decoder_layer(f"{TEXT}layers.{layer}.", vlm, vlm.width, vlm.mlp_dim, key_width=vlm.width)
    for layer in range(size.expert_depth):
        key_width = vlm.kv_heads * vlm.head_dim if _is_cross(size, layer) else width
        shapes |= _decoder_layer(f"{EXPERT}layers.{layer}.", vlm, width, size.expert_mlp_dim, key_width=key_width)
    return shapes


@contextmanager
def building_at(size: SmolVLMSize) -> Iterator[None]:
    """While active, LeRobot's SmolVLAPolicy is constructed with a vision-language model of this size, and asks no hub.

    By from_pretrained too. Other threads that want a size wait; one that constructs a policy outside meanwhile gets it.
    """
    from lerobot.policies.smolvla import smolvlm_with_expert

    tokens = SimpleNamespace(fake_image_token_id=0, global_image_token_id=0)  # of settings that are refused
    replaced = {
        "AutoConfig": _Answer(lambda: vlm_config(size)),
        "AutoProcessor": _Answer(lambda: SimpleNamespace(tokenizer=tokens)),
        "AutoModelForImageTextToText": _Answer(_refuse_weights),
    }
    with replaced_names({(smolvlm_with_expert, name): answer for name, answer in replaced.items()}):
        yield


def vlm_config(size: SmolVLMSize) -> Any:
    """transformers' config of the vision-language model."""
    from transformers import SmolVLMConfig

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
    values: dict[str, Any] = {"text_config": text, "vision_config": vision, "scale_factor": size.shuffle}
    values["pad_token_id"] = 0
    return SmolVLMConfig(**values)


class _Answer:
    """In place of one of transformers' Auto classes: `from_pretrained` gives the same whatever is named."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def from_pretrained(self, *_: Any, **__: Any) -> Any:
        return self._make()


def _refuse_weights() -> Any:
    raise ValueError("load_vlm_weights: the weights of a policy are in its own folder; none are fetched beside them")


def _require(condition: bool, message: str, where: str) -> None:
    if not condition:
        raise ValueError(f"{where} {message}")


def _read_vlm(folder: Path, name: str) -> SmolVLMSize:
    found = read_size_file(folder, SmolVLMSize) or KNOWN.get(name)
    if found is not None:
        return found
    fields = ", ".join(field.name for field in dataclasses.fields(SmolVLMSize))
    raise ValueError(
        f"policy '{folder}': config.json names the vision-language model '{name}', whose size is not known here; known are "
        f"{', '.join(KNOWN)}; for another, write its size to {folder / SIZE_FILE} ({fields})"
    )


def _is_cross(size: SmolVLASize, layer: int) -> bool:
    """Whether LeRobot makes that layer of the expert for keys and values of what was seen."""
    return not size.looks_at_itself(layer)


def _mlp_dim(width: int) -> int:
    """LeRobot's: four thirds of two widths, rounded up to 256."""
    inner = 4 * int(2 * width / 3)
    return -(-inner // 256) * 256


def _vision(size: SmolVLMSize) -> Shapes:
    tower, width = f"{VLM}model.vision_model.", size.vision_width
    shapes: Shapes = {
        f"{tower}embeddings.patch_embedding.weight": (width, 3, size.patch_size, size.patch_size),
        f"{tower}embeddings.patch_embedding.bias": (width,),
        f"{tower}embeddings.position_embedding.weight": ((size.image_size // size.patch_size) ** 2, width),
        **norm_shapes(f"{tower}post_layernorm", width),
    }
    for number in range(size.vision_depth):
        shapes |= tower_layer_shapes(f"{tower}encoder.layers.{number}.", width, size.vision_mlp_dim)
    return shapes


def _decoder_layer(prefix: str, size: SmolVLMSize, width: int, mlp_dim: int, *, key_width: int) -> Shapes:
    queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    return {
        f"{prefix}self_attn.q_proj.weight": (queries, width),
        f"{prefix}self_attn.k_proj.weight": (keys, key_width),
        f"{prefix}self_attn.v_proj.weight": (keys, key_width),
        f"{prefix}self_attn.o_proj.weight": (width, queries),
        f"{prefix}mlp.gate_proj.weight": (mlp_dim, width),
        f"{prefix}mlp.up_proj.weight": (mlp_dim, width),
        f"{prefix}mlp.down_proj.weight": (width, mlp_dim),
        f"{prefix}input_layernorm.weight": (width,),
        f"{prefix}post_attention_layernorm.weight": (width,),
    }
