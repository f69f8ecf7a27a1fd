"""Build LeRobot's PI0.5 and PI0, which share their parts, at other sizes than the published one.

LeRobot takes widths from two named variants and hard-codes the vocabulary and the vision tower.
Inside `building_at(size)`, the unchanged classes are built at `size`: only their configs differ
(see `model_size.py`).

LeRobot's attention code fixes 8 query heads, 1 key/value head, and one depth and head_dim for
language model and action expert. LeRobot is only imported to build a model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlatune.policies.model_size import ModelSize, read_size_file, replaced_names

NUM_HEADS = 8
NUM_KV_HEADS = 1


@dataclass(frozen=True)
class Pi05Size(ModelSize):
    """Size of a PI0.5 or PI0; defaults to the published models."""

    title = "PI0.5"

    width: int = 2048
    """Hidden size of the language model."""
    depth: int = 18
    """Layers of the language model and of the action expert."""
    mlp_dim: int = 16_384
    """Hidden size of the language model's MLP."""
    head_dim: int = 256
    """Attention head size of language model and action expert."""
    expert_width: int = 1024
    """Hidden size of the action expert; even, for its time embedding."""
    expert_mlp_dim: int = 4096
    """Hidden size of the action expert's MLP."""
    vision_width: int = 1152
    """Hidden size of the vision tower; a multiple of vision_heads."""
    vision_depth: int = 27
    """Layers of the vision tower."""
    vision_mlp_dim: int = 4304
    """Hidden size of the vision tower's MLP."""
    vision_heads: int = 16
    """Attention heads of the vision tower."""
    patch_size: int = 14
    """Patch side in pixels; one patch is one image token."""
    vocab_size: int = 257_152
    """Rows of the token embedding."""


@contextmanager
def building_at(size: Pi05Size) -> Iterator[None]:
    """Construct LeRobot's PI05Policy and PI0Policy at this size, also by from_pretrained.

    Other threads that enter wait; threads that build outside of it are affected.
    """
    from lerobot.policies.pi0 import modeling_pi0
    from lerobot.policies.pi05 import modeling_pi05

    replaced = {
        (modeling, name): make_at(modeling, size)
        for modeling in (modeling_pi05, modeling_pi0)
        for name, make_at in (
            ("get_gemma_config", _gemma_config_at),
            ("PaliGemmaForConditionalGenerationWithPiGemma", _paligemma_at),
            ("PiGemmaForCausalLM", _expert_at),
        )
    }
    with replaced_names(replaced):
        yield


def read_size(folder: Path) -> Pi05Size | None:
    """Read the size of a pretrained_model folder; None means the published size."""
    return read_size_file(folder, Pi05Size)


def loading_code(kind: str, size: Pi05Size) -> str:
    """Return Python code that applies `building_at` to LeRobot; for a model card."""
    heads = f"{NUM_HEADS}, {NUM_KV_HEADS}, {size.head_dim}"
    vision = {
        "projection_dim": size.width,
        "hidden_size": size.vision_width,
        "num_hidden_layers": size.vision_depth,
        "num_attention_heads": size.vision_heads,
        "intermediate_size": size.vision_mlp_dim,
        "patch_size": size.patch_size,
    }
    names = {"_vocab_size": size.vocab_size, "image_token_index": size.vocab_size}
    names |= dict.fromkeys(("hidden_size", "projection_dim"), size.width)
    return f"""\
from lerobot.policies.{kind} import modeling_{kind} as lerobot

def make_vlm(config, make=lerobot.PaliGemmaForConditionalGenerationWithPiGemma):
    config.update({names})
    config.text_config.vocab_size = {size.vocab_size}
    config.vision_config.update({vision})
    return make(config=config)

def make_expert(config, make=lerobot.PiGemmaForCausalLM):
    config.vocab_size = {size.vocab_size}
    return make(config=config)

lerobot.get_gemma_config = {{
    "gemma_2b": lerobot.GemmaConfig({size.width}, {size.depth}, {size.mlp_dim}, {heads}),
    "gemma_300m": lerobot.GemmaConfig({size.expert_width}, {size.depth}, {size.expert_mlp_dim}, {heads}),
}}.get
lerobot.PaliGemmaForConditionalGenerationWithPiGemma, lerobot.PiGemmaForCausalLM = make_vlm, make_expert"""


def _gemma_config_at(modeling: Any, size: Pi05Size):
    # LeRobot's default variant names identify the language model and the expert.
    by_variant = {
        "gemma_2b": (size.width, size.mlp_dim),
        "gemma_300m": (size.expert_width, size.expert_mlp_dim),
    }

    def get_gemma_config(variant: str):
        width, mlp_dim = by_variant[variant]
        return modeling.GemmaConfig(width, size.depth, mlp_dim, NUM_HEADS, NUM_KV_HEADS, size.head_dim)

    return get_gemma_config


def _paligemma_at(modeling: Any, size: Pi05Size):
    original = modeling.PaliGemmaForConditionalGenerationWithPiGemma

    def make_paligemma(config: Any):
        config._vocab_size = size.vocab_size
        config.image_token_index = size.vocab_size
        config.text_config.vocab_size = size.vocab_size
        config.hidden_size = config.projection_dim = size.width
        vision = config.vision_config
        vision.projection_dim = size.width
        vision.hidden_size = size.vision_width
        vision.num_hidden_layers = size.vision_depth
        vision.num_attention_heads = size.vision_heads
        vision.intermediate_size = size.vision_mlp_dim
        vision.patch_size = size.patch_size
        return original(config=config)

    return make_paligemma


def _expert_at(modeling: Any, size: Pi05Size):
    original = modeling.PiGemmaForCausalLM

    def make_expert(config: Any):
        config.vocab_size = size.vocab_size
        return original(config=config)

    return make_expert
