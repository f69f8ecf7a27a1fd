"""The `meta/` folder of a LeRobot dataset, v3.0 or v2.1, written from one `DatasetSummary`; which file holds what; and the
statistics of pictures.

Columns, keys and nesting are those that LeRobot 0.6 records (v3.0) and its v2.1 to v3.0 converter reads (v2.1).
The same summary gives the same bytes.

v3.0 keeps several episodes in a file; v2.1 is the same with one. In v3.0 the data files are made to begin at other
episodes than the video files, as they do in recorded datasets, so that a reader which mixes them up is found out.

Statistics of uint8 pictures are exact, from counts: a picture is looked at once and not kept.

Legend: C channels, V pixel values 0 to 255.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlatune.dataset.meta.stats import QUANTILES

CHUNK_FILES = 1000
"""Files per chunk folder."""


@dataclass(frozen=True)
class EpisodePlace:
    """The files of an episode, counted from 0, and where it begins in them."""

    episode_index: int
    length: int
    dataset_from_index: int
    data_file: int
    video_file: int
    video_from_frame: int

    @property
    def dataset_to_index(self) -> int:
        return self.dataset_from_index + self.length

    @property
    def video_to_frame(self) -> int:
        return self.video_from_frame + self.length


@dataclass(frozen=True)
class Layout:
    data_path: str
    """Name of a data file, as a template for `str.format`."""
    video_path: str
    """Name of a video file, as a template for `str.format`."""
    shares_files: bool
    """Whether a file holds several episodes."""

    def plan(self, lengths: Sequence[int], episodes_per_file: int) -> list[EpisodePlace]:
        """Where episodes of these lengths go."""
        per_video_file = episodes_per_file if self.shares_files else 1
        per_data_file = math.ceil(1.5 * episodes_per_file) if self.shares_files else 1
        return plan_places(lengths, per_data_file=per_data_file, per_video_file=per_video_file)

    def data_file(self, number: int) -> str:
        return _file_name(self.data_path, number)

    def video_file(self, number: int, video_key: str) -> str:
        return _file_name(self.video_path, number, video_key=video_key)


LAYOUTS = {
    "v3.0": Layout(
        data_path="data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        video_path="videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        shares_files=True,
    ),
    "v2.1": Layout(
        data_path="data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        video_path="videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
        shares_files=False,
    ),
}


def plan_places(lengths: Sequence[int], *, per_data_file: int, per_video_file: int) -> list[EpisodePlace]:
    """Fill files with episodes, in order. Example: four episodes of 5 frames, 3 per data file and 2 per video file.

    episode            0  1  2  3
    data_file          0  0  0  1
    video_file         0  0  1  1
    video_from_frame   0  5  0  5
    """
    begins = [0, *accumulate(lengths)]
    places = []
    for episode_index, length in enumerate(lengths):
        video_file = episode_index // per_video_file
        place = EpisodePlace(
            episode_index=episode_index,
            length=length,
            dataset_from_index=begins[episode_index],
            data_file=episode_index // per_data_file,
            video_file=video_file,
            video_from_frame=begins[episode_index] - begins[video_file * per_video_file],
        )
        places.append(place)
    return places


def split_file_number(number: int) -> tuple[int, int]:
    """(chunk_index, file_index) of the file with this number."""
    return divmod(number, CHUNK_FILES)


def _file_name(template: str, number: int, *, video_key: str = "") -> str:
    chunk_index, file_index = split_file_number(number)
    v30 = {"chunk_index": chunk_index, "file_index": file_index}
    v21 = {"episode_chunk": chunk_index, "episode_index": number}
    return template.format(video_key=video_key, **v30, **v21)


type Stats = dict[str, np.ndarray]
"""min, max, mean, std, count and quantiles of one feature."""


@dataclass(frozen=True)
class EpisodeSummary:
    place: EpisodePlace
    task: str
    stats: dict[str, Stats]
    """By feature."""


@dataclass(frozen=True)
class DatasetSummary:
    """All that `meta/` tells."""

    version: str
    fps: int
    features: dict[str, dict[str, Any]]
    episodes: list[EpisodeSummary]
    tasks: list[str]
    """By task index."""
    stats: dict[str, Stats]
    """By feature, over all episodes."""

    @property
    def video_keys(self) -> list[str]:
        return [key for key, feature in self.features.items() if feature["dtype"] == "video"]


def write_meta(folder: Path, summary: DatasetSummary) -> None:
    """Write `folder/meta` in the summary's version."""
    (folder / "meta").mkdir()
    _WRITERS[summary.version](folder / "meta", summary)


def _write_v30(meta: Path, summary: DatasetSummary) -> None:
    sizes = {"data_files_size_in_mb": 100, "video_files_size_in_mb": 200}  # where recording would begin a new file
    _write_json(meta / "info.json", {**_info(summary), **sizes})
    _write_json(meta / "stats.json", {key: _as_lists(stats) for key, stats in summary.stats.items()})
    pq.write_table(_tasks_table(summary.tasks), meta / "tasks.parquet")
    rows = [_episode_row(episode, summary) for episode in summary.episodes]
    (meta / "episodes/chunk-000").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), meta / "episodes/chunk-000/file-000.parquet")


