"""Columns whose values or types run code where Arrow restores them; nothing of Ray is needed to write one.

An extension type is a note on a field, and takes effect in a process that knows its name.
"""

import os
import pickle
from pathlib import Path
from typing import Any

from place import Make, Place

PICKLED, TENSOR = "ray.data.arrow_pickled_object", "ray.data.arrow_tensor"


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.marker),)


def pickled(file: str, name: str, *, deep: bool = False) -> Make:
    """Pickled objects in the place of a column, or in one more; `deep` puts them into lists."""

    def make(place: Place) -> None:
        import pyarrow as pa

        value = pickle.dumps(Payload(place.marker))
        inner = _noted("item" if deep else name, pa.large_binary(), PICKLED)
        field = pa.field(name, pa.list_(inner)) if deep else inner
        _put(place.dataset / file, field, [value] if deep else value)

    return make


def pickled_type(file: str, name: str) -> Make:
    """A column whose type itself is a pickle: no value of it needs to be looked at."""

    def make(place: Place) -> None:
        import pyarrow as pa

        note = pickle.dumps(Payload(place.marker))
        _put(place.dataset / file, _noted(name, pa.list_(pa.int64()), TENSOR, note), [1])

    return make


def of_type(file: str, name: str, kind: Any, value: Any) -> Make:
    """A column of an odd type; `kind` is called, as pyarrow is imported late."""

    def make(place: Place) -> None:
        import pyarrow as pa

        _put(place.dataset / file, pa.field(name, kind()), value)

    return make


def _noted(name: str, storage: Any, extension: str, note: bytes = b"") -> Any:
    import pyarrow as pa

    notes = {b"ARROW:extension:name": extension.encode(), b"ARROW:extension:metadata": note}
    return pa.field(name, storage, metadata=notes)


def _put(path: Path, field: Any, value: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    at = table.column_names.index(field.name) if field.name in table.column_names else len(table.column_names)
    kept = table.drop_columns([field.name]) if field.name in table.column_names else table
    pq.write_table(kept.add_column(at, field, pa.array([value] * len(table), field.type)), path)
