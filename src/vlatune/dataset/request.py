"""What a caller asks of one or several datasets -> what to read and how to call it. Pure but for `meta/`, read before.

Features have two names: the dataset's own, which the files know, and the one they are delivered under, after
`rename_map` and `feature_map`. A caller may use either in `cameras` and `delta_timestamps`. Every mistake that can be
seen in `meta/` is refused here, before a task starts.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from vlatune.batch import ACTION, STATE, TASK
from vlatune.dataset.features import RESERVED, camera_spec, check_map, delivered_names, numpy_type, vector_spec
from vlatune.dataset.meta.dataset_meta import DatasetMeta, Feature
from vlatune.dataset.reader import ReadSpec, allocate, offsets_from_timestamps
from vlatune.errors import did_you_mean

MAPS = "rename_map or feature_map"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """What to deliver; the same for all datasets that are read together."""

    resize: tuple[int, int] | None = (224, 224)
    """(height, width) of all pictures; the recorded size when None."""
    action_horizon: int | None = 50
    """Actions from the row's own on; a single one without a window when None."""
    cameras: tuple[str, ...] | None = None
    """All when None."""
    delta_timestamps: Mapping[str, Sequence[float]] | None = None
    tolerance_s: float = 1e-4


@dataclass(frozen=True)
class Delivery:
    """What to read from one dataset, and the columns to make of it."""

    spec: ReadSpec
    names: tuple[tuple[str, str], ...]
    """(the reader's column, its name in the delivered rows)."""

    def row_layout(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Delivered name -> (dtype, shape of one row)."""
        row = allocate(self.spec, 1)
        return {name: (str(row[own].dtype), row[own].shape[1:]) for own, name in self.names}

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a delivered row, with the longest sentence of the dataset."""
        row = allocate(self.spec, 1)
        return sum(row[own].nbytes for own, _ in self.names) + max(map(len, self.spec.tasks), default=0)


def check_request(request: Request) -> None:
    """Refuse what no dataset can make right."""
    resize = request.resize
    if resize is not None and (len(resize) != 2 or not all(isinstance(side, int) and side > 0 for side in resize)):
        raise ValueError(f"resize={resize}: expected (height, width) in pixels, or None for the recorded size")
    if request.action_horizon is not None and request.action_horizon < 1:
        raise ValueError(
            f"action_horizon={request.action_horizon}: must be 1 or more; None gives single actions without a window"
        )
    for key, deltas in (request.delta_timestamps or {}).items():
        if len(deltas) == 0:
            raise ValueError(f"delta_timestamps['{key}'] is empty; name at least one offset in seconds, such as 0.0")


def make_deliveries(
    metas: Sequence[DatasetMeta], request: Request, renames: Sequence[Mapping[str, str]]
) -> tuple[Delivery, ...]:
    """One per dataset, with the same columns in all. `renames` has a map of own to delivered names per dataset."""
    check_request(request)
    for rename in renames:
        check_map(metas, rename, MAPS)
    made = [
        _make_delivery(number, meta, request, delivered_names(meta, rename, MAPS))
        for number, (meta, rename) in enumerate(zip(metas, renames, strict=True))
    ]
    return _common(made)


def _make_delivery(number: int, meta: DatasetMeta, request: Request, names: Mapping[str, str]) -> Delivery:
    own_of = {delivered: own for own, delivered in names.items()}
    windows = _windows(meta, request, names, own_of)
    cameras = tuple(
        camera_spec(meta, name, request.resize, windows.get(name))
        for name in _wanted_cameras(meta, request.cameras, names, own_of)
    )
    # Actions and states are float32 vectors; anything else is as recorded.
    vectors = tuple(
        vector_spec(meta, name, is_float32=names[name] in (ACTION, STATE), offsets=windows.get(name))
        for name, feature in meta.features.items()
        if name not in RESERVED and numpy_type(feature) is not None
    )
    _warn_of_dropped(meta)
    spec = ReadSpec(meta.root, number, request.tolerance_s, cameras, vectors, meta.tasks)
    return Delivery(spec, tuple(_columns(meta, spec, names)))


def _warn_of_dropped(meta: DatasetMeta) -> None:
    dropped = [
        f"'{name}' ({feature.dtype})"
        for name, feature in meta.features.items()
        if name not in RESERVED and not feature.is_camera and numpy_type(feature) is None
    ]
    if dropped:
        logger.warning(
            "dataset '%s': features that are neither numbers nor a text are left out: %s",
            meta.root.url,
            ", ".join(dropped),
        )


def _columns(meta: DatasetMeta, spec: ReadSpec, names: Mapping[str, str]):
    for one in (*spec.cameras, *spec.vectors):
        yield one.name, names[one.name]
        if one.offsets is not None:
            yield f"{one.name}_is_pad", f"{names[one.name]}_is_pad"
    for name in ("index", "episode_index", "frame_index", "timestamp", "dataset_index", TASK):
        yield name, name
    if "task_index" in meta.features:
        yield "task_index", "task_index"


def _wanted_cameras(
    meta: DatasetMeta, wanted: Sequence[str] | None, names: Mapping[str, str], own_of: Mapping[str, str]
) -> list[str]:
    """Own names, in the dataset's order; depth and the like are refused, as they would come out as pictures."""
    known = {names[own]: own for own in meta.cameras}
    chosen = list(meta.cameras) if wanted is None else []
    for name in () if wanted is None else wanted:
        own = known.get(name) or (name if name in meta.cameras else None)
        if own is None:
            raise ValueError(
                f"dataset '{meta.root.url}': there is no camera '{name}'"
                f"{did_you_mean(name, known) or '; there are ' + (', '.join(known) or 'none')}"
            )
        chosen.append(own)
    for own in chosen:
        feature = meta.features[own]
        if feature.is_depth or _num_channels(feature) != 3:
            colour = [names[one] for one in meta.cameras if _is_colour(meta.features[one])]
            what = "depth" if feature.is_depth else f"a picture of {_num_channels(feature)} channels"
            raise ValueError(
                f"dataset '{meta.root.url}': camera '{own}' is {what}, and only RGB is read; leave it out: cameras={colour}"
            )
    return [own for own in meta.cameras if own in chosen]


def _is_colour(feature: Feature) -> bool:
    return not feature.is_depth and _num_channels(feature) == 3


def _num_channels(feature: Feature) -> int:
    height, width = feature.height_width
    return int(np.prod(feature.shape)) // (height * width)


def _windows(
    meta: DatasetMeta, request: Request, names: Mapping[str, str], own_of: Mapping[str, str]
) -> dict[str, tuple[int, ...]]:
    """Own name -> offsets in frames."""
    windows: dict[str, tuple[int, ...]] = {}
    if request.action_horizon is not None:
        windows[_own_action(meta, own_of)] = tuple(range(request.action_horizon))
    can = {names[own]: own for own, feature in meta.features.items() if _can_have_window(own, feature)}
    for key, deltas in (request.delta_timestamps or {}).items():
        own = can.get(key) or (key if key in can.values() else None)
        if own is None:
            raise ValueError(
                f"delta_timestamps['{key}']: dataset '{meta.root.url}' has no such feature"
                f"{did_you_mean(key, can) or '; there are ' + ', '.join(can)}"
            )
        windows[own] = offsets_from_timestamps(deltas, meta.fps, request.tolerance_s, key)
    return windows


def _can_have_window(name: str, feature: Feature) -> bool:
    return feature.is_camera or (name not in RESERVED and numpy_type(feature) not in (None, "object"))


def _own_action(meta: DatasetMeta, own_of: Mapping[str, str]) -> str:
    if ACTION in own_of:
        return own_of[ACTION]
    vectors = [name for name, feature in meta.features.items() if _can_have_window(name, feature)]
    likely = next((name for name in vectors if "action" in name.lower() and not meta.features[name].is_camera), None)
    remedy = (
        f"it has '{likely}': read it with feature_map={{'{likely}': 'action'}}"
        if likely
        else f"it has {', '.join(vectors)}; name it with feature_map={{'...': 'action'}}"
    )
    raise ValueError(
        f"dataset '{meta.root.url}': there is no feature 'action'; {remedy}, or ask for none with action_horizon=None"
    )


def _common(made: Sequence[Delivery]) -> tuple[Delivery, ...]:
    """Datasets that are read together give the same columns: cameras, actions and states must agree, others may go."""
    layouts = [delivery.row_layout() for delivery in made]
    kept = [name for name, layout in layouts[0].items() if all(other.get(name) == layout for other in layouts[1:])]
    for delivery, layout in zip(made, layouts, strict=True):
        cameras = {name for own, name in delivery.names if own in {camera.name for camera in delivery.spec.cameras}}
        for name in layout:
            if name in kept:
                continue
            if name in cameras or name in (ACTION, STATE):
                raise ValueError(_disagreement(name, made, layouts))
            logger.warning("feature '%s' is left out: not all datasets have it in the same form", name)
    return tuple(_only(delivery, kept) for delivery in made)


def _disagreement(name: str, made: Sequence[Delivery], layouts: Sequence[Mapping[str, tuple]]) -> str:
    here = next(number for number, layout in enumerate(layouts) if name in layout)
    there = next(number for number, layout in enumerate(layouts) if layout.get(name) != layouts[here][name])
    said = f"has {layouts[there][name][0]} of {layouts[there][name][1]}" if name in layouts[there] else "has none"
    return (
        f"feature '{name}': dataset '{made[here].spec.root.url}' has {layouts[here][name][0]} of {layouts[here][name][1]}, "
        f"dataset '{made[there].spec.root.url}' {said}; datasets that are read together must agree: "
        f"use cameras, resize, or a rename_map per dataset"
    )


def _only(delivery: Delivery, kept: Sequence[str]) -> Delivery:
    """The delivery with these columns, in this order."""
    own_of = {name: own for own, name in delivery.names}
    names = tuple((own_of[name], name) for name in kept)
    read = {own for own, _ in names}
    spec = replace(delivery.spec, vectors=tuple(one for one in delivery.spec.vectors if one.name in read))
    return Delivery(spec, names)
