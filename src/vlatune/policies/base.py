"""What a policy offers: its spec, its adapter, its module. No torch at import: specs are read on the driver.

A policy is a package with a card (`registry.py`) and an adapter, a `PolicyAdapter`. Its base model is a folder in LeRobot's
layout: a local one, a hub repository's, or one that the adapter makes with random weights for the run's datasets.
`PolicySpec` is what the folder says, so what the policy asks of the data; `Binding` is how a dataset answers it (`binding.py`
makes it).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from vlatune.policies.processors import CONFIG

if TYPE_CHECKING:
    import torch

    from vlatune.dataset.storage.feature_files import FeatureRow
    from vlatune.dataset.video.resize import PictureTransform
    from vlatune.pipeline.transforms import Transform
    from vlatune.policies.processors import Schema
    from vlatune.policies.registry import Policy

Stats = Mapping[str, Mapping[str, np.ndarray]]
"""Feature, by the policy's name -> statistic -> values."""
NO_STATS: Stats = {}
NO_OVERRIDES: Mapping[str, Any] = {}
FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """What the base model's folder says, before any weight is read. A policy that needs to know more has a subclass."""

    type: str
    folder: str
    cameras: tuple[str, ...]
    """Features that are pictures, by the policy's names."""
    image_hw: tuple[int, int]
    """Size of the delivered pictures."""
    pad: Literal["centre", "left_top", "none"] = "centre"
    """Where the bars of a picture go whose sides have another ratio; none stretches it."""
    action_offsets: tuple[int, ...]
    """Frames from an observation to each action of its chunk."""
    observation_offsets: tuple[int, ...] | None = None
    """Frames from a row to the observations that belong to it, as an axis of their own; None: its own, without an axis."""
    drop_last_frames: int = 0
    """Frames at the end of each episode that no training sample begins with; they are still parts of others' windows."""
    max_state_dim: int
    max_action_dim: int
    normalisation: Mapping[str, str]
    """VISUAL, STATE and ACTION -> QUANTILES, MIN_MAX, MEAN_STD or IDENTITY."""
    relative_exclude: tuple[str, ...] | None = None
    """Actions are learnt as the way from the state, but for those whose name holds one of these; None: as they are."""
    has_prompt: bool = False
    """Whether the sentence takes part."""
    tokenizer_file: str | None = None
    fixed_inputs: bool = False
    """True for a policy that takes what it was made for and nothing else: all its cameras, pictures recorded at `image_hw`
    (unless it stretches them), state and action of just these dims. Others resize, pad, and mask cameras that are missing."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """A run's own values for fields of config.json, as JSON has them."""

    @property
    def horizon(self) -> int:
        """Actions in a chunk."""
        return len(self.action_offsets)


@dataclass(frozen=True)
class Fit:
    """What a base model with random weights is made for."""

    cameras: tuple[str, ...]
    """Feature names, such as observation.images.top."""
    state_dim: int
    action_dim: int
    horizon: int
    """Actions in a chunk of the small twin; at full size a policy has its own."""
    image_size: int
    """Pixels on a side that the small twin looks at, likewise."""
    tasks: tuple[str, ...]
    seed: int
    recorded_hw: tuple[tuple[int, int], ...] = ()
    """Of each camera, as recorded."""
    fps: float = 0.0
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Values for fields of its config.json, by LeRobot's names."""


@dataclass(frozen=True)
class Binding:
    """A policy's inputs matched with a dataset's features."""

    cameras: tuple[tuple[str, str], ...]
    """(dataset's name, policy's name) of every camera that is delivered."""
    missing_cameras: tuple[str, ...]
    """The policy's cameras that the dataset lacks: they are masked, as LeRobot does."""
    state_dim: int
    action_dim: int
    action_names: tuple[str, ...]
    also: tuple[tuple[str, str], ...] = ()
    """(a dataset's name, policy's name) of the state, and of cameras that further datasets have under other names."""
    parts: tuple[Binding, ...] = ()
    """Of several robots: each dataset's own. The cameras are then those that any has, by the policy's names, the dims the most."""


@dataclass(frozen=True)
class Draw:
    """What decides the noise of flow matching."""

    seed: int
    flow_samples: int = 1
    """Noise and time draws per observation."""
    by_frame: bool = False
    """Whether they belong to the frame, as validation wants it, or to the sample's place in the run's order."""


