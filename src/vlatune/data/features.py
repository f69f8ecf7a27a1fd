"""Feature names, selected dims, and the read specs of features. Pure.

A name map (`--rename_map` on the command line, `rename_map` in `read_lerobot`) maps a dataset's
own feature names to the names that policies expect, in the direction of LeRobot's `rename_map`. One
map can serve all datasets; a map of a single dataset takes precedence over it.

`with_dims` reduces vectors to selected dims (`--dataset.select_dims`): shape, names and statistics
of the feature then describe the selected dims, and `Feature.dims` holds their indices in the
recorded rows.
"""

import difflib
import json
import math
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vlatune.batch import ACTION, IDS, IMAGE_PREFIX, SLOT, STATE, TASK
from vlatune.data.frames.recorded import Recorded, camera_fps
from vlatune.data.frames.resize import Pad
from vlatune.data.meta.dataset_meta import DatasetMeta, Feature
from vlatune.data.read_spec import INDEX_COLUMNS, CameraSpec, VectorSpec
from vlatune.errors import did_you_mean

RESERVED = {*IDS, *INDEX_COLUMNS, TASK, SLOT}
"""Columns that every row has or that the reader uses internally; never read as features."""
ALIASES = {
    ACTION: ("actions", "observation.action"),
    STATE: ("state", "states", "observation.states", "observation/state", "proprio"),
}
"""Maps the name that policies expect to names that datasets use instead."""

type Names = Mapping[str, str]
"""Maps a dataset's own feature name to its delivered name."""
type Dims = Mapping[str, Sequence[int | str]]
"""Maps a feature (own or delivered name) to its dims: names, indices, or ranges `begin:end`."""
SELECT_DIMS = "--dataset.select_dims"
RANGE = re.compile(r"(\d{1,9}):(\d{1,9})")


def own_map(meta: DatasetMeta, common: Names, own: Names) -> dict[str, str]:
    """Return the entries of the common and the dataset's own map that apply to this dataset."""
    return {name: other for name, other in {**common, **own}.items() if name in meta.features}


def check_map(metas: Sequence[DatasetMeta], names: Names, what: str) -> None:
    """Reject reserved names and names that none of the datasets has."""
    for name in names:
        if not any(name in meta.features for meta in metas):
            raise ValueError(f"{what}: {_no_feature(metas, name)}")
        if name in RESERVED:
            raise ValueError(f"{what}: '{name}' keeps its name; leave it out of the map")


def check_delivered(meta: DatasetMeta, names: Names, what: str) -> None:
    """Reject a map with which two columns would have the same name."""
    own_of: dict[str, str] = {}
    for own in meta.features:
        name = names.get(own, own)
        if name in own_of or (name in RESERVED and name != own):
            other = f"'{own_of[name]}' is" if name in own_of else "every row has a column"
            raise ValueError(
                f"dataset '{meta.root.url}': '{own}' cannot be called '{name}', as {other} called that; correct {what}"
            )
        own_of[name] = own


def with_names(
    metas: Sequence[DatasetMeta], common: Names, each: Sequence[Names] = (), *, what: tuple[str, str]
) -> tuple[DatasetMeta, ...]:
    """Return the datasets with their names set; `what` names the two kinds of map in messages."""
    check_map(metas, common, what[0])
    made = []
    for meta, own in zip(metas, each or [{}] * len(metas), strict=True):
        check_map([meta], own, what[1])
        names = own_map(meta, common, own)
        check_delivered(meta, names, " or ".join(dict.fromkeys(what)))
        made.append(replace(meta, names={name: other for name, other in names.items() if name != other}))
    return tuple(made)


def with_dims(metas: Sequence[DatasetMeta], given: Sequence[Dims], what: str) -> tuple[DatasetMeta, ...]:
    """Reduce vectors to selected dims; `given` has one map for all datasets or one for each."""
    if len(given) not in (0, 1, len(metas)):
        raise ValueError(
            f"{what}: {len(given)} maps for {len(metas)} datasets; give one for all, or one for each, {{}} for a dataset of which all "
            f"dims are used"
        )
    if len(given) == 1 < len(metas):
        unknown = [name for name in given[0] if not any(meta.own(name) in meta.features for meta in metas)]
        if unknown:
            raise ValueError(f"{what}: {_no_feature(metas, unknown[0])}")
        given = [{name: dims for name, dims in given[0].items() if meta.own(name) in meta.features} for meta in metas]
    return tuple(_cut(meta, dims, what) for meta, dims in zip(metas, given, strict=True)) if given else tuple(metas)


