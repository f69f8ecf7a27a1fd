"""Write a LeRobot dataset, v3.0 or v2.1, episode by episode.

The caller supplies the task, vectors and images of each episode; the writer produces rows, mp4
files, statistics and `meta/` as LeRobot 0.6 records them (v3.0), or as its v2.1 to v3.0 converter
reads them (v2.1). Images are streamed to the encoders, and equal input gives equal bytes. LeRobot's
own writer stores every image as a file first, which takes several times as long.

v3.0 stores several episodes per file, v2.1 one. In v3.0, data and video files start at different
episodes, as in recorded datasets, to expose readers that mix them up:

    episode      0  1  2  3        episodes_per_file=2
    data file    0  0  0  1
    video file   0  0  1  1

Statistics are exact, whereas LeRobot averages per-episode quantiles, which moves q01 and q99 inwards.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Self, cast

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from av.video.frame import PictureType
from av.video.stream import VideoStream

from vlatune.data.meta.stats import QUANTILES, compute_stats

PIX_FMT = "yuv420p"
GOP = 2
"""Keyframe interval in frames; LeRobot's default, which makes random access cheap."""
MIN_SIDE = 64
"""Minimum image side in pixels; libx265 corrupts the heap on smaller images."""
IMAGE_STATS_FRAMES, IMAGE_STATS_SIDE = 8, 24
"""Images per episode and camera, and rows and columns of pixels of each, that enter the image
statistics."""
CHUNK_FILES = 1000
"""Files per chunk folder."""
PATHS = {
    "v3.0": (
        "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    ),
    "v2.1": (
        "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    ),
}
"""Version -> templates of data and video files."""
INDEX_COLUMNS = {
    "timestamp": np.float32,
    "frame_index": np.int64,
    "episode_index": np.int64,
    "index": np.int64,
    "task_index": np.int64,
}
"""Columns that LeRobot adds to every row."""


@dataclass(frozen=True)
class Encoder:
    library: str
    """Name of the encoder in FFmpeg."""
    preset: str
    crf: int
    options: dict[str, str]
    """Options for single-threaded, silent encoding with keyframes on request."""


# Chosen so that frame ids survive encoding. av1 uses LeRobot's preset and quality; without
# `pred-struct=1` it occasionally drops a changed cell. h264 output is not reproducible with the
# macroblock tree enabled.
ENCODERS = {
    "h264": Encoder("libx264", "veryfast", 23, {"threads": "1", "forced-idr": "1", "x264-params": "log=-1:mbtree=0"}),
    "hevc": Encoder(
        "libx265", "ultrafast", 26, {"forced-idr": "1", "x265-params": "pools=none:frame-threads=1:log-level=none"}
    ),
    "av1": Encoder("libsvtav1", "12", 30, {"svtav1-params": "lp=1:scm=0:pred-struct=1"}),
}


class VideoWriter:
    """Writes one mp4 file with LeRobot's settings; frame n is shown at n/fps seconds."""

    def __init__(self, path: Path, encoder: Encoder, *, fps: int, height: int, width: int) -> None:
        os.environ.setdefault("SVT_LOG", "1")  # read by libsvtav1 on first use: errors only
        options = {"g": str(GOP), "crf": str(encoder.crf), "preset": encoder.preset, **encoder.options}
        self._container = av.open(str(path), "w", options={"movflags": "faststart"})
        self._stream = cast(VideoStream, self._container.add_stream(encoder.library, rate=fps, options=options))
        self._stream.height, self._stream.width, self._stream.pix_fmt = height, width, PIX_FMT
        self._time_base = Fraction(1, fps)
        self._num_frames = 0

    def write(self, image_HWC: np.ndarray, *, keyframe: bool) -> None:
        """Append an RGB image, encoded as a keyframe if `keyframe` is set."""
        frame = av.VideoFrame.from_ndarray(image_HWC, format="rgb24")
        frame.pts, frame.time_base = self._num_frames, self._time_base
        if keyframe:
            frame.pict_type = PictureType.I
        self._num_frames += 1
        with keep_scheduling_policy():
            self._container.mux(self._stream.encode(frame))

    def close(self) -> None:
        self._container.mux(self._stream.encode())
        self._container.close()


@contextmanager
def keep_scheduling_policy() -> Iterator[None]:
    """Restore the scheduling policy of the calling thread.

    libsvtav1 running as root makes the calling thread real-time, and child processes inherit it: a
    Ray cluster started later would starve other processes.
    """
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        if os.sched_getscheduler(0) != policy:
            os.sched_setscheduler(0, policy, priority)


@dataclass(frozen=True)
class DatasetFormat:
    version: str
    fps: int
    vectors: dict[str, tuple[str, ...]]
    """Maps each vector feature to the names of its dims."""
    video_keys: tuple[str, ...]
    height: int
    width: int
    codec: str
    episodes_per_file: int = 1
    """Episodes per video file in v3.0; a data file holds 1.5 times as many if they are several."""


class DatasetWriter:
    """Writes episodes; leaving the context without an error writes `meta/`."""

    def __init__(self, folder: Path, form: DatasetFormat) -> None:
        self._folder, self._form = folder, form
        self._per_video = form.episodes_per_file if form.version == "v3.0" else 1
        self._per_data = math.ceil(1.5 * self._per_video) if self._per_video > 1 else 1
        self._tasks: dict[str, int] = {}
        self._episodes: list[dict[str, Any]] = []
        self._stats: list[dict[str, dict[str, Any]]] = []
        self._rows: list[dict[str, np.ndarray]] = []
        self._num_rows, self._video_frames = 0, 0
        self._pixels: dict[str, list[np.ndarray]] = {key: [] for key in form.video_keys}
        self._open: dict[str, tuple[int, Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for number_and_file in self._open.values():
            number_and_file[1].close()
        if error is None:
            self._write_meta()

    def add_episode(
        self, task: str, vectors: Mapping[str, np.ndarray], videos: Mapping[str, Iterable[np.ndarray]]
    ) -> None:
        """Append an episode: vectors of shape (length, dims) and `length` RGB images per video."""
        number, length = len(self._episodes), len(next(iter(vectors.values())))
        index = {
            "timestamp": np.arange(length) / self._form.fps,
            "frame_index": np.arange(length),
            "episode_index": np.full(length, number),
            "index": np.arange(length) + self._num_rows,
            "task_index": np.full(length, self._tasks.setdefault(task, len(self._tasks))),
        }
        rows = {**vectors, **{key: index[key].astype(dtype) for key, dtype in INDEX_COLUMNS.items()}}
        self._file("data", number // self._per_data, self._open_data).write_table(
            pa.table({key: _as_array(values) for key, values in rows.items()})
        )
        stats = {key: _column_stats(values) for key, values in rows.items()}
        for key, images in videos.items():
            video = self._file(key, number // self._per_video, self._open_video)
            self._pixels[key].append(_write_video(video, images, length))
            stats[key] = _pixel_stats(self._pixels[key][-1], min(length, IMAGE_STATS_FRAMES))
        self._rows.append(rows)
        self._stats.append(stats)
        self._episodes.append(self._episode_row(number, task, length))
        self._num_rows += length

    def _episode_row(self, number: int, task: str, length: int) -> dict[str, Any]:
        """Make a row of meta/episodes: the episode, its files, its offsets in them."""
        begin = 0 if number % self._per_video == 0 else self._video_frames
        self._video_frames = begin + length
        row: dict[str, Any] = {"episode_index": number, "tasks": [task], "length": length}
        if self._form.version == "v2.1":
            return row
        row["data/chunk_index"], row["data/file_index"] = divmod(number // self._per_data, CHUNK_FILES)
        row["dataset_from_index"], row["dataset_to_index"] = self._num_rows, self._num_rows + length
        for key in self._form.video_keys:
            at = f"videos/{key}/"
            row[f"{at}chunk_index"], row[f"{at}file_index"] = divmod(number // self._per_video, CHUNK_FILES)
            row[f"{at}from_timestamp"] = begin / self._form.fps
            row[f"{at}to_timestamp"] = self._video_frames / self._form.fps
        return row

    def _file(self, key: str, number: int, make: Callable[[Path], Any]) -> Any:
        """Return file `number` of the data ("data") or of a camera; the one before it is closed."""
        before, file = self._open.get(key, (None, None))
        if before != number:
            if file is not None:
                file.close()
            chunk, in_chunk = divmod(number, CHUNK_FILES)
            path = self._folder / PATHS[self._form.version][key != "data"].format(
                video_key=key, chunk_index=chunk, file_index=in_chunk, episode_chunk=chunk, episode_index=number
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open[key] = (number, file := make(path))
        return file

    def _open_data(self, path: Path) -> pq.ParquetWriter:
        vectors = {key: pa.list_(pa.float32(), len(names)) for key, names in self._form.vectors.items()}
        index = {key: pa.from_numpy_dtype(dtype) for key, dtype in INDEX_COLUMNS.items()}
        return pq.ParquetWriter(path, pa.schema(vectors | index))

    def _open_video(self, path: Path) -> VideoWriter:
        form = self._form
        return VideoWriter(path, ENCODERS[form.codec], fps=form.fps, height=form.height, width=form.width)

    def _write_meta(self) -> None:
        meta, num_episodes = self._folder / "meta", len(self._episodes)
        meta.mkdir()
        info: dict[str, Any] = {
            "codebase_version": self._form.version,
            "robot_type": "synthetic",
            "fps": self._form.fps,
            "total_episodes": num_episodes,
            "total_frames": self._num_rows,
            "total_tasks": len(self._tasks),
            "chunks_size": CHUNK_FILES,
            "splits": {"train": f"0:{num_episodes}"},
            **dict(zip(("data_path", "video_path"), PATHS[self._form.version], strict=True)),
            "features": _features(self._form),
        }
        if self._form.version == "v3.0":
            info |= {"data_files_size_in_mb": 100, "video_files_size_in_mb": 200}
            self._write_v30(meta)
        else:
            chunks = math.ceil(num_episodes / CHUNK_FILES)
            info |= {"total_videos": num_episodes * len(self._form.video_keys), "total_chunks": chunks}
            self._write_v21(meta)
        _write_json(meta / "info.json", info)

    def _write_v30(self, meta: Path) -> None:
        columns = {key: np.concatenate([rows[key] for rows in self._rows]) for key in self._rows[0]}
        stats = {key: _column_stats(values) for key, values in columns.items()}
        for key, pixels in self._pixels.items():
            num_images = sum(of_episode[key]["count"][0] for of_episode in self._stats)
            stats[key] = _pixel_stats(np.concatenate(pixels), num_images)
        _write_json(meta / "stats.json", stats)
        pq.write_table(_tasks_table(list(self._tasks)), meta / "tasks.parquet")
        rows = [
            row
            | {f"stats/{key}/{name}": value for key, of in stats.items() for name, value in of.items()}
            | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
            for row, stats in zip(self._episodes, self._stats, strict=True)
        ]
        (meta / "episodes/chunk-000").mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), meta / "episodes/chunk-000/file-000.parquet")

    def _write_v21(self, meta: Path) -> None:
        lines: dict[str, list[dict[str, Any]]] = {
            "tasks": [{"task_index": number, "task": task} for task, number in self._tasks.items()],
            "episodes": self._episodes,
            "episodes_stats": [
                {
                    "episode_index": number,
                    "stats": {
                        key: {name: value for name, value in of.items() if name not in QUANTILES}  # v2.1 has none
                        for key, of in stats.items()
                    },
                }
                for number, stats in enumerate(self._stats)
            ],
        }
        for name, rows in lines.items():
            (meta / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_video(video: VideoWriter, images: Iterable[np.ndarray], length: int) -> np.ndarray:
    """Encode an episode, the first image as a keyframe; return pixels of a few images, (N, 3)."""
    sampled = set(np.linspace(0, length - 1, IMAGE_STATS_FRAMES).round().astype(int).tolist())
    pixels = []
    for frame_index, image_HWC in enumerate(images):
        video.write(image_HWC, keyframe=frame_index == 0)
        if frame_index in sampled:
            step = max(1, min(image_HWC.shape[:2]) // IMAGE_STATS_SIDE)
            pixels.append(image_HWC[::step, ::step].reshape(-1, 3))
    return np.concatenate(pixels)


def _column_stats(values: np.ndarray) -> dict[str, Any]:
    stats = compute_stats(values.reshape(len(values), -1))
    return {name: value.tolist() for name, value in stats.items()} | {"count": [len(values)]}


def _pixel_stats(pixels_N3: np.ndarray, num_images: int) -> dict[str, Any]:
    """Return statistics per channel, nested as (3, 1, 1), scaled to 0..1; `count` is in images."""
    stats = compute_stats(pixels_N3 / 255.0)
    return {name: value.reshape(3, 1, 1).tolist() for name, value in stats.items()} | {"count": [num_images]}


def _as_array(values: np.ndarray) -> pa.Array:
    if values.ndim == 1:
        return pa.array(values)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def _features(form: DatasetFormat) -> dict[str, dict[str, Any]]:
    vectors = {
        key: {"dtype": "float32", "shape": [len(names)], "names": list(names)} for key, names in form.vectors.items()
    }
    encoder = ENCODERS[form.codec]
    info = {
        "video.height": form.height,
        "video.width": form.width,
        "video.codec": form.codec,
        "video.pix_fmt": PIX_FMT,
        "video.fps": form.fps,
        "video.channels": 3,
        "has_audio": False,
        "video.g": GOP,
        "video.crf": encoder.crf,
        "video.preset": encoder.preset,
        "video.fast_decode": 0,
        "video.video_backend": "pyav",
        "video.extra_options": {},
        "is_depth_map": False,
    }
    shape = {"shape": [form.height, form.width, 3], "names": ["height", "width", "channels"]}
    videos = {key: {"dtype": "video", **shape, "info": info} for key in form.video_keys}
    index = {key: {"dtype": np.dtype(dtype).name, "shape": [1], "names": None} for key, dtype in INDEX_COLUMNS.items()}
    return {**vectors, **videos, **index}


def _tasks_table(tasks: list[str]) -> pa.Table:
    """Make the task table with the pandas metadata through which LeRobot finds the index column."""
    index = {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object", "metadata": None}
    notes = {"index_columns": ["task"], "column_indexes": [], "columns": [index]}
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks, pa.string())})
    return table.replace_schema_metadata({"pandas": json.dumps(notes)})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")
