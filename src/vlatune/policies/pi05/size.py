"""Size of LeRobot's PI0.5 and PI0, which share their parts.

LeRobot takes widths from two named variants and hard-codes the vocabulary and the vision tower. Its
attention code fixes 8 query heads, 1 key/value head, and one depth and head_dim for language model
and action expert.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlatune.policies.model_size import ModelSize, read_size_file

NUM_HEADS = 8
NUM_KV_HEADS = 1


def use_size(lerobot: Any, size: dict[str, int]) -> None:
    """Make LeRobot's module build PI0.5 or PI0 at this size; variants name language model and expert."""
    vlm, expert = lerobot.PaliGemmaForConditionalGenerationWithPiGemma, lerobot.PiGemmaForCausalLM
    width, vocab_size = size["width"], size["vocab_size"]

    def make_vlm(config: Any) -> Any:
        config.update({"_vocab_size": vocab_size, "image_token_index": vocab_size})
        config.update({"hidden_size": width, "projection_dim": width})
        config.text_config.vocab_size = vocab_size
        vision = {"hidden_size": "width", "num_hidden_layers": "depth", "num_attention_heads": "heads"}
        names = {name: size[f"vision_{part}"] for name, part in {**vision, "intermediate_size": "mlp_dim"}.items()}
        config.vision_config.update({**names, "projection_dim": width, "patch_size": size["patch_size"]})
        return vlm(config=config)

    def make_expert(config: Any) -> Any:
        config.vocab_size = vocab_size
        return expert(config=config)

    widths = {"gemma_2b": (width, size["mlp_dim"]), "gemma_300m": (size["expert_width"], size["expert_mlp_dim"])}
    lerobot.get_gemma_config = {
        variant: lerobot.GemmaConfig(hidden, size["depth"], mlp_dim, 8, 1, size["head_dim"])
        for variant, (hidden, mlp_dim) in widths.items()
    }.__getitem__
    lerobot.PaliGemmaForConditionalGenerationWithPiGemma, lerobot.PiGemmaForCausalLM = make_vlm, make_expert


@dataclass(frozen=True)
class Pi05Size(ModelSize):
    """Size of a PI0.5 or PI0; defaults to the published models. One patch is one image token."""

    title = "PI0.5"
    modules = ("lerobot.policies.pi05.modeling_pi05", "lerobot.policies.pi0.modeling_pi0")
    replaced = ("get_gemma_config", "PaliGemmaForConditionalGenerationWithPiGemma", "PiGemmaForCausalLM")
    use_size = staticmethod(use_size)

    width: int = 2048
    depth: int = 18
    mlp_dim: int = 16_384
    head_dim: int = 256
    vision_width: int = 1152
    vision_depth: int = 27
    vision_mlp_dim: int = 4304
    vision_heads: int = 16
    patch_size: int = 14
    vocab_size: int = 257_152
    expert_width: int = 1024
    """Hidden size of the action expert, which has the language model's depth; even, for its time embedding."""
    expert_mlp_dim: int = 4096
    """Hidden size of the action expert's MLP."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.expert_width % 2:
            raise ValueError(
                f"{self.title}'s size: expert_width={self.expert_width}: must be even, for its time embedding"
            )


def read_size(folder: Path) -> Pi05Size | None:
    """Read the size of a pretrained_model folder; None means the published size."""
    return read_size_file(folder, Pi05Size)
