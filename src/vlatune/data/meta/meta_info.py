"""Read and validate meta/info.json: version, rate, features, path templates, totals.

Datasets are untrusted: missing or invalid values are rejected with the key, the value and what was
expected. Both versions share this file; meta_v30.py and meta_v21.py read what differs.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vlatune.storage.files import parse_json
from vlatune.storage.limits import check_limit
from vlatune.storage.paths import missing_dataset
from vlatune.storage.root import Root

SUPPORTED = ("v3.0", "v2.1")
V30_TEMPLATES = {
    "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}
V21_TEMPLATES = {
    "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
}
TEMPLATES = {"v3.0": V30_TEMPLATES, "v2.1": V21_TEMPLATES}
FETCH = "fetch meta/ again, or convert the dataset again"
LEAVE_OUT = "leave bad episodes out with --dataset.on_bad_episode=skip (read_lerobot: on_bad_episode='skip')"
CAMERA_DTYPES = ("video", "image")
MIN_FPS, MAX_FPS = 1e-3, 1e6
MAX_NESTED = 4
"""Maximum nesting of lists and objects that is searched for names of dims."""


@dataclass(frozen=True)
class Feature:
    dtype: str
    """Dtype in info.json: float32, int64, video, image, ..."""
    shape: tuple[int, ...]
    names: tuple[str, ...] | None
    info: Mapping[str, Any]
    """Video properties in info.json: codec, pixel format, fps, is_depth_map."""
    dims: tuple[int, ...] | None = None
    """Indices of the used recorded dims, in order (`features.with_dims`); all when None."""
    recorded: "Feature | None" = None
    """The feature in info.json, if `shape` and `names` describe selected `dims`."""

    @property
    def is_camera(self) -> bool:
        return self.dtype in CAMERA_DTYPES

    @property
    def is_depth(self) -> bool:
        return bool(self.info.get("is_depth_map") or self.info.get("video.is_depth_map"))

    @property
    def height_width(self) -> tuple[int, int]:
        """Recorded size of a camera, from shape (H, W, C) or (C, H, W)."""
        first, second, third = self.shape
        names = self.names or ("",)
        if names[0] in ("channels", "channel") or (third not in (1, 3) and first in (1, 3)):
            return second, third
        return (second, first) if names[:2] == ("width", "height") else (first, second)

    def declared(self, what: str) -> Any:
        """Return a video property; keys have a prefix or not, depending on the writer's version."""
        return self.info.get(f"video.{what}", self.info.get(what))


@dataclass(frozen=True, kw_only=True)
class Info:
    """Contents of meta/info.json."""

    version: str
    fps: float
    features: Mapping[str, Feature]
    templates: Mapping[str, str]
    """data_path and video_path."""
    chunks_size: int
    total_episodes: int | None
    """Number of episodes stated in info.json, if any."""


