"""Select episodes, hold out episodes, and partition episodes into read tasks. Pure.

The held-out episodes are a function of (seed, number of episodes, share), or of the episodes' tasks
and the share, so training, evaluation and every restart agree on them. A dataset is partitioned by
the files that hold its episodes:

    episode      0     1     2     3         lengths, in rows
    mp4          a     a     b     b
    parquet      x     x     x     y

    episode      [0]   [1]   [2]   [3]       one task per episode
    file_group   [0     1]   [2     3]       neighbours with the same files; large groups are
                                             split, small ones (here 2 and 3) share a task
    chain        [0     1]   [2     3]       split only between mp4 files, so that one task
                                             opens each
    sequential   [0   1 | 1  2 | 2   3]      the stream of all rows in equal parts
    row_block    [0 | 0 | 1 | 1 | ...]       a fixed number of rows; the last task has the rest

A partitioning only chooses where the stream of all rows is cut, so the concatenated rows of its
tasks are the dataset's rows in order.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vlatune.data.meta.dataset_meta import DatasetMeta
from vlatune.errors import did_you_mean


@dataclass(frozen=True)
class Selection:
    """Episodes of all datasets in one list; flat sample numbers count over it."""

    dataset: np.ndarray
    position: np.ndarray
    """Row in that dataset's episode table."""
    length: np.ndarray

    def __len__(self) -> int:
        return len(self.dataset)


def select_episodes(
    metas: Sequence[DatasetMeta], wanted: Sequence[int] | None, excluded: Sequence[int] | None = None
) -> Selection:
    """Select all or the wanted episodes (by episode_index), except the excluded ones."""
    most = max(len(meta.episodes) for meta in metas)
    unknown = sorted(one for one in excluded or () if not 0 <= one < most)
    if unknown:
        raise ValueError(
            f"--dataset.exclude_episodes: there is no episode {unknown[0]}; "
            f"{'the longest dataset' if len(metas) > 1 else 'the dataset'} has {most} episodes, 0 to {most - 1}; "
            f"correct the list"
        )
    positions = []
    for meta in metas:
        index = meta.episodes.index
        missing = sorted(set(wanted or ()) - set(index.tolist()))
        if missing:
            raise ValueError(
                f"dataset '{meta.root.url}': there is no episode {missing[0]}; it has {len(index)} episodes, "
                f"{index[0]} to {index[-1]}; correct the list of episodes"
            )
        is_wanted = np.isin(index, index if wanted is None else list(wanted))
        positions.append(np.flatnonzero(is_wanted & ~np.isin(index, list(excluded or ()))))
    if excluded and not any(map(len, positions)):
        raise ValueError("--dataset.exclude_episodes leaves no episode; leave some of them out of the list")
    return Selection(
        dataset=np.repeat(np.arange(len(metas)), [len(part) for part in positions]),
        position=np.concatenate(positions),
        length=np.concatenate([meta.episodes.length[part] for meta, part in zip(metas, positions, strict=True)]),
    )


def hold_out(selection: Selection, share: float, seed: int, *, by_dataset: bool = False) -> tuple[Selection, Selection]:
    """Split randomly into (training, held out); a share above 0 holds out at least one of 2+.

    With `by_dataset`, the same share of every dataset is held out, to evaluate each separately.
    """
    group_E = selection.dataset if by_dataset else np.zeros_like(selection.dataset)
    is_held_E = np.zeros(len(selection), dtype=bool)
    for group in np.unique(group_E):
        places = np.flatnonzero(group_E == group)
        held = 0 if share == 0 or len(places) < 2 else min(len(places) - 1, max(1, round(share * len(places))))
        shuffled = np.random.Generator(np.random.Philox(key=seed)).permutation(len(places))
        is_held_E[places[shuffled[:held]]] = True
    return pick(selection, ~is_held_E), pick(selection, is_held_E)


def hold_out_last(selection: Selection, share: float, metas: Sequence[DatasetMeta]) -> tuple[Selection, Selection]:
    """Hold out the last ceil(share x episodes) per dataset and task, as LeRobot's `eval_split`."""
    groups: dict[tuple[int, int], list[int]] = {}
    for place, (dataset, position) in enumerate(
        zip(selection.dataset.tolist(), selection.position.tolist(), strict=True)
    ):
        tasks = metas[dataset].episodes.first_task
        groups.setdefault((dataset, -1 if tasks is None else int(tasks[position])), []).append(place)
    chosen = np.zeros(len(selection), dtype=bool)
    for places in groups.values():
        chosen[places[len(places) - math.ceil(len(places) * share) :]] = True
    if chosen.all():
        raise ValueError(
            f"--dataset.eval_split={share}: it holds the last episodes of each task out, which are all {len(selection)} episodes here; lower it, "
            f"or give --dataset.hold_out=random"
        )
    return pick(selection, ~chosen), pick(selection, chosen)


