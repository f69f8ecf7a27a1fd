"""Features: what to read of one, and their other names, what `--rename_map` of the commands and `feature_map` of `read_lerobot` have in common.

A map leads from a dataset's own names to those that policies ask for, the direction of LeRobot's `rename_map`, and may
name any feature. One map serves all datasets that have its names; each dataset may have a map of its own, which goes
before it. `camera_spec` and `vector_spec` say what the reader is to read of one. Pure.
"""

import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from vlatune.batch import ACTION, IDS, IMAGE_PREFIX, SLOT, STATE, TASK
from vlatune.dataset.meta.dataset_meta import DatasetMeta, Feature
from vlatune.dataset.reader import INDEX_COLUMNS, CameraSpec, VectorSpec
from vlatune.dataset.video.recorded import recorded_camera
from vlatune.dataset.video.resize import CENTRED, Letterbox
from vlatune.errors import did_you_mean

RESERVED = {*IDS, *INDEX_COLUMNS, TASK, SLOT}
"""Columns that every row has, or that the reader needs for itself; never read as features."""
ALIASES = {
    ACTION: ("actions", "observation.action"),
    STATE: ("state", "states", "observation.states", "observation/state", "proprio"),
}
"""The name that policies ask for -> names that datasets have in its place."""

type Names = Mapping[str, str]
"""Own name -> the name that it goes by."""


def own_map(meta: DatasetMeta, common: Names, own: Names) -> dict[str, str]:
    """What of the map for all, and of its own, concerns a dataset."""
    return {name: other for name, other in {**common, **own}.items() if name in meta.features}


def check_map(metas: Sequence[DatasetMeta], names: Names, what: str) -> None:
    """A name that none of the datasets knows is misspelt; one map may serve datasets of different names."""
    known = {name for meta in metas for name in meta.features}
    unknown = [name for name in names if name not in known]
    if unknown:
        nowhere = "no dataset has a feature" if len(metas) > 1 else f"dataset '{metas[0].root.url}' has no feature"
        raise ValueError(
            f"{what}: {nowhere} '{unknown[0]}'"
            f"{did_you_mean(unknown[0], known) or '; there are ' + ', '.join(sorted(known))}"
        )
    reserved = [name for name in names if name in RESERVED]
    if reserved:
        raise ValueError(f"{what}: '{reserved[0]}' keeps its name; leave it out of the map")


def delivered_names(meta: DatasetMeta, names: Names, what: str) -> dict[str, str]:
    """Every feature of the dataset -> the name that it goes by; no two go by one."""
    delivered = {own: names.get(own, own) for own in meta.features}
    own_of: dict[str, str] = {}
    for own, name in delivered.items():
        if name in own_of or (name in RESERVED and name != own):
            other = f"'{own_of[name]}' is" if name in own_of else "every row has a column"
            raise ValueError(
                f"dataset '{meta.root.url}': '{own}' cannot be called '{name}', as {other} called that; correct {what}"
            )
        own_of[name] = own
    return delivered


def with_names(
    metas: Sequence[DatasetMeta], common: Names, each: Sequence[Names] = (), *, what: tuple[str, str]
) -> tuple[DatasetMeta, ...]:
    """The datasets, each knowing what its features go by; `what` are the names of the two kinds of map in messages."""
    check_map(metas, common, what[0])
    made = []
    for meta, own in zip(metas, each or [{}] * len(metas), strict=True):
        check_map([meta], own, what[1])
        names = own_map(meta, common, own)
        delivered_names(meta, names, " or ".join(dict.fromkeys(what)))
        made.append(replace(meta, names={name: other for name, other in names.items() if name != other}))
    return tuple(made)


def likely_name(key: str, vectors: Collection[str]) -> str | None:
    """Which of the features that are no cameras may be the state or the action, though its name is another."""
    return next((name for name in ALIASES[key] if name in vectors), None)


def camera_name(own: str) -> str:
    """The kind of name that policies have for a camera."""
    return own if own.startswith("observation.image") else f"{IMAGE_PREFIX}{own.replace('/', '.').split('.')[-1]}"


def as_flag(names: Names, flag: str = "--rename_map") -> str:
    """As it is typed."""
    return f"{flag}={shlex.quote(json.dumps(dict(names)))}"


def camera_spec(
    meta: DatasetMeta,
    name: str,
    resize: tuple[int, int] | None,
    offsets: tuple[int, ...] | None = None,
    *,
    called: str | None = None,
    letterbox: Letterbox = CENTRED,
) -> CameraSpec:
    """A camera at this (height, width), or at the recorded size; files that differ from info.json will be refused."""
    feature = meta.features[name]
    height, width = resize or feature.height_width
    return CameraSpec(name, feature.dtype, height, width, offsets, recorded_camera(meta, name), called, letterbox)


def vector_spec(
    meta: DatasetMeta,
    name: str,
    *,
    is_float32: bool,
    offsets: tuple[int, ...] | None = None,
    called: str | None = None,
) -> VectorSpec:
    """A float32 vector, or values as recorded: a single one without an axis of its own."""
    feature = meta.features[name]
    dtype = numpy_type(feature)
    assert dtype is not None
    if is_float32 and dtype != "object":
        return VectorSpec(name, "float32", feature.shape, offsets, dtype, called)
    return VectorSpec(name, dtype, () if feature.shape == (1,) else feature.shape, offsets, dtype, called)


def numpy_type(feature: Feature) -> str | None:
    """None for what is no number and no text, such as pictures and nested records: not read as a column."""
    if feature.dtype in ("string", "str"):
        return "object" if feature.shape in ((), (1,)) else None
    try:
        dtype = np.dtype(feature.dtype)
    except TypeError:
        return None
    return dtype.name if dtype.kind in "biuf" else None
