"""Match a dataset to a policy: cameras and vectors by name, dims checked, several datasets joined.

A mismatch raises on the driver, with the flag that fixes it. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vlatune.batch import ACTION, STATE
from vlatune.config.flags import quote_flags
from vlatune.data.features import SELECT_DIMS, as_flag, dim_names, narrow_flags, no_vector, numpy_type
from vlatune.data.transforms import MixtureMasks
from vlatune.errors import did_you_mean
from vlatune.policies.base import Binding, PolicySpec, SelectedDims
from vlatune.policies.normalisation import relative_dims
from vlatune.registry import get_adapter, get_policy_info, policy_types

if TYPE_CHECKING:
    from vlatune.data.meta.dataset_meta import DatasetMeta, Feature


def bind_all(spec: PolicySpec, metas: Sequence[DatasetMeta]) -> list[Binding]:
    """Match the features of every dataset of a run."""
    return [bind(spec, meta, meta.names, metas) for meta in metas]


def bind(
    spec: PolicySpec, meta: DatasetMeta, rename_map: Mapping[str, str], of_run: Sequence[DatasetMeta] = ()
) -> Binding:
    """Match features by name after applying `rename_map`, and check their dims; `of_run` are all datasets of the run."""
    for name in rename_map:
        if name not in meta.features:
            hint = did_you_mean(name, meta.features) or f"; it has {', '.join(meta.cameras)}"
            raise ValueError(f"--rename_map: dataset '{meta.root.url}' has no feature '{name}'{hint}")
    renamed = {name: rename_map.get(name, name) for name in meta.cameras}
    _check_targets(spec, meta, rename_map, renamed)
    delivered = tuple((name, target) for name, target in renamed.items() if target in spec.cameras)
    if spec.cameras and not delivered:
        raise ValueError(
            f"none of the dataset's cameras ({', '.join(meta.cameras)}) is a camera of the policy "
            f"({', '.join(spec.cameras)}); map them with {as_flag({**rename_map, (meta.cameras or ('camera',))[0]: spec.cameras[0]})}"
        )
    names = {target for _, target in delivered}
    missing = tuple(camera for camera in spec.cameras if camera not in names)
    if missing and spec.fixed_inputs:
        free = next((name for name in meta.cameras if renamed[name] not in spec.cameras), "NAME")
        raise ValueError(
            f"dataset '{meta.root.url}': it has no camera '{missing[0]}', which the policy '{spec.folder}' requires; "
            f"map one with {as_flag({**rename_map, free: missing[0]})}"
        )
    own = {key: _own_vector(meta, key, rename_map) for key in (STATE, ACTION)}
    state, action = own[STATE], own[ACTION]
    most = {STATE: spec.max_state_dim, ACTION: spec.max_action_dim}
    state_dim, action_dim = (
        _check_width(meta, key, own[key], most, of_run or [meta], fixed=spec.fixed_inputs) for key in (STATE, ACTION)
    )
    if spec.relative_exclude is not None and state_dim < action_dim:
        raise ValueError(
            f"dataset '{meta.root.url}': '{state}' has {state_dim} dims, fewer than the {action_dim} of '{action}', and the policy "
            f"predicts actions relative to the state; use a base model with absolute actions (use_relative_actions false)"
        )
    action_names = _names(meta.features[action], "action")
    if spec.relative_exclude is not None:
        _check_relative(meta, own, relative_dims(action_names, spec.relative_exclude))
    return Binding(
        cameras=delivered,
        missing_cameras=missing,
        state_dim=state_dim,
        action_dim=action_dim,
        action_names=action_names,
        state_names=_names(meta.features[state], "state"),
        selected=tuple(
            SelectedDims(key, feature.dims, feature.recorded.shape[0])
            for key, feature in ((key, meta.features[name]) for key, name in own.items())
            if feature.dims is not None and feature.recorded is not None
        ),
        also=() if state == STATE else ((state, STATE),),
        is_relative=() if spec.relative_exclude is None else relative_dims(action_names, spec.relative_exclude),
        fps=meta.fps,
    )


def check_stored(spec: PolicySpec, binding: Binding, where: str) -> None:
    """Raise if a binding from a checkpoint does not fit the policy; `where` is for messages."""
    for part in binding.parts:
        check_stored(spec, part, where)
    remedy = "restore the checkpoint, or remove it"
    for key, dims, most in (
        (STATE, binding.state_dim, spec.max_state_dim),
        (ACTION, binding.action_dim, spec.max_action_dim),
    ):
        if dims > most or (spec.fixed_inputs and dims != most):
            raise ValueError(
                f"{where}: '{key}' has {dims} dims, expected {most} for the policy '{spec.folder}'; {remedy}"
            )
    for camera in (*(target for _, target in binding.cameras), *binding.missing_cameras):
        if camera not in spec.cameras:
            raise ValueError(f"{where}: '{camera[:80]}' is not a camera of the policy '{spec.folder}'; {remedy}")


def join_bindings(metas: Sequence[DatasetMeta], bindings: Sequence[Binding]) -> Binding:
    """Join the bindings of datasets of one robot; rows use the first dataset's camera names."""
    first = bindings[0]
    for meta, binding in zip(metas, bindings, strict=True):
        for what in ONE_ROBOT:
            if getattr(binding, what) != getattr(first, what):
                raise ValueError(
                    f"dataset '{meta.root.url}': its {what} is {getattr(binding, what)}, but {getattr(first, what)} in "
                    f"'{metas[0].root.url}'; datasets that are trained together must agree: map its cameras with --rename_map, "
                    f"or use --dataset.robots=several"
                )
    also = [pair for binding in bindings for pair in (*binding.also, *binding.cameras) if pair not in first.cameras]
    fps = first.fps if len({one.fps for one in bindings}) == 1 else 0.0
    return replace(first, also=tuple(dict.fromkeys(also)), fps=fps)


