"""How a dataset answers what a policy asks for: cameras and vectors matched by name, dims checked, several datasets as one.

Every mismatch is refused on the driver, with the flag that would mend it. No torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vlatune.batch import ACTION, STATE
from vlatune.dataset.features import RESERVED, as_flag, likely_name, numpy_type
from vlatune.pipeline.transforms import MixtureMasks
from vlatune.policies.base import Binding, PolicySpec

if TYPE_CHECKING:
    from vlatune.dataset.meta.dataset_meta import DatasetMeta, Feature


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


def why_one_robot(type_name: str) -> str:
    """Of a policy whose adapter does not say `mixes_robots`."""
    return (
        f"--policy.type={type_name} cannot be trained on several robots at once: it is made for the dims and cameras of one, and does "
        f"not mask what another lacks"
    )


def mixture_masks(spec: PolicySpec, binding: Binding) -> tuple[MixtureMasks, ...]:
    """What adds the columns MIXTURE_KEYS; nothing where there is one robot."""
    if not binding.parts:
        return ()
    own = [{target for _, target in part.cameras} for part in binding.parts]
    cameras = tuple(tuple(target in one for _, target in binding.cameras) for one in own)
    return (MixtureMasks(tuple(part.action_dim for part in binding.parts), cameras, spec.max_action_dim),)


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


def _names(feature: Feature) -> tuple[str, ...]:
    if feature.names and len(feature.names) == feature.shape[0]:
        return feature.names
    return tuple(f"action_{position}" for position in range(feature.shape[0]))
