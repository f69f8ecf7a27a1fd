"""What a policy must offer, and how it is bound to a dataset. No torch at import: specs are read on the driver.

A policy is an adapter object (see `registry.py`) with three parts:
`read_spec` (what the folder says, and whether it is whole), `make_transforms` (CPU side, the same list for training and
evaluation), and `load_module` (the torch module whose `forward(batch)` is the loss on the device).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vlatune.batch import ACTION, STATE
from vlatune.dataset.feature_map import RESERVED, as_flag, likely_name
from vlatune.dataset.feature_specs import numpy_type

if TYPE_CHECKING:
    import torch

    from vlatune.config import PolicyConfig
    from vlatune.dataset.meta import DatasetMeta, Feature
    from vlatune.pipeline.transforms import Transform

STATS_OF_MODE = {
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
    "MIN_MAX": ("min", "max"),
    "MEAN_STD": ("mean", "std"),
}


@dataclass(frozen=True)
class PolicySpec:
    """What the base model's folder says, before any weight is read."""

    type: str
    folder: str
    cameras: tuple[str, ...]
    image_hw: tuple[int, int]
    horizon: int
    max_state_dim: int
    max_action_dim: int
    normalisation: Mapping[str, str]
    """STATE and ACTION -> QUANTILES, MIN_MAX, MEAN_STD or IDENTITY."""
    tokenizer_file: str
    pad_id: int
    max_tokens: int
    flow_time: tuple[float, float, float, float] = (1.5, 1.0, 0.999, 0.001)
    """Of flow matching: time is Beta(first, second) * third + fourth."""


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
    """One of TRAIN_WAYS."""
    dtype: str | None = None
    """float32 or bfloat16; what the base model says when left out. What trains is float32 in either case."""
    flow_samples: int = 1
    """Draws per observation that a batch brings."""
    gradient_checkpointing: bool = False
    compile: bool = False
    lora_rank: int = 16
    lora_alpha: float = 16.0

    @classmethod
    def of(cls, config: PolicyConfig) -> ModuleOptions:
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})


class PolicyModule(Protocol):
    """The torch side; a real `nn.Module`."""

    def __call__(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Mean loss of the batch, 0-d, on the device; no host sync."""
        ...

    def predict(self, batch: Mapping[str, torch.Tensor], noise_BTP: torch.Tensor) -> torch.Tensor:
        """Action chunks (B, T, A), still normalised."""
        ...

    def as_lerobot(self) -> Any:
        """LeRobot's policy with what was trained, ready for its `save_pretrained`; the end of training."""
        ...


class PolicyAdapter(Protocol):
    def read_spec(self, folder: Path) -> PolicySpec: ...

    def make_transforms(
        self, spec: PolicySpec, binding: Binding, stats: Mapping[str, Mapping[str, np.ndarray]], draw: Draw
    ) -> tuple[Transform, ...]: ...

    def step_flops(self, spec: PolicySpec, binding: Binding, options: ModuleOptions) -> float:
        """Floating-point operations of a training step per sample, roughly: cores are shared out by it."""
        ...

    def load_module(
        self, spec: PolicySpec, binding: Binding, options: ModuleOptions, device: torch.device | str = "cpu"
    ) -> torch.nn.Module:
        """Each weight goes to `device` by itself: the host holds one at a time."""
        ...


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
    if not delivered:
        raise ValueError(
            f"none of the dataset's cameras ({', '.join(meta.cameras)}) is one that the policy knows "
            f"({', '.join(spec.cameras)}); map them with {as_flag({(meta.cameras or ('camera',))[0]: spec.cameras[0]})}"
        )
    names = {target for _, target in delivered}
    state, action = (_own_vector(meta, key, rename_map) for key in (STATE, ACTION))
    return Binding(
        cameras=delivered,
        missing_cameras=tuple(camera for camera in spec.cameras if camera not in names),
        state_dim=_check_width(meta, STATE, state, spec.max_state_dim),
        action_dim=_check_width(meta, ACTION, action, spec.max_action_dim),
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


def _check_width(meta: DatasetMeta, key: str, own: str, most: int) -> int:
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
    return feature.shape[0]


def _names(feature: Feature) -> tuple[str, ...]:
    if feature.names and len(feature.names) == feature.shape[0]:
        return feature.names
    return tuple(f"action_{position}" for position in range(feature.shape[0]))


def stats_needed(spec: PolicySpec) -> dict[str, Sequence[str]]:
    """Feature -> names of the statistics that the policy's normalisation uses."""
    modes = {STATE: spec.normalisation.get("STATE", "IDENTITY"), ACTION: spec.normalisation.get("ACTION", "IDENTITY")}
    unknown = [mode for mode in modes.values() if mode != "IDENTITY" and mode not in STATS_OF_MODE]
    if unknown:
        raise ValueError(
            f"policy '{spec.folder}': its normalisation mode '{unknown[0]}' is not known; known: {', '.join(STATS_OF_MODE)}"
        )
    return {key: STATS_OF_MODE[mode] for key, mode in modes.items() if mode != "IDENTITY"}
