"""SmolVLA without torch: validation of its folder.

Reads LeRobot's `config.json` and processor files as plain JSON: imports no class that they name,
and downloads only the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlatune.policies.base import Fit
from vlatune.policies.flow_matching import FlowAdapter
from vlatune.policies.model_size import read_size_file
from vlatune.policies.processors import (
    Schema,
    is_count,
    is_flag,
    is_number,
    is_numbers,
    is_plain_map,
    is_sides,
    is_size,
    is_step_count,
    is_text,
)
from vlatune.policies.smolvla.size import (
    CONFIG_DEFAULTS,
    SmolVLASpec,
    SmolVLMSize,
    loading_code,
    read_size,
)
from vlatune.policies.weight_files import Shapes

if TYPE_CHECKING:
    import torch

SCHEMA = Schema(
    type="smolvla",
    config={
        **dict.fromkeys(("chunk_size", "n_action_steps", "max_state_dim", "max_action_dim"), is_size),
        "tokenizer_max_length": is_size,
        "num_steps": is_step_count,
        "empty_cameras": is_count,
        "resize_imgs_with_padding": is_sides,
        **dict.fromkeys(("adapt_to_pi_aloha", "use_delta_joint_actions_aloha", "use_cache"), is_flag),
        **dict.fromkeys(("freeze_vision_encoder", "train_expert_only", "train_state_proj"), is_flag),
        **dict.fromkeys(("load_vlm_weights", "add_image_special_tokens", "compile_model"), is_flag),
        **dict.fromkeys(("vlm_model_name", "attention_mode", "pad_language_to", "compile_mode"), is_text),
        **dict.fromkeys(("prefix_length", "num_expert_layers", "num_vlm_layers"), is_number),
        **dict.fromkeys(("self_attn_every_n_layers", "expert_width_multiplier", "min_period", "max_period"), is_number),
        **dict.fromkeys(("optimizer_lr", "optimizer_eps", "optimizer_weight_decay"), is_number),
        **dict.fromkeys(("optimizer_grad_clip_norm", "scheduler_warmup_steps", "scheduler_decay_steps"), is_number),
        "scheduler_decay_lr": is_number,
        "optimizer_betas": is_numbers,
        "rtc_config": is_plain_map,
    },
    steps={"smolvla_new_line_processor": {}},
)
UNSUPPORTED = {
    "adapt_to_pi_aloha": "joints would have to be turned on the way",
    "use_delta_joint_actions_aloha": "LeRobot has not ported it either",
    "add_image_special_tokens": "image tokens would need words around them",
}
"""Unsupported settings of config.json, with the reason."""


class SmolVLAAdapter(FlowAdapter[SmolVLASpec]):
    schema = SCHEMA
    title, defaults = "SmolVLA", CONFIG_DEFAULTS
    spec_class = SmolVLASpec
    parts = ("vision_model", "text_model|connector", "lm_expert")

    def read_model(self, folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], Shapes]:
        where = f"policy '{folder}': config.json:"
        for name, why in UNSUPPORTED.items():
            if config.get(name):
                raise ValueError(f"{where} {name} is on, which is not supported ({why})")
        size = read_size(folder, config)
        vlm = size.vlm
        sides, multiple = config.get("resize_imgs_with_padding", (512, 512)), vlm.patch_size * vlm.shuffle
        if sides is None or sides[0] != sides[1] or sides[0] % multiple:
            raise ValueError(
                f"{where} resize_imgs_with_padding is {sides}, expected two equal sides, a multiple of {multiple} "
                f"({vlm.patch_size} pixels a patch, {vlm.shuffle} patches in a row to a token)"
            )
        side = int(sides[0])
        num_patches = (side // vlm.patch_size) ** 2
        fields = {
            "image_hw": (side, side),
            "pad": "left_top",
            "vocab_size": vlm.vocab_size,
            "num_patches": num_patches,
            "image_tokens": num_patches // vlm.shuffle**2,
            "prefix_width": (size.last_used + 1) * 2 * vlm.kv_heads * vlm.head_dim,
            "size": size,
        }
        text = "model.vlm_with_expert.vlm.model.text_model."
        return fields, {
            f"{text}embed_tokens.weight": (vlm.vocab_size, vlm.width),
            f"{text}layers.{size.depth - 1}.mlp.gate_proj.weight": (vlm.mlp_dim, vlm.width),
            "model.state_proj.weight": (vlm.width, size.state_dims),
            "model.action_in_proj.weight": (size.expert_width, size.action_dims),
        }

    def loading_code(self, folder: Path) -> str:
        size = read_size_file(folder, SmolVLMSize)
        return loading_code(size) if size else ""

    def make_base(self, folder: Path, fit: Fit, *, small: bool, place: Path) -> None:
        """Write the tiny model; the full-size one is never trained from scratch."""
        assert small
        from vlatune.policies.smolvla.tiny import make_smolvla

        make_smolvla(folder, fit, place=place)

    def loader(self) -> Callable[..., torch.nn.Module]:
        from vlatune.policies.smolvla.model import load_smolvla

        return load_smolvla
