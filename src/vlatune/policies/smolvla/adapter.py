"""SmolVLA without torch: validation of its folder.

Reads LeRobot's `config.json` and processor files as plain JSON: imports no class that they name,
and downloads only the tokenizer.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from vlatune.policies.flow_matching import FLOW_FIELDS, FlowAdapter
from vlatune.policies.processors import Schema, make_fields
from vlatune.policies.smolvla.size import SmolVLASpec, SmolVLMSize, read_size
from vlatune.policies.weight_files import Shapes

SCHEMA = Schema(
    type="smolvla",
    config={
        **FLOW_FIELDS,
        **make_fields(
            step_count="num_steps",
            sides="resize_imgs_with_padding",
            flag="adapt_to_pi_aloha use_delta_joint_actions_aloha use_cache train_state_proj load_vlm_weights "
            "add_image_special_tokens",
            text="vlm_model_name attention_mode pad_language_to",
            number="prefix_length num_expert_layers num_vlm_layers self_attn_every_n_layers expert_width_multiplier",
        ),
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
    defaults: ClassVar[Mapping[str, Any]] = {
        "vlm_model_name": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
        "attention_mode": "cross_attn",
        "num_expert_layers": -1,
        "num_vlm_layers": 16,
        "self_attn_every_n_layers": 2,
        "expert_width_multiplier": 0.75,
    }
    size_class, modeling = SmolVLMSize, SmolVLMSize.modules[0]
    spec_class = SmolVLASpec
    load, make_tiny = "vlatune.policies.smolvla.model:SmolVLAModule.load", "vlatune.policies.smolvla.tiny:make_smolvla"
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
