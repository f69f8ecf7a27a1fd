"""Datasets with the shape of public recordings, written as real parquet and mp4 files.

Each function writes one dataset into a new folder. What they have in common is small: four episodes of about a dozen frames,
64x64, one task.
"""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from recording_writer import TOP, write_recording

TASK, CAMERA = "fold the towel", TOP
DEPTH, AUDIO = "observation.images.top_depth", "observation.audio.microphone"


def write_base(folder: Path, *, version: str = "v2.1", dims: int = 6, **options: Any) -> Path:
    names = tuple(f"joint_{number}" for number in range(dims))
    return write_recording(folder, names, version=version, task=TASK, **options)


def _change_rows(folder: Path, change: Callable[[pa.Table, int], pa.Table]) -> None:
    for number, file in enumerate(sorted((folder / "data").glob("*/*.parquet"))):
        pq.write_table(change(pq.read_table(file), number), file)


def _change_features(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "meta/info.json"
    info = json.loads(file.read_text())
    change(info["features"])
    file.write_text(json.dumps(info, indent=4))


def _with_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, values)


def wall_clock(folder: Path) -> Path:
    """v2.1; rows are stamped by a clock that drifts away from the frames, as many as rows, by nine of them."""
    write_base(folder)

    def change(table: pa.Table, _: int) -> pa.Table:
        clock = table.column("timestamp").to_numpy() * 1.7 + np.random.default_rng(1).uniform(0, 0.004, len(table))
        return _with_column(table, "timestamp", pa.array(clock.astype(np.float32)))

    _change_rows(folder, change)
    return folder


def missing_columns(folder: Path) -> Path:
    """v2.1; neither `index` nor `task_index`, in the files or in info.json, and lists of float64 for float32."""
    write_base(folder)

    def change(table: pa.Table, _: int) -> pa.Table:
        for name in ("observation.state", "action"):
            table = _with_column(table, name, table.column(name).cast(pa.list_(pa.float64())))
        return table.drop_columns(["index", "task_index"])

    _change_rows(folder, change)
    _change_features(folder, lambda features: [features.pop(name) for name in ("index", "task_index")])
    return folder


def many_dims(folder: Path) -> Path:
    """A humanoid of 34 joints, two more than the PI policies take."""
    return write_base(folder, version="v3.0", dims=34)


def nested_names(folder: Path) -> Path:
    """Names of dims as a list in a list, and as a dict of lists."""
    write_base(folder, version="v3.0")

    def change(features: dict[str, Any]) -> None:
        names = features["action"]["names"]
        features["action"]["names"] = [names]
        features["observation.state"]["names"] = {"left": names[:3], "right": names[3:]}

    _change_features(folder, change)
    return folder


def missing_videos(folder: Path) -> Path:
    """v2.1; one mp4 file was never uploaded."""
    write_base(folder)
    next((folder / "videos").glob(f"*/{CAMERA}/episode_000002.mp4")).unlink()
    return folder


def images_in_parquet(folder: Path) -> Path:
    """v2.1; PNG images in the rows, and no mp4 file."""
    write_base(folder)
    for file in (folder / "videos").glob("*/*/*.mp4"):
        file.unlink()

    def change(table: pa.Table, _: int) -> pa.Table:
        frames = [np.full((64, 64, 3), 4 * at, np.uint8) for at in range(len(table))]
        images = [{"bytes": _png(image), "path": f"frame_{at:06d}.png"} for at, image in enumerate(frames)]
        return table.append_column(CAMERA, pa.array(images))

    _change_rows(folder, change)
    _change_features(folder, lambda features: (features[CAMERA].update(dtype="image"), features[CAMERA].pop("info")))
    return folder


def _png(image: np.ndarray) -> bytes:
    with io.BytesIO() as file:
        Image.fromarray(image).save(file, "PNG")
        return file.getvalue()


def hevc(folder: Path) -> Path:
    return write_base(folder, version="v3.0", codec="hevc")


def depth_and_audio(folder: Path) -> Path:
    """v2.1; a depth camera, of which a file is missing, and a microphone whose sound lies in files of its own."""
    write_base(folder, cameras=(CAMERA, DEPTH))
    next((folder / "videos").glob(f"*/{DEPTH}/episode_000001.mp4")).unlink()

    def change(features: dict[str, Any]) -> None:
        features[DEPTH]["info"]["is_depth_map"] = True
        features[AUDIO] = {"dtype": "audio", "shape": [1], "names": ["channels"], "info": {"audio.sample_rate": 16000}}

    _change_features(folder, change)
    return folder


RECORDINGS: dict[str, Callable[[Path], Path]] = {
    one.__name__: one
    for one in (
        wall_clock,
        missing_columns,
        many_dims,
        nested_names,
        missing_videos,
        images_in_parquet,
        hevc,
        depth_and_audio,
    )
}
