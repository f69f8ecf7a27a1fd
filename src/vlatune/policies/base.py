"""What a policy offers, and how it is bound to a dataset. No torch at import: specs are read on the driver.

A policy is a package with a card (`registry.py`) and an adapter, a `PolicyAdapter`. Its base model is a folder in LeRobot's
layout: a local one, a hub repository's, or one that the adapter makes with random weights for the run's datasets.
`PolicySpec` is what the folder says, so what the policy asks of the data; `Binding` is how a dataset answers it.
"""

from __future__ import annotations

import difflib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from vlatune.batch import ACTION, STATE
from vlatune.dataset.features import RESERVED, as_flag, likely_name, numpy_type
from vlatune.pipeline.transforms import MixtureMasks, Normalise, RelativeActions
from vlatune.policies.processors import CONFIG

if TYPE_CHECKING:
    import torch

    from vlatune.dataset.meta.dataset_meta import DatasetMeta, Feature
    from vlatune.dataset.video.resize import PictureTransform
    from vlatune.pipeline.transforms import Transform
    from vlatune.policies.processors import Schema
    from vlatune.policies.registry import Policy

STATS_OF_MODE = {
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
    "MIN_MAX": ("min", "max"),
    "MEAN_STD": ("mean", "std"),
}
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
        """Mean loss of the batch, 0-d, on the device; of several robots that of each sample, (B,). No host sync."""
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


def check_action_steps(config: Mapping[str, Any], where: str) -> None:
    """A robot can make no more actions of a chunk than it has; LeRobot refuses it as well."""
    made, chunk = config.get("n_action_steps"), config.get("chunk_size")
    if made is not None and chunk is not None and made > chunk:
        raise ValueError(
            f"{where}: n_action_steps is {made}, and a chunk has {chunk} actions (chunk_size); give "
            f"--policy.n_action_steps={chunk} or less, or a larger --policy.chunk_size"
        )


def make_relative(spec: PolicySpec, binding: Binding) -> list[RelativeActions]:
    """What comes before the normalisers: a step where the policy learns relative actions, else none."""
    if spec.relative_exclude is None:
        return []
    return [RelativeActions(relative_dims(binding.action_names, spec.relative_exclude))]


def relative_dims(action_names: Sequence[str], exclude: Sequence[str]) -> tuple[bool, ...]:
    """Of each action dim, whether it becomes relative: as LeRobot, a name that holds an excluded word stays absolute.

    >>> relative_dims(("shoulder.pos", "Gripper.pos"), ("gripper",))
    (True, False)
    """
    words = [word.lower() for word in exclude if word]
    return tuple(not any(word in name.lower() for word in words) for name in action_names)


def make_normalisers(spec: PolicySpec, stats: Stats) -> list[Normalise]:
    """State and action normalisers, in this order, as the policy's config asks; pictures are normalised on the device."""
    made = []
    for key, kind in ((STATE, "STATE"), (ACTION, "ACTION")):
        mode = spec.normalisation.get(kind, "IDENTITY")
        if mode != "IDENTITY":
            low, high = (stats[key][name] for name in STATS_OF_MODE[mode])
            made.append(Normalise(key, mode, low, high))
    return made


