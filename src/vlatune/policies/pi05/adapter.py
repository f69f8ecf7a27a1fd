"""PI0.5 and PI0 without torch: their folder to a spec, and their prompt.

Reads LeRobot's `config.json` and processor files as plain JSON: imports no class that they name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vlatune.data.transforms import Transform
from vlatune.policies.base import NO_OVERRIDES, Binding, Fit, ModuleOptions
from vlatune.policies.base_folder import read_config, read_steps
from vlatune.policies.flow_matching import FlowAdapter, FlowSpec
from vlatune.policies.pi05.size import NUM_KV_HEADS, Pi05Size, loading_code, read_size
from vlatune.policies.pi05.spec import EMBEDDING, PALIGEMMA, PI0, PI05, Kind, StatePrompt, model_names
from vlatune.policies.processors import (
    ABSOLUTE_STEP,
    POSTPROCESSOR,
    PREPROCESSOR,
    RELATIVE_STEP,
    Fields,
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
    is_texts,
)
from vlatune.policies.weight_files import Shapes

if TYPE_CHECKING:
    import torch

CONFIG_FIELDS: Fields = {
    **dict.fromkeys(("paligemma_variant", "action_expert_variant", "dtype", "compile_mode"), is_text),
    **dict.fromkeys(("chunk_size", "n_action_steps", "max_state_dim", "max_action_dim"), is_size),
    "num_inference_steps": is_step_count,
    "tokenizer_max_length": is_size,
    "empty_cameras": is_count,
    **dict.fromkeys(("time_sampling_beta_alpha", "time_sampling_beta_beta", "time_sampling_scale"), is_number),
    **dict.fromkeys(("time_sampling_offset", "min_period", "max_period"), is_number),
    **dict.fromkeys(("optimizer_lr", "optimizer_eps", "optimizer_weight_decay"), is_number),
    **dict.fromkeys(("optimizer_grad_clip_norm", "scheduler_warmup_steps", "scheduler_decay_steps"), is_number),
    "scheduler_decay_lr": is_number,
    **dict.fromkeys(("use_relative_actions", "gradient_checkpointing", "compile_model"), is_flag),
    **dict.fromkeys(("freeze_vision_encoder", "train_expert_only"), is_flag),
    **dict.fromkeys(("relative_exclude_joints", "action_feature_names"), is_texts),
    "image_resolution": is_sides,
    "optimizer_betas": is_numbers,
    "rtc_config": is_plain_map,
}
"""Fields of PI05Config and PI0Config."""
SCHEMA = Schema(
    type="pi05",
    config=CONFIG_FIELDS,
    steps={"pi05_prepare_state_tokenizer_processor_step": {"max_state_dim": is_count, "task_key": is_text}},
    newer={"memory_frames": 6, "memory_stride": 30, "memory_temporal_attention_every": 4},
)


class Pi05Adapter(FlowAdapter[FlowSpec]):
    kind: ClassVar[Kind] = PI05
    schema = SCHEMA
    title, defaults = PI05.title, PI05.defaults
    parts = ("vision_tower|multi_modal_projector", "language_model", "gemma_expert")

    def read_spec(self, folder: Path, overrides: Mapping[str, Any] = NO_OVERRIDES) -> FlowSpec:
        stored = read_config(folder, self.schema)
        check_relative_steps(
            folder, read_steps(folder, self.schema), is_relative=bool(stored.get("use_relative_actions"))
        )
        return super().read_spec(folder, overrides)

    def read_model(self, folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], Shapes]:
        variants, size = (config["paligemma_variant"], config["action_expert_variant"]), read_size(folder)
        if size is None and variants != ("gemma_2b", "gemma_300m"):
            raise ValueError(
                f"policy '{folder}': config.json has {variants[0]} with {variants[1]}, expected gemma_2b with gemma_300m"
            )
        size = size or Pi05Size()
        height, width = (int(side) for side in config["image_resolution"])
        time = ("beta_alpha", "beta_beta", "scale", "offset")
        num_patches = math.prod(side // size.patch_size for side in (height, width))
        fields = {
            "image_hw": (height, width),
            "relative_exclude": tuple(config["relative_exclude_joints"]) if config["use_relative_actions"] else None,
            "vocab_size": size.vocab_size,
            "flow_time": tuple(float(config[f"time_sampling_{name}"]) for name in time),
            "dtype": str(config["dtype"]),
            "num_patches": num_patches,
            "image_tokens": num_patches,
            "prefix_width": size.depth * 2 * NUM_KV_HEADS * size.head_dim,
        }
        tower, language = (f"{PALIGEMMA}model.{part}." for part in ("vision_tower.vision_model", "language_model"))
        return fields, {
            EMBEDDING: (size.vocab_size, size.width),
            "model.action_in_proj.weight": (size.expert_width, int(config["max_action_dim"])),
            f"{tower}embeddings.position_embedding.weight": ((height // size.patch_size) ** 2, size.vision_width),
            f"{language}layers.{size.depth - 1}.mlp.gate_proj.weight": (size.mlp_dim, size.width),
        }

    def loading_code(self, folder: Path) -> str:
        size = read_size(folder)
        return loading_code(self.kind.type, size) if size else ""

    def make_base(self, folder: Path, fit: Fit, *, small: bool, place: Path) -> None:
        """Write the tiny model; the full-size one is never trained from scratch."""
        assert small
        from vlatune.policies.pi05.tiny import make_tiny

        make_tiny(self.kind, folder, fit, place=place)

    def make_prompt(self, binding: Binding) -> Transform:
        return StatePrompt(tuple(part.state_dim for part in binding.parts))

    def loader(self) -> Callable[..., torch.nn.Module]:
        from vlatune.policies.pi05.model import load_pi05

        return load_pi05

    def plan_module(self, spec: FlowSpec, binding: Binding, options: ModuleOptions) -> torch.nn.Module:
        return self.loader()(spec, binding, options, "meta")

    def stored_names(self, key: str) -> tuple[str, ...]:
        return model_names(key, self.kind)


class Pi0Adapter(Pi05Adapter):
    """PI0: the prompt is the task and a newline; the state is passed to the model as numbers."""

    kind = PI0
    schema = Schema(type="pi0", config=CONFIG_FIELDS, steps={"pi0_new_line_processor": {}})
    title, defaults = PI0.title, PI0.defaults
    make_prompt = FlowAdapter.make_prompt

    def loader(self) -> Callable[..., torch.nn.Module]:
        from vlatune.policies.pi05.model import Pi0Module, load_pi05

        return partial(load_pi05, module=Pi0Module)


def check_relative_steps(folder: Path, steps: Mapping[str, list[dict[str, Any]]], *, is_relative: bool) -> None:
    """Raise if the processors use relative actions and config.json does not."""
    for file, name in ((PREPROCESSOR, RELATIVE_STEP), (POSTPROCESSOR, ABSOLUTE_STEP)):
        for step in steps.get(file, []):
            if step["registry_name"] == name and bool(step["config"].get("enabled")) and not is_relative:
                raise ValueError(
                    f"policy '{folder}': {file} has the step {name} enabled, config.json has use_relative_actions false; "
                    f"set both to the same value"
                )
