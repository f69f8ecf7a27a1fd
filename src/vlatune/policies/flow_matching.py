"""Parts shared by flow-matching policies with a prompt: adapter, spec, noise and time samples.

Does not import torch, because read tasks use it. The torch side is `modeling.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from vlatune.batch import (
    ACTION,
    ACTION_IS_PAD,
    IDS,
    MIXTURE_KEYS,
    NOISE,
    SLOT,
    STATE,
    TIME,
    TOKEN_MASK,
    TOKENS,
    Columns,
)
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
    PolicySpec,
    Stats,
    check_action_steps,
)
from vlatune.policies.base_folder import read_config, read_steps, with_defaults
from vlatune.policies.binding import mixture_masks
from vlatune.policies.model_size import SIZE_FILE, ModelSize, loading_code, read_size_file
from vlatune.policies.normalisation import make_normalisers, make_relative
from vlatune.policies.processors import PREPROCESSOR, make_fields
from vlatune.policies.tokenizer import (
    NewlinePrompt,
    PromptTokenizer,
    Tokenise,
    find_tokenizer,
    load_tokenizer,
    tokenizer_settings,
)
from vlatune.policies.weight_files import Shapes, check_shapes, count_flops, stored_tensors
from vlatune.registry import get_policy_info

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FLOW_FIELDS = make_fields(
    size="chunk_size n_action_steps max_state_dim max_action_dim tokenizer_max_length",
    count="empty_cameras",
    number="min_period max_period optimizer_lr optimizer_eps optimizer_weight_decay optimizer_grad_clip_norm "
    "scheduler_warmup_steps scheduler_decay_steps scheduler_decay_lr",
    numbers="optimizer_betas",
    flag="freeze_vision_encoder train_expert_only compile_model",
    text="compile_mode",
    plain_map="rtc_config",
)
"""Fields of config.json that all of these policies have."""
FLOW_TIME = (1.5, 1.0, 0.999, 0.001)
USED_ONCE = r"embed_tokens|lm_head|position_embedding|layernorm\.dense"
"""Weights that no token multiplies."""


@dataclass(frozen=True, kw_only=True)
class FlowSpec(PolicySpec):
    """Spec of a flow-matching policy with a prompt."""

    has_prompt: bool = True
    tokenizer: PromptTokenizer
    vocab_size: int
    """Rows of the embedding table; token ids are below it."""
    max_tokens: int
    flow_time: tuple[float, float, float, float] = FLOW_TIME
    """Time is Beta(first, second) * third + fourth."""
    dtype: str = "float32"
    """Config of the base model."""
    num_patches: int
    """Patches of the vision tower per camera."""
    image_tokens: int
    """Tokens of the language model per camera."""
    prefix_width: int
    """Numbers per token in the keys and values of all layers that the expert attends to."""


@dataclass(frozen=True)
class PadActions:
    """Pad actions with zeros to the policy's number of dims."""

    dims: int

    def __call__(self, columns: Columns) -> Columns:
        missing = self.dims - columns[ACTION].shape[-1]
        return columns | {ACTION: np.pad(columns[ACTION].astype(np.float32), ((0, 0), (0, 0), (0, missing)))}


@dataclass(frozen=True)
class FlowNoise:
    """Sample noise and time of flow matching, distributed as in LeRobot.

    Seeded by (seed, slot) in training, so that a repeated frame gets new noise, and by (seed,
    frame) in validation. No RNG state has to be saved, samples do not depend on the number of
    workers, and the device does no sampling.
    """

    spec: NoiseSpec
    horizon: int
    dims: int
    flow_time: tuple[float, float, float, float] = FLOW_TIME

    def __call__(self, columns: Columns) -> Columns:
        generators, samples = [*self.spec.generators(columns)], self.spec.flow_samples
        noise = np.empty((len(generators), samples, self.horizon, self.dims), dtype=np.float32)
        time = np.empty((len(generators), samples), dtype=np.float32)
        alpha, beta, scale, offset = self.flow_time
        for row, rng in enumerate(generators):
            for sample in range(samples):  # in sequence: the first must not depend on how many follow
                rng.standard_normal(out=noise[row, sample], dtype=np.float32)
                time[row, sample] = rng.beta(alpha, beta) * scale + offset
        return columns | {NOISE: noise, TIME: time}