def bind(spec: PolicySpec, meta: DatasetMeta, rename_map: Mapping[str, str]) -> Binding:
    """Match features by name after `rename_map`, check dims; every mismatch is named with its remedy."""
    for name in rename_map:
        if name not in meta.features:
            close = difflib.get_close_matches(name, meta.features, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else f"; it has {', '.join(meta.cameras)}"
            raise ValueError(f"--rename_map: dataset '{meta.root.url}' has no feature '{name}'{hint}")
    renamed = {name: rename_map.get(name, name) for name in meta.cameras}
    _check_targets(spec, meta, rename_map, renamed)
    delivered = tuple((name, target) for name, target in renamed.items() if target in spec.cameras)
    if spec.cameras and not delivered:
        raise ValueError(
            f"none of the dataset's cameras ({', '.join(meta.cameras)}) is one that the policy knows "
            f"({', '.join(spec.cameras)}); map them with {as_flag({(meta.cameras or ('camera',))[0]: spec.cameras[0]})}"
        )
    names = {target for _, target in delivered}
    missing = tuple(camera for camera in spec.cameras if camera not in names)
    if missing and spec.fixed_inputs:
        free = next((name for name in meta.cameras if renamed[name] not in spec.cameras), "NAME")
        raise ValueError(
            f"dataset '{meta.root.url}': it has no camera '{missing[0]}', without which the policy '{spec.folder}' cannot be used; "
            f"map one with {as_flag({free: missing[0]})}"
        )
    state, action = (_own_vector(meta, key, rename_map) for key in (STATE, ACTION))
    state_dim = _check_width(meta, STATE, state, spec.max_state_dim, fixed=spec.fixed_inputs)
    action_dim = _check_width(meta, ACTION, action, spec.max_action_dim, fixed=spec.fixed_inputs)
    if spec.relative_exclude is not None and state_dim < action_dim:
        raise ValueError(
            f"dataset '{meta.root.url}': '{state}' has {state_dim} dims, '{action}' {action_dim}, and the policy learns actions "
            f"relative to the state, dim by dim; use a base with absolute actions (use_relative_actions false)"
        )
    return Binding(
        cameras=delivered,
        missing_cameras=missing,
        state_dim=state_dim,
        action_dim=action_dim,
        action_names=_names(meta.features[action]),
        also=() if state == STATE else ((state, STATE),),
    )


def join_bindings(metas: Sequence[DatasetMeta], bindings: Sequence[Binding]) -> Binding:
    """One for all datasets: rows have the names of the first one's cameras. Datasets must deliver the same columns."""
    first = bindings[0]
    for meta, binding in zip(metas, bindings, strict=True):
        for what in ("state_dim", "action_dim", "missing_cameras"):
            if getattr(binding, what) != getattr(first, what):
                raise ValueError(_disagreement(what, metas[0], first, meta, binding))
    also = [pair for binding in bindings for pair in (*binding.also, *binding.cameras) if pair not in first.cameras]
    return replace(first, also=tuple(dict.fromkeys(also)))


def differ(bindings: Sequence[Binding]) -> bool:
    """Whether datasets deliver other columns, so that they cannot be trained on as those of one robot."""
    return len({(one.state_dim, one.action_dim, one.missing_cameras) for one in bindings}) > 1


def mix_bindings(spec: PolicySpec, bindings: Sequence[Binding]) -> Binding:
    """One for datasets of several robots: every camera that one of them has, and the most dims. Columns have the policy's names."""
    delivered = {target for binding in bindings for _, target in binding.cameras}
    widest = max(bindings, key=lambda one: one.action_dim)
    return Binding(
        cameras=tuple((camera, camera) for camera in spec.cameras if camera in delivered),
        missing_cameras=tuple(camera for camera in spec.cameras if camera not in delivered),
        state_dim=max(one.state_dim for one in bindings),
        action_dim=widest.action_dim,
        action_names=widest.action_names,
        parts=tuple(bindings),
    )


def mixture_masks(spec: PolicySpec, binding: Binding) -> tuple[MixtureMasks, ...]:
    """What adds the columns MIXTURE_KEYS; nothing where there is one robot."""
    if not binding.parts:
        return ()
    own = [{target for _, target in part.cameras} for part in binding.parts]
    cameras = tuple(tuple(target in one for _, target in binding.cameras) for one in own)
    return (MixtureMasks(tuple(part.action_dim for part in binding.parts), cameras, spec.max_action_dim),)


NEUTRAL = {name: value for low, high in STATS_OF_MODE.values() for name, value in ((low, -1.0), (high, 1.0))}
NEUTRAL["mean"] = 0.0
"""Statistics of dims that a robot lacks: they normalise 0 to 0."""


def stack_stats(each: Sequence[Stats], binding: Binding) -> Stats:
    """Each dataset's statistics as one table, (datasets, dims), padded."""
    dims = {STATE: binding.state_dim, ACTION: binding.action_dim}
    stacked: dict[str, dict[str, np.ndarray]] = {}
    for key, of in each[0].items():
        stacked[key] = {}
        for name in of:
            table = np.full((len(each), dims[key]), NEUTRAL[name])
            for number, one in enumerate(each):
                table[number, : one[key][name].size] = one[key][name]
            stacked[key][name] = table
    return stacked


def stats_of(stats: Stats, binding: Binding, number: int) -> Stats:
    """One dataset's out of the tables."""
    part = binding.parts[number]
    dims = {STATE: part.state_dim, ACTION: part.action_dim}
    return {
        key: {name: table[number, : dims[key]] if key in dims else table for name, table in of.items()}
        for key, of in stats.items()
    }


def _disagreement(what: str, meta: DatasetMeta, first: Binding, other_meta: DatasetMeta, other: Binding) -> str:
    text = (
        f"dataset '{other_meta.root.url}': its {what} is {getattr(other, what)}, that of '{meta.root.url}' is "
        f"{getattr(first, what)}; datasets that are trained together must agree"
    )
    if what != "missing_cameras":
        return text
    lacking, having = (other_meta, other), (meta, first)
    if len(first.missing_cameras) > len(other.missing_cameras):
        lacking, having = having, lacking
    wanted = next(target for _, target in having[1].cameras if target in lacking[1].missing_cameras)
    used = [name for name, _ in lacking[1].cameras]
    free = next((name for name in lacking[0].cameras if name not in used), "NAME")
    return f"{text}: say which of its cameras is '{wanted}' with {as_flag({free: wanted})}"


def _check_targets(
    spec: PolicySpec, meta: DatasetMeta, rename_map: Mapping[str, str], renamed: Mapping[str, str]
) -> None:
    """A camera must not vanish through a misspelt name, or behind another that got the same one."""
    for name, target in rename_map.items():
        if name in meta.cameras and target not in spec.cameras:
            close = difflib.get_close_matches(target, spec.cameras, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else f"; it knows {', '.join(spec.cameras)}"
            raise ValueError(f"--rename_map: the policy has no camera '{target}' (for '{name}'){hint}")
        if name not in meta.cameras and target in spec.cameras:
            raise ValueError(
                f"--rename_map: '{target}' is a camera of the policy, '{name}' of dataset '{meta.root.url}' holds "
                f"{meta.features[name].dtype}; its cameras are {', '.join(meta.cameras)}"
            )
    for target in set(renamed.values()):
        owners = [name for name, other in renamed.items() if other == target]
        if len(owners) > 1:
            raise ValueError(
                f"--rename_map: the cameras {' and '.join(owners)} would both be '{target}'; rename one of them"
            )
    for name, target in renamed.items():
        if target in spec.cameras and meta.features[name].is_depth:
            raise ValueError(
                f"dataset '{meta.root.url}': camera '{name}' holds depth, the policy's '{target}' takes colours"
            )
        recorded = meta.features[name].height_width
        if target in spec.cameras and spec.fixed_inputs and spec.pad != "none" and recorded != spec.image_hw:
            raise ValueError(
                f"dataset '{meta.root.url}': camera '{name}' is recorded at {_size(recorded)}, the policy '{spec.folder}' takes "
                f"pictures of {_size(spec.image_hw)} as they are and does not resize; re-encode the videos, or train without "
                f"--policy.path, for the recorded size"
            )


def _size(height_width: tuple[int, int]) -> str:
    return f"{height_width[0]} x {height_width[1]}"


def _own_vector(meta: DatasetMeta, key: str, rename_map: Mapping[str, str]) -> str:
    """The dataset's own name of its state or action."""
    own = next((name for name in meta.features if rename_map.get(name, name) == key), None)
    if own is not None:
        return own
    vectors = [name for name in meta.features if name not in meta.cameras and name not in RESERVED]
    likely = likely_name(key, vectors) or next(iter(difflib.get_close_matches(key, vectors, n=1, cutoff=0.4)), None)
    hint = f"; '{likely}' may be it" if likely else ""
    remedy = f"; name it with {as_flag({likely or 'NAME': key})}"
    raise ValueError(
        f"dataset '{meta.root.url}': there is no feature '{key}'{hint}; it has {', '.join(meta.features)}{remedy}"
    )


def _check_width(meta: DatasetMeta, key: str, own: str, most: int, *, fixed: bool) -> int:
    feature = meta.features[own]
    said = f"'{own}'" if own == key else f"'{own}', which is to be '{key}',"
    if numpy_type(feature) in (None, "object") or not feature.shape:
        raise ValueError(
            f"dataset '{meta.root.url}': {said} is {feature.dtype} of shape {feature.shape}, expected a vector of numbers; "
            f"name another feature with --rename_map"
        )
    if feature.shape[0] > most:
        raise ValueError(
            f"dataset '{meta.root.url}': {said} has {feature.shape[0]} dims, the policy takes {most} at most"
        )
    if fixed and feature.shape[0] != most:
        raise ValueError(
            f"dataset '{meta.root.url}': {said} has {feature.shape[0]} dims, the policy was made for {most}; train without "
            f"--policy.path, or take a base of as many"
        )
    return feature.shape[0]


def trained_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What training changes, by name: what a checkpoint holds. Parameters that train, and buffers that a step changes
    by itself, which only a module with `changing_buffers()` has (BatchNorm's running statistics).
    """
    parameters: dict[str, torch.Tensor] = {name: one for name, one in module.named_parameters() if one.requires_grad}
    return parameters | getattr(module, "changing_buffers", dict)()


def _names(feature: Feature) -> tuple[str, ...]:
    if feature.names and len(feature.names) == feature.shape[0]:
        return feature.names
    return tuple(f"action_{position}" for position in range(feature.shape[0]))


def stats_needed(spec: PolicySpec, cameras: Sequence[str] = ()) -> dict[str, Sequence[str]]:
    """Feature, by the policy's name -> names of the statistics that the policy's normalisation uses."""
    kinds = {STATE: "STATE", ACTION: "ACTION"} | dict.fromkeys(cameras, "VISUAL")
    modes = {key: spec.normalisation.get(kind, "IDENTITY") for key, kind in kinds.items()}
    unknown = [mode for mode in modes.values() if mode != "IDENTITY" and mode not in STATS_OF_MODE]
    if unknown:
        raise ValueError(
            f"policy '{spec.folder}': its normalisation mode '{unknown[0]}' is not known; known: {', '.join(STATS_OF_MODE)}"
        )
    return {key: STATS_OF_MODE[mode] for key, mode in modes.items() if mode != "IDENTITY"}
