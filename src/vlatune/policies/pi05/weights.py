"""Which tensors a folder of PI0.5 or PI0 must hold, and whether it does. No torch: the driver looks before anything is started.

How files are read and held against it is in `policies/weight_files.py`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlatune.policies.pi05.size import NUM_HEADS, Pi05Size, read_size
from vlatune.policies.weight_files import (
    Shapes,
    StoredTensor,
    check_tensors,
    linear_shapes,
    norm_shapes,
    stored_tensors,
    tower_layer_shapes,
)

PALIGEMMA = "model.paligemma_with_expert.paligemma."
EXPERT = "model.paligemma_with_expert.gemma_expert."
EMBEDDING = f"{PALIGEMMA}model.language_model.embed_tokens.weight"

CONFIG_DEFAULTS: Mapping[str, Any] = {
    "paligemma_variant": "gemma_2b",
    "action_expert_variant": "gemma_300m",
    "image_resolution": (224, 224),
    "chunk_size": 50,
    "max_state_dim": 32,
    "max_action_dim": 32,
    "tokenizer_max_length": 200,
    "time_sampling_beta_alpha": 1.5,
    "time_sampling_beta_beta": 1.0,
    "time_sampling_scale": 0.999,
    "time_sampling_offset": 0.001,
    "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"},
    "empty_cameras": 0,
    "input_features": {},
    "use_relative_actions": False,
    "relative_exclude_joints": ["gripper"],
}
"""What LeRobot takes where config.json leaves a key out (a test holds it to the real one)."""


@dataclass(frozen=True)
class Kind:
    """One of the policies that are PaliGemma with an action expert, as far as their files differ."""

    type: str
    title: str
    defaults: Mapping[str, Any]
    """What LeRobot takes where config.json leaves a key out."""
    has_state: bool
    """The state is a token of the expert's, and the time a part of the action tokens; else the state stands in the
    prompt, and the time scales the expert's norms."""
    older_names: tuple[str, str]
    """Pattern and replacement of stored names, as LeRobot's `_fix_pytorch_state_dict_keys`."""
    left_out: re.Pattern[str] | None = None
    """What openpi's checkpoints carry and the policy has no place for, likewise."""


PI05 = Kind(
    type="pi05",
    title="PI0.5",
    defaults=CONFIG_DEFAULTS,
    has_state=False,
    older_names=(r"^action_time_mlp_(in|out)\.", r"time_mlp_\1."),
    left_out=re.compile(
        r"state_proj\.|paligemma_with_expert\.gemma_expert\.model\."
        r"(layers\.\d+\.(input_layernorm|post_attention_layernorm)|norm)\.weight$"
    ),
)
PI0 = Kind(
    type="pi0",
    title="PI0",
    defaults={
        **CONFIG_DEFAULTS,
        "tokenizer_max_length": 48,
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
    },
    has_state=True,
    older_names=(r"^time_mlp_(in|out)\.", r"action_time_mlp_\1."),
)
KINDS = {kind.type: kind for kind in (PI05, PI0)}


