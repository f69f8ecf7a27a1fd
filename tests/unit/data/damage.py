"""Functions that damage the files of the small v3.0 dataset (`dataset_v3`).

Files 000 of data and videos: data has episodes 0 to 4 (5 and 6 are in 001), an mp4 0 to 2 (3 to 5 in 001, 6 in 002).
"""

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlatune.demo.writer import ENCODERS, VideoWriter

TOP, WRIST = "observation.images.top", "observation.images.wrist"
VIDEOS = f"videos/{TOP}/chunk-000"
DATA = "data/chunk-000"


def video(folder: Path, number: int = 0) -> Path:
    return folder / f"{VIDEOS}/file-{number:03d}.mp4"


def data(folder: Path, number: int = 0) -> Path:
    return folder / f"{DATA}/file-{number:03d}.parquet"


def cut(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])


def hide_moov(path: Path) -> None:
    """Remove the index, as in an interrupted recording."""
    content = path.read_bytes()
    assert content.count(b"moov") == 1
    path.write_bytes(content.replace(b"moov", b"void"))


def images_of(path: Path) -> list[np.ndarray]:
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def encode(path: Path, frames: list[np.ndarray], *, fps: int = 10, codec: str = "h264") -> None:
    height, width = frames[0].shape[:2]
    writer = VideoWriter(path, ENCODERS[codec], fps=fps, height=height, width=width)
    for frame in frames:
        writer.write(frame, keyframe=False)
    writer.close()


def enlarge(path: Path) -> None:
    """Encode the video at twice the size."""
    encode(path, [frame.repeat(2, axis=0).repeat(2, axis=1) for frame in images_of(path)])


def change_rate(path: Path, fps: int) -> None:
    encode(path, images_of(path), fps=fps)


def drop_frames(path: Path, count: int) -> None:
    encode(path, images_of(path)[:-count])


def drop_frame(path: Path, number: int) -> None:
    """Remove one frame; the others keep their times."""
    frames = images_of(path)
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=10, options={"g": "2", "bf": "0", "x264-params": "log=-1"})
        stream.height, stream.width, stream.pix_fmt = *frames[0].shape[:2], "yuv420p"
        for at, image in enumerate(frames):
            if at != number:
                frame = av.VideoFrame.from_ndarray(image, format="rgb24")
                frame.pts, frame.time_base = at, Fraction(1, 10)
                container.mux(stream.encode(frame))
        container.mux(stream.encode())


def change_column(path: Path, name: str, change: Callable[[np.ndarray, np.ndarray], Any]) -> None:
    """`change` gets the values of a column and the episode of each row."""
    table = pq.read_table(path)
    values = np.array(table.column(name).to_pylist())
    made = change(values, table.column("episode_index").to_numpy())
    new = pa.array(made.tolist() if isinstance(made, np.ndarray) else made, table.schema.field(name).type)
    pq.write_table(table.set_column(table.column_names.index(name), name, new), path)


def in_episode(number: int, value: Any) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return a change of all values of one episode."""
    return lambda values, episode: np.where(episode == number, value, values)


def cast_column(path: Path, name: str, kind: pa.DataType) -> None:
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.column_names.index(name), name, table.column(name).cast(kind)), path)


def drop_column(path: Path, name: str) -> None:
    pq.write_table(pq.read_table(path).drop_columns([name]), path)


def drop_row(path: Path, row: int) -> None:
    table = pq.read_table(path)
    pq.write_table(table.take([at for at in range(len(table)) if at != row]), path)


def change_info(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    info = json.loads((folder / "meta/info.json").read_text())
    change(info)
    (folder / "meta/info.json").write_text(json.dumps(info))
