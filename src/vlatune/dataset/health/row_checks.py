"""The rows of one episode, held against meta/: are they all there, are they its own, and of the declared form.

Pure, over numpy columns; the reader asks for each unit of work (microseconds) and the check of episodes (bad_episodes.py)
once for each episode. `where` names dataset, episode and file in the messages. What is wrong with a row is said once:
`inspect` lists the rows that `misplaced`, `not_rising`, `without_sentence` and `with_other_sentence` find, and reading
refuses the first.
"""

from collections.abc import Mapping, Sequence

import numpy as np

INDEX_KINDS = {"index": "iu", "episode_index": "iu", "frame_index": "iu", "timestamp": "f", "task_index": "iu"}
"""The columns that every data file has, and the kinds of numbers in them, as numpy names them."""
DISAGREE = "meta and data disagree: fetch the dataset anew"


def check_length(where: str, file_rows: int, begin: int, end: int) -> None:
    if end > file_rows:
        raise ValueError(
            f"{where}: has {file_rows} rows, but meta/episodes places the episode at rows {begin} to {end}; {DISAGREE}"
        )


def check_index(where: str, values: Mapping[str, np.ndarray], *, episode_index: int, from_row: int, begin: int) -> None:
    """Every row must be the episode's, in order: one that is missing would move those after it."""
    check_kinds(where, values)
    wrong = misplaced(values, episode_index=episode_index, from_row=from_row)
    if wrong.any():
        bad = int(np.argmax(wrong))
        found = ", ".join(f"{name} {int(values[name][bad])}" for name in ("episode_index", "frame_index", "index"))
        raise ValueError(
            f"{where}: row {begin + bad} is {found}; expected episode_index {episode_index}, frame_index {bad}, "
            f"index {from_row + bad}; {DISAGREE}"
        )


def check_kinds(where: str, values: Mapping[str, np.ndarray]) -> None:
    """Of those columns that are among the values."""
    for name, kinds in INDEX_KINDS.items():
        if name not in values:
            continue
        column = values[name]
        if column.ndim != 1 or column.dtype.kind not in kinds:
            expected = "a number with decimals" if kinds == "f" else "a whole number"
            raise ValueError(
                f"{where}: column '{name}' holds {_form(column)}, expected {expected} per row; fetch the file anew"
            )


def misplaced(values: Mapping[str, np.ndarray], *, episode_index: int, from_row: int) -> np.ndarray:
    """Which of an episode's rows are another's, or at another's place."""
    frame = np.arange(len(values["index"]))
    return (
        (values["episode_index"] != episode_index)
        | (values["frame_index"] != frame)
        | (values["index"] != from_row + frame)
    )


def check_times(where: str, timestamps: np.ndarray) -> None:
    wrong = not_rising(timestamps)
    if wrong.any():
        bad = int(np.argmax(wrong))
        before = f" after {timestamps[bad - 1]:.4f} s" if bad else ""
        raise ValueError(
            f"{where}: frame {bad} has the timestamp {timestamps[bad]:.4f} s{before}, expected times that rise; record or "
            f"convert the episode anew"
        )


def not_rising(timestamps: np.ndarray) -> np.ndarray:
    """A time that is no number is near to every frame and to none; one that falls is not of this episode."""
    wrong = ~np.isfinite(timestamps)
    wrong[1:] |= ~(timestamps[1:] > timestamps[:-1])
    return wrong


def check_tasks(where: str, task_index: np.ndarray, tasks: Sequence[str], told: int = -1) -> None:
    """`told` is the task_index of the sentence that meta/ names beside the episode, -1 where it names none."""
    bad = task_index[without_sentence(task_index, len(tasks))]
    if len(bad):
        raise ValueError(
            f"{where}: task_index {bad[0]} has no sentence; meta/tasks lists {len(tasks)}, expected 0 to {len(tasks) - 1}; "
            f"add the sentence to meta/tasks, or fetch meta/ anew"
        )
    other = task_index[with_other_sentence(task_index, told)]
    if len(other):
        raise ValueError(
            f"{where}: its rows have task_index {other[0]}, which is {tasks[other[0]]!r:.80} in meta/tasks, and meta/episodes says "
            f"{tasks[told]!r:.80}, task_index {told}; {DISAGREE}, or correct the one that is wrong"
        )


def with_other_sentence(task_index: np.ndarray, told: int) -> np.ndarray:
    return (task_index != told) & (told >= 0)


def without_sentence(task_index: np.ndarray, num_tasks: int) -> np.ndarray:
    return (task_index < 0) | (task_index >= num_tasks)


def check_vector(
    where: str, name: str, values: np.ndarray, *, shape: tuple[int, ...], recorded_dtype: str | None
) -> None:
    """`recorded_dtype` is info.json's; files that differ from it would differ from each other."""
    if values.shape[1:] != shape and values.size != len(values) * int(np.prod(shape)):
        raise ValueError(
            f"{where}: column '{name}' has rows of shape {values.shape[1:]}, meta/info.json says {shape}; fetch the file "
            f"anew, or correct the feature's shape"
        )
    if recorded_dtype is not None and values.dtype != np.dtype(recorded_dtype):
        said = "text" if recorded_dtype == "object" else recorded_dtype
        raise ValueError(
            f"{where}: column '{name}' holds {_form(values)}, meta/info.json says {said}; write the file anew with that type, or "
            f"correct the feature's dtype in meta/info.json if all data files have this one"
        )


def check_finite(where: str, name: str, values: np.ndarray) -> None:
    """A state that is no number would be cut into a bin as if it were one, and the loss would stay finite."""
    if values.dtype.kind != "f" or np.isfinite(values).all():
        return
    good = np.isfinite(values).reshape(len(values), -1)
    frame = int(np.argmin(good.all(axis=1)))
    dim = int(np.argmin(good[frame]))
    raise ValueError(
        f"{where}: frame {frame}: column '{name}' has {values.reshape(len(values), -1)[frame, dim]} in dim {dim}, expected a finite "
        f"number; record or convert the episode anew, or leave bad episodes out with on_bad_episode=skip"
    )


def _form(values: np.ndarray) -> str:
    kind = "text" if values.dtype == object else values.dtype.name
    return kind if values.ndim == 1 else f"{kind} of shape {values.shape[1:]}"
