"""What a dataset holds and what is wrong with it: `inspect_dataset`, behind `vlatune inspect`.

Reads meta/, lists the folders once, opens one mp4 per camera, the footers of a hundred data files (or all of both) and
some columns of one, so that 10^5 episodes take seconds. Where the metadata is refused, the report still has what info.json
says. The facts (features, episodes, tasks, cameras, statistics) are frozen dataclasses of numbers and texts, so that
`dataclasses.asdict` of an `Inspection` is what `--json` prints. Episodes stay columns of numbers; only what is summed up of
them is here.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from vlatune.dataset.features import own_map, with_names
from vlatune.dataset.meta.dataset_meta import SUPPORTED, DatasetMeta, load_meta
from vlatune.dataset.meta.listing import list_files, top_folder
from vlatune.dataset.meta.meta_info import CAMERA_DTYPES, MAX_FPS, MIN_FPS
from vlatune.dataset.meta.meta_v21 import EPISODES, read_lines
from vlatune.dataset.storage.checksums import CHECKSUMS, write_checksums
from vlatune.dataset.storage.parquet import check_columns, opened
from vlatune.dataset.storage.root import Root
from vlatune.dataset.video.recorded import camera_fps
from vlatune.files import parse_json
from vlatune.inspect.data_files import data_problems, data_rows, file_problems, row_stats_problems, video_files
from vlatune.inspect.problems import Problem, degenerate_dims, is_normalised, meta_problems, nan_dims, refusal
from vlatune.inspect.videos import Needed, VideoFacts, read_videos, span_problems, video_problems


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
                sentences.validate(full=True)  # a sentence may hold bytes that are no text
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


@dataclass(frozen=True)
class InspectOptions:
    json: bool = False
    """Print one JSON object instead of tables."""
    videos: bool = False
    """Open every mp4 and data file, not only the first mp4 of each camera and the first 100 data files."""
    write_checksums: bool = False
    """Write meta/checksums.json, the SHA-256 of every file, where no error is found; whoever reads the dataset then verifies it."""
    rename_map: dict[str, str] = field(default_factory=dict)
    """As for `vlatune train`: the dataset's name of any feature -> policy's, as {"state": "observation.state"}."""


@dataclass(frozen=True)
class Inspection:
    dataset: str
    version: str | None
    robot_type: str | None = None
    features: tuple[FeatureFacts, ...] = ()
    episodes: EpisodeFacts | None = None
    tasks: tuple[TaskFacts, ...] = ()
    cameras: tuple[CameraFacts, ...] = ()
    stats: tuple[StatsFacts, ...] = ()
    bytes: Mapping[str, int] = field(default_factory=dict)
    """data, videos, meta -> bytes on disk."""
    problems: tuple[Problem, ...] = ()
    """Errors first."""

    @property
    def has_errors(self) -> bool:
        return any(problem.severity == "error" for problem in self.problems)


@dataclass(frozen=True)
class _Files:
    """What the folders hold, and what the metadata points to."""

    folders: tuple[str, ...]
    """Names at the top."""
    present: Mapping[str, Mapping[str, int]]
    """data, videos, meta -> name -> bytes."""
    data: Mapping[str, int]
    """Data files -> rows that they must have."""
    videos: Mapping[str, Mapping[str, Needed]]
    """Camera -> its mp4 files -> what they must have."""

    def present_videos(self, camera: str) -> dict[str, int]:
        present = self.present["videos"]
        return {name: present[name] for name in self.videos[camera] if name in present}


def inspect_dataset(
    root: str | Root,
    *,
    videos: bool = False,
    rename_map: Mapping[str, str] | None = None,
    on_video: Callable[[int, int], None] = lambda done, total: None,
) -> Inspection:
    """Look at the dataset in a folder or at a URL; `on_video` gets the number of mp4 files opened, and of all.

    Names of `rename_map` that the dataset does not have are another's.
    """
    root = Root(root) if isinstance(root, str) else root
    if not root.is_dir():
        raise ValueError(f"dataset '{root.url}': there is no such folder; give a dataset's folder or URL")
    info = _read_info(root)
    try:
        meta = load_meta(root)
        meta = with_names([meta], own_map(meta, rename_map or {}, {}), what=("--rename_map", "--rename_map"))[0]
        files = _list_all(meta)
        tasks = task_facts(meta)
    except ValueError as error:
        return _from_info(root, info, error)
    opened = _open_videos(meta.root, files, on_video, every=videos)
    problems = _all_problems(meta, info, files, opened, every=videos)
    return _from_meta(meta, info, files, opened, tasks, problems)


def _read_info(root: Root) -> dict[str, Any]:
    """info.json, or nothing where it cannot be read: load_meta says why."""
    try:
        info = parse_json(root.read_bytes("meta/info.json"), "meta/info.json")
    except (FileNotFoundError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


def write_dataset_checksums(found: Inspection) -> str:
    """One line on what was written; a dataset with errors is refused, as its damage would be written down as right."""
    if found.has_errors:
        raise ValueError(f"dataset '{found.dataset}' has errors, so that no {CHECKSUMS} is written; mend them first")
    root = Root(found.dataset)
    number = write_checksums(root, list_files(root, ""))
    return f"{CHECKSUMS}: the checksums of {number:,} files are written"


def _from_info(root: Root, info: Mapping[str, Any], error: ValueError) -> Inspection:
    expected = f"the metadata of a LeRobot dataset, {' or '.join(SUPPORTED)}"
    problem = refusal(error, root.url, place="meta/", expected=expected)
    version = info.get("codebase_version")
    if version is not None and f"v{str(version).removeprefix('v')}" not in SUPPORTED:
        return Inspection(root.url, str(version), problems=(problem,))
    folders = {"data": "data", "videos": "videos", "meta": "meta"} if info else {}
    return Inspection(
        dataset=root.url,
        version=None if version is None else str(version),
        robot_type=_text(info.get("robot_type")),
        features=feature_facts_of_info(info),
        episodes=episode_facts_of_info(info),
        bytes={kind: sum(list_files(root, folder).values()) for kind, folder in folders.items()},
        problems=(problem,),
    )


def _list_all(meta: DatasetMeta) -> _Files:
    tops = {"data": top_folder(meta.templates["data_path"]), "videos": top_folder(meta.templates["video_path"])}
    return _Files(
        folders=tuple(meta.root.glob("*")),
        present={kind: list_files(meta.root, folder) for kind, folder in {**tops, "meta": "meta"}.items()},
        data=data_rows(meta),
        videos={camera: video_files(meta, camera, fps=camera_fps(meta, camera)) for camera in meta.cameras},
    )


def _open_videos(
    root: Root, files: _Files, on_video: Callable[[int, int], None], *, every: bool
) -> dict[str, list[VideoFacts]]:
    """Camera -> the facts of its files, or of the first that is there."""
    wanted = {camera: list(files.present_videos(camera))[: None if every else 1] for camera in files.videos}
    total, done = sum(map(len, wanted.values())), 0

    def count() -> None:
        nonlocal done
        done += 1
        on_video(done, total)

    return {camera: read_videos(root, names, on_file=count) for camera, names in wanted.items()}


def _from_meta(
    meta: DatasetMeta,
    info: Mapping[str, Any],
    files: _Files,
    opened: Mapping[str, list[VideoFacts]],
    tasks: tuple[TaskFacts, ...],
    problems: list[Problem],
) -> Inspection:
    return Inspection(
        dataset=meta.root.url,
        version=meta.version,
        robot_type=_text(info.get("robot_type")),
        features=feature_facts(meta),
        episodes=episode_facts(meta),
        tasks=tasks,
        cameras=tuple(
            camera_facts(meta, camera, files.present_videos(camera), opened[camera]) for camera in meta.cameras
        ),
        stats=stats_facts(meta),
        bytes={kind: sum(present.values()) for kind, present in files.present.items()},
        problems=tuple(sorted(problems, key=lambda problem: problem.severity)),  # "error" comes before "warning"
    )


def _all_problems(
    meta: DatasetMeta, info: Mapping[str, Any], files: _Files, opened: Mapping[str, list[VideoFacts]], *, every: bool
) -> list[Problem]:
    present = files.present
    all_videos = [name for names in files.videos.values() for name in names]
    problems = meta_problems(meta, info)
    problems += file_problems(meta, "data_path", list(files.data), present["data"], files.folders)
    problems += file_problems(meta, "video_path", all_videos, present["videos"], files.folders)
    problems += span_problems(meta)
    for camera, videos in opened.items():
        problems += video_problems(meta, camera, videos, files.videos[camera])
    there = {name: rows for name, rows in files.data.items() if name in present["data"]}
    of_data = data_problems(meta, there, every=every)
    is_told = any(problem.severity == "error" for problem in problems)
    return problems + of_data + ([] if of_data else row_stats_problems(meta, every=every, is_told=is_told))


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