ONE_ROBOT = ("state_dim", "action_dim", "missing_cameras", "is_relative")
"""Fields of a `Binding` that must agree for datasets of one robot."""


def differ(bindings: Sequence[Binding]) -> bool:
    """True if the datasets cannot be trained on as one robot."""
    return len({tuple(getattr(one, what) for what in ONE_ROBOT) for one in bindings}) > 1


def mix_bindings(spec: PolicySpec, bindings: Sequence[Binding]) -> Binding:
    """Join the bindings of several robots: the union of cameras and the maximum of dims."""
    delivered = {target for binding in bindings for _, target in binding.cameras}
    widest = max(bindings, key=lambda one: one.action_dim)
    return Binding(
        cameras=tuple((camera, camera) for camera in spec.cameras if camera in delivered),
        missing_cameras=tuple(camera for camera in spec.cameras if camera not in delivered),
        state_dim=max(one.state_dim for one in bindings),
        action_dim=widest.action_dim,
        action_names=widest.action_names,
        state_names=max((one.state_names for one in bindings), key=len),
        parts=tuple(bindings),
    )


def why_one_robot(type_name: str) -> str:
    """Return the error message for a policy without `mixes_robots`."""
    return (
        f"--policy.type={type_name} does not support several robots in one run: it cannot mask missing dims and cameras"
    )


def mixture_masks(spec: PolicySpec, binding: Binding) -> tuple[MixtureMasks, ...]:
    """Return the transform that adds the columns MIXTURE_KEYS, or nothing with a single robot."""
    if not binding.parts:
        return ()
    own = [{target for _, target in part.cameras} for part in binding.parts]
    cameras = tuple(tuple(target in one for _, target in binding.cameras) for one in own)
    return (MixtureMasks(tuple(part.action_dim for part in binding.parts), cameras, spec.max_action_dim),)


def _check_targets(
    spec: PolicySpec, meta: DatasetMeta, rename_map: Mapping[str, str], renamed: Mapping[str, str]
) -> None:
    """Raise on invalid, duplicate or incompatible camera mappings, which would drop a camera."""
    for name, target in rename_map.items():
        if name in meta.cameras and target not in spec.cameras:
            hint = did_you_mean(target, spec.cameras) or f"; it has {', '.join(spec.cameras)}"
            raise ValueError(f"--rename_map: the policy has no camera '{target}' (for '{name}'){hint}")
        if name not in meta.cameras and target in spec.cameras:
            raise ValueError(
                f"--rename_map: '{target}' is a camera of the policy, but '{name}' of dataset '{meta.root.url}' is "
                f"{meta.features[name].dtype}; its cameras are {', '.join(meta.cameras)}"
            )
    for target in set(renamed.values()):
        owners = [name for name, other in renamed.items() if other == target]
        if len(owners) > 1:
            raise ValueError(f"--rename_map: {' and '.join(owners)} are both mapped to '{target}'; rename one of them")
    for name, target in renamed.items():
        if target in spec.cameras and meta.features[name].is_depth:
            raise ValueError(
                f"dataset '{meta.root.url}': camera '{name}' is a depth camera, but the policy's '{target}' expects colour images"
            )
        recorded = meta.features[name].height_width
        if target in spec.cameras and spec.fixed_inputs and spec.pad != "none" and recorded != spec.image_hw:
            raise ValueError(
                f"dataset '{meta.root.url}': camera '{name}' is recorded at {recorded[0]} x {recorded[1]}, but the policy '{spec.folder}' "
                f"expects {spec.image_hw[0]} x {spec.image_hw[1]} and does not resize; re-encode the videos, or train without --policy.path"
            )