def read_info(root: Root, *, argument: str) -> Info:
    """Read meta/info.json; messages refer to the user's input as `argument`."""
    if not (is_folder := root.is_dir()) or not root.exists("meta/info.json"):
        raise missing_dataset(root.url, argument=argument, is_folder=is_folder)
    raw = parse_json(root.read_bytes("meta/info.json"), f"dataset '{root.url}': meta/info.json", remedy=FETCH)
    if not isinstance(raw, dict):
        raise _invalid(root, f"it is {shortened(raw)}", "a JSON object, as LeRobot writes it", FETCH)
    stated, fps, features = (raw.get(key) for key in ("codebase_version", "fps", "features"))
    version = f"v{str(stated).removeprefix('v')}"
    if version not in SUPPORTED:
        remedy = "convert it with LeRobot's conversion scripts, version by version, or update vlatune if it is newer"
        raise _invalid(root, f"codebase_version is {shortened(stated)}", " or ".join(SUPPORTED), remedy)
    if not isinstance(fps, int | float) or isinstance(fps, bool) or not MIN_FPS <= fps <= MAX_FPS:
        expected = "frames per second, a number above 0"
        raise _invalid(root, f"'fps' is {shortened(fps)}", expected, "set it to the rate of the recording")
    if not isinstance(features, dict) or not features:
        expected = "an object of name -> {dtype, shape, names}"
        raise _invalid(root, f"'features' is {shortened(features)}", expected, FETCH)
    templates = {which: raw.get(which) or default for which, default in TEMPLATES[version].items()}
    for which, template in templates.items():
        if not isinstance(template, str):
            expected = f"a path, as {TEMPLATES[version][which]}"
            raise _invalid(root, f"'{which}' is {shortened(template)}", expected, FETCH)
    for key, least in (("chunks_size", 1), ("total_episodes", 0)):
        value = raw.get(key)
        if value is not None and (type(value) is not int or value < least):
            raise _invalid(root, f"'{key}' is {shortened(value)}", f"an integer, {least} or more", FETCH)
    return Info(
        version=version,
        fps=float(fps),
        features={name: _feature(root, name, one) for name, one in features.items()},
        templates=templates,
        chunks_size=raw.get("chunks_size") or 1000,
        total_episodes=raw.get("total_episodes"),
    )


def _feature(root: Root, name: str, raw: Any) -> Feature:
    if not isinstance(raw, dict) or not isinstance(raw.get("dtype"), str) or "shape" not in raw:
        raise ValueError(f"dataset '{root.url}': meta/info.json: feature '{name}' lacks dtype or shape; {FETCH}")
    dtype, shape = raw["dtype"], raw["shape"]
    expected = "three sides, as [480, 640, 3]" if dtype in CAMERA_DTYPES else "a list of integers, as [7]"
    is_shape = isinstance(shape, list) and all(type(side) is int and side > 0 for side in shape)
    if not is_shape or (dtype in CAMERA_DTYPES and len(shape) != 3):
        raise _invalid(root, f"feature '{name}' has shape {shortened(shape)}", expected, FETCH)
    where = f"dataset '{root.url}': meta/info.json: feature '{name[:80]}'"
    if dtype in CAMERA_DTYPES:
        check_limit("image_side", max(shape), f"{where} has a side of")
        check_limit("image_pixels", math.prod(sorted(shape)[1:]), f"{where} has pixels:")
    else:
        check_limit("feature_values", math.prod(shape), f"{where} has values:")
    info = raw.get("info") or raw.get("video_info")
    return Feature(dtype, tuple(shape), flat_names(raw.get("names")), info if isinstance(info, dict) else {})


def flat_names(names: Any) -> tuple[str, ...] | None:
    """Flatten the names of dims, in any form that info.json uses; None if there are none.

    >>> flat_names([["shoulder", "elbow"]]), flat_names({"motors": ["x", "y"]}), flat_names({"y": 1, "x": 0})
    (('shoulder', 'elbow'), ('x', 'y'), ('x', 'y'))
    >>> flat_names({"left": ["elbow", "gripper"], "right": ["elbow"]})
    ('left.elbow', 'left.gripper', 'right.elbow')
    """
    return tuple(_each_name(names)) or None if isinstance(names, list | dict) else None


def _each_name(names: Any, depth: int = 0) -> Iterator[str]:
    if depth > MAX_NESTED or not isinstance(names, list | dict):
        yield str(names)
    elif isinstance(names, list):
        for one in names:
            yield from _each_name(one, depth + 1)
    elif all(type(one) is int for one in names.values()):  # name -> index
        yield from sorted(map(str, names), key=names.__getitem__)
    else:
        for group, inner in names.items():
            found = _each_name(inner, depth + 1)
            yield from found if len(names) == 1 else (f"{group}.{name}" for name in found)


def _invalid(root: Root, found: str, expected: str, remedy: str) -> ValueError:
    return ValueError(f"dataset '{root.url}': meta/info.json: {found}, expected {expected}; {remedy}")


def shortened(value: Any) -> str:
    """Format a value for a message, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