def _write_v21(meta: Path, summary: DatasetSummary) -> None:
    num_episodes = len(summary.episodes)
    totals = {
        "total_videos": num_episodes * len(summary.video_keys),
        "total_chunks": math.ceil(num_episodes / CHUNK_FILES),
    }
    _write_json(meta / "info.json", {**_info(summary), **totals})
    tasks = [{"task_index": task_index, "task": task} for task_index, task in enumerate(summary.tasks)]
    _write_json_lines(meta / "tasks.jsonl", tasks)
    _write_json_lines(meta / "episodes.jsonl", [_episode_facts(episode) for episode in summary.episodes])
    _write_json_lines(meta / "episodes_stats.jsonl", [_episode_stats_v21(episode) for episode in summary.episodes])


_WRITERS: dict[str, Callable[[Path, DatasetSummary], None]] = {"v3.0": _write_v30, "v2.1": _write_v21}


def _info(summary: DatasetSummary) -> dict[str, Any]:
    num_episodes, layout = len(summary.episodes), LAYOUTS[summary.version]
    return {
        "codebase_version": summary.version,
        "robot_type": "synthetic",
        "fps": summary.fps,
        "total_episodes": num_episodes,
        "total_frames": summary.episodes[-1].place.dataset_to_index,
        "total_tasks": len(summary.tasks),
        "chunks_size": CHUNK_FILES,
        "splits": {"train": f"0:{num_episodes}"},
        "data_path": layout.data_path,
        "video_path": layout.video_path,
        "features": summary.features,
    }


def _episode_row(episode: EpisodeSummary, summary: DatasetSummary) -> dict[str, Any]:
    """A row of meta/episodes: the episode, its files, its span in them, its statistics."""
    place = episode.place
    row = _episode_facts(episode)
    row["data/chunk_index"], row["data/file_index"] = split_file_number(place.data_file)
    row["dataset_from_index"], row["dataset_to_index"] = place.dataset_from_index, place.dataset_to_index
    for key in summary.video_keys:
        row[f"videos/{key}/chunk_index"], row[f"videos/{key}/file_index"] = split_file_number(place.video_file)
        row[f"videos/{key}/from_timestamp"] = place.video_from_frame / summary.fps
        row[f"videos/{key}/to_timestamp"] = place.video_to_frame / summary.fps
    for key, stats in episode.stats.items():
        row |= {f"stats/{key}/{name}": value for name, value in _as_lists(stats).items()}
    return {**row, "meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}


def _episode_facts(episode: EpisodeSummary) -> dict[str, Any]:
    return {"episode_index": episode.place.episode_index, "tasks": [episode.task], "length": episode.place.length}


def _episode_stats_v21(episode: EpisodeSummary) -> dict[str, Any]:
    """v2.1 has no quantiles: who needs them goes through the rows."""
    stats = {
        key: {name: value for name, value in _as_lists(stats).items() if name not in QUANTILES}
        for key, stats in episode.stats.items()
    }
    return {"episode_index": episode.place.episode_index, "stats": stats}


def _tasks_table(tasks: Sequence[str]) -> pa.Table:
    """LeRobot looks a sentence up in the index of a pandas frame, and pandas finds its index in the schema's notes."""
    kinds = {"task_index": ("int64", "int64"), "task": ("unicode", "object")}
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy_kind, "metadata": None}
        for name, (kind, numpy_kind) in kinds.items()
    ]
    notes = {"index_columns": ["task"], "column_indexes": [], "columns": columns}
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks, pa.string())})
    return table.replace_schema_metadata({"pandas": json.dumps(notes)})


def _as_lists(stats: Stats) -> dict[str, Any]:
    return {name: value.tolist() for name, value in stats.items()}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")


def _write_json_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


class PixelCounts:
    """How often each channel of some uint8 pictures had each value: all that exact statistics need."""

    def __init__(self) -> None:
        self.num_images = 0
        self.counts_CV = np.zeros((3, 256), np.int64)

    def add(self, image_HWC: np.ndarray) -> None:
        self.num_images += 1
        for channel in range(3):
            self.counts_CV[channel] += np.bincount(image_HWC[..., channel].reshape(-1), minlength=256)

    def merge(self, other: "PixelCounts") -> None:
        self.num_images += other.num_images
        self.counts_CV += other.counts_CV

    def stats(self) -> dict[str, np.ndarray]:
        """Per channel, shape (3, 1, 1), scaled to [0, 1]; `count` is the number of pictures."""
        per_channel = [_counted_stats(counts_V) for counts_V in self.counts_CV]
        scaled = {
            name: np.array([stats[name] for stats in per_channel]).reshape(3, 1, 1) / 255.0 for name in per_channel[0]
        }
        return {**scaled, "count": np.array([self.num_images])}


def _counted_stats(counts_V: np.ndarray) -> dict[str, float]:
    """Statistics of values 0 to 255, given how often each occurs."""
    values_V, total = np.arange(256), counts_V.sum()
    present = np.flatnonzero(counts_V)
    mean = (values_V * counts_V).sum() / total
    variance = ((values_V - mean) ** 2 * counts_V).sum() / total
    quantiles = {name: _counted_quantile(counts_V, share) for name, share in QUANTILES.items()}
    return {"min": present[0], "max": present[-1], "mean": mean, "std": np.sqrt(variance), **quantiles}


def _counted_quantile(counts_V: np.ndarray, share: float) -> float:
    """NumPy's linear quantile of the sorted values, without sorting or even having them."""
    last_of_value_V = counts_V.cumsum()  # values below v fill the sorted positions up to last_of_value_V[v] - 1
    position = share * (last_of_value_V[-1] - 1)
    lower, upper = np.searchsorted(last_of_value_V, [np.floor(position), np.ceil(position)], side="right")
    return float(lower + (upper - lower) * (position - np.floor(position)))
