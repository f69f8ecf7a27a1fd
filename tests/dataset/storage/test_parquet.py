"""The door for parquet files: which types come through it, at any depth, and that nobody goes around it."""

import ast
import base64
import io
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hostile_parquet import extension_field, pickled_field

from vlatune.dataset.storage import parquet as door
from vlatune.dataset.storage.parquet import NOTE, TAIL_BYTES, open_parquet, opened
from vlatune.dataset.storage.root import Root
from vlatune.dataset.storage.tables import read_columns

SRC = Path(__file__).parents[3] / "src/vlatune"
READERS = {"ParquetFile", "ParquetDataset", "read_table", "read_schema", "read_metadata", "read_pandas", "read_parquet"}
"""Of pyarrow.parquet and pandas."""
OTHER_FORMATS = {"pyarrow.dataset", "pyarrow.feather", "pyarrow.orc", "pyarrow.ipc"}
BOXING = {"to_pylist", "as_py", "to_pydict", "to_pandas"}
"""What hands values to Python, and so to the code of a registered type."""


def write(folder: Path, schema: pa.Schema) -> Root:
    pq.write_table(schema.empty_table(), folder / "rows.parquet")
    return Root(str(folder))


def refusal(root: Root) -> str:
    with pytest.raises(ValueError, match="which is not read") as caught, opened(root, "rows.parquet"):
        pass
    return str(caught.value)


DEEP = {
    "top": (pickled_field("x"), "x"),
    "list": (pa.field("x", pa.list_(pickled_field())), "x.item"),
    "large list": (pa.field("x", pa.large_list(pickled_field())), "x.item"),
    "fixed list": (pa.field("x", pa.list_(pickled_field(), 2)), "x.item"),
    "struct": (pa.field("x", pa.struct([("path", pa.string()), pickled_field("bytes")])), "x.bytes"),
    "map's value": (pa.field("x", pa.map_(pa.string(), pickled_field("value"))), "x.entries.value"),
    "struct in list in struct": (
        pa.field("x", pa.struct([("a", pa.list_(pa.struct([pickled_field("b")])))])),
        "x.a.item.b",
    ),
    "list inside an array of datasets": (
        extension_field("x", pa.list_(pa.list_(pickled_field())), "datasets.features.features.Array2DExtensionType"),
        "x.item.item",
    ),
}


@pytest.mark.parametrize(("field", "path"), DEEP.values(), ids=DEEP)
def test_extension_types_are_refused_at_any_depth(field, path, tmp_path):
    told = refusal(write(tmp_path, pa.schema([("index", pa.int64()), field])))
    assert told.startswith(f"dataset '{tmp_path}': rows.parquet: column '{path}' ")
    assert "has the extension type 'ray.data.arrow_pickled_object'" in told
    assert "a column holds numbers, text, bytes or times, or lists and structs of them" in told


@pytest.mark.parametrize(
    "kind",
    [
        pa.dictionary(pa.int32(), pa.string()),
        pa.list_(pa.dictionary(pa.int32(), pa.string())),
        pa.struct([("a", pa.dictionary(pa.int8(), pa.int64()))]),
        pa.uuid(),
        pa.fixed_shape_tensor(pa.float32(), [2, 3]),
        pa.opaque(pa.binary(), "object", "someone"),
    ],
    ids=str,
)
def test_types_that_are_not_plain_are_refused(kind, tmp_path):
    assert "column 'x" in refusal(write(tmp_path, pa.schema([("x", kind)])))


def test_what_parquet_cannot_store_but_a_note_may_claim_is_refused(tmp_path):
    """A union in the note of a file whose column is a number."""
    claimed = pa.schema([("x", pa.dense_union([pa.field("a", pa.int64())]))])
    assert "has the type dense_union" in refusal(with_note(tmp_path, claimed.serialize().to_pybytes()))


@pytest.mark.parametrize("note", [b"", b"no schema at all", b"\xff\xff\xff\xff\x10\x00\x00\x00" + b"\xff" * 16])
def test_a_damaged_note_is_told(note, tmp_path):
    with pytest.raises(ValueError, match=r"rows.parquet is not readable parquet .*; fetch the dataset anew"):
        read_columns(with_note(tmp_path, note), "rows.parquet", ["x"])


