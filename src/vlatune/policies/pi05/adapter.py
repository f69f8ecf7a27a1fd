"""PI0.5, the side without torch: what its folder says and may hold, and what happens to samples on the CPU. PI0's is derived from it.

Reads LeRobot's `config.json` and processor files as plain JSON: no class that they name is imported.
The torch side is `module.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vlatune.batch import ACTION, ACTION_IS_PAD, IDS, MIXTURE_KEYS, NOISE, SLOT, STATE, TIME, TOKEN_MASK, TOKENS
from vlatune.pipeline.transforms import Rename, Select, Transform
from vlatune.policies.base import (
    NO_OVERRIDES,
    NO_STATS,
    Binding,
    Draw,
    Fit,
    ModuleOptions,
    PolicyAdapter,
    Stats,
    check_action_steps,
)
from vlatune.policies.base_folder import read_config, read_steps
from vlatune.policies.binding import mixture_masks
from vlatune.policies.flow_matching import FlowSpec, PadActions, camera_names, draw_flow
from vlatune.policies.model_size import SIZE_FILE
from vlatune.policies.normalisation import make_normalisers, make_relative
from vlatune.policies.pi05.prompt import StatePrompt
from vlatune.policies.pi05.size import Pi05Size, read_size
from vlatune.policies.pi05.weights import PI05, Kind, find_tensors, model_names
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
    is_text,
    is_texts,
)
from vlatune.policies.tokenizer import Tokenise, find_pad_id, find_tokenizer, tokenizer_settings

if TYPE_CHECKING:
    import torch

CONFIG_FIELDS: Fields = {
    **dict.fromkeys(("paligemma_variant", "action_expert_variant", "dtype", "compile_mode"), is_text),
    **dict.fromkeys(("chunk_size", "n_action_steps", "max_state_dim", "max_action_dim"), is_size),
    **dict.fromkeys(("num_inference_steps", "tokenizer_max_length"), is_size),
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
"""Of PI05Config and of PI0Config, which have the same."""
SCHEMA = Schema(
    type="pi05",
    config=CONFIG_FIELDS,
    steps={"pi05_prepare_state_tokenizer_processor_step": {"max_state_dim": is_count, "task_key": is_text}},
)


class Pi05Adapter(PolicyAdapter[FlowSpec]):
    kind: ClassVar[Kind] = PI05
    schema = SCHEMA
    carried_files = (SIZE_FILE,)
    mixes_robots = True

    def read_spec(self, folder: Path, overrides: Mapping[str, Any] = NO_OVERRIDES) -> FlowSpec:
        """What the folder says, if its weights are all there: a base that cannot be loaded is refused at once."""
        stored, steps = read_config(folder, self.schema), read_steps(folder, self.schema)
        check_relative_steps(folder, steps, is_relative=bool(stored.get("use_relative_actions")))
        config = read_config(folder, self.schema, overrides)
        if overrides:
            check_action_steps(config, f"policy '{folder}'")
        step = tokenizer_settings(folder, steps[PREPROCESSOR])
        tokenizer_file = find_tokenizer(folder, step["tokenizer_name"])
        pad_id = find_pad_id(tokenizer_file)
        try:
            spec = _make_spec(self.kind, folder, config, step, tokenizer_file, pad_id)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"policy '{folder}': config.json is not as LeRobot writes it for {self.kind.title} "
                f"({type(error).__name__}: {error})"
            ) from error
        find_tensors(folder, config)
        return spec

    def make_base(self, folder: Path, fit: Fit, *, small: bool, place: Path) -> None:
        """Only the small twin: the real one grew out of a vision-language model and is never trained from nothing."""
        assert small
        from vlatune.policies.pi05.small import make_small

        make_small(self.kind, folder, fit, place=place)

    def make_transforms(self, spec: FlowSpec, binding: Binding, stats: Stats, draw: Draw) -> tuple[Transform, ...]:
        """Rename, make actions relative where asked for, normalise, prompt, tokenise, pad, draw: as LeRobot's processors."""
        cameras = tuple(target for _, target in binding.cameras)
        masks = mixture_masks(spec, binding)
        also = MIXTURE_KEYS if masks else ()
        return (
            Rename(dict(binding.cameras)),
            *make_relative(spec, binding),
            *make_normalisers(spec, stats),
            self.make_prompt(binding),
            Tokenise(spec.tokenizer_file, spec.max_tokens, spec.pad_id),
            PadActions(spec.max_action_dim),
            draw_flow(spec, draw),
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
        """The torch side's own: (spec, binding, options, device) -> module."""
        from vlatune.policies.pi05.module import load_pi05

        return load_pi05

    def plan_module(self, spec: FlowSpec, binding: Binding, options: ModuleOptions) -> torch.nn.Module:
        return self.loader()(spec, binding, options, "meta")

    def stored_names(self, key: str) -> tuple[str, ...]:
        return model_names(key, self.kind)


def check_relative_steps(folder: Path, steps: Mapping[str, list[dict[str, Any]]], *, is_relative: bool) -> None:
    """Refuse processors that do the one where config.json says the other: LeRobot would train and act on different things."""
    for file, name in ((PREPROCESSOR, RELATIVE_STEP), (POSTPROCESSOR, ABSOLUTE_STEP)):
        for step in steps.get(file, []):
            if step["registry_name"] == name and bool(step["config"].get("enabled")) and not is_relative:
                raise ValueError(
                    f"policy '{folder}': {file} has the step {name} enabled, config.json says use_relative_actions false; "
                    f"set both alike"
                )


def _make_spec(
    kind: Kind,
    folder: Path,
    stored: Mapping[str, Any],
    step: Mapping[str, Any],
    tokenizer_file: Path,
    pad_id: int,
) -> FlowSpec:
    config = {**kind.defaults, **stored}
    return FlowSpec(
        type=kind.type,
        folder=str(folder),
        cameras=camera_names(config),
        image_hw=(int(config["image_resolution"][0]), int(config["image_resolution"][1])),
        action_offsets=tuple(range(int(config["chunk_size"]))),
        max_state_dim=int(config["max_state_dim"]),
        max_action_dim=int(config["max_action_dim"]),
        normalisation=dict(config["normalization_mapping"]),
        relative_exclude=tuple(config["relative_exclude_joints"] or ()) if config["use_relative_actions"] else None,
        tokenizer_file=str(tokenizer_file),
        pad_id=pad_id,
        max_tokens=int(step.get("max_length", config["tokenizer_max_length"])),
        flow_time=(
            float(config["time_sampling_beta_alpha"]),
            float(config["time_sampling_beta_beta"]),
            float(config["time_sampling_scale"]),
            float(config["time_sampling_offset"]),
        ),
    )
