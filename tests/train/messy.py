"""Datasets as people record them: other names, one episode per file, `to_timestamp` one frame short."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlatune.dataset.synthetic.writer import DatasetFormat, DatasetWriter
from vlatune.dataset.synthetic.writer_meta import plan_places

FPS, SIDE = 10, 64


def write_recording(
    folder: Path,
    *,
    names: Mapping[str, str],
    colour: tuple[int, int, int],
    task: str,
    lengths: tuple[int, ...] = (14, 12, 13, 11),
    seed: int = 0,
) -> Path:
    """`names` says what state, action and camera are called; every picture has about one colour."""
    form = DatasetFormat(
        version="v3.0",
        fps=FPS,
        vectors={names["state"]: ("x", "y", "z"), names["action"]: ("dx", "dy")},
        video_keys=(names["camera"],),
        height=SIDE,
        width=SIDE,
        codec="h264",
    )
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    with DatasetWriter(folder, form) as writer:
        for place in plan_places(lengths, per_data_file=1, per_video_file=1):
            vectors = {
                names["state"]: rng.normal(seed, 1, (place.length, 3)).astype(np.float32),
                names["action"]: rng.normal(-seed, 2, (place.length, 2)).astype(np.float32),
            }
            writer.add_episode(place, task, vectors, {names["camera"]: _film(colour, place.length)})
        writer.finish()
    _end_at_the_last_frame(folder / "meta/episodes/chunk-000/file-000.parquet")
    return folder


def _film(colour: tuple[int, int, int], length: int) -> Iterator[np.ndarray]:
    for frame in range(length):
        picture = np.full((SIDE, SIDE, 3), colour, np.uint8)
        picture[:4, : 2 * frame + 2] = 255
        yield picture


def _end_at_the_last_frame(file: Path) -> None:
    table = pq.read_table(file)
    for number, name in enumerate(table.column_names):
        if name.endswith("/to_timestamp"):
            short = pa.array(np.asarray(table.column(name)) - 1 / FPS)
            table = table.set_column(number, name, short)
    pq.write_table(table, file)


def rows_of(folder: Path, column: str) -> np.ndarray:
    """All rows of a feature, read without vlatune."""
    files = sorted((folder / "data").glob("*/*.parquet"))
    return np.array([row for file in files for row in pq.read_table(file).column(column).to_pylist()], np.float32)
