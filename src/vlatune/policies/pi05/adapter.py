"""PI0.5 and PI0 without torch: their folder to a spec, and their prompt.

Reads LeRobot's `config.json` and processor files as plain JSON: imports no class that they name.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlatune.data.transforms import Transform
from vlatune.policies.base import NO_OVERRIDES, Binding
from vlatune.policies.base_folder import read_config, read_steps
from vlatune.policies.flow_matching import FLOW_FIELDS, FLOW_TIME, FlowAdapter, FlowSpec
from vlatune.policies.pi05.size import NUM_KV_HEADS, Pi05Size, read_size
from vlatune.policies.pi05.spec import EMBEDDING, PALIGEMMA, StatePrompt, model_names
from vlatune.policies.processors import (
    ABSOLUTE_STEP,
    POSTPROCESSOR,
    PREPROCESSOR,
    RELATIVE_STEP,
    Fields,
    Schema,
    is_count,
    is_text,
    make_fields,
)
from vlatune.policies.weight_files import Shapes

VARIANTS = ("gemma_2b", "gemma_300m")
TIME_FIELDS = tuple(f"time_sampling_{name}" for name in ("beta_alpha", "beta_beta", "scale", "offset"))
CONFIG_FIELDS: Fields = {
    **FLOW_FIELDS,
    **make_fields(
        text="paligemma_variant action_expert_variant dtype",
        step_count="num_inference_steps",
        flag="use_relative_actions gradient_checkpointing",
        texts="relative_exclude_joints action_feature_names",
        number=" ".join(TIME_FIELDS),
        sides="image_resolution",
    ),
}
"""Fields of PI05Config and PI0Config."""
SCHEMA = Schema(
    type="pi05",
    config=CONFIG_FIELDS,
    steps={"pi05_prepare_state_tokenizer_processor_step": {"max_state_dim": is_count, "task_key": is_text}},
    newer={"memory_frames": 6, "memory_stride": 30, "memory_temporal_attention_every": 4},
)


def _defaults(normalisation: str) -> dict[str, Any]:
    return {
        "paligemma_variant": VARIANTS[0],
        "action_expert_variant": VARIANTS[1],
        "dtype": "float32",
        "image_resolution": (224, 224),
        **dict(zip(TIME_FIELDS, FLOW_TIME, strict=True)),
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": normalisation, "ACTION": normalisation},
    }


class Pi05Adapter(FlowAdapter[FlowSpec]):
    schema = SCHEMA
    defaults = _defaults("QUANTILES")
    size_class, modeling = Pi05Size, "lerobot.policies.pi05.modeling_pi05"
    load, make_tiny = "vlatune.policies.pi05.model:Pi05Module.load", "vlatune.policies.pi05.tiny:make_pi05"
    parts = ("vision_tower|multi_modal_projector", "language_model", "gemma_expert")

    def read_spec(self, folder: Path, overrides: Mapping[str, Any] = NO_OVERRIDES) -> FlowSpec:
        stored = read_config(folder, self.schema)
        check_relative_steps(
            folder, read_steps(folder, self.schema), is_relative=bool(stored.get("use_relative_actions"))
        )
        return super().read_spec(folder, overrides)

    def read_model(self, folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], Shapes]:
        variants, size = (config["paligemma_variant"], config["action_expert_variant"]), read_size(folder)
        if size is None and variants != VARIANTS:
            raise ValueError(
                f"policy '{folder}': config.json has {variants[0]} with {variants[1]}, expected gemma_2b with gemma_300m"
            )
        for name in TIME_FIELDS[:2]:
            if config[name] <= 0:
                raise ValueError(
                    f"policy '{folder}': config.json: {name} is {config[name]:g}, expected a number above 0; correct it"
                )
        size = size or Pi05Size()
        height, width = (int(side) for side in config["image_resolution"])
        num_patches = math.prod(side // size.patch_size for side in (height, width))
        fields = {
            "image_hw": (height, width),
            "relative_exclude": tuple(config["relative_exclude_joints"]) if config["use_relative_actions"] else None,
            "vocab_size": size.vocab_size,
            "flow_time": tuple(float(config[name]) for name in TIME_FIELDS),
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

    def make_prompt(self, binding: Binding) -> Transform:
        return StatePrompt(tuple(part.state_dim for part in binding.parts))

    def stored_names(self, key: str) -> tuple[str, ...]:
        return model_names(key, self.schema.type)


class Pi0Adapter(Pi05Adapter):
    """PI0: the prompt is the task and a newline; the state is passed to the model as numbers."""

    schema = Schema(type="pi0", config=CONFIG_FIELDS, steps={"pi0_new_line_processor": {}})
    defaults = _defaults("MEAN_STD")
    modeling = "lerobot.policies.pi0.modeling_pi0"
    load, make_tiny = "vlatune.policies.pi05.model:Pi0Module.load", "vlatune.policies.pi05.tiny:make_pi0"
    make_prompt = FlowAdapter.make_prompt


def check_relative_steps(folder: Path, steps: Mapping[str, list[dict[str, Any]]], *, is_relative: bool) -> None:
    """Raise if the processors use relative actions and config.json does not."""
    for file, name in ((PREPROCESSOR, RELATIVE_STEP), (POSTPROCESSOR, ABSOLUTE_STEP)):
        for step in steps.get(file, []):
            if step["registry_name"] == name and bool(step["config"].get("enabled")) and not is_relative:
                raise ValueError(
                    f"policy '{folder}': {file} has the step {name} enabled, config.json has use_relative_actions false; "
                    f"set both to the same value"
                )
