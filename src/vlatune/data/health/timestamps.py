"""Choose how to find a row's frame in its mp4 file: by recorded timestamp, or by frame_index / fps.

LeRobot writes frame_index / fps to both, so they agree. Other recorders take the rows' times from a
clock while the encoder counts frames: the times drift apart, but row n still belongs to frame n.

    rows     0.00   0.07   0.14   0.23        a clock
    frames   0.00   0.05   0.10   0.15        20 fps

`auto` uses frame_index if the recorded times of an episode cannot be right and it has as many
frames as rows. The choice depends only on the dataset and the selected episodes, so `inspect`,
`doctor`, `train` and `eval` agree.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pyarrow as pa

from vlatune.data.frames.recorded import camera_fps
from vlatune.data.health.row_checks import can_stand_for, is_not_rising, is_regular
from vlatune.data.health.video_health import frame_times, nearest
from vlatune.data.meta.dataset_meta import DatasetMeta
from vlatune.data.order.partition import Selection
from vlatune.data.read_spec import DERIVABLE, CameraSpec, ReadSpec
from vlatune.data.tables import read_rows
from vlatune.findings import Finding
from vlatune.storage.parquet import opened

type Timestamps = Literal["auto", "recorded", "frame_index"]
SMALL_FRAMES = 200_000
"""Local datasets up to this many frames are checked completely, others by sampled episodes."""
SAMPLED = 8
"""Number of sampled episodes, and of irregular episodes whose videos are checked."""


def is_small(metas: Sequence[DatasetMeta], selection: Selection) -> bool:
    """True if every row and packet of the episodes can be read within seconds."""
    return all(meta.root.is_local for meta in metas) and int(selection.length.sum()) <= SMALL_FRAMES


def with_timestamps(
    metas: Sequence[DatasetMeta], specs: Sequence[ReadSpec], selection: Selection, wanted: Timestamps
) -> tuple[tuple[ReadSpec, ...], list[Finding]]:
    """Return the specs with the choice made, and a warning per dataset that needs frame_index."""
    chosen, warnings = list(specs), []
    for number, (meta, spec) in enumerate(zip(metas, specs, strict=True)):
        positions = selection.position[selection.dataset == number]
        sampled = positions if is_small([meta], selection) else spread(positions)
        reason = _why_not_recorded(meta, spec, sampled.tolist()) if wanted == "auto" else ""
        if reason or wanted == "frame_index":
            chosen[number] = replace(spec, fps=meta.fps)
        if reason:
            text = f"{reason}, so frames are matched with rows by frame_index (--dataset.timestamps=frame_index)"
            warnings.append(Finding("warn", "episodes", text, place=f"dataset '{meta.root.url}'"))
    return tuple(chosen), warnings


def spread(positions: np.ndarray) -> np.ndarray:
    """Return a few evenly spread positions."""
    chosen = np.unique(np.linspace(0, max(len(positions) - 1, 0), SAMPLED).round().astype(int))
    return positions[chosen[: len(positions)]]


def _why_not_recorded(meta: DatasetMeta, spec: ReadSpec, positions: Sequence[int]) -> str:
    """Return why the recorded timestamps must be wrong and frame_index fits; empty if not."""
    irregular: dict[int, np.ndarray] = {}
    for position, times_s in _recorded_times(meta, positions):
        if times_s is None:
            return "the data files have no column 'timestamp'"
        if not is_regular(times_s, meta.fps, spec.tolerance_s):
            irregular[position] = times_s
    for position in spread(np.array(list(irregular), dtype=np.int64)).tolist():
        times_s = irregular[position]
        frames_s = list(_frames_of(meta, spec, position))
        is_recorded = not is_not_rising(times_s).any() and all(
            _fits(meta, spec, camera, position, times_s, found_s) for camera, found_s in frames_s
        )
        if not is_recorded and all(_fits_index(meta, spec, camera, position, found_s) for camera, found_s in frames_s):
            expected_s = np.arange(len(times_s)) / meta.fps
            row = int(np.argmax(np.nan_to_num(np.abs(times_s - expected_s), nan=np.inf)))
            return (
                f"the recorded timestamps cannot be right (episode {meta.episodes.index[position]}, frame {row}: "
                f"{times_s[row]:.4f} s, its frame is at {expected_s[row]:.4f} s)"
            )
    return ""


def _recorded_times(meta: DatasetMeta, positions: Sequence[int]) -> Iterator[tuple[int, np.ndarray | None]]:
    """Yield the episodes' timestamps, None if missing; unreadable episodes are skipped."""
    for position in positions:
        begin, file = int(meta.episodes.data_offset[position]), meta.data_path(position)
        end = begin + int(meta.episodes.length[position])
        try:
            rows = read_rows(meta.root, file, ["timestamp"], begin, end, optional=["timestamp"])
        except ValueError:  # other checks report it
            continue
        column = rows.columns.get("timestamp")
        if column is None:
            yield position, None
        elif column.dtype.kind in "iuf" and column.size == len(column):
            yield position, column.reshape(-1).astype(np.float64)


