"""A unit of work -> rows: parquet values joined with decoded frames, written once into a block's buffers.

A unit is some frames of one episode, in rising order. Each camera's mp4 is opened once per unit; pictures in
parquet are streamed from it. Nothing here knows of Ray, torch or the policy: `ReadSpec` says what is wanted, `Unit` says where it lies, and
`read_into` fills rows of columns that `allocate` made.

Windows, from a frame and its offsets to row numbers and pad masks:

    episode of 5 frames, offsets 0..3, frame 3:   frames 3 4 4 4   pad . . x x
                                                             ^clamped to the last frame

LeRobot clamps at both ends of the episode and marks what it clamped; so do we.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vlatune.batch import SLOT, TASK, Columns
from vlatune.dataset.health.row_checks import (
    check_finite,
    check_index,
    check_length,
    check_tasks,
    check_times,
    check_vector,
)
from vlatune.dataset.meta.dataset_meta import DatasetMeta
from vlatune.dataset.meta.listing import missing_remedy
from vlatune.dataset.storage.feature_files import FeatureFiles, FeatureRow
from vlatune.dataset.storage.root import Root
from vlatune.dataset.storage.tables import read_rows
from vlatune.dataset.video.decoder import VideoPlace, decode_into
from vlatune.dataset.video.images import read_images_into
from vlatune.dataset.video.recorded import Recorded
from vlatune.dataset.video.resize import CENTRED, Letterbox, PictureTransform, Spread

INDEX_COLUMNS = ("index", "episode_index", "frame_index", "timestamp", "task_index")


@dataclass(frozen=True)
class CameraSpec:
    name: str
    kind: str
    """`video` or `image`; `features` where what was kept of the pictures is read in place of them."""
    height: int
    width: int
    """Size of the delivered picture."""
    offsets: tuple[int, ...] | None = None
    """Frames around each row to deliver, as a second axis; only the row's own when None."""
    recorded: Recorded | None = None
    """What info.json says of the pictures; not checked when None."""
    called: str | None = None
    """Name of the delivered column; the dataset's own when None."""
    letterbox: Letterbox = CENTRED
    """How pictures get the delivered size."""
    kept: FeatureFiles | None = None
    """Where features are."""

    @property
    def column(self) -> str:
        return self.called or self.name

    def empty(self, *shape: int) -> np.ndarray:
        """Room for so many of what is delivered of a picture, with nothing in it."""
        if self.kept is not None:
            return np.empty((*shape, *self.kept.row.shape), dtype=self.kept.row.column_dtype)
        return np.empty((*shape, 3, self.height, self.width), dtype=np.uint8)


@dataclass(frozen=True)
class VectorSpec:
    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None = None
    recorded_dtype: str | None = None
    """The dtype in info.json; not checked when None."""
    called: str | None = None
    """Name of the delivered column; the dataset's own when None."""
    widened: int | None = None
    """Dims of the delivered vector, those beyond the dataset's zero; the dataset's own when None."""

    @property
    def column(self) -> str:
        return self.called or self.name

    @property
    def delivered_shape(self) -> tuple[int, ...]:
        return self.shape if self.widened is None else (self.widened,)


@dataclass(frozen=True)
class ReadSpec:
    """What to read from one dataset."""

    root: Root
    dataset_index: int
    tolerance_s: float
    cameras: tuple[CameraSpec, ...]
    vectors: tuple[VectorSpec, ...]
    tasks: tuple[str, ...]
    absent: tuple[CameraSpec, ...] = ()
    """Cameras of other datasets that this one lacks: their columns are there, black."""


def augmented(specs: Sequence[ReadSpec], before: tuple[PictureTransform, ...]) -> tuple[ReadSpec, ...]:
    """The same, with something done to every picture before it is resized."""
    if not before:
        return tuple(specs)
    changed = [[replace(c, letterbox=replace(c.letterbox, before=before)) for c in spec.cameras] for spec in specs]
    return tuple(replace(spec, cameras=tuple(cameras)) for spec, cameras in zip(specs, changed, strict=True))


