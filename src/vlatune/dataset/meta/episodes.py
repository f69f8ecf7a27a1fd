"""The episodes of a dataset as columns: a numpy value per episode, so that 10^5 of them are a few MB; and the sentences of a dataset, in the
order of task_index.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlatune.dataset.meta.meta_info import shortened
from vlatune.dataset.storage.root import Root
from vlatune.limits import check_limit

MAX_S = 1e9
"""No episode begins so late in its file: thirty years."""


@dataclass(frozen=True)
class VideoSpan:
    """Where the episodes' frames are in one camera's mp4 files, a value per episode."""

    chunk: np.ndarray
    file: np.ndarray
    from_s: np.ndarray
    to_s: np.ndarray


@dataclass(frozen=True)
class Episodes:
    """A value per episode, in the order of `index`."""

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
    """The task_index of the one sentence that meta/ names beside the episode; -1 where that does not tell one."""

    def __len__(self) -> int:
        return len(self.index)


def check_episodes(root: Root, episodes: Episodes) -> None:
    """Refuse gaps, overlaps, episodes without frames, and places that cannot be."""
    where, remedy = f"dataset '{root.url}'", "meta/ is damaged: fetch it anew, or convert the dataset anew"
    if len(episodes) == 0:
        raise ValueError(f"{where}: it has no episodes; record some, or fetch meta/ anew")
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
        found = f"episode {episodes.index[here]}" + (f" after episode {episodes.index[here - 1]}" if here else " first")
        raise ValueError(
            f"{where}: meta/ lists {found}, expected episode {here}: missing, or one is there twice; {remedy}"
        )
    expected = np.cumsum(episodes.length) - episodes.length
    moved = np.flatnonzero(episodes.from_row != expected)
    if len(moved):
        here = int(moved[0])
        how = "leaves a gap before it" if episodes.from_row[here] > expected[here] else "overlaps the episode before it"
        raise ValueError(
            f"{where}: episode {episodes.index[here]} begins at row {episodes.from_row[here]} and {how}, "
            f"expected row {expected[here]}; {remedy}"
        )
    _check_spans(where, episodes, remedy)


def _check_spans(where: str, episodes: Episodes, remedy: str) -> None:
    """A time that is no number would be near to every frame and to none."""
    for camera, span in episodes.videos.items():
        bad = np.flatnonzero(~(span.from_s < MAX_S) | (span.from_s < 0) | (span.chunk < 0) | (span.file < 0))
        if len(bad):
            here = bad[0]
            raise ValueError(
                f"{where}: episode {episodes.index[here]}, camera '{camera}': meta/episodes places it at "
                f"{span.from_s[here]} s of chunk {span.chunk[here]}, file {span.file[here]}, expected 0 or more; {remedy}"
            )


def frames_of_others(episodes: Episodes, camera: str, fps: float) -> dict[int, str]:
    """Position -> what is wrong, of episodes whose frames in a camera's mp4 file are another's, too, by more than half of one."""
    span = episodes.videos[camera]
    order = np.lexsort((span.from_s, span.file, span.chunk))
    before, after = order[:-1], order[1:]
    is_same_file = (span.chunk[before] == span.chunk[after]) & (span.file[before] == span.file[after])
    end_s = span.from_s[before] + (episodes.length[before] - 0.5) / fps
    wrong = {}
    for one in np.flatnonzero(is_same_file & (span.from_s[after] < end_s)).tolist():
        first, second = int(before[one]), int(after[one])
        text = (
            f"camera '{camera}': episode {episodes.index[second]} begins at {span.from_s[second]:.4f} s of its mp4 file, inside of "
            f"episode {episodes.index[first]} of {episodes.length[first]} frames from {span.from_s[first]:.4f} s on, so that one "
            f"would show the other's pictures; convert the dataset anew, or leave bad episodes out with on_bad_episode=skip"
        )
        wrong |= {first: text, second: text}
    return wrong


def told_tasks(sentences: Sequence[Any], tasks: Sequence[str]) -> np.ndarray:
    """For `Episodes.task`: an episode's sentence, or None, against those of meta/tasks. One that is not there, as after a
    change of its words, and one that is there twice tell nothing.
    """
    times = Counter(tasks)
    number = {sentence: index for index, sentence in enumerate(tasks) if times[sentence] == 1}
    return np.array([-1 if one is None else number.get(one, -1) for one in sentences], dtype=np.int64)


def sentences_in_order(root: Root, name: str, pairs: Sequence[tuple[Any, Any]]) -> tuple[str, ...]:
    """The sentences of task_index 0, 1, 2, ... out of (task_index, sentence); `name` is their file.

    Refused where one is missing, is there twice, or is no text.
    """
    where = f"dataset '{root.url}': {name}"
    by_index = {index: sentence for index, sentence in pairs if type(index) is int}
    if any(type(index) is not int for index, _ in pairs):
        found = ", ".join(shortened(index) for index, _ in pairs[:10])
        raise ValueError(f"{where}: task_index must count 0, 1, 2, ...; found {found}; fetch meta/ anew")
    if len(by_index) < len(pairs):
        [(twice, _)] = Counter(index for index, _ in pairs).most_common(1)
        raise ValueError(
            f"{where}: task_index {twice} is there twice, so that one sentence would stand for the other; fetch meta/ anew"
        )
    for number in range(len(by_index)):
        if number not in by_index:
            found = ", ".join(shortened(one) for one in list(by_index)[:10])
            raise ValueError(f"{where}: task_index must count 0, 1, 2, ...; found {found}; fetch meta/ anew")
        if not isinstance(by_index[number], str):
            raise ValueError(
                f"{where}: the sentence of task_index {number} is {shortened(by_index[number])}, expected text; "
                f"fetch meta/ anew"
            )
        check_limit(
            "text_chars", len(by_index[number]), f"{where}: the sentence of task_index {number} has characters:"
        )
    return tuple(by_index[number] for number in range(len(by_index)))