def _no_feature(metas: Sequence[DatasetMeta], name: str) -> str:
    known = {called for meta in metas for own in meta.features for called in (own, meta.names.get(own, own))}
    nowhere = "no dataset has a feature" if len(metas) > 1 else f"dataset '{metas[0].root.url}' has no feature"
    return f"{nowhere} '{name}'{did_you_mean(name, known) or '; there are ' + ', '.join(sorted(known))}"


def _cut(meta: DatasetMeta, selected: Dims, what: str) -> DatasetMeta:
    features, stats = dict(meta.features), dict(meta.stats)
    for name, words in selected.items():
        own = meta.own(name)
        if own not in features:
            raise ValueError(f"{what}: {_no_feature([meta], name)}")
        feature, where = features[own], f"{what}: dataset '{meta.root.url}': '{own}'"
        if feature.dims is not None:
            raise ValueError(f"{where} is named twice; give all of its dims in one list")
        if own in RESERVED or len(feature.shape) != 1 or numpy_type(feature) in (None, "object"):
            raise ValueError(
                f"{where} is {feature.dtype} of shape {feature.shape}; dims are selected of a vector of numbers, such as '{ACTION}'"
            )
        dims = find_dims(feature, words, where)
        names = dim_names(feature)
        features[own] = replace(
            feature,
            shape=(len(dims),),
            names=names and tuple(names[dim] for dim in dims),
            dims=dims,
            recorded=feature,
        )
        # Statistics of another shape are dropped and computed from the rows instead.
        stats[own] = {
            key: values[list(dims)] for key, values in meta.stats.get(own, {}).items() if values.shape == feature.shape
        }
    return replace(meta, features=features, stats=stats)


def find_dims(feature: Feature, words: Sequence[int | str], where: str) -> tuple[int, ...]:
    """Return the indices of the dims that `words` name, in the given order.

    >>> arm = Feature("float32", (6,), ("x", "y", "z", "roll", "pitch", "grip"), {})
    >>> find_dims(arm, ["grip", 0, "2:4"], "action")
    (5, 0, 2, 3)
    """
    width, names = feature.shape[0], dim_names(feature) or ()
    found: list[int] = []
    for word in map(str, words):
        is_index, span = word.isdecimal() and len(word) < 10, RANGE.fullmatch(word)
        named = [dim for dim, name in enumerate(names) if name == word]
        if len(named) > 1 or (named and is_index and named != [int(word)]):
            raise ValueError(
                f"{where}: '{word}' is the name of dim {' and of dim '.join(map(str, named))}{', and an index' if is_index else ''}; "
                f"select the dim by its index as a range, such as {named[0]}:{named[0] + 1}"
            )
        if named:
            found += named
        elif span or is_index:
            begin, end = (int(span[1]), int(span[2])) if span else (int(word), int(word) + 1)
            if not 0 <= begin < end <= width:
                raise ValueError(
                    f"{where}: '{word}' is out of range; it has {width} dims: indices are 0 to {width - 1}, the range of all is 0:{width}"
                )
            found += range(begin, end)
        else:
            known = (
                f"; its dims are {', '.join(names)}"
                if names
                else f"; its dims have no names, only indices 0 to {width - 1}"
            )
            raise ValueError(f"{where} has no dim '{word}'{did_you_mean(word, names) or known}")
    if not found:
        raise ValueError(f"{where}: the list of dims is empty; name at least one, or leave the feature out")
    if len(set(found)) < len(found):
        twice = next(dim for place, dim in enumerate(found) if dim in found[:place])
        name = f" ('{names[twice]}')" if names else ""
        raise ValueError(f"{where}: dim {twice}{name} is selected twice; leave one out")
    return tuple(found)


def dim_names(feature: Feature) -> tuple[str, ...] | None:
    """Return a name for each dim of a vector, or None if info.json has none or a wrong number."""
    return feature.names if feature.names and feature.shape == (len(feature.names),) else None


def likely_name(key: str, vectors: Collection[str]) -> str | None:
    """Return the vector feature that is likely the state or action under another name."""
    return next((name for name in ALIASES[key] if name in vectors), None)


def similar_vector(key: str, vectors: Collection[str]) -> str | None:
    """Return the vector feature that is the state or action under another or a similar name."""
    close = difflib.get_close_matches(key, vectors, n=1, cutoff=0.4)
    return likely_name(key, vectors) or (close[0] if close else None)


