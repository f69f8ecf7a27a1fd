"""Parquet files of a dataset -> numpy columns, converted once per file and kept for the next unit.

A read worker meets the same data file many times; the last few stay in memory (tabular columns alone:
about 100 bytes a row). Extension types are refused: reading them may run code that the file brought.
"""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlatune.dataset.storage import Root

CACHED_FILES = 4

_cache: OrderedDict[tuple, dict[str, np.ndarray]] = OrderedDict()


def read_columns(root: Root, name: str, columns: Sequence[str]) -> dict[str, np.ndarray]:
    """Columns of one data file; lists of equal length become a second axis."""
    key = (root.url, name, tuple(columns), _version_of(root, name))
    if key not in _cache:
        _cache[key] = _read(root, name, columns)
        while len(_cache) > CACHED_FILES:
            _cache.popitem(last=False)
    _cache.move_to_end(key)
    return _cache[key]


def _version_of(root: Root, name: str) -> int:
    """Changes when a local file is replaced, so that the cache is never stale."""
    path = Path(root.join(name))
    return path.stat().st_mtime_ns if root.is_local and path.exists() else 0


def _read(root: Root, name: str, columns: Sequence[str]) -> dict[str, np.ndarray]:
    where = f"dataset '{root.url}': {name}"
    try:
        with root.open(name) as file:
            parquet = pq.ParquetFile(file)
            missing = [column for column in columns if column not in parquet.schema_arrow.names]
            if missing:
                raise ValueError(
                    f"{where} lacks the column '{missing[0]}' that meta/info.json names; it has {', '.join(parquet.schema_arrow.names)}"
                )
            table = parquet.read(columns=list(columns))
    except FileNotFoundError as error:
        raise ValueError(f"{where} is missing; fetch the dataset anew") from error
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{where} is not readable parquet ({error}); fetch the dataset anew") from error
    return {column: to_numpy(table.column(column), f"{where}, column '{column}'") for column in columns}


def to_numpy(column: pa.ChunkedArray, where: str) -> np.ndarray:
    """(N,) for scalars, (N, D) or (N, D, E) for lists of equal length."""
    array = column.combine_chunks()
    _check_plain(array, where)
    rows, shape = len(array), []
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        flat = array.flatten()
        size, rest = divmod(len(flat), max(len(array), 1))
        if rest or (not pa.types.is_fixed_size_list(array.type) and not _equal_lengths(array, size)):
            raise ValueError(f"{where}: its lists have different lengths; every row must have the same shape")
        shape.append(size)
        array = flat
        _check_plain(array, where)
    return array.to_numpy(zero_copy_only=False).reshape(rows, *shape)


def _check_plain(array: pa.Array, where: str) -> None:
    """At every depth: flattening skips a list that is null, and the rows after it would move up."""
    if isinstance(array.type, pa.BaseExtensionType):
        raise ValueError(f"{where} has the extension type {array.type}; only plain types are read from a dataset")
    if array.null_count:
        raise ValueError(f"{where}: {array.null_count} values are null; every row must have a value")


def _equal_lengths(array: pa.ListArray, size: int) -> bool:
    offsets = array.offsets.to_numpy()
    return bool(np.all(np.diff(offsets) == size))
