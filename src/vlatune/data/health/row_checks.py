"""Read the rows of one episode and validate them against meta/: order, shapes, dtypes, values.

The reader raises the first problem of an episode; bad_episodes.py lists the episodes.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

import numpy as np

from vlatune.data.meta.meta_info import LEAVE_OUT
from vlatune.data.read_spec import DERIVABLE, ReadSpec, Unit
from vlatune.data.tables import read_rows

INDEX_KINDS = {"index": "iu", "episode_index": "iu", "frame_index": "iu", "timestamp": "iuf", "task_index": "iu"}
"""Columns that LeRobot adds to every row, with the allowed numpy dtype kinds."""
RECORDED = "recorded timestamp"
"""Column with the recorded timestamps if frame_index / fps replaces them."""
DISAGREE = "meta/ and the data files disagree: fetch the dataset again"


def read_values(spec: ReadSpec, unit: Unit) -> dict[str, np.ndarray]:
    """Read and check the columns of all rows of the unit's episode."""
    end, texts = unit.data_offset + unit.length, [one.name for one in spec.vectors if one.dtype == "object"]
    try:
        table = read_rows(
            spec.root, unit.data_path, spec.columns, unit.data_offset, end, optional=DERIVABLE, texts=texts
        )
    except ValueError as error:  # names the file but not the episode
        text = str(error).removeprefix(f"dataset '{spec.root.url}': ")
        raise ValueError(f"dataset '{spec.root.url}': episode {unit.episode_index}: {text}") from error
    values = _complete_rows(spec, unit, table.columns)
    check_rows(spec, unit, values, table.file_rows)
    return values