class FlowAdapter[S: FlowSpec](PolicyAdapter[S]):
    """The adapter of a policy with a vision-language prefix and an action expert."""

    defaults: ClassVar[Mapping[str, Any]]
    """LeRobot's defaults for fields missing from config.json, besides the policy's options."""
    size_class: ClassVar[type[ModelSize]]
    modeling: ClassVar[str]
    """LeRobot's module that builds the model."""
    spec_class: ClassVar[type[Any]] = FlowSpec
    load: ClassVar[str]
    """`module:function` that loads the torch module on a device."""
    make_tiny: ClassVar[str]
    """`module:function` that writes the tiny model, see `make_base`."""
    parts: ClassVar[tuple[str, str, str]]
    """Patterns of tensor names: vision tower, language model, action expert."""
    carried_files = (SIZE_FILE,)
    mixes_robots = True

    @abstractmethod
    def read_model(self, folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], Shapes]:
        """Return fields of the spec that depend on the model's size, and some shapes of its weights."""

    def make_prompt(self, binding: Binding) -> Transform:
        return NewlinePrompt()

    def make_base(self, folder: Path, fit: Fit, *, small: bool, place: Path) -> None:
        """Write the tiny model; the full-size one is never trained from scratch."""
        assert small
        resolve_name(self.make_tiny)(folder, fit, place=place)

    def loading_code(self, folder: Path) -> str:
        size = read_size_file(folder, self.size_class)
        return loading_code(size, self.modeling) if size else ""

    def config_defaults(self) -> dict[str, Any]:
        """Return LeRobot's defaults for all fields that are used."""
        common = {"max_state_dim": 32, "max_action_dim": 32, "empty_cameras": 0, "input_features": {}}
        return {**common, **get_policy_info(self.schema.type).option_defaults, **self.defaults}

    def read_spec(self, folder: Path, overrides: Mapping[str, Any] = NO_OVERRIDES) -> S:
        """Read and validate the folder; of the weights only some shapes, loading compares all."""
        steps = read_steps(folder, self.schema)
        config = with_defaults(read_config(folder, self.schema, overrides), self.config_defaults())
        if overrides:
            check_action_steps(config, f"policy '{folder}'")
        fields, shapes = self.read_model(folder, config)
        step = tokenizer_settings(folder, steps[PREPROCESSOR], overrides)
        tokenizer_file = find_tokenizer(folder, step["tokenizer_name"])
        spec = self.spec_class(
            type=self.schema.type,
            folder=str(folder),
            cameras=camera_names(folder, config),
            action_offsets=tuple(range(int(config["chunk_size"]))),
            max_state_dim=int(config["max_state_dim"]),
            max_action_dim=int(config["max_action_dim"]),
            normalisation=dict(config["normalization_mapping"]),
            tokenizer_file=str(tokenizer_file),
            tokenizer=load_tokenizer(tokenizer_file, fields["vocab_size"]),
            max_tokens=int(step.get("max_length") or config["tokenizer_max_length"]),
            **fields,
        )
        found = {name: one for one in stored_tensors(folder) for name in self.stored_names(one.key)}
        check_shapes(folder, shapes, found, get_policy_info(self.schema.type).title)
        return spec

    def make_transforms(self, spec: S, binding: Binding, stats: Stats, noise: NoiseSpec) -> tuple[Transform, ...]:
        """Return the equivalents of LeRobot's processors."""
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
            FlowNoise(noise, spec.horizon, spec.max_action_dim, spec.flow_time),
            *masks,
            Select((*cameras, STATE, ACTION, ACTION_IS_PAD, TOKENS, TOKEN_MASK, NOISE, TIME, *IDS, SLOT, *also)),
        )

    def step_flops(self, spec: S, binding: Binding, options: ModuleOptions) -> float:
        cameras, forward = len(binding.cameras), 1 / 3  # backward takes twice as many operations as forward
        tower, language, expert = self.parts
        uses = {
            USED_ONCE: 0.0,
            tower: spec.num_patches * cameras * (1 if options.train == "full" else forward),
            language: (spec.image_tokens * cameras + spec.max_tokens) * (forward if _is_frozen(options) else 1),
            expert: spec.horizon * options.flow_samples,
        }
        return count_flops(Path(spec.folder), uses)

    def kept_prefix(self, spec: S, binding: Binding, options: ModuleOptions) -> PrefixLayout | None:
        if not _is_frozen(options):
            return None
        tokens = spec.image_tokens * len(binding.cameras)
        return PrefixLayout("prefix", tokens, spec.max_tokens, spec.prefix_width, options.dtype or spec.dtype)

    def load_module(
        self,
        spec: S,
        binding: Binding,
        options: ModuleOptions,
        device: torch.device | str = "cpu",
        *,
        stats: Stats = NO_STATS,
    ) -> torch.nn.Module:
        return resolve_name(self.load)(spec, binding, options, device)

    def plan_module(self, spec: S, binding: Binding, options: ModuleOptions) -> torch.nn.Module | None:
        return resolve_name(self.load)(spec, binding, options, "meta")


def _is_frozen(options: ModuleOptions) -> bool:
    """True if nothing in the vision-language prefix trains."""
    return options.train in ("heads", "expert")


def camera_names(folder: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cameras of config.json, including the empty ones that LeRobot adds."""
    named = [key for key, feature in config["input_features"].items() if feature["type"] == "VISUAL"]
    if not named:
        raise ValueError(
            f"policy '{folder}': config.json: input_features names no camera; write the policy's cameras there"
        )
    empty = [f"observation.images.empty_camera_{number}" for number in range(int(config["empty_cameras"]))]
    return tuple(dict.fromkeys([*named, *empty]))


def mean_over_own_dims(losses_MTP: Tensor, mask_BP: Tensor) -> Tensor:
    """Return each sample's mean, (B,), over noise samples, time steps and its robot's dims."""
    by_sample_BKTP = losses_MTP.unflatten(0, (len(mask_BP), -1))
    own_BP = mask_BP.to(losses_MTP.dtype)
    return (by_sample_BKTP.mean(dim=(1, 2)) * own_BP).sum(dim=1) / own_BP.sum(dim=1)
