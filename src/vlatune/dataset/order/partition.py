"""Which episodes are read, trained on or held out, and how they are cut into read tasks. Pure: ints in, ints out.

The held-out episodes are a function of (seed, number of episodes, share): the same for training, evaluation and every
restart. A whole dataset is cut by the files its episodes lie in:

    episode      0     1     2     3         lengths, in rows
    mp4          a     a     b     b
    parquet      x     x     x     y

    episode      [0]   [1]   [2]   [3]       a task per episode
    file_group   [0     1]   [2     3]       neighbours with the same files together, cut where a task would grow too
                                             long; small groups (here 2 and 3) share a task
    chain        [0     1]   [2     3]       cut only where no mp4 goes on, so that one task opens it
    sequential   [0   1 | 1  2 | 2   3]      the stream of all rows in equal parts
    row_block    [0 | 0 | 1 | 1 | ...]       a fixed number of rows; the last task has the rest

Tasks and the spans in them follow the order of the episodes, so their rows, joined, are the dataset's rows in order.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vlatune.dataset.meta.dataset_meta import DatasetMeta
from vlatune.errors import did_you_mean


@dataclass(frozen=True)
class Selection:
    """Episodes of all datasets in one list; flat sample numbers count over it."""

    dataset: np.ndarray
    position: np.ndarray
    """Place in that dataset's episode table."""
    length: np.ndarray

    def __len__(self) -> int:
        return len(self.dataset)


def select_episodes(metas: Sequence[DatasetMeta], wanted: Sequence[int] | None) -> Selection:
    """All episodes, or those whose episode_index is wanted, of every dataset."""
    parts = [_wanted_positions(meta, wanted) for meta in metas]
    return Selection(
        dataset=np.concatenate([np.full(len(part), number) for number, part in enumerate(parts)]),
        position=np.concatenate(parts),
        length=np.concatenate([meta.episodes.length[part] for meta, part in zip(metas, parts, strict=True)]),
    )


def hold_out(selection: Selection, share: float, seed: int) -> tuple[Selection, Selection]:
    """(training, held out); at least one episode is held out when the share is above 0 and there are two."""
    count = len(selection)
    held = 0 if share == 0 or count < 2 else min(count - 1, max(1, round(share * count)))
    chosen = np.zeros(count, dtype=bool)
    chosen[np.random.Generator(np.random.Philox(key=seed)).permutation(count)[:held]] = True
    return pick(selection, ~chosen), pick(selection, chosen)


def hold_out_each(selection: Selection, share: float, seed: int) -> tuple[Selection, Selection]:
    """The same share of every dataset's episodes, so that each can be evaluated by itself."""
    numbers = np.unique(selection.dataset)
    parts = [hold_out(pick(selection, selection.dataset == number), share, seed) for number in numbers]
    return _joined([training for training, _ in parts]), _joined([held for _, held in parts])


def _joined(parts: Sequence[Selection]) -> Selection:
    columns = ([getattr(part, name) for part in parts] for name in ("dataset", "position", "length"))
    return Selection(*map(np.concatenate, columns))


def pick(selection: Selection, mask: np.ndarray) -> Selection:
    """The episodes where the mask is true."""
    return Selection(selection.dataset[mask], selection.position[mask], selection.length[mask])


def drop_last_frames(selection: Selection, count: int) -> Selection:
    """Without the last frames of each episode, as LeRobot's sampler drops them; an episode that has no others goes whole.

    Frames keep their numbers, as those before the dropped ones do not move.
    """
    if count == 0:
        return selection
    longer = pick(selection, selection.length > count)
    if len(longer) == 0:
        raise ValueError(
            f"the policy leaves the last {count} frames of each episode out (drop_n_last_frames), and no episode to train on has "
            f"more; use a base with a smaller number, or longer episodes"
        )
    return Selection(longer.dataset, longer.position, longer.length - count)


def _wanted_positions(meta: DatasetMeta, wanted: Sequence[int] | None) -> np.ndarray:
    if wanted is None:
        return np.arange(len(meta.episodes))
    missing = sorted(set(wanted) - set(meta.episodes.index.tolist()))
    if missing:
        raise ValueError(
            f"dataset '{meta.root.url}': there is no episode {missing[0]}; it has {len(meta.episodes)} episodes, "
            f"{meta.episodes.index[0]} to {meta.episodes.index[-1]}; correct the list of episodes"
        )
    return np.flatnonzero(np.isin(meta.episodes.index, list(wanted)))


class Span(NamedTuple):
    """Frames [begin, end) of one episode."""

    episode: int
    """Its place in the list that was partitioned."""
    begin: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.begin


type Tasks = list[list[Span]]


@dataclass(frozen=True)
class EpisodeFiles:
    """What a partitioning looks at; a file is any number that tells it from the others."""

    lengths_E: np.ndarray
    data_E: np.ndarray
    """The parquet file of each episode."""
    videos_EC: np.ndarray
    """The mp4 of each episode and camera; no columns for a dataset without video."""


def partition(how: str, episodes: EpisodeFiles, *, task_rows: int, block_rows: int) -> Tasks:
    """Read tasks over all rows. `task_rows` is the size to aim at, `block_rows` that of a `row_block` task."""
    check_partitioning(how)
    return _PARTITIONINGS[how](episodes, task_rows, block_rows)


