"""Interfaces of a policy: spec, adapter and module. Imports no torch: the driver reads specs.

A policy is a package with metadata (`registry.PolicyInfo`) and a `PolicyAdapter`. Its base model is a
folder in LeRobot's layout, which may be created with random weights for the run's datasets.
`PolicySpec` holds what the folder requires of the data; `Binding` (made by `binding.py`) matches a
dataset to it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np

from vlatune.batch import SLOT, Columns
from vlatune.policies.processors import CONFIG
from vlatune.random_streams import Stream, make_generator

if TYPE_CHECKING:
    import torch

    from vlatune.data.frames.prefix_store import PrefixLayout
    from vlatune.data.transforms import Transform
    from vlatune.policies.processors import Schema
    from vlatune.registry import PolicyInfo

Stats = Mapping[str, Mapping[str, np.ndarray]]
"""Maps a feature (by the policy's name) to statistic name to values."""
NO_STATS: Stats = {}
NO_OVERRIDES: Mapping[str, Any] = {}
FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """Settings read from the base model's folder, without its weights."""

    type: str
    folder: str
    cameras: tuple[str, ...]
    """Image features, by the policy's names."""
    image_hw: tuple[int, int]
    """Size of the images that the policy receives."""
    pad: Literal["centre", "left_top", "none"] = "centre"
    """Where padding goes if the aspect ratio differs; "none" stretches the image."""
    action_offsets: tuple[int, ...]
    """Frame offsets from an observation to each action of its chunk."""
    observation_offsets: tuple[int, ...] | None = None
    """Frame offsets of a sample's observations on an extra axis; None: the current frame, no
    axis."""
    drop_last_frames: int = 0
    """Frames at the end of each episode that start no training sample, but are part of windows."""
    max_state_dim: int
    max_action_dim: int
    normalisation: Mapping[str, str]
    """Maps VISUAL, STATE and ACTION to QUANTILES, MIN_MAX, MEAN_STD or IDENTITY."""
    relative_exclude: tuple[str, ...] | None = None
    """Words in names of action dims that stay absolute; None: no dim is relative to the state."""
    has_prompt: bool = False
    """Whether the policy reads the task instruction."""
    tokenizer_file: str | None = None
    fixed_inputs: bool = False
    """Require all cameras, images recorded at `image_hw` (unless stretched) and these exact dims;
    other policies resize, pad, and mask missing cameras."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """The run's values for fields of config.json, as JSON types."""

    @property
    def horizon(self) -> int:
        """Number of actions in a chunk."""
        return len(self.action_offsets)


@dataclass(frozen=True)
class Fit:
    """Inputs for creating a base model with random weights."""

    cameras: tuple[str, ...]
    state_dim: int
    action_dim: int
    horizon: int
    """Chunk size of the tiny model; the full-size model uses the policy's default."""
    image_size: int
    """Image side in pixels of the tiny model; the full-size model uses the policy's default."""
    tasks: tuple[str, ...]
    seed: int
    recorded_hw: tuple[tuple[int, int], ...] = ()
    """Recorded height and width of each camera."""
    fps: float = 0.0
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Values for fields of config.json, by LeRobot's names."""


class SelectedDims(NamedTuple):
    key: str
    dims: tuple[int, ...]
    """Indices of the recorded dims that are used, in order."""
    recorded: int
    """Number of recorded dims."""


@dataclass(frozen=True)
class Binding:
    """A match between a policy's inputs and a dataset's features."""

    cameras: tuple[tuple[str, str], ...]
    """Pairs (name in the dataset, name in the policy) of the delivered cameras."""
    missing_cameras: tuple[str, ...]
    """Cameras of the policy that the dataset lacks; they are masked, as in LeRobot."""
    state_dim: int
    action_dim: int
    action_names: tuple[str, ...]
    state_names: tuple[str, ...] = ()
    selected: tuple[SelectedDims, ...] = ()
    """State and action, if only some recorded dims are used (--dataset.select_dims)."""
    also: tuple[tuple[str, str], ...] = ()
    """(name in a dataset, name in the policy) of a renamed state, and of further datasets'
    cameras."""
    parts: tuple[Binding, ...] = ()
    """Bindings of the datasets of several robots; `cameras` is their union, dims are the
    maximum."""
    is_relative: tuple[bool, ...] = ()
    """Whether each action dim is relative to the state; empty if none is, or with `parts`."""
    fps: float = 0.0
    """Frame rate of the recording; 0 if joined datasets differ."""


@dataclass(frozen=True)
class NoiseSpec:
    """Settings that determine the flow-matching noise."""

    seed: int
    flow_samples: int = 1
    """Noise and time samples per observation."""
    by_frame: bool = False
    """Seed by frame, as validation needs, rather than by the sample's slot in the run's order."""

    def generators(self, columns: Columns) -> Iterator[np.random.Generator]:
        """Yield the generator of every row."""
        stream, key = (Stream.EVAL_NOISE, "index") if self.by_frame else (Stream.NOISE, SLOT)
        for number in columns[key].tolist():
            yield make_generator(stream, self.seed, number)


@dataclass(frozen=True)
class ModuleOptions:
    """The part of `PolicyConfig` that determines how the torch module is loaded and run."""

    train: str
    """One of the fine-tuning modes listed in `PolicyInfo.train_modes`."""
    dtype: str | None = None
    """float32 or bfloat16, by default the base model's. Trainable weights are always float32."""
    flow_samples: int = 1
    """Noise samples per observation in a batch."""
    gradient_checkpointing: bool = False
    compile: bool = False
    lora_rank: int = 16
    lora_alpha: float = 16.0

    @classmethod
    def of(cls, config: object) -> ModuleOptions:
        """Build from a `PolicyConfig`; only a training worker compiles (`train/worker/device.py`)."""
        names = [field.name for field in fields(cls) if field.name != "compile"]
        return cls(**{name: getattr(config, name) for name in names})


class PolicyOutput(NamedTuple):
    """Result of a policy's forward pass, on the device."""

    loss: torch.Tensor
    """Mean loss, 0-d."""
    errors_MTA: torch.Tensor | None = None
    """Detached elements of the loss, for losses by task, action dim and episode. M is B times the
    noise samples, adjacent per sample; dims that only pad are dropped. None: not reported."""
    counted: torch.Tensor | None = None
    """Mask of the elements that count, broadcastable to `errors_MTA`; None counts all."""
    loss_B: torch.Tensor | None = None
    """Loss of each sample, whose mean is `loss`; required with several robots."""


class PolicyAdapter[S: PolicySpec](ABC):
    """The interface of a policy to the rest of vlatune.

    Runs on the driver, in read tasks and in workers. Only methods that load modules import torch.
    """

    schema: ClassVar[Schema]
    """Allowed content of the JSON files in the policy's folder."""
    carried_files: ClassVar[tuple[str, ...]] = ()
    """Files of the base model's folder that an export copies if they exist."""
    horizon_fields: ClassVar[tuple[str, ...]] = ("chunk_size", "horizon")
    """Fields of config.json that may hold the chunk size; for `vlatune doctor`."""
    mixes_robots: ClassVar[bool] = False
    """Whether it can train on robots with different dims and cameras together: its transforms end
    with `mixture_masks`, and its module applies the masks and returns `loss_B`."""

    @abstractmethod
    def read_spec(self, folder: Path, overrides: Mapping[str, Any] = NO_OVERRIDES) -> S:
        """Read and validate the folder. Callers use `read_policy`.

        `overrides` are values for fields of config.json; policies without any may omit it.
        """

    @abstractmethod
    def make_base(self, folder: Path, fit: Fit, *, small: bool, place: Path) -> None:
        """Write a folder with random weights that depend only on `fit`.

        `small` selects the tiny model of the demo and the tests, which trains on a CPU in minutes.
        `folder` is renamed to `place` afterwards, for files that contain their own path.
        """

    @abstractmethod
    def make_transforms(self, spec: S, binding: Binding, stats: Stats, noise: NoiseSpec) -> tuple[Transform, ...]:
        """Return the transforms from the reader's rows to the module's inputs."""

    def augment_rows(self, spec: S, binding: Binding, noise: NoiseSpec) -> tuple[Transform, ...]:
        """Return training-only transforms of rows, applied before `make_transforms`."""
        return ()

    def training_transforms(self, spec: S, binding: Binding, stats: Stats, noise: NoiseSpec) -> tuple[Transform, ...]:
        return (*self.augment_rows(spec, binding, noise), *self.make_transforms(spec, binding, stats, noise))

    def step_flops(self, spec: S, binding: Binding, options: ModuleOptions) -> float:
        """Estimate the floating-point operations of a training step per sample.

        The default assumes that each weight is used once: two operations forward, four backward.
        """
        return 6.0 * sum(file.stat().st_size for file in Path(spec.folder).glob("model*.safetensors")) / FLOAT32_BYTES

    def kept_prefix(self, spec: S, binding: Binding, options: ModuleOptions) -> PrefixLayout | None:
        """Return what a run may keep of each sample; None if everything trains."""
        return None

    @abstractmethod
    def load_module(
        self,
        spec: S,
        binding: Binding,
        options: ModuleOptions,
        device: torch.device | str = "cpu",
        *,
        stats: Stats = NO_STATS,
    ) -> torch.nn.Module:
        """Return the module (docs/adding_a_policy.md), whose trainable weights are selected by `options.train`.

        `forward(batch)` returns a `PolicyOutput`. Weights move to `device` one at a time. `stats` may be empty if nothing is computed.
        """

    def rate_factors(self, spec: S, lr: float) -> Mapping[str, float]:
        """Map prefixes of parameter names to factors on the learning rate `lr`.

        The first match applies. Each prefix is an optimizer group with the common schedule.
        """
        return {}

    def plan_module(self, spec: S, binding: Binding, options: ModuleOptions) -> torch.nn.Module | None:
        """Return the module on the meta device, for `vlatune doctor`; None if not supported."""
        return None

    def loading_code(self, folder: Path) -> str:
        """Return Python code that LeRobot needs to load a model of this size, or ""."""
        return ""

    def stored_names(self, key: str) -> tuple[str, ...]:
        """Return the module's names, without prefix, of a tensor in the base model's files."""
        return (key,)

    def base_files(self, spec: S) -> dict[str, Path]:
        """Return the files besides the weights that a checkpoint fingerprints, by name."""
        files = {"config": Path(spec.folder) / CONFIG}
        return files | ({"tokenizer": Path(spec.tokenizer_file)} if spec.tokenizer_file else {})


def read_policy(
    adapter: PolicyAdapter[Any], folder: Path, info: PolicyInfo, overrides: Mapping[str, Any]
) -> PolicySpec:
    """Read the spec of a base model's folder with the run's overrides applied."""
    used = {name: value for name, value in overrides.items() if info.option(name).metadata["with_base"] != "unused"}
    if not used:
        return adapter.read_spec(folder)
    spec = adapter.read_spec(folder, used)
    return replace(spec, overrides={**spec.overrides, **json.loads(json.dumps(used))})


def require_kept(
    adapter: PolicyAdapter[Any], spec: PolicySpec, binding: Binding, info: PolicyInfo, options: ModuleOptions
) -> PrefixLayout:
    """Return what a run keeps of each sample; raise if `options.train` changes it with every step."""
    modes = {
        mode: adapter.kept_prefix(spec, binding, replace(options, train=mode))
        for mode in dict.fromkeys((options.train, *info.train_modes))
    }
    if found := modes[options.train]:
        return found
    usable = "".join(f", or use --policy.train={mode}" for mode, layout in modes.items() if layout)
    raise ValueError(
        f"--policy.keep_prefix=true: --policy.train={options.train} trains all that images pass through, so the prefix changes with "
        f"every step; remove the flag{usable}"
    )


def check_action_steps(config: Mapping[str, Any], where: str) -> None:
    """Raise if n_action_steps exceeds chunk_size, as LeRobot does."""
    steps, chunk = config.get("n_action_steps"), config.get("chunk_size")
    if steps is not None and chunk is not None and steps > chunk:
        raise ValueError(
            f"{where}: n_action_steps is {steps}, but a chunk has {chunk} actions (chunk_size); use "
            f"--policy.n_action_steps={chunk} or less, or a larger --policy.chunk_size"
        )


def trained_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that training changes, by name; a checkpoint stores exactly these.

    Modules with `changing_buffers()` add buffers that a step updates (BatchNorm statistics).
    """
    parameters: dict[str, torch.Tensor] = {name: one for name, one in module.named_parameters() if one.requires_grad}
    return parameters | getattr(module, "changing_buffers", dict)()
