"""A LeRobot dataset, v3.0 or v2.1, written episode by episode.

The caller brings vectors, pictures and the sentence of each episode; from them come rows, mp4 files, statistics and,
at the end, `meta/`. Pictures stream into the encoders, so memory grows with the rows only. The same input gives the
same bytes.

Statistics are exact. LeRobot estimates quantiles from a histogram per episode and averages them over the episodes,
which pulls q01 and q99 inwards: a recorded dataset's quantiles differ from those of its rows, these do not.

`VideoWriter` puts frames into an mp4 file as LeRobot records them: 4:2:0 colour, a keyframe every second frame. Encoders run on one thread and without a clock. Nothing is printed. A writer
holds a few frames, however long the film is.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol, Self, cast

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from av.video.frame import PictureType
from av.video.stream import VideoStream

from vlatune.dataset.meta.stats import compute_stats
from vlatune.dataset.synthetic.writer_meta import (
    LAYOUTS,
    DatasetSummary,
    EpisodePlace,
    EpisodeSummary,
    PixelCounts,
    Stats,
    write_meta,
)

PIX_FMT = "yuv420p"
GOP = 2
"""Frames from one keyframe to the next; LeRobot's default, so that a random frame is cheap to reach."""
MIN_SIDE = 64
"""Pixels; libx265 corrupts the heap on smaller pictures (seen at 48x48)."""


@dataclass(frozen=True)
class Encoder:
    library: str
    """The encoder's name in FFmpeg."""
    preset: str
    crf: int
    alone: dict[str, str]
    """Options that keep it to one thread, quiet, and able to begin a new group of pictures on request."""


# Chosen so that frame ids survive. av1 has LeRobot's own preset and quality; without `pred-struct=1` it drops a change of
# a flat cell now and then (2 of 3,600 frames of the small world, 45 of 960 when every frame is a new picture). h264 gave
# different files for the same frames now and then; its macroblock tree is the suspect, and off.
ENCODERS = {
    "h264": Encoder("libx264", "veryfast", 23, {"threads": "1", "forced-idr": "1", "x264-params": "log=-1:mbtree=0"}),
    "hevc": Encoder(
        "libx265", "ultrafast", 26, {"forced-idr": "1", "x265-params": "pools=none:frame-threads=1:log-level=none"}
    ),
    "av1": Encoder("libsvtav1", "12", 30, {"svtav1-params": "lp=1:scm=0:pred-struct=1"}),
}


class VideoWriter:
    """One mp4 file that is being written; frame n is shown at n/fps seconds."""

    def __init__(self, path: Path, encoder: Encoder, *, fps: int, height: int, width: int) -> None:
        os.environ.setdefault("SVT_LOG", "1")  # libsvtav1 reads it on its first use: errors only
        options = {"g": str(GOP), "crf": str(encoder.crf), "preset": encoder.preset, **encoder.alone}
        self._container = av.open(str(path), "w", options={"movflags": "faststart"})
        self._stream = cast(VideoStream, self._container.add_stream(encoder.library, rate=fps, options=options))
        self._stream.height, self._stream.width, self._stream.pix_fmt = height, width, PIX_FMT
        self._time_base = Fraction(1, fps)
        self._num_frames = 0

    def write(self, image_HWC: np.ndarray, *, keyframe: bool) -> None:
        """Append an RGB picture; `keyframe` makes it one that decoding can begin at."""
        frame = av.VideoFrame.from_ndarray(image_HWC, format="rgb24")
        frame.pts, frame.time_base = self._num_frames, self._time_base
        if keyframe:
            frame.pict_type = PictureType.I
        self._num_frames += 1
        with own_schedule():
            self._container.mux(self._stream.encode(frame))

    def close(self) -> None:
        self._container.mux(self._stream.encode())
        self._container.close()


@contextmanager
def own_schedule() -> Iterator[None]:
    """libsvtav1, where root runs it, makes the calling thread a real-time one, and with it every process that is started
    later: a whole Ray cluster would take its cores from all others.
    """
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        if os.sched_getscheduler(0) != policy:
            os.sched_setscheduler(0, policy, priority)


IMAGE_STATS_FRAMES = 8
"""Pictures per episode and camera that enter the image statistics."""

INDEX_COLUMNS = {
    "timestamp": np.float32,
    "frame_index": np.int64,
    "episode_index": np.int64,
    "index": np.int64,
    "task_index": np.int64,
}
"""What LeRobot adds to every row."""


@dataclass(frozen=True)
class DatasetFormat:
    version: str
    fps: int
    vectors: dict[str, tuple[str, ...]]
    """Names of the values of each vector feature."""
    video_keys: tuple[str, ...]
    height: int
    width: int
    codec: str


