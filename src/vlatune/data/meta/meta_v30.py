"""The v3.0 layout of `meta/`: episodes, tasks and stats in parquet and JSON."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa

from vlatune.data.meta.episodes import Episodes, VideoSpan, match_tasks, texts_in_order
from vlatune.data.meta.meta_info import FETCH, shortened
from vlatune.data.tables import to_numpy
from vlatune.storage.files import parse_json
from vlatune.storage.limits import check_limit
from vlatune.storage.parquet import check_columns, opened
from vlatune.storage.root import Root

BASE_COLUMNS = ("episode_index", "length", "dataset_from_index", "data/chunk_index", "data/file_index")
SPAN_COLUMNS = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
TASK = "tasks"
"""Column of meta/episodes with the tasks of an episode; LeRobot uses the tasks of meta/tasks."""
FIRST_TASK = "first task"
"""Name of a derived column."""
TASKS = "meta/tasks.parquet"
TASK_COLUMNS = ("task", "__index_level_0__")
STATS = "meta/stats.json"
FETCH_META = "fetch meta/ again"


def read_episodes(root: Root, video_keys: list[str], tasks: Sequence[str]) -> Episodes:
    columns = [*BASE_COLUMNS, *(f"videos/{key}/{name}" for key in video_keys for name in SPAN_COLUMNS)]
    names = root.glob("meta/episodes/*/*.parquet")
    if not names:
        raise ValueError(
            f"dataset '{root.url}': no meta/episodes/*/*.parquet; the dataset is incomplete: fetch meta/ again"
        )
    parts = [_read_columns(root, name, columns, tasks) for name in names]
    column = {name: np.concatenate([part[name] for part in parts]) for name in [*columns, TASK, FIRST_TASK]}
    order = np.argsort(column["episode_index"], kind="stable")
    column = {name: values[order] for name, values in column.items()}
    spans = {
        key: VideoSpan(
            chunk=column[f"videos/{key}/chunk_index"],
            file=column[f"videos/{key}/file_index"],
            from_s=column[f"videos/{key}/from_timestamp"],
            to_s=column[f"videos/{key}/to_timestamp"],
        )
        for key in video_keys
    }
    chunk, file, from_row = column["data/chunk_index"], column["data/file_index"], column["dataset_from_index"]
    return Episodes(
        index=column["episode_index"],
        length=column["length"],
        from_row=from_row,
        data_chunk=chunk,
        data_file=file,
        data_offset=_offset_in_file(chunk, file, from_row),
        videos=spans,
        task=column[TASK],
        first_task=column[FIRST_TASK],
    )


def read_tasks(root: Root) -> tuple[str, ...]:
    """Read task texts by task_index; tasks.parquet stores them as the index of a pandas frame."""
    where = f"dataset '{root.url}': {TASKS}"
    with opened(root, TASKS, texts=TASK_COLUMNS, remedy=FETCH_META) as parquet:
        names = parquet.schema_arrow.names
        text = next((name for name in TASK_COLUMNS if name in names), None)
        if text is None or "task_index" not in names:
            raise ValueError(f"{where} has columns {names}, expected task and task_index; {FETCH_META}")
        check_limit("tasks", parquet.metadata.num_rows, f"{where} has tasks:")
        check_columns(parquet.metadata, ["task_index"])
        table = parquet.read(columns=["task_index", text])
        pairs = list(zip(table["task_index"].to_pylist(), _texts(table[text]), strict=True))
    return texts_in_order(root, TASKS, pairs)


def read_stats(root: Root) -> dict[str, dict[str, np.ndarray]]:
    if not root.exists(STATS):
        return {}
    remedy = "delete the file and vlatune computes its own, or fetch meta/ again"
    raw = parse_json(root.read_bytes(STATS), f"dataset '{root.url}': {STATS}", remedy=remedy)
    if not isinstance(raw, dict) or not all(isinstance(values, dict) for values in raw.values()):
        raise ValueError(f"dataset '{root.url}': {STATS}: expected feature -> {{min, max, mean, ...}}; {remedy}")
    return {
        feature: {name: _numbers(value, f"{STATS}, {feature}.{name}", root, remedy) for name, value in values.items()}
        for feature, values in raw.items()
    }


def _numbers(value: Any, place: str, root: Root, remedy: str) -> np.ndarray:
    try:
        return np.asarray(value, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"dataset '{root.url}': {place}: is {shortened(value)}, expected numbers in lists of one length; {remedy}"
        ) from error


def _read_columns(root: Root, name: str, columns: list[str], tasks: Sequence[str]) -> dict[str, np.ndarray]:
    with opened(root, name, columns, texts=[TASK], remedy=FETCH_META) as parquet:
        there = [TASK] if _has_texts(parquet.schema_arrow, TASK) else []
        table = parquet.read(columns=[*columns, *there])
        found = {column: _typed(root, name, column, table.column(column)) for column in columns}
        texts, counts = _first_texts(table[TASK]) if there else ([None] * len(table), [0] * len(table))
        return found | dict(zip((TASK, FIRST_TASK), match_tasks(texts, counts, tasks), strict=True))


def _has_texts(schema: pa.Schema, name: str) -> bool:
    """True if it is a column of lists of text, read as dictionaries; other types are ignored."""
    kind = schema.field(name).type if name in schema.names else None
    return kind is not None and pa.types.is_list(kind) and pa.types.is_dictionary(kind.value_type)


def _first_texts(lists: pa.ChunkedArray) -> tuple[list[str | None], list[int]]:
    """Return the first text of each list, and its length."""
    texts = _texts(pa.chunked_array([part.flatten() for part in lists.chunks], lists.type.value_type))
    lengths = [length or 0 for part in lists.chunks for length in part.value_lengths().to_pylist()]
    begins = accumulate(lengths, initial=0)
    return [texts[begin] if length else None for begin, length in zip(begins, lengths, strict=False)], lengths


def _texts(column: pa.ChunkedArray) -> list[Any]:
    """Convert dictionaries to Python objects; equal texts share one object."""
    texts: list[Any] = []
    for values in column.chunks:
        if not pa.types.is_dictionary(values.type):
            raise pa.ArrowInvalid(f"an instruction has the type {values.type}, expected text")
        values.dictionary.validate(full=True)  # may hold bytes that are not valid text
        known = [*values.dictionary.to_pylist(), None]
        texts += [known[-1 if code is None else code] for code in values.indices.to_pylist()]
    return texts


def _typed(root: Root, name: str, column: str, values: pa.ChunkedArray) -> np.ndarray:
    """Convert timestamps to float64 and everything else to int64."""
    where = f"dataset '{root.url}': {name}, column '{column}'"
    is_time = column.endswith("_timestamp")
    found = to_numpy(values, where)
    if found.ndim != 1 or found.dtype.kind not in ("iuf" if is_time else "iu"):
        expected = "a number" if is_time else "an integer"
        raise ValueError(f"{where}: its type is {values.type}, expected {expected} per episode; {FETCH}")
    return found.astype(np.float64 if is_time else np.int64)


def _offset_in_file(chunk: np.ndarray, file: np.ndarray, from_row: np.ndarray) -> np.ndarray:
    """Return the episodes' rows relative to the first row of their parquet file."""
    if len(from_row) == 0:
        return from_row
    _, group = np.unique(np.stack([chunk, file]), axis=1, return_inverse=True)
    group = group.reshape(-1)
    first = np.full(group.max() + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, group, from_row)
    return from_row - first[group]