def find_tensors(folder: Path, config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Every tensor of the model that `config` (config.json) describes, by the model's name for it."""
    found: dict[str, StoredTensor] = {}
    kind = KINDS[config["type"]]
    for stored in stored_tensors(folder):
        names = model_names(stored.key, kind)
        for name in names:
            if name not in found or name == names[0]:  # a table of its own goes before the tied one
                found[name] = stored
    check_tensors(folder, expected_shapes(folder, config), found, kind.title)
    return found


def model_names(key: str, kind: Kind = PI05) -> tuple[str, ...]:
    """A stored name -> the model's names, which may be none or two: openpi stores tied tables once, as the head."""
    if kind.left_out and kind.left_out.match(key):
        return ()
    key = re.sub(*kind.older_names, key)
    name = key if key.startswith("model.") else f"model.{key}"
    return (name, EMBEDDING) if name == f"{PALIGEMMA}lm_head.weight" else (name,)


def expected_shapes(folder: Path, config: Mapping[str, Any]) -> Shapes:
    kind = KINDS[config["type"]]
    config = {**kind.defaults, **config}
    size = read_size(folder) or _published_size(folder, config)
    return shapes_at(
        size,
        image_size=int(config["image_resolution"][0]),
        action_dims=int(config["max_action_dim"]),
        state_dims=int(config["max_state_dim"]) if kind.has_state else None,
    )


def shapes_at(size: Pi05Size, *, image_size: int, action_dims: int, state_dims: int | None = None) -> Shapes:
    """LeRobot's policy at a size: the name and shape of every tensor (a test holds it to the real one).

    With `state_dims` it is PI0, whose expert has a state token and plain norms; without, PI0.5.
    """
    expert = f"{EXPERT}model."
    shapes = _vision(size, image_size) | _heads(size.expert_width, action_dims, state_dims)
    for layer in range(size.depth):
        shapes |= _gemma_layer(f"{PALIGEMMA}model.language_model.layers.{layer}.", size.width, size.mlp_dim, size)
        shapes |= _gemma_layer(f"{expert}layers.{layer}.", size.expert_width, size.expert_mlp_dim, size)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{PALIGEMMA}model.language_model.layers.{layer}.{norm}.weight"] = (size.width,)
            shapes |= _expert_norm(f"{expert}layers.{layer}.{norm}", size.expert_width, is_plain=state_dims is not None)
    return shapes | {
        EMBEDDING: (size.vocab_size, size.width),
        f"{PALIGEMMA}lm_head.weight": (size.vocab_size, size.width),
        f"{PALIGEMMA}model.language_model.norm.weight": (size.width,),
        f"{EXPERT}lm_head.weight": (size.vocab_size, size.expert_width),
        **_expert_norm(f"{expert}norm", size.expert_width, is_plain=state_dims is not None),
    }


def _vision(size: Pi05Size, image_size: int) -> Shapes:
    tower, width = f"{PALIGEMMA}model.vision_tower.vision_model.", size.vision_width
    patch = (size.patch_size, size.patch_size)
    shapes: Shapes = {
        f"{tower}embeddings.patch_embedding.weight": (width, 3, *patch),
        f"{tower}embeddings.patch_embedding.bias": (width,),
        f"{tower}embeddings.position_embedding.weight": ((image_size // size.patch_size) ** 2, width),
        **norm_shapes(f"{tower}post_layernorm", width),
        **linear_shapes(f"{PALIGEMMA}model.multi_modal_projector.linear", size.width, width),
    }
    for number in range(size.vision_depth):
        shapes |= tower_layer_shapes(f"{tower}encoder.layers.{number}.", width, size.vision_mlp_dim)
    return shapes


def _gemma_layer(prefix: str, width: int, mlp_dim: int, size: Pi05Size) -> Shapes:
    queries = NUM_HEADS * size.head_dim
    return {
        f"{prefix}self_attn.q_proj.weight": (queries, width),
        f"{prefix}self_attn.k_proj.weight": (size.head_dim, width),
        f"{prefix}self_attn.v_proj.weight": (size.head_dim, width),
        f"{prefix}self_attn.o_proj.weight": (width, queries),
        f"{prefix}mlp.gate_proj.weight": (mlp_dim, width),
        f"{prefix}mlp.up_proj.weight": (mlp_dim, width),
        f"{prefix}mlp.down_proj.weight": (width, mlp_dim),
    }


def _expert_norm(name: str, width: int, *, is_plain: bool) -> Shapes:
    """Of PI0.5 a layer that makes scale, shift and gate of the flow time."""
    return {f"{name}.weight": (width,)} if is_plain else linear_shapes(f"{name}.dense", 3 * width, width)


def _heads(width: int, action_dims: int, state_dims: int | None) -> Shapes:
    time = "time_mlp" if state_dims is None else "action_time_mlp"
    return {
        **linear_shapes("model.action_in_proj", width, action_dims),
        **linear_shapes("model.action_out_proj", action_dims, width),
        **linear_shapes(f"model.{time}_in", width, width if state_dims is None else 2 * width),
        **linear_shapes(f"model.{time}_out", width, width),
        **({} if state_dims is None else linear_shapes("model.state_proj", width, state_dims)),
    }


def _published_size(folder: Path, config: Mapping[str, Any]) -> Pi05Size:
    variants = config.get("paligemma_variant"), config.get("action_expert_variant")
    if variants != ("gemma_2b", "gemma_300m"):
        raise ValueError(
            f"policy '{folder}': config.json asks for {variants[0]} with {variants[1]}, expected gemma_2b with gemma_300m"
        )
    return Pi05Size()
