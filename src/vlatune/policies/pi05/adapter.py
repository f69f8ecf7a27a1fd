"""PI0.5 without torch: its folder to a spec, and transforms of samples. PI0 derives from it.

Reads LeRobot's `config.json` and processor files as plain JSON: imports no class that they name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

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
from vlatune.policies.flow_matching import FlowSpec, PadActions, camera_names, make_flow_noise
from vlatune.policies.model_size import SIZE_FILE
from vlatune.policies.normalisation import make_normalisers, make_relative
from vlatune.policies.pi05.size import NUM_KV_HEADS, Pi05Size, loading_code, read_size
from vlatune.policies.pi05.spec import EMBEDDING, PALIGEMMA, PI05, Kind, StatePrompt, model_names
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
from vlatune.policies.tokenizer import Tokenise, find_tokenizer, load_tokenizer, tokenizer_settings
from vlatune.policies.weight_files import check_shapes, stored_tensors

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


class Pi05Adapter(PolicyAdapter[FlowSpec]):
    kind: ClassVar[Kind] = PI05
    schema = SCHEMA
    carried_files = (SIZE_FILE,)
    mixes_robots = True

    def read_spec(self, folder: Path, overrides: Mapping[str, Any] = NO_OVERRIDES) -> FlowSpec:
        """Read and validate the folder; of the weights only some shapes, loading compares all."""
        stored, steps = read_config(folder, self.schema), read_steps(folder, self.schema)
        check_relative_steps(folder, steps, is_relative=bool(stored.get("use_relative_actions")))
        config = {**self.kind.defaults, **read_config(folder, self.schema, overrides)}
        if overrides:
            check_action_steps(config, f"policy '{folder}'")
        size = _find_size(folder, config)
        step = tokenizer_settings(folder, steps[PREPROCESSOR], overrides)
        tokenizer_file = find_tokenizer(folder, step["tokenizer_name"])
        tokenizer = load_tokenizer(tokenizer_file, size.vocab_size)
        try:
            action_dims, image_size = int(config["max_action_dim"]), int(config["image_resolution"][0])
            spec = FlowSpec(
                type=self.kind.type,
                folder=str(folder),
                cameras=camera_names(config),
                image_hw=(image_size, int(config["image_resolution"][1])),
                action_offsets=tuple(range(int(config["chunk_size"]))),
                max_state_dim=int(config["max_state_dim"]),
                max_action_dim=action_dims,
                normalisation=dict(config["normalization_mapping"]),
                relative_exclude=tuple(config["relative_exclude_joints"] or ())
                if config["use_relative_actions"]
                else None,
                tokenizer_file=str(tokenizer_file),
                tokenizer=tokenizer,
                vocab_size=size.vocab_size,
                max_tokens=int(step.get("max_length", config["tokenizer_max_length"])),
                flow_time=(
                    float(config["time_sampling_beta_alpha"]),
                    float(config["time_sampling_beta_beta"]),
                    float(config["time_sampling_scale"]),
                    float(config["time_sampling_offset"]),
                ),
            )
        except (KeyError, TypeError, IndexError, AttributeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"policy '{folder}': config.json is not as LeRobot writes it for {self.kind.title} "
                f"({type(error).__name__}: {error})"
            ) from error
        found = {name: one for one in stored_tensors(folder) for name in model_names(one.key, self.kind)}
        tower = f"{PALIGEMMA}model.vision_tower.vision_model."
        expected = {
            EMBEDDING: (size.vocab_size, size.width),
            "model.action_in_proj.weight": (size.expert_width, action_dims),
            f"{tower}embeddings.position_embedding.weight": ((image_size // size.patch_size) ** 2, size.vision_width),
            f"{PALIGEMMA}model.language_model.layers.{size.depth - 1}.mlp.gate_proj.weight": (size.mlp_dim, size.width),
        }
        check_shapes(folder, expected, found, self.kind.title)
        return spec

    def make_base(self, folder: Path, fit: Fit, *, small: bool, place: Path) -> None:
        """Write the tiny model; the full-size one is never trained from scratch."""
        assert small
        from vlatune.policies.pi05.tiny import make_tiny

        make_tiny(self.kind, folder, fit, place=place)

    def make_transforms(
        self, spec: FlowSpec, binding: Binding, stats: Stats, noise: NoiseSpec
    ) -> tuple[Transform, ...]:
        """Return the equivalents of LeRobot's processors, in LeRobot's order."""
        cameras = tuple(target for _, target in binding.cameras)
        masks = mixture_masks(spec, binding)
        also = MIXTURE_KEYS if masks else ()
        return (
            Rename(dict(binding.cameras)),
            *make_relative(spec, binding),
            *make_normalisers(spec, stats),
            self.make_prompt(binding),
            Tokenise(spec.tokenizer, spec.max_tokens, spec.vocab_size),
            PadActions(spec.max_action_dim),
            make_flow_noise(spec, noise),
            *masks,
            Select((*cameras, STATE, ACTION, ACTION_IS_PAD, TOKENS, TOKEN_MASK, NOISE, TIME, *IDS, SLOT, *also)),
        )

    def make_prompt(self, binding: Binding) -> Transform:
        return StatePrompt(tuple(part.state_dim for part in binding.parts))

    def step_flops(self, spec: FlowSpec, binding: Binding, options: ModuleOptions) -> float:
        size = read_size(Path(spec.folder)) or Pi05Size()
        patches = math.prod(spec.image_hw) // size.patch_size**2 * len(spec.cameras)
        forward, both = 2, 6  # operations per weight and token; backward takes twice as many as forward
        prefix = both if options.train in ("lora", "full") else forward
        prefix_tokens = patches + spec.max_tokens
        return (
            prefix * (size.vision_weights * patches + size.language_weights * prefix_tokens)
            + both * size.expert_weights * (spec.horizon + self.kind.has_state) * options.flow_samples
        )

    def kept_prefix(self, spec: FlowSpec, binding: Binding, options: ModuleOptions) -> PrefixLayout | None:
        if options.train in ("lora", "full"):
            return None
        size = read_size(Path(spec.folder)) or Pi05Size()
        patches = math.prod(side // size.patch_size for side in spec.image_hw) * len(binding.cameras)
        width = size.depth * 2 * NUM_KV_HEADS * size.head_dim
        dtype = options.dtype or read_config(Path(spec.folder), self.schema).get("dtype", "float32")
        return PrefixLayout("prefix", patches, spec.max_tokens, width, str(dtype))

    def load_module(
        self,
        spec: FlowSpec,
        binding: Binding,
        options: ModuleOptions,
        device: torch.device | str = "cpu",
        *,
        stats: Stats = NO_STATS,
    ) -> torch.nn.Module:
        return self.loader()(spec, binding, options, device)

    def loader(self) -> Callable[..., torch.nn.Module]:
        """Return the loader of the torch module: (spec, binding, options, device) -> module."""
        from vlatune.policies.pi05.model import load_pi05

        return load_pi05

    def plan_module(self, spec: FlowSpec, binding: Binding, options: ModuleOptions) -> torch.nn.Module:
        return self.loader()(spec, binding, options, "meta")

    def loading_code(self, folder: Path) -> str:
        size = read_size(folder)
        return loading_code(self.kind.type, size) if size else ""

    def stored_names(self, key: str) -> tuple[str, ...]:
        return model_names(key, self.kind)


def check_relative_steps(folder: Path, steps: Mapping[str, list[dict[str, Any]]], *, is_relative: bool) -> None:
    """Raise if the processors use relative actions and config.json does not."""
    for file, name in ((PREPROCESSOR, RELATIVE_STEP), (POSTPROCESSOR, ABSOLUTE_STEP)):
        for step in steps.get(file, []):
            if step["registry_name"] == name and bool(step["config"].get("enabled")) and not is_relative:
                raise ValueError(
                    f"policy '{folder}': {file} has the step {name} enabled, config.json has use_relative_actions false; "
                    f"set both to the same value"
                )


def _find_size(folder: Path, config: Mapping[str, Any]) -> Pi05Size:
    """Return the size of the folder's size file, or the published one."""
    variants = config["paligemma_variant"], config["action_expert_variant"]
    size = read_size(folder)
    if size is None and variants != ("gemma_2b", "gemma_300m"):
        raise ValueError(
            f"policy '{folder}': config.json has {variants[0]} with {variants[1]}, expected gemma_2b with gemma_300m"
        )
    return size or Pi05Size()
