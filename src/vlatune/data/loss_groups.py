"""Groups for which losses are reported: robots, tasks, action dims, episodes. Pure, no torch.

All groups are columns of one table of loss sums and counts on the worker's device
(`train/worker/optimizer.py`). Read tasks add each row's column numbers; names stay on the host.

    columns   robots | tasks | action dims |  episodes ...
              `----- since the last log line ------'  `-- second half of the run

A log line reads and resets the first three; episodes are read at the end of the run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from vlatune.batch import LOSS_GROUPS, TASK, Columns
from vlatune.console import printable
from vlatune.data.transforms import Transform, apply_all

MOST_TASKS = 64
"""Maximum number of separate tasks; all others form one group."""
MOST_NAME_CHARS = 80
"""Maximum length of a task name in metrics.jsonl."""
MOST_EPISODES = 1 << 17
"""Maximum number of episodes for losses by episode, to limit the size of checkpoints."""
WORST_EPISODES = 100
OTHERS = "all other tasks"


def task_name(task: str) -> str:
    """Return the name of a task's group; long tasks with the same beginning share a group."""
    return printable(task[:MOST_NAME_CHARS]) or "no task"


@dataclass(frozen=True)
class LossGroups:
    """The groups, in order of the table's columns."""

    robots: int
    """Number of datasets if they are of several robots, else 0."""
    tasks: tuple[str, ...]
    """Task names; empty if there is only one task."""
    dims: int
    first_episode: tuple[int, ...]
    """Index of each dataset's first episode, over all datasets."""
    episodes: int
    """Number of episodes; 0 if too many, which then share one column."""

    @property
    def dim_columns(self) -> slice:
        begin = self.robots + len(self.tasks)
        return slice(begin, begin + self.dims)

    @property
    def interval(self) -> int:
        """Number of columns that a log line reads."""
        return self.dim_columns.stop

    @property
    def columns(self) -> int:
        return self.interval + max(1, self.episodes)

    def numbers(self, columns: Columns) -> np.ndarray:
        """Return (N, groups of a row): the table's columns for each row."""
        dataset_N = columns["dataset_index"]
        found = [dataset_N] if self.robots else []
        if self.tasks:
            known = {name: number for number, name in enumerate(self.tasks)}
            by_text = {text: known.get(task_name(text), len(self.tasks) - 1) for text in set(columns[TASK])}
            found.append(self.robots + np.array([by_text[text] for text in columns[TASK]]))
        episode_N = np.array(self.first_episode)[dataset_N] + columns["episode_index"]
        found.append(self.interval + (episode_N if self.episodes else np.zeros_like(episode_N)))
        return np.stack(found, axis=1).astype(np.int64)

    def to_metrics(self, sums_and_counts: Sequence[float]) -> dict[str, Any]:
        """Return the metrics of an interval from its sums and counts; None for empty groups."""
        half = len(sums_and_counts) // 2
        pairs = zip(sums_and_counts[:half], sums_and_counts[half:], strict=True)
        means = [total / count if count else None for total, count in pairs]
        tasks, dims = means[self.robots : self.dim_columns.start], means[self.dim_columns]
        found = {
            "loss_by_dataset": means[: self.robots],
            "loss_by_task": dict(zip(self.tasks, tasks, strict=True)) if tasks.count(None) < len(tasks) else {},
            "loss_by_dim": dims if dims.count(None) < len(dims) else [],
        }
        return {name: values for name, values in found.items() if values}

    def worst_episodes(self, sums_2E: np.ndarray) -> tuple[dict[str, int | float], ...]:
        """Return the episodes with the highest losses for summary.json, from sums and counts."""
        sums_E, counts_E = sums_2E[:, : self.episodes]
        seen = np.flatnonzero(counts_E)
        losses = sums_E[seen] / counts_E[seen]
        worst = np.lexsort((seen, -losses))[:WORST_EPISODES]
        dataset_E = np.searchsorted(self.first_episode, seen, side="right") - 1
        return tuple(
            {
                "dataset": int(dataset_E[one]),
                "episode": int(seen[one]) - self.first_episode[dataset_E[one]],
                "loss": float(losses[one]),
                "samples": int(counts_E[seen[one]]),
            }
            for one in worst
        )


def make_loss_groups(
    tasks: Sequence[Sequence[str]], num_episodes: Sequence[int], *, dims: int, robots: int
) -> LossGroups:
    """Build the groups from the tasks and episodes of each dataset."""
    names = list(dict.fromkeys(task_name(task) for of_dataset in tasks for task in of_dataset))
    if len(names) > MOST_TASKS:
        names = [*names[:MOST_TASKS], OTHERS]
    total = sum(num_episodes)
    return LossGroups(
        robots=robots,
        tasks=tuple(names) if len(names) > 1 else (),
        dims=dims,
        first_episode=tuple(accumulate(num_episodes[:-1], initial=0)),
        episodes=total if total <= MOST_EPISODES else 0,
    )


@dataclass(frozen=True)
class WithLossGroups:
    """Apply transforms and add the rows' column numbers, transparently to the policy."""

    groups: LossGroups
    transforms: tuple[Transform, ...]

    def __call__(self, columns: Columns) -> Columns:
        numbers = self.groups.numbers(columns)
        return apply_all(self.transforms, columns) | {LOSS_GROUPS: numbers}
