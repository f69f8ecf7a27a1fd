"""LeRobot's PI0.5 and PI0, which are made of the same parts, at other sizes than the two they know.

LeRobot's policies take their widths from two named variants and write the vocabulary and the vision tower's shape
into their constructors. Inside `building_at(size)` the same, unchanged classes are built at `size`: only the configs that
they are given differ (`model_size.py` has what is common to sizes, and the file that carries one).

Fixed by LeRobot's attention code and therefore no fields: 8 query heads, 1 key/value head, and one depth and one
head_dim for language model and action expert. LeRobot is imported where a model is built: sizes alone are read without.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from vlatune.policies.model_size import ModelSize, read_size_file, replaced_names

NUM_HEADS = 8
NUM_KV_HEADS = 1


@dataclass(frozen=True)
class Pi05Size(ModelSize):
    """The defaults are the published PI0.5, and the published PI0."""

    title = "PI0.5"
    multiples: ClassVar[Mapping[str, str]] = {"vision_width": "vision_heads"}
    even = ("head_dim", "expert_width")

    width: int = 2048
    """Hidden size of the language model, and what the vision tower is projected to."""
    depth: int = 18
    """Layers of the language model and of the action expert."""
    mlp_dim: int = 16_384
    """Hidden size of the language model's MLP."""
    head_dim: int = 256
    """Size of one attention head, in both."""
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
    """Pixels on a side of one image token."""
    vocab_size: int = 257_152
    """Rows of the token embedding."""

    @property
    def vision_weights(self) -> int:
        """Of the vision tower's layers."""
        return self.vision_depth * (4 * self.vision_width**2 + 2 * self.vision_width * self.vision_mlp_dim)

    @property
    def language_weights(self) -> int:
        """Of the language model's layers, without its embedding."""
        return self._decoder_weights(self.width, self.mlp_dim)

    @property
    def expert_weights(self) -> int:
        """Of the action expert's layers."""
        return self._decoder_weights(self.expert_width, self.expert_mlp_dim)

    def _decoder_weights(self, width: int, mlp_dim: int) -> int:
        attention = width * self.head_dim * 2 * (NUM_HEADS + NUM_KV_HEADS)
        return self.depth * (attention + 3 * width * mlp_dim)


@contextmanager
def building_at(size: Pi05Size) -> Iterator[None]:
    """While active, LeRobot's PI05Policy and PI0Policy are constructed at this size, by from_pretrained too.

    Other threads that want a size wait; one that constructs such a policy outside `building_at` meanwhile would get it.
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
    """The size that lies in a pretrained_model folder, or None: then the model is of standard size."""
    return read_size_file(folder, Pi05Size)


def _gemma_config_at(modeling: Any, size: Pi05Size):
    # The two variant names of LeRobot's configs stay what they are by default and serve as the names of the two roles.
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
