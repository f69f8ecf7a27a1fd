"""`vlatune inspect` of very many episodes: it reads meta/ and lists folders, and opens few files."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from vlatune import cli
from vlatune.dataset.synthetic.generate import SyntheticSpec, make_dataset

FEW = 100
EPISODES, DATA, VIDEO = "meta/episodes/chunk-000", "data/chunk-000/file-000.parquet", "chunk-000/file-000.mp4"


def make_many(folder: Path, times: int) -> Path:
    """A dataset of 100 episodes, so many times: each time with a data file and, per camera, an mp4 file of its own."""
    make_dataset(folder, SyntheticSpec(episodes=FEW, frames=3, episodes_per_file=FEW, height=64, width=64))
    info = json.loads((folder / "meta/info.json").read_text())
    frames = info["total_frames"]
    cameras = [name for name, feature in info["features"].items() if feature["dtype"] == "video"]
    data, episodes = pq.read_table(folder / DATA), pq.read_table(folder / EPISODES / "file-000.parquet")
    parts = []
    for number in range(times):
        chunk, file = divmod(number, 1000)
        moved = {"data/chunk_index": chunk, "data/file_index": file}
        moved |= {
            f"videos/{camera}/{what}": value
            for camera in cameras
            for what, value in (("chunk_index", chunk), ("file_index", file))
        }
        part = _shifted(
            episodes, {"episode_index": FEW, "dataset_from_index": frames, "dataset_to_index": frames}, number
        )
        parts.append(_set(part, moved))
        if number:
            _write(_shifted(data, {"index": frames, "episode_index": FEW}, number), folder / _at(DATA, chunk, file))
            for camera in cameras:
                target = folder / "videos" / camera / _at(VIDEO, chunk, file)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(folder / "videos" / camera / VIDEO, target)
    pq.write_table(pa.concat_tables(parts).combine_chunks(), folder / EPISODES / "file-000.parquet")
    info |= {"total_episodes": FEW * times, "total_frames": frames * times}
    (folder / "meta/info.json").write_text(json.dumps(info))
    return folder


def _shifted(table: pa.Table, by: dict[str, int], times: int) -> pa.Table:
    for name, step in by.items():
        if name in table.column_names:
            kind = table.schema.field(name).type
            table = table.set_column(
                table.column_names.index(name), name, pc.add(table[name], pa.scalar(step * times, kind)).cast(kind)
            )
    return table


def _set(table: pa.Table, values: dict[str, int]) -> pa.Table:
    for name, value in values.items():
        kind = table.schema.field(name).type
        table = table.set_column(table.column_names.index(name), name, pa.array([value] * len(table), kind))
    return table


def _write(table: pa.Table, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


def _at(name: str, chunk: int, file: int) -> str:
    return name.replace("chunk-000", f"chunk-{chunk:03d}").replace("file-000", f"file-{file:03d}")


def test_many_episodes_are_inspected(tmp_path, capsys) -> None:
    folder = make_many(tmp_path / "many", 20)
    assert cli.main(["inspect", str(folder), "--json=true"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert found["episodes"]["count"] == 2000
    assert [camera["files"] for camera in found["cameras"]] == [20, 20]


@pytest.mark.slow
def test_a_hundred_thousand_episodes_take_ten_seconds(tmp_path) -> None:
    folder = make_many(tmp_path / "many", 1000)
    begin = time.perf_counter()
    command = [sys.executable, "-m", "vlatune.cli", "inspect", str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": ":".join(sys.path)}
    )
    seconds = time.perf_counter() - begin
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert "no problems found" in done.stdout
    assert "100,000" in done.stdout.replace("100000", "100,000")
    print(f"inspect of 10^5 episodes: {seconds:.1f} s")  # noqa: T201
    assert seconds < 10