def _complete_rows(spec: ReadSpec, unit: Unit, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the columns of the unit's episode, with missing ones derived from meta/."""

    def missing(name: str, expected: str) -> ValueError:
        return ValueError(
            f"{spec.place(unit)}: lacks the column '{name}', expected {expected}; fetch or convert the dataset again"
        )

    found = {
        name: _as_scalars(column, INDEX_KINDS[name]) if name in INDEX_KINDS else column
        for name, column in values.items()
    }
    frames = np.arange(len(found["episode_index"]))
    if "index" not in found and "frame_index" not in found:
        raise missing("index' and 'frame_index", "one of them, to check that no row is missing")
    found[RECORDED] = found.get("timestamp", frames)
    found.setdefault("index", unit.from_row + frames)
    found.setdefault("frame_index", frames)
    if "task_index" not in found:
        if unit.task < 0 and len(spec.tasks) != 1:
            raise missing("task_index", "it, as meta/ does not name one task for the episode")
        found["task_index"] = np.full(len(frames), max(unit.task, 0))
    if spec.fps is not None:
        found["timestamp"] = frames / spec.fps
    elif "timestamp" not in found:
        raise missing("timestamp", "it with --dataset.timestamps=recorded; leave the flag out")
    return found


def _as_scalars(column: np.ndarray, kinds: str) -> np.ndarray:
    """Normalise columns of converters: lists of one number, and integers stored as floats."""
    column = column[:, 0] if column.ndim == 2 and column.shape[1] == 1 else column
    if column.dtype.kind != "f" or "f" in kinds:
        return column
    with np.errstate(invalid="ignore"):
        integers = column.astype(np.int64)
    return integers if np.array_equal(integers, column) else column


def check_rows(spec: ReadSpec, unit: Unit, values: Mapping[str, np.ndarray], file_rows: int) -> None:
    """Reject rows of another episode or that contradict meta/; `values` are all of its rows."""

    def fail(text: str, remedy: str) -> NoReturn:
        raise ValueError(f"{spec.place(unit)}: {text}; {remedy}")

    begin, end = unit.data_offset, unit.data_offset + unit.length
    if end > file_rows:
        fail(f"has {file_rows} rows, but meta/episodes places the episode at rows {begin} to {end}", DISAGREE)
    for name, kinds in INDEX_KINDS.items():
        if values[name].ndim != 1 or values[name].dtype.kind not in kinds:
            expected = f"{'a number' if 'f' in kinds else 'an integer'} per row"
            fail(f"column '{name}' holds {_type_name(values[name])}, expected {expected}", "fetch the file again")
    frames = np.arange(len(values["index"]))
    expected = {"episode_index": unit.episode_index, "frame_index": frames, "index": unit.from_row + frames}
    wrong = np.any([values[name] != numbers for name, numbers in expected.items()], axis=0)
    if wrong.any():
        row = int(np.argmax(wrong))
        found, right = (
            ", ".join(f"{name} {int(np.broadcast_to(of[name], len(frames))[row])}" for name in expected)
            for of in (values, expected)
        )
        fail(f"row {begin + row} is {found}, expected {right}", DISAGREE)
    times_s = values["timestamp"]
    if is_not_rising(times_s).any():
        row = int(np.argmax(is_not_rising(times_s)))
        after = f" after {times_s[row - 1]:.4f} s" if row else ""
        text = f"frame {row} has the timestamp {times_s[row]:.4f} s{after}, expected increasing times"
        fail(text, "record or convert the episode again")
    tasks = values["task_index"]
    unknown, other = tasks[(tasks < 0) | (tasks >= len(spec.tasks))], tasks[tasks != unit.task]
    if len(unknown):
        text = f"task_index {unknown[0]} is not in meta/tasks, expected 0 to {len(spec.tasks) - 1}"
        fail(text, "add the task to meta/tasks, or fetch meta/ again")
    if unit.task >= 0 and len(other):
        text = f"its rows have task_index {other[0]}, and meta/episodes has task_index {unit.task}"
        fail(text, f"{DISAGREE}, or correct the wrong one")
    for vector in spec.vectors:
        column, what = values[vector.name], f"column '{vector.name}'"
        if column.shape[1:] != vector.shape and column.size != len(column) * int(np.prod(vector.shape)):
            text = f"{what} has rows of shape {column.shape[1:]}, meta/info.json has {vector.shape}"
            fail(text, "fetch the file again, or correct the feature's shape")
        declared = vector.recorded_dtype
        if declared is not None and not can_stand_for(column.dtype, np.dtype(declared)):
            known = "text" if declared == "object" else declared
            text = f"{what} holds {_type_name(column)}, meta/info.json has {known}"
            fail(text, "write the file with that type, or correct the dtype in meta/info.json if all files have it")
        used = vector.used(column)
        if used.dtype.kind == "f" and not np.isfinite(used).all():  # a NaN state would be binned silently
            used_ND = used.reshape(len(used), -1)
            frame, dim = np.argwhere(~np.isfinite(used_ND))[0].tolist()
            recorded_dim = dim if vector.dims is None else vector.dims[dim]
            text = f"frame {frame}: {what} has {used_ND[frame, dim]} in dim {recorded_dim}, expected a finite number"
            fail(text, f"record or convert the episode again, or {LEAVE_OUT}")


def is_not_rising(times_s: np.ndarray) -> np.ndarray:
    """Return a mask of timestamps that are not finite or not later than the previous one."""
    wrong = ~np.isfinite(times_s)
    wrong[1:] |= ~(times_s[1:] > times_s[:-1])
    return wrong


def is_regular(times_s: np.ndarray, fps: float, tolerance_s: float) -> bool:
    """True if every timestamp of an episode is frame_index / fps."""
    if times_s.dtype.kind not in "iuf" or times_s.ndim != 1:
        return False
    return bool(np.all(np.abs(times_s - np.arange(len(times_s)) / fps) <= tolerance_s))


def matched_unit(spec: ReadSpec, unit: Unit, values: Mapping[str, np.ndarray]) -> Unit:
    """Return the unit, with a required number of frames if only that identifies frames.

    Frames are then located by frame_index, and the recorded timestamps cannot confirm the match.
    """
    is_sure = spec.fps is None or is_regular(values[RECORDED], spec.fps, spec.tolerance_s)
    return unit if is_sure or not unit.has_own_videos else replace(unit, num_video_frames=unit.length)


def can_stand_for(found: np.dtype, declared: np.dtype) -> bool:
    """True if a column of dtype `found` can be read as `declared`: any numbers as floats."""
    return found == declared or (declared.kind == "f" and found.kind in "iuf")


def _type_name(values: np.ndarray) -> str:
    name = "text" if values.dtype == object else values.dtype.name
    return name if values.ndim == 1 else f"{name} of shape {values.shape[1:]}"
