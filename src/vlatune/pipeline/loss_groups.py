"""Whose loss is it? Groups of samples whose losses are told apart: robots, tasks, action dims, episodes. Pure, without torch.

All groups are columns of one table of two lines, sums of losses and how many they are, which lies on the worker's device
(`train/worker/optimizer.py`). A row's own columns come with it as numbers, made in the read task; names stay here, on the host.

    columns   robots | tasks | action dims |  episodes ...
              `----- since the last log line ------'  `-- since half of the run

A log line reads the first three and sets them to zero; episodes are read at the run's end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from vlatune.batch import LOSS_GROUPS, TASK, Columns
from vlatune.console import printable
from vlatune.pipeline.transforms import Transform, apply_all

MOST_TASKS = 64
"""Told apart: the first sentences of the datasets; all others are one group more."""
MOST_NAME_CHARS = 80
"""Of a sentence as the name of a group: it stands in every line of metrics.jsonl."""
MOST_EPISODES = 1 << 17
"""Of all datasets; a run with more has no losses by episode. A checkpoint holds eight bytes a worker for each."""
WORST_EPISODES = 100
OTHERS = "all other tasks"


def task_name(sentence: str) -> str:
    """What a sentence goes by; two that begin alike for long are one group."""
    return printable(sentence[:MOST_NAME_CHARS]) or "no sentence"


@dataclass(frozen=True)
class LossGroups:
    """Which groups there are, in the order of the table's columns."""

    robots: int
    """Datasets of several robots; 0 of one."""
    tasks: tuple[str, ...]
    """Names; none where there is one task only."""
    dims: int
    first_episode: tuple[int, ...]
    """Of each dataset, how many episodes the datasets before it have."""
    episodes: int
    """0 where there are too many; one column then is all of them."""

    @property
    def dim_columns(self) -> slice:
        begin = self.robots + len(self.tasks)
        return slice(begin, begin + self.dims)

    @property
    def interval(self) -> int:
        """Columns that a log line reads."""
        return self.dim_columns.stop

    @property
    def columns(self) -> int:
        return self.interval + max(1, self.episodes)

    def numbers(self, columns: Columns) -> np.ndarray:
        """(N, groups of a row): the table's columns that a row's loss is added to."""
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
        """What a log line says of the interval's columns, sums first; None where no sample of a group came."""
        half = len(sums_and_counts) // 2
        pairs = zip(sums_and_counts[:half], sums_and_counts[half:], strict=True)
        means = [total / count if count else None for total, count in pairs]
        tasks = means[self.robots : self.dim_columns.start]
        found = {
            "loss_by_dataset": means[: self.robots],
            "loss_by_task": dict(zip(self.tasks, tasks, strict=True)) if _any(tasks) else {},
            "loss_by_dim": means[self.dim_columns] if _any(means[self.dim_columns]) else [],
        }
        return {name: values for name, values in found.items() if values}

    def worst_episodes(self, sums_2E: np.ndarray) -> tuple[dict[str, int | float], ...]:
        """For summary.json, of all workers' sums and counts of episodes: the highest losses first."""
        sums_E, counts_E = sums_2E[:, : self.episodes]
        seen = np.flatnonzero(counts_E)
        losses = sums_E[seen] / counts_E[seen]
        worst = np.lexsort((seen, -losses))[:WORST_EPISODES]
        return tuple(
            self._place(int(seen[one])) | {"loss": float(losses[one]), "samples": int(counts_E[seen[one]])}
            for one in worst
        )

    def _place(self, number: int) -> dict[str, int | float]:
        dataset = int(np.searchsorted(self.first_episode, number, side="right")) - 1
        return {"dataset": dataset, "episode": number - self.first_episode[dataset]}


def _any(means: Sequence[float | None]) -> bool:
    return any(mean is not None for mean in means)


def make_loss_groups(
    tasks: Sequence[Sequence[str]], num_episodes: Sequence[int], *, dims: int, robots: int
) -> LossGroups:
    """Of the datasets' sentences and episodes, dataset by dataset."""
    names = list(dict.fromkeys(task_name(sentence) for of_dataset in tasks for sentence in of_dataset))
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
    """Transforms, and beside what they make of a row its numbers in the table: a policy need not know of them."""

    groups: LossGroups
    transforms: tuple[Transform, ...]

    def __call__(self, columns: Columns) -> Columns:
        numbers: Mapping[str, np.ndarray] = {LOSS_GROUPS: self.groups.numbers(columns)}
        return apply_all(self.transforms, columns) | numbers
