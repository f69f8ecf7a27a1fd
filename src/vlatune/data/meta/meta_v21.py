"""The v2.1 layout of `meta/`: JSON lines, one parquet and one mp4 file per episode.

Lines are streamed, because statistics of many episodes are large; only sums are kept.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vlatune.data.meta.episodes import Episodes, VideoSpan, match_tasks, texts_in_order
from vlatune.storage.files import parse_json
from vlatune.storage.limits import check_limit
from vlatune.storage.root import Root

EPISODES, TASKS, STATS = "meta/episodes.jsonl", "meta/tasks.jsonl", "meta/episodes_stats.jsonl"
MOMENTS = ("min", "max", "mean", "std", "count")
CHUNK_BYTES = 1 << 20
BATCH_LINES = 256
"""Episodes whose statistics are merged at once."""
_STATS_REMEDY = "delete the file and vlatune computes its own, or fetch meta/ again"


def read_episodes(root: Root, video_keys: list[str], tasks: Sequence[str]) -> Episodes:
    rows = [
        (read_integer(row, "episode_index", where), read_integer(row, "length", where), *_first_text(row.get("tasks")))
        for where, row in read_lines(root, EPISODES)
    ]
    rows.sort(key=lambda row: row[:2])
    index, length = np.array([row[:2] for row in rows], dtype=np.int64).reshape(-1, 2).T
    zero, none = np.zeros(len(index), dtype=np.int64), np.zeros(len(index))
    task, first_task = match_tasks([row[2] for row in rows], [row[3] for row in rows], tasks)
    span = VideoSpan(chunk=zero, file=zero, from_s=none, to_s=none + np.inf)  # one file per episode, so it starts at 0
    return Episodes(
        index=index,
        length=length,
        from_row=np.cumsum(length) - length,
        data_chunk=zero,
        data_file=zero,
        data_offset=zero,
        videos=dict.fromkeys(video_keys, span),
        task=task,
        first_task=first_task,
    )


def _first_text(tasks: Any) -> tuple[str | None, int]:
    is_text = isinstance(tasks, list) and bool(tasks) and isinstance(tasks[0], str)
    return (sys.intern(tasks[0]), len(tasks)) if is_text else (None, 0)  # interned, because many episodes share it


def read_tasks(root: Root) -> tuple[str, ...]:
    pairs = [(read_integer(row, "task_index", where), row.get("task")) for where, row in read_lines(root, TASKS)]
    return texts_in_order(root, TASKS, pairs)


def read_stats(root: Root) -> dict[str, dict[str, np.ndarray]]:
    """Merge the episodes' statistics; quantiles cannot be merged and are left out."""
    parts: dict[str, list[dict[str, np.ndarray]]] = {}
    for where, row in read_lines(root, STATS) if root.exists(STATS) else ():
        if not isinstance(row.get("stats"), dict):
            raise ValueError(f"{where} has no 'stats'; {_STATS_REMEDY}")
        for feature, raw in row["stats"].items():
            found = parts.setdefault(feature, [])
            found.append(_read_moments(raw, found[0]["mean"].size if found else None, f"{where}, feature '{feature}'"))
            if len(found) > BATCH_LINES:
                found[:] = [_merge(found)]
    return {feature: _merge(found) for feature, found in parts.items()}


def _read_moments(raw: Any, size: int | None, where: str) -> dict[str, np.ndarray]:
    """Return an episode's moments of one feature; `size` is their size in the lines before."""
    try:
        found = {name: np.array(raw[name], dtype=np.float64).reshape(-1) for name in MOMENTS}
        sizes = {values.size for name, values in found.items() if name != "count"} | ({size} if size else set())
        is_valid = len(sizes) == 1 and found["count"][0] > 0
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        found, is_valid = {}, False
    if not is_valid:
        size_text = f"{size} numbers, as in the lines before," if size else "numbers,"
        expected = f"expected {', '.join(MOMENTS)}, each {size_text} and a count above 0"
        raise ValueError(f"{where}: {expected}; {_STATS_REMEDY}")
    return found | {"count": found["count"][:1]}


def _merge(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    column = {name: np.stack([part[name] for part in parts]) for name in MOMENTS}
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


def read_integer(row: Mapping[str, Any], key: str, where: str) -> int:
    value = row.get(key)
    if type(value) is not int or not -(2**63) <= value < 2**63:
        found = f"'{key}' is {str(value)[:60]!r}" if key in row else f"there is no '{key}'"
        raise ValueError(f"{where}: {found}, expected an integer; fetch meta/ again, or correct the line")
    return value


def read_lines(root: Root, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location for messages, object) of each line; skip empty lines."""
    if not root.exists(name):
        raise ValueError(f"dataset '{root.url}': {name} is missing; fetch meta/ again")
    for number, line in enumerate(_split_lines(root, name), start=1):
        if line.strip():
            where = f"dataset '{root.url}': {name}, line {number}"
            row = parse_json(line, where, remedy="fetch meta/ again, or correct the line")
            if not isinstance(row, dict):
                raise ValueError(f"{where} is not a JSON object; fetch meta/ again, or correct the line")
            yield where, row


def _split_lines(root: Root, name: str) -> Iterator[bytes]:
    """Yield the lines; `readline` of a remote file would read byte by byte."""
    rest = b""
    with root.open(name) as file:
        while chunk := file.read(CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines
            check_limit("line_bytes", len(rest), f"dataset '{root.url}': {name}: a line has bytes:")
    yield rest
