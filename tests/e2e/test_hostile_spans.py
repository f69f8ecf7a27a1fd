"""Two episodes of equal length whose spans in the videos are swapped, so that each shows the other's images."""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlatune import cli
from vlatune.demo.generate import SyntheticSpec, make_dataset

EPISODES, CAMERA = "meta/episodes/chunk-000/file-000.parquet", "observation.images.top"
SPAN = [f"videos/{CAMERA}/{name}" for name in ("chunk_index", "file_index", "from_timestamp", "to_timestamp")]


@pytest.fixture(scope="module")
def equal_lengths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("equal") / "dataset"
    make_dataset(folder, SyntheticSpec(episodes=4, frames=6, episodes_per_file=2, height=64, width=64))
    return folder


def swap_spans(dataset: Path, first: int, second: int) -> None:
    table = pq.read_table(dataset / EPISODES)
    for name in SPAN:
        values = table.column(name).to_pylist()
        values[first], values[second] = values[second], values[first]
        at = table.column_names.index(name)
        table = table.set_column(at, name, pa.array(values, table.schema.field(name).type))
    pq.write_table(table, dataset / EPISODES)


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 2)], ids=["in one file", "in two files"])
def test_swapped_spans_are_an_error(first, second, equal_lengths, small_base, tmp_path, capsys) -> None:
    dataset = Path(shutil.copytree(equal_lengths, tmp_path / "dataset"))
    swap_spans(dataset, first, second)
    assert cli.main(["inspect", str(dataset)]) == 1
    assert "1 error" in capsys.readouterr().out
    flags = [f"--dataset.root={dataset}", f"--policy.path={small_base}", f"--output_dir={tmp_path / 'out'}"]
    assert cli.main(["train", *flags, "--batch_size=4", "--steps=1"]) == 2
    message = capsys.readouterr().err
    assert all(f"episode {number}" in message or f"{number}" in message for number in (first, second))
    assert "observation.images" in message
