"""Write parquet columns whose values or types run code when Arrow restores their extension type.

An extension type is a note on a field; it takes effect in a process that has registered its name.
"""

import os
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.marker),)


def put_pickles(path: Path, column: str, marker: Path, *, nested: bool = False) -> None:
    """Replace or add a column of pickled objects, or of lists of them."""
    field = _extension("item" if nested else column, pa.large_binary(), "ray.data.arrow_pickled_object")
    value = pickle.dumps(Payload(marker))
    _put(path, pa.field(column, pa.list_(field)) if nested else field, [value] if nested else value)


def put_pickled_type(path: Path, column: str, marker: Path) -> None:
    """Add a column whose type is a pickle, so that reading the schema would run it."""
    note = pickle.dumps(Payload(marker))
    _put(path, _extension(column, pa.list_(pa.int64()), "ray.data.arrow_tensor", note), [1])


def _extension(name: str, storage: pa.DataType, extension: str, note: bytes = b"") -> pa.Field:
    return pa.field(
        name, storage, metadata={b"ARROW:extension:name": extension.encode(), b"ARROW:extension:metadata": note}
    )


def _put(path: Path, field: pa.Field, value: object) -> None:
    table = pq.read_table(path)
    at = table.column_names.index(field.name) if field.name in table.column_names else len(table.column_names)
    rest = table.drop_columns([field.name]) if field.name in table.column_names else table
    pq.write_table(rest.add_column(at, field, pa.array([value] * len(table), field.type)), path)