def check_partitioning(how: str) -> None:
    if how not in _PARTITIONINGS:
        raise ValueError(
            f"partitioning='{how}' is not known{did_you_mean(how, _PARTITIONINGS) or ';'} "
            f"there are {', '.join(_PARTITIONINGS)}"
        )


def cut_rows(spans: Sequence[Span], rows: int) -> Iterator[list[Span]]:
    """The same rows in lists of `rows` rows each; the last has what is left."""
    taken: list[Span] = []
    room = rows
    for span in spans:
        begin = span.begin
        while begin < span.end:
            end = min(span.end, begin + room)
            taken.append(Span(span.episode, begin, end))
            room -= end - begin
            begin = end
            if room == 0:
                yield taken
                taken, room = [], rows
    if taken:
        yield taken


def _by_episode(episodes: EpisodeFiles, task_rows: int, block_rows: int) -> Tasks:
    return [[span] for span in _whole(episodes)]


def _by_file_group(episodes: EpisodeFiles, task_rows: int, block_rows: int) -> Tasks:
    files_EF = np.column_stack([episodes.data_E, episodes.videos_EC])
    changes_E = (files_EF[1:] != files_EF[:-1]).any(axis=1)
    groups = _split(_whole(episodes), changes_E)
    return _pack([task for group in groups for task in _fill(group, task_rows)], task_rows)


def _by_chain(episodes: EpisodeFiles, task_rows: int, block_rows: int) -> Tasks:
    files_EF = episodes.videos_EC if episodes.videos_EC.shape[1] else episodes.data_E[:, None]
    return _split(_whole(episodes), ~_goes_on(files_EF))


def _by_sequence(episodes: EpisodeFiles, task_rows: int, block_rows: int) -> Tasks:
    total = int(episodes.lengths_E.sum())
    num_tasks = -(-total // task_rows)
    edges = [total * number // num_tasks for number in range(num_tasks + 1)]
    spans, tasks = _whole(episodes), []
    ends_E = np.cumsum(episodes.lengths_E)
    for begin, end in itertools.pairwise(edges):
        first, last = np.searchsorted(ends_E, [begin, end - 1], side="right").tolist()
        starts = (ends_E - episodes.lengths_E)[first : last + 1].tolist()
        tasks.append(
            [
                Span(span.episode, max(0, begin - start), min(span.end, end - start))
                for span, start in zip(spans[first : last + 1], starts, strict=True)
            ]
        )
    return tasks


def _by_row_block(episodes: EpisodeFiles, task_rows: int, block_rows: int) -> Tasks:
    return list(cut_rows(_whole(episodes), block_rows))


_PARTITIONINGS: dict[str, Callable[[EpisodeFiles, int, int], Tasks]] = {
    "episode": _by_episode,
    "file_group": _by_file_group,
    "chain": _by_chain,
    "sequential": _by_sequence,
    "row_block": _by_row_block,
}


def _whole(episodes: EpisodeFiles) -> list[Span]:
    return [Span(episode, 0, length) for episode, length in enumerate(episodes.lengths_E.tolist())]


def _split(spans: list[Span], cut_after: np.ndarray) -> Tasks:
    """Cut the list after every span whose flag is set; there is one flag less than spans."""
    bounds = [0, *(np.flatnonzero(cut_after) + 1).tolist(), len(spans)]
    return [spans[begin:end] for begin, end in itertools.pairwise(bounds)]


def _goes_on(files_EF: np.ndarray) -> np.ndarray:
    """For each gap between neighbouring episodes, whether a file is used both before and after it."""
    opened = np.zeros(len(files_EF), dtype=np.int64)
    for files in files_EF.T:
        _, first, group = np.unique(files, return_index=True, return_inverse=True)
        last = np.zeros(len(first), dtype=np.int64)
        np.maximum.at(last, group.reshape(-1), np.arange(len(files)))
        np.add.at(opened, first, 1)
        np.add.at(opened, last, -1)
    return np.cumsum(opened)[:-1] > 0


def _pack(tasks: Tasks, task_rows: int) -> Tasks:
    """Neighbouring tasks in one while they fit: starting a task costs more than reading a short episode."""
    packed: Tasks = []
    room = 0
    for task in tasks:
        rows = sum(span.rows for span in task)
        if rows > room:
            packed.append([])
            room = task_rows
        packed[-1] += task
        room -= rows
    return packed


def _fill(group: list[Span], task_rows: int) -> Iterator[list[Span]]:
    """Whole episodes together up to `task_rows` rows; one that is longer is cut into equal parts, each a task."""
    taken: list[Span] = []
    for span in group:
        if taken and sum(one.rows for one in taken) + span.rows > task_rows:
            yield taken
            taken = []
        if span.rows <= task_rows:
            taken.append(span)
            continue
        parts = -(-span.rows // task_rows)
        edges = [span.begin + span.rows * number // parts for number in range(parts + 1)]
        yield from ([Span(span.episode, begin, end)] for begin, end in itertools.pairwise(edges))
    if taken:
        yield taken