@dataclass(frozen=True)
class ModuleOptions:
    """How the torch module is loaded and run: what of `PolicyConfig` concerns it."""

    train: str
    """One of the ways on the policy's card."""
    dtype: str | None = None
    """float32 or bfloat16; what the base model says when left out. What trains is float32 in either case."""
    flow_samples: int = 1
    """Draws per observation that a batch brings."""
    gradient_checkpointing: bool = False
    compile: bool = False
    lora_rank: int = 16
    lora_alpha: float = 16.0
    keep_features: bool = False
    """Whether training batches bring kept features in place of pictures; the module takes either."""

    @classmethod
    def of(cls, config: object) -> ModuleOptions:
        """Of a `PolicyConfig`."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})


class LossParts(NamedTuple):
    """What a loss is the mean of, detached, on the device: for losses by task, by action dim and by episode."""

    errors_MTA: torch.Tensor
    """Draws of a sample stand in a row, M is B times their number; dims that are padding for all are cut off."""
    counted: torch.Tensor | None = None
    """Which of them count, of a shape that broadcasts to theirs; None: all."""


class PolicyModule(Protocol):
    """The torch side; a real `nn.Module`. It may have `loss_parts`, the `LossParts` of its newest forward pass; where it has
    none, losses are told apart by task and episode only where they come for each sample.
    """

    def __call__(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Mean loss of the batch, 0-d, on the device; of several robots that of each sample, (B,). No host sync.

        A policy that keeps features takes them in place of a camera's pictures, and tells the two apart by their axes.
        """
        ...

    def predict(self, batch: Mapping[str, torch.Tensor], noise_BTP: torch.Tensor) -> torch.Tensor:
        """Action chunks (B, T, A), still normalised; no host sync. A policy that does not sample leaves the noise alone."""
        ...

    def as_lerobot(self) -> Any:
        """What was trained, with a `save_pretrained(folder)` that writes config.json and weights; the end of training."""
        ...


class PolicyAdapter[S: PolicySpec](ABC):
    """All that the other rooms ask of a policy. Runs on the driver, in read tasks and in workers: torch only in `load_module`."""

    schema: ClassVar[Schema]
    """What the JSON files of its folder may hold."""
    carried_files: ClassVar[tuple[str, ...]] = ()
    """Files of the base's folder that an export takes along where they are there."""
    horizon_fields: ClassVar[tuple[str, ...]] = ("chunk_size", "horizon")
    """Fields of config.json one of which says how many actions a chunk has; for `vlatune doctor`."""
    mixes_robots: ClassVar[bool] = False
    """Whether it trains on robots of other dims and cameras together: its transforms end with `mixture_masks`, its module leaves
    out what the masks do not name, and returns a loss for each sample, (B,), where a batch has them."""

    @abstractmethod
    def read_spec(self, folder: Path, overrides: Mapping[str, Any] = NO_OVERRIDES) -> S:
        """What the folder says, if it can be loaded: everything that is refused here costs nobody a GPU.

        `overrides` are a run's own values for fields of config.json, for `read_config`; a policy whose card has none may
        do without the argument. Call `read_policy`.
        """

    @abstractmethod
    def make_base(self, folder: Path, fit: Fit, *, small: bool, place: Path) -> None:
        """Write a folder with random weights for some datasets, a pure function of `fit`.

        `small` asks for the twin of demo and tests, which learns on a CPU in minutes. `folder` is renamed to `place`
        afterwards, for files that name their own path.
        """

    @abstractmethod
    def make_transforms(self, spec: S, binding: Binding, stats: Stats, draw: Draw) -> tuple[Transform, ...]:
        """Rows as the reader delivers them -> what the module takes, in training and in evaluation."""

    def augment_pictures(self, spec: S, draw: Draw) -> tuple[PictureTransform, ...]:
        """Of training alone, on pictures as recorded, before they are resized."""
        return ()

    def augment_rows(self, spec: S, binding: Binding, draw: Draw) -> tuple[Transform, ...]:
        """Of training alone, on rows as the reader delivers them, after the resize and before `make_transforms`."""
        return ()

    def training_transforms(self, spec: S, binding: Binding, stats: Stats, draw: Draw) -> tuple[Transform, ...]:
        return (*self.augment_rows(spec, binding, draw), *self.make_transforms(spec, binding, stats, draw))

    def step_flops(self, spec: S, binding: Binding, options: ModuleOptions) -> float:
        """Floating-point operations of a training step per sample, roughly: cores are shared out by it.

        Unless a policy knows better, each weight is used once: two forward, four backward.
        """
        return 6.0 * sum(file.stat().st_size for file in Path(spec.folder).glob("model*.safetensors")) / FLOAT32_BYTES

    def kept_feature(self, spec: S, options: ModuleOptions) -> FeatureRow | None:
        """What could be kept of a picture, where the part that looks at it does not train: a pure function of that part's
        weights and of the picture. None where it trains, or where a policy does not offer it.
        """
        return None

    def load_encoder(self, spec: S, options: ModuleOptions, device: torch.device | str = "cpu") -> torch.nn.Module:
        """That part alone: uint8 pictures (B, 3, H, W) -> kept features, (B, *shape), in the dtype of their column."""
        raise NotImplementedError(f"{spec.type}: an adapter with `kept_feature` has this, too")

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
        """A `PolicyModule` with what `options.train` names trainable. Each weight goes to `device` by itself: the host
        holds one at a time. `stats` are those of pictures and all else; where nothing is computed there are none.
        """

    def rate_factors(self, spec: S, lr: float) -> Mapping[str, float]:
        """Beginning of parameters' names, as the module has them -> by what --optimizer.lr, given as `lr`, is multiplied for
        them; the first that fits counts. Each is a group of the optimizer, and the schedule holds for all.
        """
        return {}

    def plan_module(self, spec: S, binding: Binding, options: ModuleOptions) -> torch.nn.Module | None:
        """The module on torch's meta device: shapes and dtypes without memory, for the arithmetic of `vlatune doctor`.

        None where a policy does not offer it; then the weights are loaded for it, if they are small.
        """
        return None

    def stored_names(self, key: str) -> tuple[str, ...]:
        """What the module calls a tensor of the base's files, but for what stands before it; several where it is used twice."""
        return (key,)

    def base_files(self, spec: S) -> dict[str, Path]:
        """What of the base decides the result beside its weights, by the name that a checkpoint's fingerprints have for it."""
        files = {"config": Path(spec.folder) / CONFIG}
        return files | ({"tokenizer": Path(spec.tokenizer_file)} if spec.tokenizer_file else {})