def from_features(specs: Sequence[ReadSpec], root: Root, row: FeatureRow) -> tuple[ReadSpec, ...]:
    """The same, with features in place of every picture."""
    changed = [
        [
            replace(camera, kind="features", kept=FeatureFiles(root, f"{spec.dataset_index}/{number}", row))
            for number, camera in enumerate(spec.cameras)
        ]
        for spec in specs
    ]
    return tuple(replace(spec, cameras=tuple(cameras)) for spec, cameras in zip(specs, changed, strict=True))


@dataclass(frozen=True)
class Unit:
    """Some frames of one episode, with all that is needed to find them."""

    dataset_index: int
    episode_index: int
    length: int
    from_row: int
    data_path: str
    data_offset: int
    videos: tuple[tuple[str, str, float], ...]
    """(camera, file, the episode's start in it in seconds)."""
    frames: np.ndarray
    slots: np.ndarray
    """Where each row belongs in the consumer's order."""
    task: int = -1
    """As `Episodes.task`."""


def make_unit(meta: DatasetMeta, spec: ReadSpec, position: int, frames: np.ndarray, slots: np.ndarray) -> Unit:
    """The unit for `frames` of the episode at `position` of the dataset's table."""
    episodes = meta.episodes
    videos = tuple(
        (camera.name, meta.video_path(position, camera.name), float(episodes.videos[camera.name].from_s[position]))
        for camera in spec.cameras
        if camera.kind == "video"
    )
    return Unit(
        dataset_index=spec.dataset_index,
        episode_index=int(episodes.index[position]),
        length=int(episodes.length[position]),
        from_row=int(episodes.from_row[position]),
        data_path=meta.data_path(position),
        data_offset=int(episodes.data_offset[position]),
        videos=videos,
        frames=frames,
        slots=slots,
        task=-1 if episodes.task is None else int(episodes.task[position]),
    )


def allocate(spec: ReadSpec, rows: int) -> Columns:
    """Buffers for `rows` rows, with nothing in them: pages that are zeroed first cost a read task more than resizing."""
    columns: Columns = {}
    for camera in (*spec.cameras, *spec.absent):
        window = () if camera.offsets is None else (len(camera.offsets),)
        columns[camera.column] = camera.empty(rows, *window)
        if camera.offsets is not None:
            columns[f"{camera.column}_is_pad"] = np.empty((rows, len(camera.offsets)), dtype=bool)
    for vector in spec.vectors:
        window = () if vector.offsets is None else (len(vector.offsets),)
        columns[vector.column] = np.empty((rows, *window, *vector.delivered_shape), dtype=vector.dtype)
        if vector.offsets is not None:
            columns[f"{vector.column}_is_pad"] = np.empty((rows, len(vector.offsets)), dtype=bool)
    for name in ("dataset_index", "index", "episode_index", "frame_index", "task_index", SLOT):
        columns[name] = np.empty(rows, dtype=np.int64)
    columns["timestamp"] = np.empty(rows, dtype=np.float32)
    columns[TASK] = np.empty(rows, dtype=object)
    return columns


def read_into(spec: ReadSpec, unit: Unit, columns: Columns, at: int) -> None:
    """Fill rows [at, at + len(unit.frames)) of the buffers."""
    rows = slice(at, at + len(unit.frames))
    values = _read_values(spec, unit)
    columns["dataset_index"][rows] = unit.dataset_index
    columns[SLOT][rows] = unit.slots
    for name in INDEX_COLUMNS:
        columns[name][rows] = values[name][unit.frames]
    columns[TASK][rows] = [spec.tasks[number] for number in values["task_index"][unit.frames]]
    for vector in spec.vectors:
        _read_vector(vector, unit, values[vector.name], columns, rows)
    timestamps = values["timestamp"].astype(np.float64)
    for camera in spec.cameras:
        _read_camera(spec, camera, unit, timestamps, columns, rows)
    for camera in spec.absent:
        columns[camera.column][rows] = 0
        if camera.offsets is not None:
            columns[f"{camera.column}_is_pad"][rows] = window_frames(unit.frames, camera.offsets, unit.length)[1]