def _frames_of(meta: DatasetMeta, spec: ReadSpec, position: int) -> Iterator[tuple[CameraSpec, np.ndarray]]:
    """Yield each camera's frame times; empty if unreadable, which other checks report."""
    for camera in spec.cameras:
        if camera.kind == "video":
            file = meta.video_path(position, camera.name)
            try:
                yield camera, frame_times(spec.root, file, camera.recorded, file)
            except ValueError:
                yield camera, np.zeros(0)


def _fits(
    meta: DatasetMeta, spec: ReadSpec, camera: CameraSpec, position: int, times_s: np.ndarray, found_s: np.ndarray
) -> bool:
    """True if every time has a frame and, at the dataset's rate, no frame is skipped."""
    wanted_s = meta.episodes.videos[camera.name].from_s[position] + times_s
    near_s = nearest(found_s, wanted_s)
    if not np.all(np.abs(near_s - wanted_s) <= spec.tolerance_s):
        return False
    return not _has_own_rate(meta, camera) or bool(np.all(np.diff(np.searchsorted(found_s, near_s)) == 1))


def _fits_index(meta: DatasetMeta, spec: ReadSpec, camera: CameraSpec, position: int, found_s: np.ndarray) -> bool:
    """True if the episode has as many frames as rows, each at frame_index / fps."""
    length, span = int(meta.episodes.length[position]), meta.episodes.videos[camera.name]
    if not _has_own_rate(meta, camera) or not _fits(
        meta, spec, camera, position, np.arange(length) / meta.fps, found_s
    ):
        return False
    if meta.has_own_videos:
        return len(found_s) == length
    frames = (span.to_s[position] - span.from_s[position]) * meta.fps
    return round(frames) in (length, length - 1)  # some writers store the time of the last frame, not its end


def _has_own_rate(meta: DatasetMeta, camera: CameraSpec) -> bool:
    return camera_fps(meta, camera.name) == meta.fps


def all_conversions(metas: Sequence[DatasetMeta], specs: Sequence[ReadSpec], selection: Selection) -> list[Finding]:
    """Return which columns the reader derives or converts in each dataset's first data file."""
    found: list[Finding] = []
    for number, (meta, spec) in enumerate(zip(metas, specs, strict=True)):
        positions = selection.position[selection.dataset == number]
        if len(positions) == 0:
            continue
        try:
            with opened(meta.root, meta.data_path(int(positions[0]))) as parquet:
                schema = parquet.schema_arrow
        except ValueError:  # other checks report it
            continue
        missing = ", ".join(f"'{name}'" for name in DERIVABLE if name not in schema.names)
        texts = [f"the data files lack the columns {missing}, which are derived from meta/"] if missing else []
        for vector in spec.vectors:
            kind = schema.field(vector.name).type if vector.name in schema.names else None
            if kind is not None and (name := converted(kind, vector.recorded_dtype)):
                texts.append(f"column '{vector.name}' holds {name}, converted to {vector.recorded_dtype}")
        found += [Finding("warn", "episodes", text, place=f"dataset '{meta.root.url}'") for text in texts]
    return found


def converted(kind: pa.DataType, declared: str | None) -> str:
    """Return a column's type if it differs from the declared one but is convertible, else ""."""
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    try:
        found, wanted = np.dtype(kind.to_pandas_dtype()), np.dtype(declared or "O")
    except (TypeError, NotImplementedError):
        return ""
    return str(kind) if found != wanted and can_stand_for(found, wanted) else ""
