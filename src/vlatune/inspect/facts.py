"""The facts of a dataset as plain values: features, episodes, tasks, cameras, statistics.

Frozen dataclasses of numbers and texts, so that they become JSON as they are, and the functions that make them from
the metadata. Episodes stay columns of numbers; only what is summed up of them is here.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from vlatune.dataset.meta.dataset_meta import DatasetMeta
from vlatune.dataset.meta.meta_info import CAMERA_DTYPES, MAX_FPS, MIN_FPS
from vlatune.dataset.meta.meta_v21 import EPISODES, read_lines
from vlatune.dataset.storage.parquet import check_columns, opened
from vlatune.dataset.storage.root import Root
from vlatune.dataset.video.recorded import camera_fps
from vlatune.inspect.problems import degenerate_dims, is_normalised, nan_dims
from vlatune.inspect.videos import VideoFacts


@dataclass(frozen=True)
class FeatureFacts:
    name: str
    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...] | None
    is_depth: bool = False

    @property
    def is_camera(self) -> bool:
        return self.dtype in CAMERA_DTYPES


@dataclass(frozen=True)
class EpisodeFacts:
    count: int
    frames: int
    fps: float
    duration_s: float
    min_length: int | None = None
    median_length: float | None = None
    max_length: int | None = None
    """Lengths in frames; not known where only info.json could be read."""


@dataclass(frozen=True)
class TaskFacts:
    task: str
    episodes: int
    """How many episodes name the sentence."""
    has_index: bool
    """Whether meta/tasks lists it; without that no row can refer to it."""


@dataclass(frozen=True)
class CameraFacts:
    name: str
    kind: str
    """video or image"""
    height: int
    width: int
    codec: str | None
    pixel_format: str | None
    fps: float
    files: int
    bytes: int
    opened: int
    """mp4 files that were opened; size, codec, pixel format and fps are the first one's then, else info.json's."""


@dataclass(frozen=True)
class StatsFacts:
    feature: str
    present: tuple[str, ...]
    nan_dims: tuple[str, ...]
    degenerate_dims: tuple[str, ...]


def feature_facts(meta: DatasetMeta) -> tuple[FeatureFacts, ...]:
    return tuple(
        FeatureFacts(name, one.dtype, one.shape, one.names, one.is_depth) for name, one in meta.features.items()
    )


def feature_facts_of_info(info: Mapping[str, Any]) -> tuple[FeatureFacts, ...]:
    """Of an info.json that may be damaged anywhere."""
    features = info.get("features")
    raw = {name: one for name, one in features.items() if isinstance(one, dict)} if isinstance(features, dict) else {}
    return tuple(
        FeatureFacts(str(name), str(one.get("dtype")), _list(one.get("shape")), _list(one.get("names")) or None)
        for name, one in raw.items()
    )


def _list(value: Any) -> tuple:
    return tuple(value) if isinstance(value, list) else ()


def episode_facts(meta: DatasetMeta) -> EpisodeFacts:
    length = meta.episodes.length
    return EpisodeFacts(
        count=len(length),
        frames=meta.num_frames,
        fps=meta.fps,
        duration_s=meta.num_frames / meta.fps,
        min_length=int(length.min()),
        median_length=float(np.median(length)),
        max_length=int(length.max()),
    )


def episode_facts_of_info(info: Mapping[str, Any]) -> EpisodeFacts | None:
    """What info.json claims; None where it does not say."""
    count, frames, fps = (info.get(name) for name in ("total_episodes", "total_frames", "fps"))
    if not (isinstance(count, int) and isinstance(frames, int) and isinstance(fps, int | float)):
        return None
    if not (MIN_FPS <= fps <= MAX_FPS and 0 <= frames < 2**63 and 0 <= count < 2**63):
        return None
    return EpisodeFacts(count=count, frames=frames, fps=float(fps), duration_s=frames / fps)


def task_facts(meta: DatasetMeta) -> tuple[TaskFacts, ...]:
    """Sentences in the order of task_index, then those that only the episodes name."""
    counts = _count_tasks_v30(meta.root) if meta.version == "v3.0" else _count_tasks_v21(meta.root)
    known = dict.fromkeys(meta.tasks)
    return tuple(
        TaskFacts(task, counts[task], has_index=task in known) for task in [*known, *sorted(counts.keys() - known)]
    )


def _count_tasks_v30(root: Root) -> Counter[str]:
    """File by file, one column of it: the sentences of 10^5 episodes are never in memory together."""
    counts: Counter[str] = Counter()
    for name in root.glob("meta/episodes/*/*.parquet"):
        with opened(root, name) as parquet:
            schema = parquet.schema_arrow
            if "tasks" in schema.names and pa.types.is_list(schema.field("tasks").type):
                check_columns(parquet.metadata, ["tasks"])
                sentences: Any = parquet.read(columns=["tasks"]).column("tasks").combine_chunks()
                for pair in sentences.flatten().value_counts().to_pylist():
                    counts[str(pair["values"])] += pair["counts"]
    return counts


def _count_tasks_v21(root: Root) -> Counter[str]:
    counts: Counter[str] = Counter()
    for _, row in read_lines(root, EPISODES):
        counts.update(str(task) for task in _list(row.get("tasks")))
    return counts


def camera_facts(meta: DatasetMeta, camera: str, files: Mapping[str, int], opened: Sequence[VideoFacts]) -> CameraFacts:
    """`files` are the camera's mp4 files that are there, with their bytes."""
    feature = meta.features[camera]
    video = next((one for one in opened if not one.error), None)
    height, width = (video.height, video.width) if video else feature.height_width
    return CameraFacts(
        name=camera,
        kind=feature.dtype,
        height=height,
        width=width,
        codec=video.codec if video else feature.declared("codec"),
        pixel_format=video.pixel_format if video else feature.declared("pix_fmt"),
        fps=video.fps if video else camera_fps(meta, camera),
        files=len(files),
        bytes=sum(files.values()),
        opened=len(opened),
    )


def stats_facts(meta: DatasetMeta) -> tuple[StatsFacts, ...]:
    """A line per feature that has statistics or should have them."""
    wanted = [name for name, one in meta.features.items() if name in meta.stats or is_normalised(name, one)]
    return tuple(
        StatsFacts(
            feature=name,
            present=tuple(meta.stats.get(name, {})),
            nan_dims=tuple(nan_dims(meta.stats.get(name, {}), meta.features[name])),
            degenerate_dims=tuple(degenerate_dims(meta.stats.get(name, {}), meta.features[name]))
            if is_normalised(name, meta.features[name])
            else (),
        )
        for name in wanted
    )