def read_units(specs: Sequence[ReadSpec] | Mapping[int, ReadSpec], units: Sequence[Unit]) -> Columns:
    """The units' rows, one after the other; `specs` by their dataset's number."""
    columns = allocate(specs[units[0].dataset_index], sum(len(unit.frames) for unit in units))
    at = 0
    for unit in units:
        read_into(specs[unit.dataset_index], unit, columns, at)
        at += len(unit.frames)
    return columns


def read_unit(spec: ReadSpec, unit: Unit) -> Columns:
    """One unit in buffers of its own."""
    return read_units({unit.dataset_index: spec}, [unit])


def column_names(spec: ReadSpec) -> list[str]:
    """The columns of a data file that are read."""
    return [*INDEX_COLUMNS, *(vector.name for vector in spec.vectors)]


def place_of(spec: ReadSpec, unit: Unit) -> str:
    """Dataset, episode and data file, for messages."""
    return f"dataset '{spec.root.url}': episode {unit.episode_index}, {unit.data_path}"


def check_rows(spec: ReadSpec, unit: Unit, values: Mapping[str, np.ndarray], file_rows: int) -> None:
    """Refuse rows that are not the episode's, or not of the form that meta/ says; `values` are all of its rows."""
    where = place_of(spec, unit)
    check_length(where, file_rows, unit.data_offset, unit.data_offset + unit.length)
    check_index(where, values, episode_index=unit.episode_index, from_row=unit.from_row, begin=unit.data_offset)
    check_times(where, values["timestamp"])
    check_tasks(where, values["task_index"], spec.tasks, unit.task)
    for vector in spec.vectors:
        check_vector(where, vector.name, values[vector.name], shape=vector.shape, recorded_dtype=vector.recorded_dtype)
        check_finite(where, vector.name, values[vector.name])


def _read_values(spec: ReadSpec, unit: Unit) -> dict[str, np.ndarray]:
    """The columns of all rows of the unit's episode, checked."""
    end = unit.data_offset + unit.length
    try:
        table = read_rows(spec.root, unit.data_path, column_names(spec), unit.data_offset, end)
    except ValueError as error:  # it names the file, not the episode
        said = str(error).removeprefix(f"dataset '{spec.root.url}': ")
        raise ValueError(f"dataset '{spec.root.url}': episode {unit.episode_index}: {said}") from error
    first = unit.data_offset - table.begin
    values = {name: column[first : first + unit.length] for name, column in table.columns.items()}
    check_rows(spec, unit, values, table.file_rows)
    return values


def _read_vector(vector: VectorSpec, unit: Unit, values: np.ndarray, columns: Columns, rows: slice) -> None:
    values = values.reshape(len(values), *vector.shape)
    if vector.widened is not None:
        values = np.pad(values, ((0, 0), (0, vector.widened - vector.shape[0])))
    if vector.offsets is None:
        columns[vector.column][rows] = values[unit.frames]
        return
    frames_NT, is_pad_NT = window_frames(unit.frames, vector.offsets, unit.length)
    columns[vector.column][rows] = values[frames_NT]
    columns[f"{vector.column}_is_pad"][rows] = is_pad_NT


