"""The `meta/` folder of a LeRobot dataset, v3.0 or v2.1, written from one `DatasetSummary`.

Columns, keys and nesting are those that LeRobot 0.6 records (v3.0) and its v2.1 to v3.0 converter reads (v2.1).
The same summary gives the same bytes.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlatune.dataset.meta.stats import QUANTILES
from vlatune.dataset.synthetic.writer_layout import CHUNK_FILES, LAYOUTS, EpisodePlace, split_file_number

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