class DatasetWriter:
    """Write each episode at its place, then `finish`; as a context it closes its files, whatever happens."""

    def __init__(self, folder: Path, form: DatasetFormat) -> None:
        self._folder, self._form = folder, form
        self._task_indices: dict[str, int] = {}
        self._episodes: list[EpisodeSummary] = []
        self._rows: list[dict[str, np.ndarray]] = []
        self._pixels = {key: PixelCounts() for key in form.video_keys}
        self._open_files = ExitStack()
        self._data = self._open_files.enter_context(closing(FileSequence(self._open_data)))
        self._videos = {key: self._open_files.enter_context(closing(self._video_files(key))) for key in form.video_keys}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open_files.close()

    def add_episode(
        self,
        place: EpisodePlace,
        task: str,
        vectors: Mapping[str, np.ndarray],
        films: Mapping[str, Iterable[np.ndarray]],
    ) -> None:
        """Append an episode; its vectors are (length, values) and its films yield `length` RGB pictures each."""
        task_index = self._task_indices.setdefault(task, len(self._task_indices))
        rows = {**vectors, **_index_columns(place, task_index, self._form.fps)}
        self._data.at(place.data_file).write_table(_as_table(rows))
        counts = {key: _write_film(self._videos[key].at(place.video_file), film, place) for key, film in films.items()}
        for key, count in counts.items():
            self._pixels[key].merge(count)
        self._rows.append(rows)
        self._episodes.append(EpisodeSummary(place, task, _feature_stats(rows, counts)))

    def finish(self) -> None:
        """Complete the files and write `meta/`."""
        self._open_files.close()
        columns = {key: np.concatenate([rows[key] for rows in self._rows]) for key in self._rows[0]}
        summary = DatasetSummary(
            version=self._form.version,
            fps=self._form.fps,
            features=_features(self._form),
            episodes=self._episodes,
            tasks=list(self._task_indices),
            stats=_feature_stats(columns, self._pixels),
        )
        write_meta(self._folder, summary)

    def _open_data(self, number: int) -> pq.ParquetWriter:
        path = self._folder / LAYOUTS[self._form.version].data_file(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        return pq.ParquetWriter(path, _schema(self._form))

    def _video_files(self, key: str) -> "FileSequence[VideoWriter]":
        form = self._form

        def open_video(number: int) -> VideoWriter:
            path = self._folder / LAYOUTS[form.version].video_file(number, key)
            path.parent.mkdir(parents=True, exist_ok=True)
            return VideoWriter(path, ENCODERS[form.codec], fps=form.fps, height=form.height, width=form.width)

        return FileSequence(open_video)


class Closable(Protocol):
    def close(self) -> None: ...


class FileSequence[File: Closable]:
    """Numbered files that are written one after the other: at most one is open."""

    def __init__(self, open_file: Callable[[int], File]) -> None:
        self._open_file = open_file
        self._open: tuple[int, File] | None = None

    def at(self, number: int) -> File:
        if self._open is None or self._open[0] != number:
            self.close()
            self._open = (number, self._open_file(number))
        return self._open[1]

    def close(self) -> None:
        if self._open is not None:
            (_, file), self._open = self._open, None
            file.close()


def _index_columns(place: EpisodePlace, task_index: int, fps: int) -> dict[str, np.ndarray]:
    frame_index = np.arange(place.length)
    values = {
        "timestamp": frame_index / fps,
        "frame_index": frame_index,
        "episode_index": np.full(place.length, place.episode_index),
        "index": frame_index + place.dataset_from_index,
        "task_index": np.full(place.length, task_index),
    }
    return {key: values[key].astype(dtype) for key, dtype in INDEX_COLUMNS.items()}


def _write_film(video: VideoWriter, film: Iterable[np.ndarray], place: EpisodePlace) -> PixelCounts:
    """Encode an episode's pictures and count the pixels of a few; as in LeRobot, an episode begins with a keyframe."""
    sampled = set(np.linspace(0, place.length - 1, IMAGE_STATS_FRAMES).round().astype(int).tolist())
    counts = PixelCounts()
    for frame_index, image_HWC in enumerate(film):
        video.write(image_HWC, keyframe=frame_index == 0)
        if frame_index in sampled:
            counts.add(image_HWC)
    return counts


def _feature_stats(columns: Mapping[str, np.ndarray], pixels: Mapping[str, PixelCounts]) -> dict[str, Stats]:
    of_columns = {key: _column_stats(values) for key, values in columns.items()}
    return of_columns | {key: counts.stats() for key, counts in pixels.items()}


def _column_stats(values: np.ndarray) -> Stats:
    return {**compute_stats(values.reshape(len(values), -1)), "count": np.array([len(values)])}


def _schema(form: DatasetFormat) -> pa.Schema:
    vectors = {key: pa.list_(pa.float32(), len(names)) for key, names in form.vectors.items()}
    return pa.schema(vectors | {key: pa.from_numpy_dtype(dtype) for key, dtype in INDEX_COLUMNS.items()})


def _as_table(columns: Mapping[str, np.ndarray]) -> pa.Table:
    return pa.table({key: _as_array(values) for key, values in columns.items()})


def _as_array(values: np.ndarray) -> pa.Array:
    if values.ndim == 1:
        return pa.array(values)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def _features(form: DatasetFormat) -> dict[str, dict[str, Any]]:
    """The `features` of info.json."""
    vectors = {
        key: {"dtype": "float32", "shape": [len(names)], "names": list(names)} for key, names in form.vectors.items()
    }
    video = {"dtype": "video", "shape": [form.height, form.width, 3], "names": ["height", "width", "channels"]}
    videos = {key: {**video, "info": _video_info(form)} for key in form.video_keys}
    added = {key: {"dtype": np.dtype(dtype).name, "shape": [1], "names": None} for key, dtype in INDEX_COLUMNS.items()}
    return {**vectors, **videos, **added}


def _video_info(form: DatasetFormat) -> dict[str, Any]:
    encoder = ENCODERS[form.codec]
    return {
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