def _read_camera(
    spec: ReadSpec, camera: CameraSpec, unit: Unit, timestamps: np.ndarray, columns: Columns, rows: slice
) -> None:
    out = columns[camera.column][rows]
    if camera.offsets is None and not camera.letterbox.before:
        _read_frames(spec, camera, unit, timestamps, unit.frames, out)
        return
    frames_NT, is_pad_NT = window_frames(unit.frames, camera.offsets or (0,), unit.length)
    _read_each_once(spec, camera, unit, timestamps, frames_NT, out if camera.offsets else out[:, None])
    if camera.offsets is not None:
        columns[f"{camera.column}_is_pad"][rows] = is_pad_NT


def _read_each_once(
    spec: ReadSpec,
    camera: CameraSpec,
    unit: Unit,
    timestamps: np.ndarray,
    frames_NT: np.ndarray,
    out_NTCHW: np.ndarray,
) -> None:
    """A frame that several rows look at is decoded once, and goes to each of them; what is done to it before it is resized
    depends on the row that it is for.
    """
    distinct = np.unique(frames_NT)
    if not camera.letterbox.before:
        decoded = camera.empty(len(distinct))
        _read_frames(spec, camera, unit, timestamps, distinct, decoded)
        out_NTCHW[:] = decoded[np.searchsorted(distinct, frames_NT)]
        return
    of_row = [replace(camera.letterbox, slot=int(slot)) for slot in unit.slots]
    places = (np.argwhere(frames_NT == frame) for frame in distinct)
    targets = ([(of_row[row], out_NTCHW[row, nth]) for row, nth in where] for where in places)
    spread = replace(camera, letterbox=Spread(targets=targets))
    _read_frames(spec, spread, unit, timestamps, distinct, np.empty((len(distinct), 0), dtype=np.uint8))


def _read_frames(
    spec: ReadSpec, camera: CameraSpec, unit: Unit, timestamps: np.ndarray, frames: np.ndarray, out: np.ndarray
) -> None:
    if camera.kept is not None:
        camera.kept.read_into(unit.episode_index, unit.length, frames, out)
        return
    if camera.kind == "image":
        place = VideoPlace(
            spec.root.url, unit.episode_index, camera.name, unit.data_path, camera.recorded, camera.letterbox
        )
        read_images_into(spec.root, (unit.data_offset + frames).tolist(), out, place)
        return
    file, from_s = next((file, from_s) for name, file, from_s in unit.videos if name == camera.name)
    wanted_s = (from_s + timestamps[frames]).tolist()
    place = VideoPlace(spec.root.url, unit.episode_index, camera.name, file, camera.recorded, camera.letterbox)
    try:
        if spec.root.is_local:
            decode_into(spec.root.local_path(file), wanted_s, out, tolerance_s=spec.tolerance_s, place=place)
            return
        with spec.root.open(file) as opened:
            decode_into(opened, wanted_s, out, tolerance_s=spec.tolerance_s, place=place)
    except FileNotFoundError as error:
        raise ValueError(f"{place}: the file is missing; {missing_remedy(spec.root, file)}") from error


def window_frames(frame_index_N: np.ndarray, offsets_T: Sequence[int], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Frame numbers (N, T) inside an episode of `length` frames, and True where the offset left the episode."""
    wanted_NT = frame_index_N[:, None] + np.asarray(offsets_T, dtype=np.int64)[None, :]
    is_pad_NT = (wanted_NT < 0) | (wanted_NT >= length)
    return np.clip(wanted_NT, 0, length - 1), is_pad_NT


def offsets_from_timestamps(deltas_s: Sequence[float], fps: float, tolerance_s: float, key: str) -> tuple[int, ...]:
    """Offsets in frames for offsets in seconds, refused where a delta does not lie on the frame grid."""
    offsets = tuple(round(delta * fps) for delta in deltas_s)
    for delta, offset in zip(deltas_s, offsets, strict=True):
        if abs(delta - offset / fps) > tolerance_s:
            raise ValueError(
                f"delta_timestamps['{key}']: {delta} s is not a multiple of 1/{fps} s (nearest {offset / fps:.6f} s); "
                f"use multiples of the frame time"
            )
    return offsets
