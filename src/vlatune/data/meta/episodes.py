"""Episodes of a dataset as numpy columns, and its tasks ordered by task_index."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlatune.data.meta.meta_info import FETCH, LEAVE_OUT, shortened
from vlatune.storage.limits import check_limit
from vlatune.storage.root import Root

MAX_S = 1e9
"""Upper limit of an episode's start in its file."""


@dataclass(frozen=True)
class VideoSpan:
    """Location of the episodes' frames in one camera's mp4 files, a value per episode."""

    chunk: np.ndarray
    file: np.ndarray
    from_s: np.ndarray
    to_s: np.ndarray


@dataclass(frozen=True)
class Episodes:
    """Columns with a value per episode, ordered by `index`."""

    index: np.ndarray
    length: np.ndarray
    from_row: np.ndarray
    """The dataset-wide `index` of the episode's first frame."""
    data_chunk: np.ndarray
    data_file: np.ndarray
    data_offset: np.ndarray
    """Row of the episode's first frame inside its parquet file."""
    videos: Mapping[str, VideoSpan]
    task: np.ndarray | None = None
    """task_index of the only task that meta/ lists for the episode; -1 if it is ambiguous."""
    first_task: np.ndarray | None = None
    """task_index of the first task that meta/ lists for the episode; -1 if it is unknown."""

    def __len__(self) -> int:
        return len(self.index)


def check_episodes(root: Root, episodes: Episodes) -> None:
    """Reject gaps, overlaps, empty episodes and impossible file positions."""
    where, remedy = f"dataset '{root.url}'", "meta/ is damaged: fetch it again, or convert the dataset again"
    if len(episodes) == 0:
        raise ValueError(f"{where}: it has no episodes; record some, or fetch meta/ again")
    empty = np.flatnonzero(episodes.length <= 0)
    if len(empty):
        index, length = episodes.index[empty[0]], episodes.length[empty[0]]
        raise ValueError(f"{where}: episode {index} has length {length}, expected 1 or more; {remedy}")
    longest = int(np.argmax(episodes.length))
    what = f"{where}: episode {episodes.index[longest]} has frames:"
    check_limit("episode_frames", int(episodes.length[longest]), what)
    check_limit("dataset_frames", int(episodes.length.sum(dtype=np.float64)), f"{where}: its episodes have frames:")
    number = np.flatnonzero(episodes.index != np.arange(len(episodes)))
    if len(number):
        here = int(number[0])
        raise ValueError(
            f"{where}: meta/ lists episode {episodes.index[here]} at place {here}: one is missing or occurs twice; {remedy}"
        )
    expected = np.cumsum(episodes.length) - episodes.length
    moved = np.flatnonzero(episodes.from_row != expected)
    if len(moved):
        here = int(moved[0])
        raise ValueError(
            f"{where}: episode {here} begins at row {episodes.from_row[here]}, expected row {expected[here]}: its rows overlap the "
            f"episode before it or leave a gap; {remedy}"
        )
    for camera, span in episodes.videos.items():  # NaN times would compare as false everywhere
        bad = np.flatnonzero(~(span.from_s < MAX_S) | (span.from_s < 0) | (span.chunk < 0) | (span.file < 0))
        if len(bad):
            here = bad[0]
            raise ValueError(
                f"{where}: episode {episodes.index[here]}, camera '{camera}': meta/episodes places it at "
                f"{span.from_s[here]} s of chunk {span.chunk[here]}, file {span.file[here]}, expected 0 or more; {remedy}"
            )


def find_shared_frames(episodes: Episodes, camera: str, fps: float) -> dict[int, str]:
    """Return position -> message for episodes that overlap or are out of order in the mp4 files.

    LeRobot appends episodes to a camera's files in the order of their index.
    """
    span = episodes.videos[camera]
    end_s = span.from_s + (episodes.length - 0.5) / fps
    order = np.argsort(np.lexsort((span.file, span.chunk)))  # equal files keep the order of the episodes
    is_same_file = (np.diff(span.chunk) == 0) & (np.diff(span.file) == 0)
    is_wrong = np.where(is_same_file, span.from_s[1:] < end_s[:-1], np.diff(order) < 0)
    wrong: dict[int, str] = {}
    for first in np.flatnonzero(is_wrong).tolist():
        text = (
            f"camera '{camera}': episode {episodes.index[first + 1]} begins at {span.from_s[first + 1]:.4f} s of mp4 file "
            f"{span.file[first + 1]}, before the end of episode {episodes.index[first]} ({episodes.length[first]} frames from "
            f"{span.from_s[first]:.4f} s of file {span.file[first]}), so one may show the other's images; convert the dataset "
            f"again, or {LEAVE_OUT}"
        )
        wrong = {first: text, first + 1: text} | wrong
    return wrong


def match_tasks(texts: Sequence[Any], counts: Sequence[int], tasks: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return `Episodes.task` and `first_task` from each episode's first text and number of texts."""
    times = Counter(tasks)
    number = {text: index for index, text in enumerate(tasks) if times[text] == 1}
    first = np.array([-1 if one is None else number.get(one, -1) for one in texts], dtype=np.int64)
    return np.where(np.array(counts) == 1, first, -1), first


def texts_in_order(root: Root, name: str, pairs: Sequence[tuple[Any, Any]]) -> tuple[str, ...]:
    """Return task texts by task_index from (task_index, text) pairs; reject gaps and duplicates."""
    where = f"dataset '{root.url}': {name}"
    texts: dict[int, str] = {}
    for index, text in pairs:
        if type(index) is not int or not 0 <= index < len(pairs) or index in texts:
            found = f"{shortened(index)} occurs twice" if type(index) is int and index in texts else shortened(index)
            raise ValueError(f"{where}: task_index {found}, expected each of 0 to {len(pairs) - 1} once; {FETCH}")
        if not isinstance(text, str):
            raise ValueError(f"{where}: the text of task_index {index} is {shortened(text)}, expected text; {FETCH}")
        check_limit("text_chars", len(text), f"{where}: the text of task_index {index} has characters:")
        texts[index] = text
    return tuple(texts[index] for index in range(len(pairs)))
