"""meta/info.json of a LeRobot dataset, checked: version, rate, features, path templates, totals.

A dataset may come from anyone, so nothing in the file is taken on trust: whatever is missing or of another kind is
refused with the key, the value and what was expected. The two versions share this file; meta_v30.py and meta_v21.py
read what differs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlatune.dataset.storage.root import Root
from vlatune.files import parse_json
from vlatune.limits import check_limit

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
FETCH = "fetch meta/ anew, or convert the dataset anew"
CAMERA_DTYPES = ("video", "image")
MIN_FPS, MAX_FPS = 1e-3, 1e6


@dataclass(frozen=True)
class Feature:
    dtype: str
    """As info.json has it: float32, int64, video, image, ..."""
    shape: tuple[int, ...]
    names: tuple[str, ...] | None
    info: Mapping[str, Any]
    """What info.json says of a video: codec, pixel format, fps, is_depth_map."""

    @property
    def is_camera(self) -> bool:
        return self.dtype in CAMERA_DTYPES

    @property
    def is_depth(self) -> bool:
        return bool(self.info.get("is_depth_map") or self.info.get("video.is_depth_map"))

    @property
    def height_width(self) -> tuple[int, int]:
        """Recorded size of a camera; LeRobot writes (H, W, C) or (C, H, W), told apart by the names or the 3."""
        first, second, third = self.shape
        names = self.names or ("",)
        if names[0] in ("channels", "channel") or (third not in (1, 3) and first in (1, 3)):
            return second, third
        return (second, first) if names[:2] == ("width", "height") else (first, second)

    def declared(self, what: str) -> Any:
        """What info.json says of the video; keys have a prefix or not, depending on the version that wrote them."""
        return self.info.get(f"video.{what}", self.info.get(what))


@dataclass(frozen=True)
class Info:
    version: str
    fps: float
    features: Mapping[str, Feature]
    templates: Mapping[str, str]
    """data_path and video_path."""
    chunks_size: int
    total_episodes: int | None
    """None where the file does not say."""


def read_info(root: Root, *, argument: str) -> Info:
    """`argument` is what the caller's user named the dataset with, for the messages."""
    raw = _read_json(root, argument)
    version = _version(root, raw)
    features = raw.get("features")
    if not isinstance(features, dict) or not features:
        raise _refused(
            root, f"'features' is {shortened(features)}", "an object of name -> {dtype, shape, names}", FETCH
        )
    return Info(
        version=version,
        fps=_fps(root, raw.get("fps")),
        features={name: _feature(root, name, one) for name, one in features.items()},
        templates={which: _template(root, which, raw, default) for which, default in TEMPLATES[version].items()},
        chunks_size=_count(root, raw, "chunks_size", least=1) or 1000,
        total_episodes=_count(root, raw, "total_episodes", least=0),
    )


def _read_json(root: Root, argument: str) -> dict[str, Any]:
    if not root.is_dir():
        raise ValueError(f"dataset '{root.url}': there is no such folder; check {argument}")
    if not root.exists("meta/info.json"):
        raise ValueError(
            f"dataset '{root.url}': no meta/info.json in it, so it is not a LeRobot dataset; "
            f"{argument} must be the folder that holds meta/, data/ and videos/"
        )
    raw = parse_json(root.read_bytes("meta/info.json"), f"dataset '{root.url}': meta/info.json", remedy=FETCH)
    if not isinstance(raw, dict):
        raise _refused(root, f"it is {shortened(raw)}", "a JSON object, as LeRobot writes it", FETCH)
    return raw


def _version(root: Root, raw: Mapping[str, Any]) -> str:
    said = raw.get("codebase_version")
    version = f"v{str(said).removeprefix('v')}"
    if version in SUPPORTED:
        return version
    found = "has no codebase_version" if said is None else f"says codebase_version {shortened(said)}"
    raise ValueError(
        f"dataset '{root.url}': meta/info.json {found}; vlatune reads {' and '.join(SUPPORTED)}; {_version_remedy(said)}"
    )


def _version_remedy(said: Any) -> str:
    """What leads from a version to one that is read; None where the file does not say."""
    if said is None:
        return "set it if the files are laid out as in one of them, else fetch meta/ anew"
    if str(said).removeprefix("v").startswith(("0.", "1.", "2.")):
        return "convert it with LeRobot's conversion scripts, version by version (v1.6, v2.0, v2.1)"
    return "it is newer than this vlatune: update vlatune, or convert the dataset"


def _fps(root: Root, fps: Any) -> float:
    if isinstance(fps, int | float) and not isinstance(fps, bool) and MIN_FPS <= fps <= MAX_FPS:
        return float(fps)
    found = "there is no 'fps'" if fps is None else f"'fps' is {shortened(fps)}"
    raise _refused(root, found, "frames per second, a number above 0", "set it to the rate of the recording")


def _feature(root: Root, name: str, raw: Any) -> Feature:
    if not isinstance(raw, dict) or not isinstance(raw.get("dtype"), str) or "shape" not in raw:
        raise ValueError(f"dataset '{root.url}': meta/info.json: feature '{name}' lacks dtype or shape; {FETCH}")
    dtype, shape = raw["dtype"], raw["shape"]
    expected = "three sides, as [480, 640, 3]" if dtype in CAMERA_DTYPES else "a list of whole numbers, as [7]"
    if not isinstance(shape, list) or not all(type(side) is int and side > 0 for side in shape):
        raise _refused(root, f"feature '{name}' has shape {shortened(shape)}", expected, FETCH)
    if dtype in CAMERA_DTYPES and len(shape) != 3:
        raise _refused(root, f"camera '{name}' has shape {shortened(shape)}", expected, FETCH)
    where = f"dataset '{root.url}': meta/info.json: feature '{name[:80]}'"
    if dtype in CAMERA_DTYPES:
        check_limit("picture_side", max(shape), f"{where} has a side of")
        check_limit("picture_pixels", math.prod(sorted(shape)[1:]), f"{where} has pixels:")
    else:
        check_limit("feature_values", math.prod(shape), f"{where} has values:")
    names = raw.get("names")
    if isinstance(names, dict):  # {"motors": [...]}, as LeRobot's older recordings have it
        names = next(iter(names.values()), None)
    flat = tuple(str(each) for each in names) if isinstance(names, list) else None
    info = raw.get("info") or raw.get("video_info")
    return Feature(dtype, tuple(shape), flat, info if isinstance(info, dict) else {})


def _template(root: Root, which: str, raw: Mapping[str, Any], default: str) -> str:
    template = raw.get(which) or default
    if not isinstance(template, str):
        raise _refused(root, f"'{which}' is {shortened(template)}", f"a path, as {default}", FETCH)
    return template


def _count(root: Root, raw: Mapping[str, Any], key: str, *, least: int) -> int | None:
    value = raw.get(key)
    if value is None:
        return None
    if type(value) is not int or value < least:
        raise _refused(root, f"'{key}' is {shortened(value)}", f"a whole number, {least} or more", FETCH)
    return value


def _refused(root: Root, found: str, expected: str, remedy: str) -> ValueError:
    return ValueError(f"dataset '{root.url}': meta/info.json: {found}, expected {expected}; {remedy}")


def shortened(value: Any) -> str:
    """A value for a message, whatever the file holds."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
