"""Turn a request for one or several datasets into read specs with common columns. Pure.

Features have two names: the dataset's own, used in its files, and the delivered name, after
`rename_map`. Callers may use either in `cameras` and `delta_timestamps`. Every mistake that shows
in `meta/` is rejected here, before a task starts.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from vlatune.batch import ACTION, STATE, TASK
from vlatune.data.features import (
    RESERVED,
    Dims,
    Names,
    camera_spec,
    likely_name,
    numpy_type,
    vector_spec,
)
from vlatune.data.health.timestamps import Timestamps
from vlatune.data.meta.dataset_meta import DatasetMeta, Feature
from vlatune.data.order.partition import check_partitioning
from vlatune.data.read_spec import ReadSpec
from vlatune.data.reader import allocate, offsets_from_timestamps
from vlatune.errors import did_you_mean

ROW_COLUMNS = ("index", "episode_index", "frame_index", "timestamp", "dataset_index", TASK)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """What to read from all datasets and how: the arguments of `read_lerobot`, see its docstring."""

    resize: tuple[int, int] | None = (224, 224)
    action_horizon: int | None = 50
    cameras: Sequence[str] | None = None
    episodes: Sequence[int] | None = None
    exclude_episodes: Sequence[int] | None = None
    delta_timestamps: Mapping[str, Sequence[float]] | None = None
    partitioning: str = "file_group"
    storage_options: Mapping[str, Any] | None = None
    rename_map: Names | Sequence[Names] | None = None
    select_dims: Dims | Sequence[Dims] | None = None
    tolerance_s: float = 1e-4
    timestamps: Timestamps = "auto"
    block_bytes: int | None = None
    on_bad_episode: str = "fail"

    def __post_init__(self) -> None:
        check_partitioning(self.partitioning)
        for argument, known in (("on_bad_episode", ("fail", "skip")), ("timestamps", get_args(Timestamps.__value__))):
            if getattr(self, argument) not in known:
                raise ValueError(f"{argument}='{getattr(self, argument)}': expected one of {', '.join(known)}")
        if isinstance(self.cameras, str):
            raise ValueError(f"cameras='{self.cameras}': expected a list of names, such as ['{self.cameras}']")
        if self.block_bytes is not None and self.block_bytes < 1:
            raise ValueError(f"block_bytes={self.block_bytes}: must be 1 or more")
        resize = self.resize
        if resize is not None and (len(resize) != 2 or not all(isinstance(side, int) and side > 0 for side in resize)):
            raise ValueError(f"resize={resize}: expected (height, width) in pixels, or None for the recorded size")
        if self.action_horizon is not None and self.action_horizon < 1:
            raise ValueError(
                f"action_horizon={self.action_horizon}: must be 1 or more; None gives single actions without a window"
            )
        for key, deltas in (self.delta_timestamps or {}).items():
            if len(deltas) == 0:
                raise ValueError(
                    f"delta_timestamps['{key}'] is empty; name at least one offset in seconds, such as 0.0"
                )


def make_read_specs(metas: Sequence[DatasetMeta], request: Request) -> tuple[tuple[ReadSpec, ...], tuple[str, ...]]:
    """Return a spec per dataset and the columns that all of them deliver in the same form.

    Other columns than cameras, actions and states are left out if they differ.
    """
    specs = [_make_spec(number, meta, request) for number, meta in enumerate(metas)]
    layouts = [row_layout(spec, meta) for spec, meta in zip(specs, metas, strict=True)]
    kept = [name for name, layout in layouts[0].items() if all(other.get(name) == layout for other in layouts[1:])]
    required = {ACTION, STATE, *(camera.column for spec in specs for camera in spec.cameras)}
    for name in dict.fromkeys(name for layout in layouts for name in layout if name not in kept):
        if name in required:
            raise ValueError(_disagreement(name, specs, layouts))
        logger.warning("feature '%s' is left out: not all datasets have it in the same form", name)
    read = [replace(spec, vectors=tuple(one for one in spec.vectors if one.column in kept)) for spec in specs]
    return tuple(read), tuple(kept)


def row_layout(spec: ReadSpec, meta: DatasetMeta) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Map each delivered column to (dtype, shape of one row)."""
    row, names = allocate(spec, 1), []
    for one in (*spec.cameras, *spec.vectors):
        names += [one.column] if one.offsets is None else [one.column, f"{one.column}_is_pad"]
    names += [*ROW_COLUMNS, *(name for name in ("task_index",) if name in meta.features)]
    return {name: (str(row[name].dtype), row[name].shape[1:]) for name in names}


