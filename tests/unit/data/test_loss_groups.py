"""Loss groups: the columns of a row, the metrics of an interval, the worst episodes."""

import numpy as np

from vlatune.batch import LOSS_GROUPS, TASK
from vlatune.data import loss_groups
from vlatune.data.loss_groups import (
    MOST_NAME_CHARS,
    OTHERS,
    LossGroups,
    WithLossGroups,
    make_loss_groups,
    task_name,
)
from vlatune.data.transforms import Select


def columns(datasets: list[int], episodes: list[int], tasks: list[str]) -> dict[str, np.ndarray]:
    ids = {"dataset_index": np.array(datasets), "episode_index": np.array(episodes)}
    return ids | {TASK: np.array(tasks, dtype=object)}


def two_robots() -> LossGroups:
    return make_loss_groups([["fold", "open"], ["open", "push"]], [3, 2], dims=2, robots=2)


def test_every_row_has_a_column_per_group():
    groups = two_robots()
    assert groups.tasks == ("fold", "open", "push")
    assert (groups.interval, groups.columns) == (2 + 3 + 2, 2 + 3 + 2 + 5)
    numbers = groups.numbers(columns([0, 1, 1], [2, 0, 1], ["open", "open", "push"]))
    assert numbers.dtype == np.int64
    assert numbers.tolist() == [[0, 3, 7 + 2], [1, 3, 7 + 3], [1, 4, 7 + 4]]


def test_the_number_of_tasks_and_episodes_is_limited(monkeypatch):
    monkeypatch.setattr(loss_groups, "MOST_TASKS", 2)
    monkeypatch.setattr(loss_groups, "MOST_EPISODES", 3)
    groups = make_loss_groups([["a", "b", "c", "d"]], [4], dims=1, robots=0)
    assert groups.tasks == ("a", "b", OTHERS)
    assert groups.episodes == 0
    assert groups.numbers(columns([0] * 3, [1] * 3, ["b", "d", "unknown"])).tolist() == [[1, 4], [2, 4], [2, 4]]
    assert groups.columns == 5
    assert groups.worst_episodes(np.ones((2, 1))) == ()


def test_task_names_are_short_and_without_escape_sequences():
    long = "x" * (MOST_NAME_CHARS + 1)
    groups = make_loss_groups([["", "\x1b[2Jgone\n", long, f"{long}y"]], [1], dims=1, robots=0)
    assert groups.tasks == ("no task", "?[2Jgone?", "x" * MOST_NAME_CHARS)
    assert groups.numbers(columns([0, 0], [0, 0], ["\x1b[2Jgone\n", f"{long}y"]))[:, 0].tolist() == [1, 2]
    assert len(task_name("\x1b" * 10**6)) == MOST_NAME_CHARS


def test_metrics_contain_means_and_omit_empty_groups():
    groups = two_robots()
    sums, counts = [4.0, 0.0, 3.0, 1.0, 0.0, 6.0, 2.0], [2.0, 0.0, 1.0, 1.0, 0.0, 3.0, 4.0]
    assert groups.to_metrics([*sums, *counts]) == {
        "loss_by_dataset": [2.0, None],
        "loss_by_task": {"fold": 3.0, "open": 1.0, "push": None},
        "loss_by_dim": [2.0, 0.5],
    }
    alone = make_loss_groups([["fold", "open"]], [1], dims=2, robots=0)
    assert alone.to_metrics([0.0] * 8) == {}


def test_episodes_are_sorted_by_loss(monkeypatch):
    monkeypatch.setattr(loss_groups, "WORST_EPISODES", 3)
    sums_2E = np.array([[1.0, 0.0, 9.0, 2.0, 8.0], [1.0, 0.0, 3.0, 4.0, 2.0]], dtype=np.float32)
    assert two_robots().worst_episodes(sums_2E) == (
        {"dataset": 1, "episode": 1, "loss": 4.0, "samples": 2},
        {"dataset": 0, "episode": 2, "loss": 3.0, "samples": 3},
        {"dataset": 0, "episode": 0, "loss": 1.0, "samples": 1},
    )


def test_numbers_are_added_after_the_policys_transforms():
    transform = WithLossGroups(two_robots(), (Select(("episode_index",)),))
    made = transform(columns([0], [1], ["fold"]))
    assert made.keys() == {"episode_index", LOSS_GROUPS}
    assert made[LOSS_GROUPS].tolist() == [[0, 2, 8]]