def _own_vector(meta: DatasetMeta, key: str, rename_map: Mapping[str, str]) -> str:
    """Return the dataset's name of the state or action."""
    own = next((name for name in meta.features if rename_map.get(name, name) == key), None)
    if own is None:
        raise no_vector(meta, key, rename_map)
    return own


def _check_width(
    meta: DatasetMeta, key: str, own: str, limits: Mapping[str, int], of_run: Sequence[DatasetMeta], *, fixed: bool
) -> int:
    feature, most = meta.features[own], limits[key]
    shown = f"'{own}'" if own == key else f"'{own}' (mapped to '{key}')"
    if numpy_type(feature) in (None, "object") or not feature.shape:
        raise ValueError(
            f"dataset '{meta.root.url}': {shown} is {feature.dtype} of shape {feature.shape}, expected a vector of numbers; "
            f"name another feature with --rename_map"
        )
    width = feature.shape[0]
    if width == most or (width < most and not fixed):
        return width
    remedies = [f"train a wider policy ({others}, without --policy.path)"] if (others := _wider(width, of_run)) else []
    if fixed:
        remedies = ["train without --policy.path", "use another base model"]
    if width > most:
        remedies.append(f"use some of its dims, such as the first: {quote_flags(narrow_flags(of_run, limits))}")
    expected = f"expects {most}" if fixed else f"supports at most {most}"
    raise ValueError(
        f"dataset '{meta.root.url}': {shown} has {width} dims, but the policy {expected}; {', or '.join(remedies)}"
    )


def _wider(dims: int, of_run: Sequence[DatasetMeta]) -> str:
    """Return the flags of the policies that accept vectors of `dims` dims, for several datasets also of several robots."""
    infos = [get_policy_info(name) for name in policy_types()]
    fitting = [
        one for one in infos if one.max_dims >= dims and (len(of_run) == 1 or get_adapter(one.type).mixes_robots)
    ]
    return " or ".join(f"--policy.type={one.type}" for one in fitting)


def _check_relative(meta: DatasetMeta, own: Mapping[str, str], is_relative: Sequence[bool]) -> None:
    """Raise if selected action dims would be relative to other joints of the state."""
    action, state = meta.features[own[ACTION]], meta.features[own[STATE]]
    if (action.dims is None) == (state.dims is None):
        return
    for dim, other, relative in zip(_recorded_dims(action), _recorded_dims(state), is_relative, strict=False):
        if relative and dim[0] != other[0] and (dim[1] != other[1] or not dim[1]):
            words = [name or number for number, name in _recorded_dims(action)]
            raise ValueError(
                f"dataset '{meta.root.url}': dim {dim[0]} ('{dim[1]}') of '{own[ACTION]}' would be relative to dim {other[0]} "
                f"('{other[1]}') of '{own[STATE]}'; select the same dims of both, in the same order: "
                f"{as_flag({ACTION: words, STATE: words}, SELECT_DIMS)}"
            )


def _recorded_dims(feature: Feature) -> list[tuple[int, str]]:
    """Return (index in the recorded vector, name or "") of every used dim."""
    dims = feature.dims or range(feature.shape[0])
    return list(zip(dims, dim_names(feature) or [""] * len(dims), strict=True))


def _names(feature: Feature, prefix: str) -> tuple[str, ...]:
    """Return a unique name for every dim."""
    names = dim_names(feature)
    if names is None:
        return tuple(f"{prefix}_{dim}" for dim in feature.dims or range(feature.shape[0]))
    return tuple(name if names.count(name) == 1 else f"{name}_{place}" for place, name in enumerate(names))