def row_bytes(spec: ReadSpec, columns: Sequence[str]) -> int:
    """Return the size of a delivered row with the longest task text of the dataset."""
    row = allocate(spec, 1)
    return sum(row[name].nbytes for name in columns) + max(map(len, spec.tasks), default=0)


def _make_spec(number: int, meta: DatasetMeta, request: Request) -> ReadSpec:
    names = {own: meta.names.get(own, own) for own in meta.features}
    windows = _windows(meta, request, names)
    cameras = tuple(
        camera_spec(meta, name, request.resize, windows.get(name), called=names[name])
        for name in _wanted_cameras(meta, request.cameras, names)
    )
    others = {name: one for name, one in meta.features.items() if name not in RESERVED and not one.is_camera}
    dropped = [f"'{name}' ({one.dtype})" for name, one in others.items() if numpy_type(one) is None]
    if dropped:
        text = "dataset '%s': features that are neither numbers nor a text are left out: %s"
        logger.warning(text, meta.root.url, ", ".join(dropped))
    vectors = tuple(  # actions and states are delivered as float32; other features keep their dtype
        vector_spec(
            meta, name, is_float32=names[name] in (ACTION, STATE), offsets=windows.get(name), called=names[name]
        )
        for name, one in others.items()
        if numpy_type(one) is not None
    )
    return ReadSpec(meta.root, number, request.tolerance_s, cameras, vectors, meta.tasks)


def _wanted_cameras(meta: DatasetMeta, wanted: Sequence[str] | None, names: Mapping[str, str]) -> list[str]:
    """Return own camera names in the dataset's order; reject depth and other non-RGB cameras."""
    known = {names[own]: own for own in meta.cameras}
    chosen = [known.get(name, name) for name in (known if wanted is None else wanted)]
    for own in chosen:
        if own not in meta.cameras:
            raise ValueError(
                f"dataset '{meta.root.url}': there is no camera '{own}'"
                f"{did_you_mean(own, known) or '; there are ' + (', '.join(known) or 'none')}"
            )
        if (what := _not_rgb(meta.features[own])) is not None:
            colour = [names[one] for one in meta.cameras if _not_rgb(meta.features[one]) is None]
            raise ValueError(
                f"dataset '{meta.root.url}': camera '{own}' is {what}, and only RGB is read; leave it out: cameras={colour}"
            )
    return [own for own in meta.cameras if own in chosen]


def _not_rgb(feature: Feature) -> str | None:
    """Return what a camera records instead of RGB images."""
    channels = int(np.prod(feature.shape)) // int(np.prod(feature.height_width))
    return "depth" if feature.is_depth else None if channels == 3 else f"an image of {channels} channels"


def _windows(meta: DatasetMeta, request: Request, names: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Map own feature names to offsets in frames."""
    can = {
        names[own]: own
        for own, feature in meta.features.items()
        if feature.is_camera or (own not in RESERVED and numpy_type(feature) not in (None, "object"))
    }
    windows: dict[str, tuple[int, ...]] = {}
    if request.action_horizon is not None:
        if ACTION not in names.values():
            likely = likely_name(ACTION, can.values())
            remedy = f"rename_map={{'{likely or '...'}': 'action'}}"
            raise ValueError(
                f"dataset '{meta.root.url}': there is no feature 'action', only {', '.join(can.values())}; name it with {remedy}, "
                f"or read none with action_horizon=None"
            )
        windows[next(own for own, name in names.items() if name == ACTION)] = tuple(range(request.action_horizon))
    for key, deltas in (request.delta_timestamps or {}).items():
        own = can.get(key, key)
        if own not in can.values():
            raise ValueError(
                f"delta_timestamps['{key}']: dataset '{meta.root.url}' has no such feature"
                f"{did_you_mean(key, can) or '; there are ' + ', '.join(can)}"
            )
        windows[own] = offsets_from_timestamps(deltas, meta.fps, request.tolerance_s, key)
    return windows


def _disagreement(name: str, specs: Sequence[ReadSpec], layouts: Sequence[Mapping[str, tuple]]) -> str:
    found = ", ".join(
        f"dataset '{spec.root.url}' has {f'{of[name][0]} of {of[name][1]}' if name in of else 'none'}"
        for spec, of in zip(specs, layouts, strict=True)
    )
    return f"feature '{name}': {found}; datasets that are read together must agree: use cameras, resize, or a rename_map per dataset"