def with_note(folder: Path, note: bytes) -> Root:
    """A file with one number column that says this of its Arrow types."""
    table = pa.table({"x": [1, 2]})
    with pq.ParquetWriter(folder / "rows.parquet", table.schema, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({NOTE: base64.b64encode(note)})
    return Root(str(folder))


def test_plain_types_are_read_by_their_storage(tmp_path):
    columns = {
        "index": pa.array([0, 1]),
        "flag": pa.array([True, False]),
        "half": pa.array(np.zeros(2, np.float16)),
        "time": pa.array([0, 1], pa.timestamp("us")),
        "text": pa.array(["a", "b"], pa.large_string()),
        "fixed": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)),
        "picture": pa.array([{"bytes": b"1", "path": "1.png"}, {"bytes": b"2", "path": None}]),
        "pairs": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
        "nothing": pa.nulls(2),
        "said": pa.array(['{"a": 1}', "2"], pa.json_()),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    with opened(Root(str(tmp_path)), "rows.parquet", list(columns)) as parquet:
        rows = parquet.read().to_pylist()
    assert rows == pa.table(columns).to_pylist()


def test_arrays_of_datasets_are_read_as_lists_of_lists(tmp_path):
    """LeRobot's features of two axes."""
    import datasets

    features = datasets.Features({"a": datasets.Array2D((2, 3), "float32")})
    values = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    datasets.Dataset.from_dict({"a": values.tolist()}, features=features).to_parquet(tmp_path / "rows.parquet")
    assert isinstance(pq.read_schema(tmp_path / "rows.parquet").field("a").type, pa.ExtensionType)
    assert np.array_equal(read_columns(Root(str(tmp_path)), "rows.parquet", ["a"])["a"], values)


def test_a_long_footer_is_read_whole(tmp_path):
    wide = pa.table({f"column-{number:04d}": [number] for number in range(1000)})
    pq.write_table(wide, tmp_path / "rows.parquet")
    with (tmp_path / "rows.parquet").open("rb") as file:
        assert open_parquet(file).read().to_pylist() == wide.to_pylist()


class Recorded(io.BytesIO):
    """A file that notes which bytes were asked for."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.seen: set[int] = set()

    def read(self, size: int | None = -1, /) -> bytes:
        begin = self.tell()
        data = super().read(size)
        self.seen.update(range(begin // 4096, -(-(begin + len(data)) // 4096)))
        return data


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("is_small", [True, False])
def test_pages_are_checked_among_the_bytes_that_are_read_anyway(version, is_small) -> None:
    rows = 500 if is_small else 60_000
    table = pa.table({"a": np.arange(rows), "b": [f"{one * 7919}" for one in range(rows)], "c": [[1.5] * 3] * rows})
    file = io.BytesIO()
    pq.write_table(
        table, file, row_group_size=rows // 3, data_page_size=4096, data_page_version=version, use_dictionary=["a"]
    )
    for columns in (["a"], ["a", "b", "c"], None):
        ours, plain = Recorded(file.getvalue()), Recorded(file.getvalue())
        found = open_parquet(ours).read(columns)
        pq.ParquetFile(plain, buffer_size=1 << 20, pre_buffer=False).read(columns)
        assert found.equals(table.select(columns or table.column_names))
        tail = set(range(max(0, len(file.getvalue()) - TAIL_BYTES) // 4096, len(file.getvalue()) // 4096 + 1))
        assert ours.seen <= plain.seen | tail, "bytes that Arrow does not need"


def test_a_reader_that_goes_on_after_another_began_is_checked_too() -> None:
    file = io.BytesIO()
    pq.write_table(pa.table({"a": np.arange(3000), "b": np.arange(3000)}), file, row_group_size=1000)
    parquet = open_parquet(file)
    with mock.patch.object(door, "check_pages", wraps=door.check_pages) as checked:
        first, second = (parquet.iter_batches(100, row_groups=[0, 1], columns=[name]) for name in ("a", "b"))
        next(first)
        next(second)
        assert sum(map(len, first)) + sum(map(len, second)) == 3800
    met = {pages for call in checked.call_args_list for pages in call.args[1]}
    assert sorted(pages._chunk.path_in_schema for pages in met) == ["a", "a", "b", "b"]
    assert all(pages.is_done for pages in met)


def calls_in(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            yield node.lineno, node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id


def imports_in(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_nobody_goes_around_the_door():
    door = SRC / "dataset/storage/parquet.py"
    for path in sorted(set(SRC.rglob("*.py")) - {door}):
        around = [f"{path}:{line}: {name}" for line, name in calls_in(path) if name in READERS]
        assert not around, "open it with vlatune.dataset.storage.parquet.opened"
        assert not imports_in(path) & OTHER_FORMATS, (
            f"{path}: datasets are parquet, read through dataset/storage/parquet.py"
        )


def test_values_are_handed_to_python_only_by_those_who_came_through_the_door():
    for path in sorted(SRC.rglob("*.py")):
        boxing = [f"{path}:{line}: {name}" for line, name in calls_in(path) if name in BOXING]
        assert not boxing or "vlatune.dataset.storage.parquet" in imports_in(path), boxing
