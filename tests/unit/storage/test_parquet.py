"""Untrusted parquet files run no code, are read by parquet's own types, and cannot understate their pages."""

import ast
import base64
import io
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from repository_files import ROOT
from unit.storage.pickled_columns import put_pickled_type, put_pickles

from vlatune.data.meta.dataset_meta import load_meta
from vlatune.data.tables import read_rows
from vlatune.storage.limits import TooMuchError
from vlatune.storage.parquet import SCHEMA_KEY, PageGuard, open_parquet, opened
from vlatune.storage.root import Root

TASKS, EPISODES = "meta/tasks.parquet", "meta/episodes/chunk-000/file-000.parquet"
SRC = ROOT / "src/vlatune"


def read_columns(root: Root, name: str, columns: list[str]) -> dict[str, np.ndarray]:
    return read_rows(root, name, columns, 0, 1 << 30).columns


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "code-ran"


def test_the_payload_runs_in_plain_pyarrow(tmp_path, marker) -> None:
    """The other tests would prove nothing with a payload that does not work."""
    import ray.data  # noqa: F401 (registers the type)

    pq.write_table(pa.table({"a": [1]}), tmp_path / "one.parquet")
    put_pickles(tmp_path / "one.parquet", "b", marker)
    pq.read_table(tmp_path / "one.parquet").column("b").to_pylist()
    assert marker.exists()


@pytest.mark.parametrize(
    ("file", "column", "nested"),
    [(TASKS, "task", False), (TASKS, "note", True), (EPISODES, "tasks", True), (EPISODES, "length", False)],
)
def test_pickled_values_are_never_unpickled(file, column, nested, dataset_v3, tmp_path, marker) -> None:
    import ray.data  # noqa: F401 (registers the type)

    folder = Path(shutil.copytree(dataset_v3, tmp_path / "dataset"))
    put_pickles(folder / file, column, marker, nested=nested)
    if column in ("task", "length"):  # the others are not read as numbers or text, and are ignored
        with pytest.raises(ValueError, match=f"{file}.*(task_index 0|'length')"):
            load_meta(str(folder))
    else:
        load_meta(str(folder))
    assert not marker.exists()


