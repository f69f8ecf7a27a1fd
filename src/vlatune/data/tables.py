"""Read parquet files of a dataset as numpy columns, with a cache.

Read workers access the same data file many times. Small files are converted completely; of large
ones only the rows of the wanted episode, so that memory does not grow with the file. The most
recent results are cached.
"""

import errno
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlatune.storage.parquet import UNREADABLE, check_columns, leaves, opened
from vlatune.storage.root import Root

CACHED_FILES = 4
CACHED_BYTES = 64 << 20
"""Limit of the cache; the latest result is kept regardless of its size."""
COMPLETE_FILE_BYTES = 24 << 20
"""Files whose wanted columns are at most this large are converted completely."""
BATCH_ROWS = 8192


@dataclass(frozen=True)
class RowRange:
    """A range of rows of a data file."""

    columns: dict[str, np.ndarray]
    file_rows: int
    """Number of rows of the file."""

    @property
    def num_bytes(self) -> int:
        return sum(values.nbytes for values in self.columns.values())

    def cut(self, begin: int, end: int) -> "RowRange":
        return replace(self, columns={name: values[begin:end] for name, values in self.columns.items()})


_cache: OrderedDict[tuple, RowRange] = OrderedDict()
_lock = threading.Lock()


def read_rows(
    root: Root,
    name: str,
    columns: Sequence[str],
    begin: int,
    end: int,
    *,
    optional: Sequence[str] = (),
    texts: Sequence[str] = (),
) -> RowRange:
    """Read rows [begin, end) of one data file, or fewer if the file ends before.

    `optional` columns that the file lacks are left out. Only the columns in `texts` may hold text.
    """
    try:
        version = root.version(name)  # changes when the file or object is replaced
    except OSError as error:
        if not isinstance(error, FileNotFoundError) and error.errno != errno.ELOOP:  # a link to itself is no file
            raise
        raise ValueError(f"dataset '{root.url}': {name} is missing; fetch the dataset again") from error
    every = (root.url, name, tuple(columns), version)
    part = (*every, begin, end)
    for key, first in ((every, 0), (part, begin)):
        if (found := _cache.get(key)) is not None:
            return _keep(key, found).cut(begin - first, end - first)
    with opened(root, name, [column for column in columns if column not in optional], texts=texts) as parquet:
        there = [column for column in columns if column in parquet.schema_arrow.names]
        parquet.require_numbers(there)
        check_columns(parquet.metadata, there)

        def convert(table: pa.Table) -> RowRange:
            where = f"dataset '{root.url}': {name}"
            values = {column: to_numpy(table.column(column), f"{where}, column '{column}'") for column in there}
            return RowRange(values, parquet.metadata.num_rows)

        if _is_small(parquet, there):
            try:
                return _keep(every, convert(parquet.read(columns=there))).cut(begin, end)
            except PermissionError:
                raise
            except (ValueError, *UNREADABLE):  # the wanted rows may be readable even if others are not
                pass
        return _keep(part, convert(_slice(parquet, there, begin, end)))


def _keep(key: tuple, rows: RowRange) -> RowRange:
    """Put the rows at the end of the cache and remove the oldest ones."""
    with _lock:
        _cache[key] = rows
        _cache.move_to_end(key)
        while len(_cache) > 1 and (
            len(_cache) > CACHED_FILES or sum(one.num_bytes for one in _cache.values()) > CACHED_BYTES
        ):
            _cache.popitem(last=False)
    return rows


def _is_small(parquet: pq.ParquetFile, columns: Sequence[str]) -> bool:
    """True if the decoded columns are small, judged by the number of values, not encoded sizes."""
    numbers, total = leaves(parquet.metadata.schema, columns), 0
    for group in map(parquet.metadata.row_group, range(parquet.num_row_groups)):
        chunks = map(group.column, numbers)
        total += sum(max(chunk.num_values * 8, chunk.total_uncompressed_size) for chunk in chunks)
        if total > COMPLETE_FILE_BYTES:
            return False
    return True


def _slice(parquet: pq.ParquetFile, columns: Sequence[str], begin: int, end: int) -> pa.Table:
    sizes = [parquet.metadata.row_group(number).num_rows for number in range(parquet.num_row_groups)]
    ends = np.cumsum(sizes)
    groups = np.flatnonzero((ends > begin) & (ends - sizes < end))
    at = int(ends[groups[0]] - sizes[groups[0]]) if len(groups) else 0
    parts = [parquet.schema_arrow.empty_table().select(list(columns))]
    for batch in parquet.iter_batches(BATCH_ROWS, list(columns), groups.tolist()):
        low, high = max(begin - at, 0), min(end - at, len(batch))
        at += len(batch)
        if low < high:
            parts.append(pa.Table.from_batches([batch.slice(low, high - low)]).select(list(columns)))
        if at >= end:
            break
    return pa.concat_tables(parts)


def to_numpy(column: pa.ChunkedArray, where: str) -> np.ndarray:
    """Return (N,) for scalars, (N, D) or (N, D, E) for lists of equal length."""
    array = column.combine_chunks()
    _check_no_nulls(array, where)
    rows, shape = len(array), []
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        flat = array.flatten()
        size, rest = divmod(len(flat), max(len(array), 1))
        if rest or (not pa.types.is_fixed_size_list(array.type) and (np.diff(array.offsets.to_numpy()) != size).any()):
            raise ValueError(f"{where}: its lists have different lengths; every row must have the same shape")
        shape.append(size)
        array = flat
        _check_no_nulls(array, where)
    if pa.types.is_dictionary(array.type):
        array.dictionary.validate(full=True)  # it may hold bytes that are no text
        known = np.array([*array.dictionary.to_pylist(), None], dtype=object)  # None: a table without rows has no text
        return known[array.indices.to_numpy(zero_copy_only=False)].reshape(rows, *shape)
    return array.to_numpy(zero_copy_only=False).reshape(rows, *shape)


def _check_no_nulls(array: pa.Array, where: str) -> None:
    """Reject nulls at every depth; flattening skips null lists, which would shift later rows."""
    if array.null_count:
        raise ValueError(f"{where}: {array.null_count} values are null; every row must have a value")