def no_vector(meta: DatasetMeta, key: str, names: Names) -> ValueError:
    """Return the error for a dataset without a state or an action; its flag keeps `names` and names both."""
    vectors = [name for name in meta.features if name not in meta.cameras and name not in {*RESERVED, *names}]
    known = {names.get(name, name) for name in meta.features}
    likely = {one: similar_vector(one, vectors) for one in (STATE, ACTION) if one not in known}
    flag = as_flag({**names, **{likely[one] or f"NAME OF THE {one.split('.')[-1].upper()}": one for one in likely}})
    hint = f"; did you mean '{likely[key]}'?" if likely[key] else ""
    return ValueError(
        f"dataset '{meta.root.url}': no feature '{key}'{hint}; it has {', '.join(meta.features)}; name it with {flag}"
    )


def camera_name(own: str) -> str:
    """Return the name that policies would use for a camera."""
    return own if own.startswith("observation.image") else f"{IMAGE_PREFIX}{own.replace('/', '.').split('.')[-1]}"


def narrow_flags(metas: Sequence[DatasetMeta], most: Mapping[str, int]) -> tuple[str, ...]:
    """Return the flags that select the first `most[key]` (selected) dims of wider vectors."""
    maps = [
        {
            key: _words((feature.dims or range(feature.shape[0]))[: most[key]])
            for key in most
            if (feature := meta.features.get(meta.own(key)))
            and (feature.dims or int(np.prod(feature.shape)) > most[key])
        }
        for meta in metas
    ]
    maps = maps[:1] if all(one == maps[0] for one in maps) else maps
    return tuple(f"{SELECT_DIMS}={json.dumps(one)}" for one in maps)


def _words(dims: Sequence[int]) -> Sequence[int | str]:
    """Write neighbouring dims as one range."""
    dims = list(dims)
    is_range = len(dims) > 1 and dims == list(range(dims[0], dims[0] + len(dims)))
    return [f"{dims[0]}:{dims[-1] + 1}"] if is_range else dims


def as_flag(names: Mapping[str, Any], flag: str = "--rename_map") -> str:
    """Format a map as a shell-quoted command line flag."""
    return f"{flag}={shlex.quote(json.dumps(dict(names)))}"


def camera_spec(
    meta: DatasetMeta,
    name: str,
    resize: tuple[int, int] | None,
    offsets: tuple[int, ...] | None = None,
    *,
    called: str | None = None,
    pad: Pad = "centre",
) -> CameraSpec:
    """Return the spec of a camera at this (height, width), or at the recorded size if None."""
    feature = meta.features[name]
    recorded = Recorded(*feature.height_width, fps=camera_fps(meta, name) if feature.dtype == "video" else None)
    return CameraSpec(name, feature.dtype, *(resize or feature.height_width), offsets, recorded, called, pad)


def vector_spec(
    meta: DatasetMeta,
    name: str,
    *,
    is_float32: bool,
    offsets: tuple[int, ...] | None = None,
    called: str | None = None,
) -> VectorSpec:
    """Return the spec of a float32 vector, or of values as recorded (scalars without an axis)."""
    feature, dims = meta.features[name], meta.features[name].dims
    shape = (feature.recorded or feature).shape
    dtype = numpy_type(feature)
    assert dtype is not None
    if is_float32 and dtype != "object":
        return VectorSpec(name, "float32", shape, offsets, dtype, called, dims=dims)
    return VectorSpec(name, dtype, () if shape == (1,) and not dims else shape, offsets, dtype, called, dims=dims)


def offsets_at_rate(offsets: tuple[int, ...], fps: float, rate: float | None) -> tuple[int, ...]:
    """Return the frame offsets at `fps` nearest to steps of 1 / rate seconds; unchanged if rate is
    None.

    >>> offsets_at_rate((0, 1, 2), 20, 10), offsets_at_rate((0, 1, 2), 5, 10), offsets_at_rate((0, 1, 2), 5, None)
    ((0, 2, 4), (0, 1, 1), (0, 1, 2))
    """
    return offsets if rate is None else tuple(math.floor(offset * fps / rate + 0.5) for offset in offsets)


def numpy_type(feature: Feature) -> str | None:
    """Return the column dtype, or None for features that are neither numbers nor text."""
    if feature.dtype in ("string", "str"):
        return "object" if feature.shape in ((), (1,)) else None
    try:
        dtype = np.dtype(feature.dtype)
    except TypeError:
        return None
    return dtype.name if dtype.kind in "biuf" else None
