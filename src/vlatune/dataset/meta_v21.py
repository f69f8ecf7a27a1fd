"""The v2.1 layout of `meta/`: JSON lines, one parquet and one mp4 per episode."""

import json
from typing import Any

import numpy as np

from vlatune.dataset.episodes import Episodes, VideoSpan
from vlatune.dataset.storage import Root


def read_episodes(root: Root, video_keys: list[str]) -> Episodes:
    rows = sorted(_read_lines(root, "meta/episodes.jsonl"), key=lambda row: row["episode_index"])
    index = np.array([row["episode_index"] for row in rows], dtype=np.int64)
    length = np.array([row["length"] for row in rows], dtype=np.int64)
    zero, none = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows))
    span = VideoSpan(chunk=zero, file=zero, from_s=none, to_s=none + np.inf)  # a file per episode: it starts at 0
    return Episodes(
        index=index,
        length=length,
        from_row=np.cumsum(length) - length,
        data_chunk=zero,
        data_file=zero,
        data_offset=zero,
        videos=dict.fromkeys(video_keys, span),
    )


def read_tasks(root: Root) -> tuple[str, ...]:
    by_index = {row["task_index"]: str(row["task"]) for row in _read_lines(root, "meta/tasks.jsonl")}
    if sorted(by_index) != list(range(len(by_index))):
        raise ValueError(
            f"dataset '{root.url}': meta/tasks.jsonl: task_index must count 0, 1, 2, ...; found {sorted(by_index)[:10]}"
        )
    return tuple(by_index[position] for position in range(len(by_index)))


def read_stats(root: Root) -> dict[str, dict[str, np.ndarray]]:
    """Stats of the whole dataset from those of the episodes; quantiles cannot be joined, so they are left out."""
    if not root.exists("meta/episodes_stats.jsonl"):
        return {}
    episodes = [row["stats"] for row in _read_lines(root, "meta/episodes_stats.jsonl")]
    features = episodes[0] if episodes else {}
    return {name: _join([stats[name] for stats in episodes if name in stats]) for name in features}


def _join(parts: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Pooled mean and variance: E[x^2] is the count-weighted mean of std^2 + mean^2."""
    column = {
        name: np.stack([np.asarray(part[name], dtype=np.float64).reshape(-1) for part in parts]) for name in parts[0]
    }
    weight = column["count"][:, :1] / column["count"].sum(axis=0)[:1]
    mean = (column["mean"] * weight).sum(axis=0)
    square = ((column["std"] ** 2 + column["mean"] ** 2) * weight).sum(axis=0)
    return {
        "min": column["min"].min(axis=0),
        "max": column["max"].max(axis=0),
        "mean": mean,
        "std": np.sqrt(np.maximum(square - mean**2, 0.0)),
        "count": column["count"].sum(axis=0),
    }


def _read_lines(root: Root, name: str) -> list[dict[str, Any]]:
    if not root.exists(name):
        raise ValueError(f"dataset '{root.url}': no {name}, which a v2.1 dataset must have; the dataset is incomplete")
    lines = root.read_bytes(name).decode("utf-8").splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"dataset '{root.url}': {name}, line {number} is not JSON ({error})") from error
    return rows
