"""Parquet files that abort Arrow or expand a thousandfold in memory, read by commands in child processes."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from measured import measured

DATA, TASKS = "data/chunk-000/file-000.parquet", "meta/tasks.parquet"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
MAX_BYTES = 320 << 20
"""The interpreter and its imports take 120 to 200 MB."""


@pytest.fixture
def dataset(dataset_v3: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dataset_v3, tmp_path / "dataset"))


def shared_text(rows: int, chars: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), ["x" * chars])


def write(path: Path, columns: dict[str, Any], **options: Any) -> None:
    pq.write_table(pa.table(columns), path, store_schema=False, compression="zstd", **options)
    assert path.stat().st_size < 200_000


def text_of_all_tasks(dataset: Path) -> None:
    write(dataset / TASKS, {"task_index": np.arange(3000), "task": shared_text(3000, 1_000_000)})


def prefix_of_all_tasks(dataset: Path) -> None:
    """Each text is the one before it, and nothing more."""
    columns = {"task_index": np.arange(300), "task": ["x" * 1_000_000] * 300}
    write(dataset / TASKS, columns, use_dictionary=False, column_encoding={"task": "DELTA_BYTE_ARRAY"})


def text_of_all_row_groups(dataset: Path) -> None:
    columns = {"task_index": np.arange(12), "task": ["x" * 30_000_000] * 12}
    write(dataset / TASKS, columns, row_group_size=1)


def lists_of_one_text(dataset: Path) -> None:
    table = pq.read_table(dataset / EPISODES)
    values = shared_text(3000, 1_000_000)
    tasks = pa.ListArray.from_arrays(np.array([0, 3000, *[3000] * (len(table) - 1)], np.int32), values)
    columns = {name: table.column(name) for name in table.column_names} | {"tasks": tasks}
    write(dataset / EPISODES, columns)


def text_for_actions(dataset: Path) -> None:
    table = pq.read_table(dataset / DATA)
    columns = {name: table.column(name) for name in table.column_names} | {
        "action": shared_text(len(table), 30_000_000)
    }
    write(dataset / DATA, columns)


def long_fixed_values(dataset: Path) -> None:
    table = pq.read_table(dataset / DATA)
    values = pa.array([b"\0" * 10_000_000] * len(table), pa.binary(10_000_000))
    write(dataset / DATA, {name: table.column(name) for name in table.column_names} | {"action": values})


def check_rejected(dataset: Path, base: Path, inspected: str, trained: str) -> None:
    """`inspect` reports the dataset and `train` rejects it, both in little memory."""
    flags = (f"--dataset.root={dataset}", f"--policy.path={base}", f"--output_dir={dataset.parent / 'out'}")
    for code, text, words in ((1, inspected, ("inspect", dataset)), (2, trained, ("train", *flags, "--batch_size=4"))):
        ended = measured(*words)
        assert (ended.code, text in ended.text) == (code, True), ended.text
        assert "Traceback" not in ended.text
        assert ended.peak_bytes < MAX_BYTES


GROWING: dict[str, tuple[Callable[[Path], None], str]] = {
    "a text that 3,000 tasks share": (text_of_all_tasks, "1,000,000"),
    "a prefix that 300 tasks share": (prefix_of_all_tasks, "meta/tasks.parquet"),
    "a text in each of many row groups": (text_of_all_row_groups, "column 'task'"),
    "a text for actions": (text_for_actions, "column 'action'"),
    "fixed values for actions": (long_fixed_values, "column 'action'"),
}


@pytest.mark.parametrize(("make", "message"), GROWING.values(), ids=GROWING)
def test_a_small_file_does_not_fill_the_memory(make, message, dataset, small_base) -> None:
    make(dataset)
    check_rejected(dataset, small_base, "", message)


def test_a_list_of_one_long_text_is_never_expanded(dataset) -> None:
    """An episode's own texts are compared with the tasks; 3 GB of them are one of 1 MB."""
    lists_of_one_text(dataset)
    ended = measured("inspect", dataset)
    assert "Traceback" not in ended.text
    assert ended.peak_bytes < MAX_BYTES


def test_many_distinct_instructions_are_read(dataset) -> None:
    """More than fit into one dictionary page, so that plain pages follow it."""
    instructions = [f"{number} {'y' * 80}" for number in range(40_000)]
    pq.write_table(pa.table({"task_index": np.arange(40_000), "task": instructions}), dataset / TASKS)
    from vlatune.data.meta.dataset_meta import load_meta

    assert load_meta(str(dataset)).tasks == tuple(instructions)


@pytest.mark.parametrize("file", [DATA, EPISODES, TASKS])
def test_damaged_size_statistics_are_an_error_and_no_abort(file, dataset, small_base) -> None:
    """One byte of the footer makes a column required, which contradicts its histogram of levels."""
    path, name = dataset / file, {DATA: b"timestamp", EPISODES: b"length", TASKS: b"task_index"}[file]
    data, old = path.read_bytes(), b"\x25\x02\x18" + bytes([len(name)]) + name
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, old.replace(b"\x25\x02", b"\x25\x00")))
    damaged = "is not readable parquet (Definition level histogram"
    check_rejected(dataset, small_base, damaged, f"{file} is not readable parquet")


@pytest.mark.parametrize(("file", "name"), [(DATA, "action"), (EPISODES, "length"), (TASKS, "task")])
def test_two_columns_of_one_name_are_an_error(file, name, dataset, small_base) -> None:
    table = pq.read_table(dataset / file)
    pq.write_table(table.append_column(name, table.column(name)), dataset / file)
    found = f"2 columns are named '{name}'"
    check_rejected(dataset, small_base, found, f"{file}: {found}")