def test_a_pickled_type_is_never_restored(dataset_v3, tmp_path, marker) -> None:
    """Ray has a switch for its older files; with it, parsing the schema alone would run code."""
    folder = Path(shutil.copytree(dataset_v3, tmp_path / "dataset"))
    put_pickled_type(folder / TASKS, "note", marker)
    call = "import sys, ray.data; from vlatune.data.meta.dataset_meta import load_meta; load_meta(sys.argv[1])"
    env = {"RAY_DATA_AUTOLOAD_CLOUDPICKLE_TENSOR_METADATA": "1", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", call, str(folder)], env=env, check=True)
    assert not marker.exists()


@pytest.mark.parametrize("note", [b"", b"not a schema", b"\xff\xff\xff\xff\x10\x00\x00\x00" + b"\xff" * 16])
def test_a_damaged_arrow_schema_is_ignored(note, tmp_path) -> None:
    table = pa.table({"x": [1, 2]})
    with pq.ParquetWriter(tmp_path / "rows.parquet", table.schema, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({SCHEMA_KEY: base64.b64encode(note)})
    assert read_columns(Root(str(tmp_path)), "rows.parquet", ["x"])["x"].tolist() == [1, 2]


def test_columns_are_read_by_parquets_own_types(tmp_path) -> None:
    columns = {
        "index": pa.array([0, 1]),
        "flag": pa.array([True, False]),
        "half": pa.array(np.zeros(2, np.float16)),
        "time": pa.array([0, 1], pa.timestamp("us")),
        "fixed": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)),
        "nothing": pa.nulls(2),
        "text": pa.array(["a", "b"], pa.large_string()),
        "image": pa.array([{"bytes": b"1", "path": "1.png"}, {"bytes": b"2", "path": None}]),
        "pairs": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
        "json": pa.array(['{"a": 1}', "2"], pa.json_()),
        "category": pa.array(["a", "b"]).dictionary_encode(),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    numbers = ["index", "flag", "half", "time", "fixed", "nothing"]
    with opened(Root(str(tmp_path)), "rows.parquet", numbers) as parquet:
        assert parquet.read(numbers).to_pylist() == pa.table(columns).select(numbers).to_pylist()
        assert parquet.text_columns == columns.keys() - set(numbers)
    for name in columns.keys() - set(numbers):
        with opened(Root(str(tmp_path)), "rows.parquet", texts=[name]) as parquet:
            assert parquet.read([name]).column(0).to_pylist() == columns[name].to_pylist()
    for name in ("text", "image", "pairs", "json", "category"):
        with pytest.raises(ValueError, match=f"rows.parquet, column '{name}' holds text"):
            read_columns(Root(str(tmp_path)), "rows.parquet", [name])


def test_two_dimensional_features_are_read_as_nested_lists(tmp_path) -> None:
    """LeRobot writes them with an extension type of Hugging Face datasets."""
    import datasets

    features = datasets.Features({"a": datasets.Array2D((2, 3), "float32")})
    values = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    datasets.Dataset.from_dict({"a": values.tolist()}, features=features).to_parquet(tmp_path / "rows.parquet")
    assert isinstance(pq.read_schema(tmp_path / "rows.parquet").field("a").type, pa.ExtensionType)
    assert np.array_equal(read_columns(Root(str(tmp_path)), "rows.parquet", ["a"])["a"], values)


def test_a_footer_longer_than_the_first_read(tmp_path) -> None:
    wide = pa.table({f"column-{number:04d}": [number] for number in range(1000)})
    pq.write_table(wide, tmp_path / "rows.parquet")
    with (tmp_path / "rows.parquet").open("rb") as file:
        assert open_parquet(file).read().to_pylist() == wide.to_pylist()


def test_pages_beyond_the_footers_numbers_are_rejected() -> None:
    """Also if another column was announced before the first one was read."""
    honest, small = io.BytesIO(), io.BytesIO()
    pq.write_table(pa.table({"a": np.arange(50_000), "b": np.arange(50_000)}), honest, use_dictionary=False)
    pq.write_table(pa.table({"a": np.arange(10), "b": np.arange(10)}), small, use_dictionary=False)
    guard = PageGuard(honest, _with_sizes_of(honest, small))
    guard.expect(0, ["a"])
    guard.expect(0, ["b"])
    guard.seek(4)
    with pytest.raises(TooMuchError, match=r"column 'a': its pages hold at least [\d,]+ values .* states 10 and"):
        guard.read(1 << 20)


def _with_sizes_of(honest: io.BytesIO, small: io.BytesIO) -> pq.FileMetaData:
    """Return the metadata of `small`, whose first column also begins at byte 4, as in `honest`."""
    assert all(pq.read_metadata(one).row_group(0).column(0).data_page_offset == 4 for one in (honest, small))
    return pq.read_metadata(small)


READERS = {"ParquetFile", "ParquetDataset", "read_table", "read_schema", "read_metadata", "read_pandas", "read_parquet"}
OTHER_FORMATS = {"pyarrow.dataset", "pyarrow.feather", "pyarrow.orc", "pyarrow.ipc"}
BOXING = {"to_pylist", "as_py", "to_pydict", "to_pandas"}
"""Calls that pass values to the code of a registered type."""


def test_all_parquet_files_are_opened_by_storage_parquet() -> None:
    for path in set(SRC.rglob("*.py")) - {SRC / "storage/parquet.py"}:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls, imports = set(_calls(tree)), set(_imports(tree))
        assert not calls & READERS, f"{path}: use vlatune.storage.parquet.opened"
        assert not imports & OTHER_FORMATS, path
        assert not calls & BOXING or "vlatune.storage.parquet" in imports, path


def _calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            yield node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))