def read_policy(adapter: PolicyAdapter[Any], folder: Path, card: Policy, overrides: Mapping[str, Any]) -> PolicySpec:
    """What a base's folder says with a run's own values in it."""
    used = {name: value for name, value in overrides.items() if card.overrides[name].with_base != "unused"}
    if not used:
        return adapter.read_spec(folder)
    spec = adapter.read_spec(folder, used)
    return replace(spec, overrides={**spec.overrides, **json.loads(json.dumps(used))})


def require_kept(adapter: PolicyAdapter[Any], spec: PolicySpec, card: Policy, options: ModuleOptions) -> FeatureRow:
    """What is kept of a picture, if it can be."""
    found = adapter.kept_feature(spec, options)
    if found is not None:
        return found
    able = [f"--policy.train={w}" for w in card.train_ways if adapter.kept_feature(spec, replace(options, train=w))]
    raise ValueError(
        f"--policy.keep_features=true: with --policy.train={options.train} what looks at the pictures is trained, and what it makes of one "
        f"changes with every step; leave the flag out{''.join(f', or give {flag}' for flag in able)}"
    )


def check_action_steps(config: Mapping[str, Any], where: str) -> None:
    """A robot can make no more actions of a chunk than it has; LeRobot refuses it as well."""
    made, chunk = config.get("n_action_steps"), config.get("chunk_size")
    if made is not None and chunk is not None and made > chunk:
        raise ValueError(
            f"{where}: n_action_steps is {made}, and a chunk has {chunk} actions (chunk_size); give "
            f"--policy.n_action_steps={chunk} or less, or a larger --policy.chunk_size"
        )


def trained_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What training changes, by name: what a checkpoint holds. Parameters that train, and buffers that a step changes
    by itself, which only a module with `changing_buffers()` has (BatchNorm's running statistics).
    """
    parameters: dict[str, torch.Tensor] = {name: one for name, one in module.named_parameters() if one.requires_grad}
    return parameters | getattr(module, "changing_buffers", dict)()
