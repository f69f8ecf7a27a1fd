"""Read units of work into rows: parquet values joined with decoded frames.

A unit is some frames of one episode, in ascending order. Each camera's mp4 is opened once per unit;
images in parquet are streamed. Nothing here depends on Ray, torch or the policy: `ReadSpec`
describes what to read, `Unit` where it is stored, and `read_into` fills rows of columns made by
`allocate`.

Windows map a frame and its offsets to row numbers and pad masks. As in LeRobot, offsets are clamped
at both ends of the episode and clamped entries are marked as padding:

    episode of 5 frames, offsets 0..3, frame 3:   frames 3 4 4 4   pad . . x x
                                                             ^clamped to the last frame
"""

from collections.abc import Mapping, Sequence

import numpy as np

from vlatune.batch import SLOT, TASK, Columns
from vlatune.data.frames.cache import CachedFrames
from vlatune.data.frames.decoder import VideoFrames
from vlatune.data.frames.images import ParquetImages
from vlatune.data.health.row_checks import matched_unit, read_values
from vlatune.data.meta.dataset_meta import DatasetMeta
from vlatune.data.read_spec import INDEX_COLUMNS, CameraSpec, ReadSpec, Unit, VectorSpec


def make_unit(meta: DatasetMeta, spec: ReadSpec, position: int, frames: np.ndarray, slots: np.ndarray) -> Unit:
    """Make the unit for `frames` of the episode at `position` of the dataset's table."""
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
        has_own_videos=meta.has_own_videos,
    )


def allocate(spec: ReadSpec, rows: int) -> Columns:
    """Return uninitialised buffers for `rows` rows; zeroing the pages would be expensive."""
    columns: Columns = {}
    for feature in (*spec.cameras, *spec.absent, *spec.vectors):
        window = () if feature.offsets is None else (len(feature.offsets),)
        columns[feature.column] = feature.empty(rows, *window)
        if feature.offsets is not None:
            columns[f"{feature.column}_is_pad"] = np.empty((rows, *window), dtype=bool)
    for name in ("dataset_index", "index", "episode_index", "frame_index", "task_index", SLOT):
        columns[name] = np.empty(rows, dtype=np.int64)
    columns["timestamp"] = np.empty(rows, dtype=np.float32)
    columns[TASK] = np.empty(rows, dtype=object)
    return columns


def make_blank_row(spec: ReadSpec) -> Columns:
    """Return a row of zeros and empty texts."""
    columns = allocate(spec, 1)
    for values in columns.values():
        values[:] = "" if values.dtype == object else 0
    return columns


def read_into(spec: ReadSpec, unit: Unit, columns: Columns, at: int) -> float:
    """Fill rows [at, at + len(unit.frames)) of the buffers; return the share of cached images."""
    rows = slice(at, at + len(unit.frames))
    values = read_values(spec, unit)
    columns["dataset_index"][rows] = unit.dataset_index
    columns[SLOT][rows] = unit.slots
    for name in INDEX_COLUMNS:
        columns[name][rows] = values[name][unit.frames]
    columns[TASK][rows] = [spec.tasks[number] for number in values["task_index"][unit.frames]]
    for vector in spec.vectors:
        used = vector.used(values[vector.name])
        if vector.widened is not None:
            used = np.pad(used, ((0, 0), (0, vector.widened - used.shape[1])))
        columns[vector.column][rows] = used[_frames_of(vector, unit, columns, rows)]
    timestamps = values["timestamp"].astype(np.float64)
    unit = matched_unit(spec, unit, values)
    cameras, black = ((), (*spec.cameras, *spec.absent)) if unit.skips_images else (spec.cameras, spec.absent)
    cached = [_read_camera(spec, camera, unit, timestamps, columns, rows) for camera in cameras]
    for camera in black:
        columns[camera.column][rows] = 0
        _frames_of(camera, unit, columns, rows)
    return sum(cached) / len(cached) if cached else 0.0


def read_units(
    specs: Sequence[ReadSpec] | Mapping[int, ReadSpec], units: Sequence[Unit], cached: list[float] | None = None
) -> Columns:
    """Read the rows of all units in sequence; `specs` are indexed by dataset.

    Appends the share of cached images of each unit to `cached`.
    """
    columns, at = allocate(specs[units[0].dataset_index], sum(len(unit.frames) for unit in units)), 0
    for unit in units:
        share = read_into(specs[unit.dataset_index], unit, columns, at)
        at += len(unit.frames)
        if cached is not None:
            cached.append(share)
    return columns


def read_unit(spec: ReadSpec, unit: Unit) -> Columns:
    return read_units({unit.dataset_index: spec}, [unit])


def _frames_of(feature: CameraSpec | VectorSpec, unit: Unit, columns: Columns, rows: slice) -> np.ndarray:
    """Return the frame of each row, (N,), or fill the pad mask of windows and return their frames, (N, T)."""
    if feature.offsets is None:
        return unit.frames
    frames_NT, columns[f"{feature.column}_is_pad"][rows] = window_frames(unit.frames, feature.offsets, unit.length)
    return frames_NT


def _read_camera(
    spec: ReadSpec, camera: CameraSpec, unit: Unit, timestamps: np.ndarray, columns: Columns, rows: slice
) -> float:
    """Fill the column of a camera; return the share of its frames that came from a cache.

    A frame that several windows contain is decoded once.
    """
    is_image = camera.kind == "image"
    source = ParquetImages(spec.root, camera) if is_image else VideoFrames(spec.root, camera, spec.tolerance_s)
    if spec.cache is not None:
        source = CachedFrames(source, spec.root, camera, spec.tolerance_s, spec.cache)
    out, frames = columns[camera.column][rows], _frames_of(camera, unit, columns, rows)
    if camera.offsets is None:
        return source.read_into(unit, frames, timestamps[frames], out) / len(frames)
    distinct = np.unique(frames)
    decoded = camera.empty(len(distinct))
    num_cached = source.read_into(unit, distinct, timestamps[distinct], decoded)
    out[:] = decoded[np.searchsorted(distinct, frames)]
    return num_cached / len(distinct)


def window_frames(frame_index_N: np.ndarray, offsets_T: Sequence[int], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return frame numbers (N, T) clamped to the episode and a mask that is True where clamped."""
    wanted_NT = frame_index_N[:, None] + np.asarray(offsets_T, dtype=np.int64)[None, :]
    is_pad_NT = (wanted_NT < 0) | (wanted_NT >= length)
    return np.clip(wanted_NT, 0, length - 1), is_pad_NT


def offsets_from_timestamps(deltas_s: Sequence[float], fps: float, tolerance_s: float, key: str) -> tuple[int, ...]:
    """Convert offsets in seconds to frames; reject offsets that are off the frame grid."""
    offsets = tuple(round(delta * fps) for delta in deltas_s)
    for delta, offset in zip(deltas_s, offsets, strict=True):
        if abs(delta - offset / fps) > tolerance_s:
            raise ValueError(
                f"delta_timestamps['{key}']: {delta} s is not a multiple of 1/{fps} s (nearest {offset / fps:.6f} s); "
                f"use multiples of the frame time"
            )
    return offsets
