"""Parquet columns to numpy: plain types and lists of one shape; other columns are rejected."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlatune.data.tables import CACHED_FILES, read_rows, to_numpy
from vlatune.storage.root import Root


def write(folder: Path, name: str = "rows.parquet", **columns) -> Root:
    pq.write_table(pa.table(columns), folder / name)
    return Root(str(folder))


def read_columns(root: Root, name: str, columns: list[str]) -> dict[str, np.ndarray]:
    return read_rows(root, name, columns, 0, 1 << 30).columns


def in_one_chunk(array: pa.Array) -> pa.ChunkedArray:
    return pa.chunked_array([array])


def test_scalars_keep_their_type(tmp_path):
    root = write(tmp_path, index=pa.array([3, 4, 5]), timestamp=pa.array([0.0, 0.1, 0.2], pa.float32()))
    columns = read_columns(root, "rows.parquet", ["timestamp", "index"])
    assert list(columns) == ["timestamp", "index"]
    assert columns["index"].dtype == np.int64
    assert columns["timestamp"].dtype == np.float32
    assert columns["index"].tolist() == [3, 4, 5]


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.large_list(pa.float32()), pa.list_(pa.float32(), 2)])
def test_lists_of_one_length_become_a_second_axis(kind, tmp_path):
    root = write(tmp_path, action=pa.array([[0, 1], [2, 3], [4, 5]], kind))
    action = read_columns(root, "rows.parquet", ["action"])["action"]
    assert action.dtype == np.float32
    assert action.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_nested_lists_become_a_third_axis():
    values = np.arange(12).reshape(2, 3, 2)
    assert np.array_equal(to_numpy(in_one_chunk(pa.array(values.tolist())), "x"), values)


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.list_(pa.int64(), 2)])
def test_slices_are_converted(kind):
    column = in_one_chunk(pa.array([[0, 1], [2, 3], [4, 5], [6, 7]], kind)).slice(1, 2)
    assert to_numpy(column, "x").tolist() == [[2, 3], [4, 5]]


def test_chunks_are_joined():
    column = pa.chunked_array([pa.array([[1, 2]]), pa.array([[3, 4], [5, 6]])])
    assert to_numpy(column, "x").tolist() == [[1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize(
    "rows",
    [[[1, 2], [3]], [[1, 2], [3, 4, 5], [6]], [[[1, 2], [3, 4]], [[5, 6, 7], [8]]]],
    ids=["short", "even", "deep"],
)
def test_lists_of_different_lengths_are_rejected(rows):
    with pytest.raises(ValueError, match="file x, column 'a': its lists have different lengths; every row must have"):
        to_numpy(in_one_chunk(pa.array(rows)), "file x, column 'a'")


@pytest.mark.parametrize(
    "array",
    [
        pa.array([1, None, 3]),
        pa.array([[1, None], [3, 4]]),
        pa.array([[1, 2], None]),
        pa.array([[1, 2], None], pa.list_(pa.int64(), 2)),
        pa.array([[[1, 2], None], [[3, 4], [5, 6]]]),
    ],
    ids=["scalar", "inside", "list", "fixed list", "deep"],
)
def test_nulls_are_rejected(array):
    with pytest.raises(ValueError, match="file x, column 'a': 1 values are null; every row must"):
        to_numpy(in_one_chunk(array), "file x, column 'a'")


def test_a_missing_column_is_named_with_those_that_are_there(tmp_path):
    root = write(tmp_path, index=pa.array([1]), actions=pa.array([2]))
    message = r"rows.parquet lacks the column 'action' \(it has index, actions\)"
    with pytest.raises(ValueError, match=message) as caught:
        read_columns(root, "rows.parquet", ["index", "action"])
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("damage", ["missing", "empty", "text", "truncated", "inside"])
def test_a_file_that_is_not_readable_is_named(damage, tmp_path):
    root, file = write(tmp_path, index=np.random.default_rng(0).integers(0, 2**60, 5000)), tmp_path / "rows.parquet"
    data = file.read_bytes()
    damaged = {
        "empty": b"",
        "text": b"not parquet",
        "truncated": data[:-100],
        "inside": data[:4] + bytes(196) + data[200:],
    }
    file.write_bytes(damaged[damage]) if damage in damaged else file.unlink()
    with pytest.raises(
        ValueError, match=r"rows.parquet is (missing|not readable parquet .*); .*the dataset again"
    ) as caught:
        read_columns(root, "rows.parquet", ["index"])
    assert str(tmp_path) in str(caught.value)


def test_converted_files_are_cached(tmp_path):
    root = write(tmp_path, index=pa.array([1, 2]))
    first, second = (read_columns(root, "rows.parquet", ["index"])["index"] for _ in range(2))
    assert np.shares_memory(first, second)


def test_a_file_that_was_replaced_is_read_again(tmp_path):
    root = write(tmp_path, index=pa.array([1, 2]))
    read_columns(root, "rows.parquet", ["index"])
    write(tmp_path, index=pa.array([3, 4]))
    os.utime(tmp_path / "rows.parquet", ns=(1, 1))  # another time, however coarse the clock
    assert read_columns(root, "rows.parquet", ["index"])["index"].tolist() == [3, 4]


def test_the_least_recently_used_file_is_evicted(tmp_path):
    names = [f"{number}.parquet" for number in range(CACHED_FILES + 1)]
    for number, name in enumerate(names):
        root = write(tmp_path, name, index=pa.array([number]))

    def read(name: str) -> np.ndarray:
        return read_columns(root, name, ["index"])["index"]

    first = [read(name) for name in names[:-1]]
    assert np.shares_memory(read(names[0]), first[0])  # used again: now names[1] is the oldest
    read(names[-1])
    assert np.shares_memory(read(names[0]), first[0])
    assert not np.shares_memory(read(names[1]), first[1])


def test_a_denied_file_is_not_reported_as_damaged(tmp_path, monkeypatch):
    root = write(tmp_path, index=pa.array([1]))

    def deny(self: Root, name: str):
        raise PermissionError(f"'{name}': access denied")

    monkeypatch.setattr(Root, "open", deny)
    for read in (
        lambda: read_columns(root, "rows.parquet", ["index"]),
        lambda: read_rows(root, "rows.parquet", ["index"], 0, 1),
    ):
        with pytest.raises(PermissionError, match="access denied"):
            read()


def test_valid_rows_are_read_from_a_file_with_invalid_ones(tmp_path):
    root = write(tmp_path, index=pa.array([0, 1, None, 3]))
    rows = read_rows(root, "rows.parquet", ["index"], 0, 2)
    assert rows.columns["index"].tolist() == [0, 1]
    assert rows.file_rows == 4
    with pytest.raises(ValueError, match=r"rows.parquet, column 'index': 1 values are null"):
        read_rows(root, "rows.parquet", ["index"], 2, 4)