def pick(selection: Selection, mask: np.ndarray) -> Selection:
    """Return the episodes where the mask is true."""
    return Selection(selection.dataset[mask], selection.position[mask], selection.length[mask])


def drop_last_frames(selection: Selection, count: int) -> Selection:
    """Drop the last `count` frames of each episode, like LeRobot's sampler, or all if shorter."""
    if count == 0:
        return selection
    longer = pick(selection, selection.length > count)
    if len(longer) == 0:
        raise ValueError(
            f"the policy leaves the last {count} frames of each episode out (drop_n_last_frames), and no episode to train on has "
            f"more; use a base with a smaller number, or longer episodes"
        )
    return Selection(longer.dataset, longer.position, longer.length - count)


class Span(NamedTuple):
    """Frames [begin, end) of one episode."""

    episode: int
    """Index in the list that was partitioned."""
    begin: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class EpisodeFiles:
    """Lengths and files of the episodes to partition; files are identified by any unique number."""

    lengths_E: np.ndarray
    data_E: np.ndarray
    """The parquet file of each episode."""
    videos_EC: np.ndarray
    """The mp4 file of each episode and camera; no columns for a dataset without video."""


def partition(how: str, episodes: EpisodeFiles, *, task_rows: int, block_rows: int) -> list[list[Span]]:
    """Partition all rows into read tasks of about `task_rows`, or of `block_rows`, rows."""
    lengths_E = episodes.lengths_E.tolist()
    ends_E = np.cumsum(lengths_E)
    begins_E = (ends_E - lengths_E).tolist()
    tasks = []
    for begin, end in itertools.pairwise([0, *_PARTITIONINGS[how](episodes, task_rows, block_rows)]):
        first, last = np.searchsorted(ends_E, [begin, end - 1], side="right").tolist()
        tasks.append(
            [
                Span(at, max(0, begin - begins_E[at]), min(lengths_E[at], end - begins_E[at]))
                for at in range(first, last + 1)
            ]
        )
    return tasks


def check_partitioning(how: str) -> None:
    if how not in _PARTITIONINGS:
        raise ValueError(
            f"partitioning='{how}' is not known{did_you_mean(how, _PARTITIONINGS) or ';'} "
            f"there are {', '.join(_PARTITIONINGS)}"
        )


def _cut_file_groups(episodes: EpisodeFiles, task_rows: int, block_rows: int) -> list[int]:
    files_EF = np.column_stack([episodes.data_E, episodes.videos_EC])
    changes = np.flatnonzero((files_EF[1:] != files_EF[:-1]).any(axis=1)) + 1
    parts: list[int] = []  # rows that stay together: a group, else an episode, else a share of an episode
    for group in np.split(episodes.lengths_E, changes):
        for rows in [int(group.sum())] if group.sum() <= task_rows else group.tolist():
            parts += np.diff(_cut_equally(rows, task_rows), prepend=0).tolist()
    ends, begin, end = [], 0, 0
    for rows in parts:  # a task takes as many parts as fit, because starting a task is expensive
        if end + rows - begin > task_rows:
            ends.append(end)
            begin = end
        end += rows
    return [*ends, end]


def _cut_chains(episodes: EpisodeFiles, task_rows: int, block_rows: int) -> list[int]:
    """Cut between neighbouring episodes if no file is used on both sides."""
    files_EF = episodes.videos_EC if episodes.videos_EC.shape[1] else episodes.data_E[:, None]
    num_open_E = np.zeros(len(files_EF), dtype=np.int64)
    for files in files_EF.T:
        _, first, group = np.unique(files, return_index=True, return_inverse=True)
        last = np.zeros(len(first), dtype=np.int64)
        np.maximum.at(last, group.reshape(-1), np.arange(len(files)))
        np.add.at(num_open_E, first, 1)
        np.add.at(num_open_E, last, -1)
    return np.cumsum(episodes.lengths_E)[np.cumsum(num_open_E) == 0].tolist()


def _cut_equally(rows: int, task_rows: int) -> list[int]:
    num_tasks = -(-rows // task_rows)
    return [rows * number // num_tasks for number in range(1, num_tasks + 1)]


def _cut_blocks(episodes: EpisodeFiles, task_rows: int, block_rows: int) -> list[int]:
    total = int(episodes.lengths_E.sum())
    return [*range(block_rows, total, block_rows), total]


_PARTITIONINGS: dict[str, Callable[[EpisodeFiles, int, int], list[int]]] = {
    "episode": lambda episodes, task_rows, block_rows: np.cumsum(episodes.lengths_E).tolist(),
    "file_group": _cut_file_groups,
    "chain": _cut_chains,
    "sequential": lambda episodes, task_rows, block_rows: _cut_equally(int(episodes.lengths_E.sum()), task_rows),
    "row_block": _cut_blocks,
}
"""Functions that return the end row of each task."""
