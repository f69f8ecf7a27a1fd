"""The v3.0 layout of `meta/`: episodes, tasks and stats in parquet and JSON."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlatune.dataset.episodes import Episodes, VideoSpan
from vlatune.dataset.storage import Root

BASE_COLUMNS = ("episode_index", "length", "dataset_from_index", "data/chunk_index", "data/file_index")
SPAN_COLUMNS = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")


def read_episodes(root: Root, video_keys: list[str]) -> Episodes:
    columns = [*BASE_COLUMNS, *(f"videos/{key}/{name}" for key in video_keys for name in SPAN_COLUMNS)]
    names = root.glob("meta/episodes/*/*.parquet")
    if not names:
        raise ValueError(f"dataset '{root.url}': no meta/episodes/*/*.parquet; the dataset is incomplete")
    table = pa.concat_tables([_read_columns(root, name, columns) for name in names]).sort_by("episode_index")
    column = {name: table.column(name).to_numpy() for name in columns}
    chunk, file = column["data/chunk_index"].astype(np.int64), column["data/file_index"].astype(np.int64)
    from_row = column["dataset_from_index"].astype(np.int64)
    spans = {
        key: VideoSpan(
            chunk=column[f"videos/{key}/chunk_index"].astype(np.int64),
            file=column[f"videos/{key}/file_index"].astype(np.int64),
            from_s=column[f"videos/{key}/from_timestamp"].astype(np.float64),
            to_s=column[f"videos/{key}/to_timestamp"].astype(np.float64),
        )
        for key in video_keys
    }
    return Episodes(
        index=column["episode_index"].astype(np.int64),
        length=column["length"].astype(np.int64),
        from_row=from_row,
        data_chunk=chunk,
        data_file=file,
        data_offset=_offset_in_file(chunk, file, from_row),
        videos=spans,
    )


def read_tasks(root: Root) -> tuple[str, ...]:
    """Sentences by task_index; in tasks.parquet they are the index column of a pandas frame."""
    if not root.exists("meta/tasks.parquet"):
        raise ValueError(
            f"dataset '{root.url}': no meta/tasks.parquet; a policy that reads a sentence cannot be trained on it"
        )
    with root.open("meta/tasks.parquet") as file:
        table = pq.read_table(file)
    text = next((name for name in ("task", "__index_level_0__") if name in table.column_names), None)
    if text is None or "task_index" not in table.column_names:
        raise ValueError(
            f"dataset '{root.url}': meta/tasks.parquet has columns {table.column_names}, expected task and task_index"
        )
    by_index = dict(zip(table.column("task_index").to_pylist(), table.column(text).to_pylist(), strict=True))
    if sorted(by_index) != list(range(len(by_index))):
        raise ValueError(
            f"dataset '{root.url}': meta/tasks.parquet: task_index must count 0, 1, 2, ...; found {sorted(by_index)[:10]}"
        )
    return tuple(str(by_index[position]) for position in range(len(by_index)))


def read_stats(root: Root) -> dict[str, dict[str, np.ndarray]]:
    if not root.exists("meta/stats.json"):
        return {}
    raw: dict[str, dict[str, Any]] = json.loads(root.read_bytes("meta/stats.json"))
    return {
        feature: {name: np.asarray(value, dtype=np.float64).reshape(-1) for name, value in values.items()}
        for feature, values in raw.items()
    }


def _read_columns(root: Root, name: str, columns: list[str]) -> pa.Table:
    with root.open(name) as file:
        try:
            parquet = pq.ParquetFile(file)
        except pa.ArrowInvalid as error:
            raise ValueError(f"dataset '{root.url}': {name} is not readable parquet ({error})") from error
        missing = [column for column in columns if column not in parquet.schema_arrow.names]
        if missing:
            raise ValueError(
                f"dataset '{root.url}': {name} lacks the column '{missing[0]}'; "
                f"meta/info.json and meta/episodes disagree: convert the dataset anew"
            )
        return parquet.read(columns=columns)


def _offset_in_file(chunk: np.ndarray, file: np.ndarray, from_row: np.ndarray) -> np.ndarray:
    """Row inside the parquet file: the dataset's row less that of the file's first episode."""
    if len(from_row) == 0:
        return from_row
    _, group = np.unique(np.stack([chunk, file]), axis=1, return_inverse=True)
    group = group.reshape(-1)
    first = np.full(group.max() + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, group, from_row)
    return from_row - first[group]
