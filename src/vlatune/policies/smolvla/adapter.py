"""SmolVLA without torch: validation of its folder, and transforms of samples on the CPU.

Reads LeRobot's `config.json` and processor files as plain JSON: imports no class that they name,
and downloads only the tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlatune.batch import ACTION, ACTION_IS_PAD, IDS, MIXTURE_KEYS, NOISE, SLOT, STATE, TIME, TOKEN_MASK, TOKENS
from vlatune.data.frames.prefix_store import PrefixLayout
from vlatune.data.transforms import Rename, Select, Transform
from vlatune.policies.base import (
    NO_OVERRIDES,
    NO_STATS,
    Binding,
    Fit,
    ModuleOptions,
    NoiseSpec,
    PolicyAdapter,
    Stats,
    check_action_steps,
)
from vlatune.policies.base_folder import read_config, read_steps
from vlatune.policies.binding import mixture_masks
from vlatune.policies.flow_matching import PadActions, camera_names, make_flow_noise
from vlatune.policies.model_size import SIZE_FILE, read_size_file
from vlatune.policies.normalisation import make_normalisers
from vlatune.policies.processors import (
    PREPROCESSOR,
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
    KEPT_PART,
    PREFIX_PART,
    TOWER_PART,
    SmolVLASize,
    SmolVLASpec,
    SmolVLMSize,
    loading_code,
    read_size,
)
from vlatune.policies.tokenizer import NewlinePrompt, Tokenise, find_tokenizer, load_tokenizer, tokenizer_settings
from vlatune.policies.weight_files import check_shapes, stored_tensors

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
STATE_TOKENS = 1


class SmolVLAAdapter(PolicyAdapter[SmolVLASpec]):
    schema = SCHEMA
    carried_files = (SIZE_FILE,)
    mixes_robots = True

    def read_spec(self, folder: Path, overrides: Mapping[str, Any] = NO_OVERRIDES) -> SmolVLASpec:
        """Read and validate the folder; of the weights only some shapes, loading compares all."""
        config = read_config(folder, SCHEMA, overrides)
        if overrides:
            check_action_steps(config, f"policy '{folder}'")
        for name, why in UNSUPPORTED.items():
            if config.get(name):
                raise ValueError(f"policy '{folder}': config.json: {name} is on, which is not supported ({why})")
        size = read_size(folder, config)
        step = tokenizer_settings(folder, read_steps(folder, SCHEMA)[PREPROCESSOR], overrides)
        tokenizer_file = find_tokenizer(folder, step["tokenizer_name"])
        tokenizer = load_tokenizer(tokenizer_file, size.vlm.vocab_size)
        config = {**CONFIG_DEFAULTS, **config}
        try:
            spec = SmolVLASpec(
                type="smolvla",
                folder=str(folder),
                cameras=camera_names(config),
                image_hw=_image_hw(config, size),
                pad="left_top",
                action_offsets=tuple(range(int(config["chunk_size"]))),
                max_state_dim=size.state_dims,
                max_action_dim=size.action_dims,
                normalisation=dict(config["normalization_mapping"]),
                tokenizer_file=str(tokenizer_file),
                tokenizer=tokenizer,
                vocab_size=size.vlm.vocab_size,
                max_tokens=int(step.get("max_length") or config["tokenizer_max_length"]),
                size=size,
            )
        except (KeyError, TypeError, IndexError, AttributeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"policy '{folder}': config.json is not as LeRobot writes it for SmolVLA ({type(error).__name__}: {error})"
            ) from error
        text = "model.vlm_with_expert.vlm.model.text_model."
        expected = {
            f"{text}embed_tokens.weight": (size.vlm.vocab_size, size.vlm.width),
            f"{text}layers.{size.depth - 1}.mlp.gate_proj.weight": (size.vlm.mlp_dim, size.vlm.width),
            "model.state_proj.weight": (size.vlm.width, size.state_dims),
            "model.action_in_proj.weight": (size.expert_width, size.action_dims),
        }
        check_shapes(folder, expected, {one.key: one for one in stored_tensors(folder)}, "SmolVLA")
        return spec

    def make_base(self, folder: Path, fit: Fit, *, small: bool, place: Path) -> None:
        """Write the tiny model, or a random one of the published size for benchmarks."""
        from vlatune.policies.smolvla.tiny import make_smolvla

        make_smolvla(folder, fit, small=small, place=place)

    def make_transforms(
        self, spec: SmolVLASpec, binding: Binding, stats: Stats, noise: NoiseSpec
    ) -> tuple[Transform, ...]:
        """Return the equivalents of LeRobot's processors, in LeRobot's order."""
        cameras = tuple(target for _, target in binding.cameras)
        masks = mixture_masks(spec, binding)
        also = MIXTURE_KEYS if masks else ()
        return (
            Rename(dict(binding.cameras)),
            NewlinePrompt(),
            Tokenise(spec.tokenizer, spec.max_tokens, spec.vocab_size),
            *make_normalisers(spec, stats),
            PadActions(spec.max_action_dim),
            make_flow_noise(spec, noise),
            *masks,
            Select((*cameras, STATE, ACTION, ACTION_IS_PAD, TOKENS, TOKEN_MASK, NOISE, TIME, *IDS, SLOT, *also)),
        )

    def step_flops(self, spec: SmolVLASpec, binding: Binding, options: ModuleOptions) -> float:
        size = spec.size
        forward, both = 2, 6  # operations per weight and token; backward takes twice as many as forward
        patches = math.prod(spec.image_hw) // size.vlm.patch_size**2 * len(binding.cameras)
        tokens = patches // size.vlm.shuffle**2 + spec.max_tokens + STATE_TOKENS
        tower = both if options.train == "full" else forward
        language = forward if options.train in ("heads", "expert") else both
        return (
            tower * size.vision_weights * patches
            + language * size.language_weights * tokens
            + both * size.expert_weights * spec.horizon * options.flow_samples
        )

    def kept_prefix(self, spec: SmolVLASpec, binding: Binding, options: ModuleOptions) -> PrefixLayout | None:
        part, size = KEPT_PART.get(options.train), spec.size.vlm
        if part is None:
            return None
        dtype = "bfloat16" if options.dtype == "bfloat16" else "float32"
        patches = math.prod(spec.image_hw) // size.patch_size**2 * len(binding.cameras)
        if part == TOWER_PART:
            return PrefixLayout(part, patches, 0, size.vision_width, dtype)
        tokens = patches // size.shuffle**2
        if part != PREFIX_PART:
            return PrefixLayout(part, tokens, 0, size.width, dtype)
        width = (spec.size.last_used + 1) * 2 * size.kv_heads * size.head_dim
        return PrefixLayout(part, tokens, spec.max_tokens, width, dtype)

    def loading_code(self, folder: Path) -> str:
        size = read_size_file(folder, SmolVLMSize)
        return loading_code(size) if size else ""

    def load_module(
        self,
        spec: SmolVLASpec,
        binding: Binding,
        options: ModuleOptions,
        device: torch.device | str = "cpu",
        *,
        stats: Stats = NO_STATS,
    ) -> torch.nn.Module:
        from vlatune.policies.smolvla.model import load_smolvla

        return load_smolvla(spec, binding, options, device)


def _image_hw(config: Mapping[str, Any], size: SmolVLASize) -> tuple[int, int]:
    """Return (height, width) of the images; LeRobot stores width first."""
    if config["resize_imgs_with_padding"] is None:
        raise ValueError("resize_imgs_with_padding is null; write the size that the model is to see, as [512, 512]")
    width, height = (int(side) for side in config["resize_imgs_with_padding"])
    multiple = size.vlm.patch_size * size.vlm.shuffle
    if width != height or width % multiple:
        raise ValueError(
            f"resize_imgs_with_padding is [{width}, {height}], expected two equal sides, a multiple of {multiple} "
            f"({size.vlm.patch_size} pixels a patch, {size.vlm.shuffle} patches in a row to a token)"
        )
    return height, width
