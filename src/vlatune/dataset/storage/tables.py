"""Parquet files of a dataset -> numpy columns, converted once and kept for the next unit.

A read worker meets the same data file many times. A small file is converted whole; of a large one only the rows of
the wanted episode are, a few thousand at a time, so that memory does not grow with the file. The last few results
stay in memory.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlatune.dataset.storage.parquet import UNREADABLE, opened
from vlatune.dataset.storage.root import Root

CACHED_FILES = 4
CACHED_BYTES = 64 << 20
"""Kept in memory at most, but for the last result, which is kept whatever its size."""
WHOLE_FILE_BYTES = 24 << 20
"""A file whose wanted columns take no more is converted whole: about 200,000 rows of a robot arm."""
BATCH_ROWS = 8192


@dataclass(frozen=True)
class RowRange:
    """Some neighbouring rows of a data file."""

    columns: dict[str, np.ndarray]
    begin: int
    """The row of the file that is row 0 of the columns."""
    file_rows: int


_cache: OrderedDict[tuple, RowRange] = OrderedDict()


def read_columns(root: Root, name: str, columns: Sequence[str]) -> dict[str, np.ndarray]:
    """Columns of one data file; lists of equal length become a second axis."""
    key = (root.url, name, tuple(columns), _version_of(root, name))
    if key not in _cache:
        with opened(root, name, columns) as parquet:
            _cache[key] = _convert(root, name, columns, parquet.read(columns=list(columns)), 0, parquet)
    return _kept(key).columns


def read_rows(root: Root, name: str, columns: Sequence[str], begin: int, end: int) -> RowRange:
    """Columns of rows [begin, end) of one data file, with as many rows around them as is convenient.

    Fewer where the file ends before.
    """
    whole = (root.url, name, tuple(columns), _version_of(root, name))
    part = (*whole, begin, end)
    key = next((key for key in (whole, part) if key in _cache), None)
    if key is None:
        with opened(root, name, columns) as parquet:
            rows = _whole(root, name, columns, parquet) if _is_small(parquet, columns) else None
            key = part if rows is None else whole
            if rows is None:
                rows = _convert(root, name, columns, _slice(parquet, columns, begin, end), begin, parquet)
            _cache[key] = rows
    return _kept(key)


def _whole(root: Root, name: str, columns: Sequence[str], parquet: pq.ParquetFile) -> RowRange | None:
    """None where some rows cannot be read: the wanted ones may be others."""
    try:
        return _convert(root, name, columns, parquet.read(columns=list(columns)), 0, parquet)
    except PermissionError:
        raise
    except (ValueError, *UNREADABLE):
        return None


def _kept(key: tuple) -> RowRange:
    _cache.move_to_end(key)
    while len(_cache) > 1 and (len(_cache) > CACHED_FILES or sum(map(_held_bytes, _cache.values())) > CACHED_BYTES):
        _cache.popitem(last=False)
    return _cache[key]


def _held_bytes(rows: RowRange) -> int:
    return sum(values.nbytes for values in rows.columns.values())


def _version_of(root: Root, name: str) -> str:
    """Changes when a file or an object is replaced, so that the cache is never stale."""
    try:
        return root.version(name)
    except FileNotFoundError as error:
        raise ValueError(f"dataset '{root.url}': {name} is missing; fetch the dataset anew") from error


def _is_small(parquet: pq.ParquetFile, columns: Sequence[str]) -> bool:
    """By the number of values, as sizes in the file are those of encodings; a large file is known by its first part."""
    prefixes, total = tuple(f"{column}." for column in columns), 0
    for number in range(parquet.num_row_groups):
        group = parquet.metadata.row_group(number)
        for chunk in map(group.column, range(group.num_columns)):
            if f"{chunk.path_in_schema}.".startswith(prefixes):
                total += max(chunk.num_values * 8, chunk.total_uncompressed_size)
        if total > WHOLE_FILE_BYTES:
            return False
    return True


def _slice(parquet: pq.ParquetFile, columns: Sequence[str], begin: int, end: int) -> pa.Table:
    """Rows [begin, end) of the row groups that hold them, and no others."""
    sizes = [parquet.metadata.row_group(number).num_rows for number in range(parquet.num_row_groups)]
    ends = np.cumsum(sizes)
    groups = np.flatnonzero((ends > begin) & (ends - sizes < end))
    at = int(ends[groups[0]] - sizes[groups[0]]) if len(groups) else 0
    parts = [parquet.schema_arrow.empty_table().select(list(columns))]
    for batch in parquet.iter_batches(BATCH_ROWS, row_groups=groups.tolist(), columns=list(columns)):
        low, high = max(begin - at, 0), min(end - at, len(batch))
        at += len(batch)
        if low < high:
            parts.append(pa.Table.from_batches([batch.slice(low, high - low)]).select(list(columns)))
        if at >= end:
            break
    return pa.concat_tables(parts)


def _convert(
    root: Root, name: str, columns: Sequence[str], table: pa.Table, begin: int, parquet: pq.ParquetFile
) -> RowRange:
    where = f"dataset '{root.url}': {name}"
    values = {column: to_numpy(table.column(column), f"{where}, column '{column}'") for column in columns}
    return RowRange(values, begin, parquet.metadata.num_rows)


def to_numpy(column: pa.ChunkedArray, where: str) -> np.ndarray:
    """(N,) for scalars, (N, D) or (N, D, E) for lists of equal length."""
    array = column.combine_chunks()
    _check_no_nulls(array, where)
    rows, shape = len(array), []
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        flat = array.flatten()
        size, rest = divmod(len(flat), max(len(array), 1))
        if rest or (not pa.types.is_fixed_size_list(array.type) and not _equal_lengths(array, size)):
            raise ValueError(f"{where}: its lists have different lengths; every row must have the same shape")
        shape.append(size)
        array = flat
        _check_no_nulls(array, where)
    return array.to_numpy(zero_copy_only=False).reshape(rows, *shape)


def _check_no_nulls(array: pa.Array, where: str) -> None:
    """At every depth: flattening skips a list that is null, and the rows after it would move up."""
    if array.null_count:
        raise ValueError(f"{where}: {array.null_count} values are null; every row must have a value")


def _equal_lengths(array: pa.ListArray, size: int) -> bool:
    offsets = array.offsets.to_numpy()
    return bool(np.all(np.diff(offsets) == size))
