"""The v2.1 layout of `meta/`: JSON lines, one parquet and one mp4 per episode.

Lines are streamed: statistics of 10^5 episodes are a GB of text, of which only sums stay in memory.
"""

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vlatune.dataset.meta.episodes import Episodes, VideoSpan, sentences_in_order, told_tasks
from vlatune.dataset.storage.root import Root
from vlatune.files import parse_json
from vlatune.limits import check_limit

EPISODES, TASKS, STATS = "meta/episodes.jsonl", "meta/tasks.jsonl", "meta/episodes_stats.jsonl"
MOMENTS = ("min", "max", "mean", "std", "count")
CHUNK_BYTES = 1 << 20
BATCH_LINES = 256
"""Episodes whose statistics are joined at once; one by one it would take twice as long."""
_STATS_REMEDY = "delete the file and vlatune computes its own, or fetch meta/ anew"


def read_episodes(root: Root, video_keys: list[str], tasks: Sequence[str]) -> Episodes:
    _check_there(root, EPISODES)
    rows = [
        (whole_number(row, "episode_index", where), whole_number(row, "length", where), _only_text(row.get("tasks")))
        for where, row in read_lines(root, EPISODES)
    ]
    rows.sort(key=lambda row: row[:2])
    index, length = np.array([row[:2] for row in rows], dtype=np.int64).reshape(-1, 2).T
    zero, none = np.zeros(len(index), dtype=np.int64), np.zeros(len(index))
    span = VideoSpan(chunk=zero, file=zero, from_s=none, to_s=none + np.inf)  # a file per episode: it starts at 0
    return Episodes(
        index=index,
        length=length,
        from_row=np.cumsum(length) - length,
        data_chunk=zero,
        data_file=zero,
        data_offset=zero,
        videos=dict.fromkeys(video_keys, span),
        task=told_tasks([sentence for *_, sentence in rows], tasks),
    )


def _only_text(sentences: Any) -> str | None:
    is_one = isinstance(sentences, list) and len(sentences) == 1 and isinstance(sentences[0], str)
    return sys.intern(sentences[0]) if is_one else None  # 10^5 episodes may share it


def read_tasks(root: Root) -> tuple[str, ...]:
    _check_there(root, TASKS)
    pairs = [(whole_number(row, "task_index", where), row.get("task")) for where, row in read_lines(root, TASKS)]
    return sentences_in_order(root, TASKS, pairs)


def read_stats(root: Root) -> dict[str, dict[str, np.ndarray]]:
    """Stats of the whole dataset from those of the episodes; quantiles cannot be joined, so they are left out."""
    pools: dict[str, Pool] = {}
    lines = read_lines(root, STATS) if root.exists(STATS) else iter(())
    for batch in itertools.batched(lines, BATCH_LINES):
        parts: dict[str, list[tuple[str, Any]]] = {}
        for where, row in batch:
            if not isinstance(row.get("stats"), dict):
                raise ValueError(f"{where} has no 'stats'; {_STATS_REMEDY}")
            for feature, moments in row["stats"].items():
                parts.setdefault(feature, []).append((where, moments))
        for feature, found in parts.items():
            pools.setdefault(feature, Pool(feature)).add(found)
    return {feature: pool.stats() for feature, pool in pools.items()}


class Pool:
    """Moments of all rows of a feature seen so far: of several parts, the variance is theirs and that of their means."""

    def __init__(self, feature: str) -> None:
        self._feature = feature
        self._at: dict[str, np.ndarray] | None = None

    def add(self, parts: Sequence[tuple[str, Any]]) -> None:
        """`parts` are (place for messages, moments) of some episodes."""
        columns = _columns(parts, self._feature)
        if self._at is not None:
            if self._at["mean"].shape != columns["mean"].shape[1:]:
                raise _misfit(parts[0][0], self._feature, f"{self._at['mean'].size} values, as in the lines before")
            columns = {name: np.concatenate([self._at[name][None], columns[name]]) for name in MOMENTS}
        self._at = _join(columns)

    def stats(self) -> dict[str, np.ndarray]:
        assert self._at is not None  # a pool is made for the first part of it
        return self._at


def _columns(parts: Sequence[tuple[str, Any]], feature: str) -> dict[str, np.ndarray]:
    """Each moment of all parts as one array, (parts, values); where that fails, the line that is to blame is named."""
    try:
        found = _as_arrays([raw for _, raw in parts])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        if len(parts) == 1:
            raise _misfit(parts[0][0], feature, "numbers, and a count above 0") from error
        sizes = [_columns([part], feature)["mean"].size for part in parts]  # raises for a line that is wrong by itself
        wrong = next((number for number, size in enumerate(sizes) if size != sizes[0]), 0)
        raise _misfit(parts[wrong][0], feature, f"{sizes[0]} values, as in the lines before") from error
    return found


def _as_arrays(raws: Sequence[Any]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {
        name: np.array([raw[name] for raw in raws], dtype=np.float64).reshape(len(raws), -1) for name in MOMENTS
    }
    found["count"] = found["count"][:, :1]
    if len({found[name].shape for name in ("min", "max", "mean", "std")}) != 1 or not (found["count"] > 0).all():
        raise ValueError
    return found


def _misfit(where: str, feature: str, expected: str) -> ValueError:
    return ValueError(f"{where}, feature '{feature}': expected {', '.join(MOMENTS)}, each {expected}; {_STATS_REMEDY}")


def _join(column: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    weight = column["count"] / column["count"].sum(axis=0)
    mean = (column["mean"] * weight).sum(axis=0)
    variance = ((column["std"] ** 2 + (column["mean"] - mean) ** 2) * weight).sum(axis=0)
    return {
        "min": column["min"].min(axis=0),
        "max": column["max"].max(axis=0),
        "mean": mean,
        "std": np.sqrt(variance),
        "count": column["count"].sum(axis=0),
    }


def whole_number(row: Mapping[str, Any], key: str, where: str) -> int:
    value = row.get(key)
    if type(value) is not int or not -(2**63) <= value < 2**63:
        found = f"'{key}' is {str(value)[:60]!r}" if key in row else f"there is no '{key}'"
        raise ValueError(f"{where}: {found}, expected a whole number; fetch meta/ anew, or correct the line")
    return value


def read_lines(root: Root, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place for messages, object) of each line, one at a time; empty lines are skipped."""
    for number, line in enumerate(_split_lines(root, name), start=1):
        if line.strip():
            where = f"dataset '{root.url}': {name}, line {number}"
            row = parse_json(line, where, remedy="fetch meta/ anew, or correct the line")
            if not isinstance(row, dict):
                raise ValueError(f"{where} is not a JSON object; fetch meta/ anew, or correct the line")
            yield where, row


def _split_lines(root: Root, name: str) -> Iterator[bytes]:
    """By hand: a remote file's own `readline` would read byte by byte."""
    rest = b""
    with root.open(name) as file:
        while chunk := file.read(CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines
            check_limit("line_bytes", len(rest), f"dataset '{root.url}': {name}: a line has bytes:")
    yield rest


def _check_there(root: Root, name: str) -> None:
    if not root.exists(name):
        raise ValueError(
            f"dataset '{root.url}': no {name}, which a v2.1 dataset must have; the dataset is incomplete: fetch meta/ anew"
        )
