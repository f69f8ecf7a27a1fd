"""What a LeRobot dataset says of itself, v3.0 or v2.1, as one frozen `DatasetMeta`.

Reads `meta/` once, on the driver. Episodes are kept as columns (numpy), so that 10^5 of them are a few
MB. File names come from fixed fields of the templates in info.json, never from `str.format`. Everything
wrong that can be seen without opening data or video files is refused here, with file, value and remedy.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlatune.dataset import meta_v21, meta_v30
from vlatune.dataset.episodes import Episodes
from vlatune.dataset.storage import Root

SUPPORTED = ("v3.0", "v2.1")
V30_TEMPLATES = {
    "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}
V21_TEMPLATES = {
    "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
}


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
        return self.dtype in ("video", "image")

    @property
    def is_depth(self) -> bool:
        return bool(self.info.get("is_depth_map") or self.info.get("video.is_depth_map"))

    @property
    def height_width(self) -> tuple[int, int]:
        """Recorded size of a camera; LeRobot writes (H, W, C) or (C, H, W), told apart by the names or the 3."""
        height, width, channels = self.shape
        first = (self.names or ("",))[0]
        if first in ("channels", "channel") or (channels not in (1, 3) and height in (1, 3)):
            return width, channels
        return height, width


@dataclass(frozen=True)
class DatasetMeta:
    root: Root
    version: str
    fps: float
    features: Mapping[str, Feature]
    tasks: tuple[str, ...]
    episodes: Episodes
    stats: Mapping[str, Mapping[str, np.ndarray]]
    """Feature -> min, max, mean, std, q01, ... as flat float64 arrays; empty where the dataset has none."""
    templates: Mapping[str, str]
    chunks_size: int

    @property
    def cameras(self) -> tuple[str, ...]:
        return tuple(name for name, feature in self.features.items() if feature.is_camera)

    @property
    def num_frames(self) -> int:
        return int(self.episodes.length.sum())

    def data_path(self, position: int) -> str:
        """Name of the parquet file of the episode at `position` of the table."""
        return self._fill("data_path", position, self.episodes.data_chunk, self.episodes.data_file)

    def video_path(self, position: int, camera: str) -> str:
        span = self.episodes.videos[camera]
        return self._fill("video_path", position, span.chunk, span.file, video_key=camera)

    def _fill(self, which: str, position: int, chunk: np.ndarray, file: np.ndarray, **texts: str) -> str:
        episode = int(self.episodes.index[position])
        numbers = {"chunk_index": int(chunk[position]), "file_index": int(file[position])}
        numbers |= {"episode_index": episode, "episode_chunk": episode // self.chunks_size}
        return fill_template(self.templates[which], numbers, texts)


def load_meta(root: str | Root) -> DatasetMeta:
    """Read `meta/` of the dataset at a folder or URL."""
    root = Root(root) if isinstance(root, str) else root
    info = _read_info(root)
    version = _check_version(root, info)
    features = {name: _make_feature(root, name, raw) for name, raw in info.get("features", {}).items()}
    layout = meta_v30 if version == "v3.0" else meta_v21
    video_keys = [name for name, feature in features.items() if feature.dtype == "video"]
    defaults = V30_TEMPLATES if version == "v3.0" else V21_TEMPLATES
    episodes = layout.read_episodes(root, video_keys)
    _check_episodes(root, episodes)
    return DatasetMeta(
        root=root,
        version=version,
        fps=float(info["fps"]),
        features=features,
        tasks=layout.read_tasks(root),
        episodes=episodes,
        stats=layout.read_stats(root),
        templates={which: info.get(which) or default for which, default in defaults.items()},
        chunks_size=int(info.get("chunks_size") or 1000),
    )


def fill_template(template: str, numbers: Mapping[str, int], texts: Mapping[str, str]) -> str:
    """Put known fields into a path template from info.json.

    Only `{name}` and `{name:0Nd}` are understood: `str.format` on a template from a dataset would let it
    reach into our objects.
    """

    def replace(match: re.Match[str]) -> str:
        name, width = match.group(1), match.group(2)
        if name in texts and width is None:
            return texts[name]
        if name in numbers:
            return str(numbers[name]).zfill(int(width or 0))
        raise ValueError(f"meta/info.json: the path template '{template}' asks for '{{{name}}}', which is not known")

    filled = re.sub(r"\{(\w+)(?::0(\d{1,2})d)?\}", replace, template)
    if "{" in filled or "}" in filled:
        raise ValueError(f"meta/info.json: cannot read the path template '{template}'")
    return filled


def _read_info(root: Root) -> dict[str, Any]:
    if not root.is_dir():
        raise ValueError(f"dataset '{root.url}': there is no such folder; check --dataset.root")
    if not root.exists("meta/info.json"):
        raise ValueError(
            f"dataset '{root.url}': no meta/info.json in it, so it is not a LeRobot dataset; "
            f"point --dataset.root at the folder that holds meta/, data/ and videos/"
        )
    try:
        info = json.loads(root.read_bytes("meta/info.json"))
    except ValueError as error:
        raise ValueError(f"dataset '{root.url}': meta/info.json is not readable JSON ({error})") from error
    if not isinstance(info, dict) or not info.get("fps"):
        raise ValueError(f"dataset '{root.url}': meta/info.json has no 'fps'; it is not a LeRobot info file")
    return info


def _check_version(root: Root, info: Mapping[str, Any]) -> str:
    version = info.get("codebase_version")
    version = version if str(version).startswith("v") or version is None else f"v{version}"
    if version not in SUPPORTED:
        raise ValueError(
            f"dataset '{root.url}': meta/info.json says codebase_version {version!r}; vlatune reads "
            f"{' and '.join(SUPPORTED)}; convert it with LeRobot's conversion scripts"
        )
    return version


def _make_feature(root: Root, name: str, raw: Any) -> Feature:
    if not isinstance(raw, dict) or "dtype" not in raw or "shape" not in raw:
        raise ValueError(f"dataset '{root.url}': meta/info.json: feature '{name}' lacks dtype or shape")
    names = raw.get("names")
    if isinstance(names, dict):  # {"motors": [...]}, as LeRobot's older recordings have it
        names = next(iter(names.values()), None)
    shape = tuple(int(side) for side in raw["shape"])
    if raw["dtype"] in ("video", "image") and len(shape) != 3:
        raise ValueError(f"dataset '{root.url}': meta/info.json: camera '{name}' has shape {shape}, expected (H, W, 3)")
    flat = tuple(str(each) for each in names) if isinstance(names, list) else None
    return Feature(str(raw["dtype"]), shape, flat, raw.get("info") or raw.get("video_info") or {})


def _check_episodes(root: Root, episodes: Episodes) -> None:
    if len(episodes) == 0:
        raise ValueError(f"dataset '{root.url}': it has no episodes")
    empty = np.flatnonzero(episodes.length <= 0)
    if len(empty):
        raise ValueError(
            f"dataset '{root.url}': episode {episodes.index[empty[0]]} has length {episodes.length[empty[0]]}"
        )
    gap = np.flatnonzero(episodes.from_row[1:] != episodes.from_row[:-1] + episodes.length[:-1])
    if len(gap):
        here = gap[0] + 1
        expected = episodes.from_row[here - 1] + episodes.length[here - 1]
        raise ValueError(
            f"dataset '{root.url}': episode {episodes.index[here]} starts at row {episodes.from_row[here]}, "
            f"expected {expected} after episode {episodes.index[here - 1]}; meta/episodes is damaged, convert the dataset anew"
        )
