"""Partitionings: every row once and in order, few files opened twice. Episodes by number, and those held out."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlatune.data.meta.dataset_meta import load_meta
from vlatune.data.order.partition import EpisodeFiles, Selection, hold_out, partition, select_episodes

PARTITIONINGS = ("episode", "file_group", "chain", "sequential", "row_block")


@st.composite
def layouts(draw) -> EpisodeFiles:
    """Make episodes in files of several cameras, each camera with files of other lengths."""
    count = draw(st.integers(1, 12))
    lengths = draw(st.lists(st.integers(1, 30), min_size=count, max_size=count))
    kinds = draw(st.integers(1, 4))
    steps = np.array(draw(st.lists(st.booleans(), min_size=count * kinds, max_size=count * kinds)))
    files = np.cumsum(steps.reshape(count, kinds), axis=0)
    return EpisodeFiles(np.array(lengths), files[:, 0], files[:, 1:])


def rows_of(tasks) -> list[tuple[int, int]]:
    return [(span.episode, frame) for task in tasks for span in task for frame in range(span.begin, span.end)]


def all_rows(files: EpisodeFiles) -> list[tuple[int, int]]:
    return [(episode, frame) for episode, length in enumerate(files.lengths_E) for frame in range(length)]


def sizes(tasks) -> list[int]:
    return [sum(span.rows for span in task) for task in tasks]


@pytest.mark.parametrize("how", PARTITIONINGS)
@settings(deadline=None, max_examples=80)
@given(layouts(), st.integers(1, 40), st.integers(1, 40))
def test_every_row_is_read_once_and_in_order(how, files, task_rows, block_rows):
    tasks = partition(how, files, task_rows=task_rows, block_rows=block_rows)
    assert rows_of(tasks) == all_rows(files)
    assert all(span.rows > 0 for task in tasks for span in task)
    assert all(tasks)


@settings(deadline=None, max_examples=80)
@given(layouts(), st.integers(1, 40))
def test_a_file_group_is_read_by_one_task_if_it_fits(files, task_rows):
    tasks = partition("file_group", files, task_rows=task_rows, block_rows=1)
    assert max(sizes(tasks)) <= task_rows
    of_episode = np.column_stack([files.data_E, files.videos_EC])
    assert all(one + two > task_rows for one, two in itertools.pairwise(sizes(tasks)))  # no task without need
    for task, after in itertools.pairwise(tasks):
        left, right = task[-1].episode, after[0].episode
        if (of_episode[left] == of_episode[right]).all():  # a group is cut only when it is too long for a task
            assert sum(files.lengths_E[(of_episode == of_episode[left]).all(axis=1)]) > task_rows or left == right


@settings(deadline=None, max_examples=80)
@given(layouts())
def test_a_chain_opens_each_video_in_one_task_and_is_cut_wherever_that_allows(files):
    tasks = partition("chain", files, task_rows=1, block_rows=1)
    by_file = files.videos_EC if files.videos_EC.shape[1] else files.data_E[:, None]
    used = [{(kind, file) for span in task for kind, file in enumerate(by_file[span.episode])} for task in tasks]
    assert sum(map(len, used)) == len(set().union(*used))
    for task in tasks:  # neighbours in a task share a file
        for left, right in itertools.pairwise(task):
            assert (by_file[left.episode] == by_file[right.episode]).any()


def test_a_chain_follows_a_file_that_is_used_again_later():
    files = EpisodeFiles(np.array([3, 3, 3, 3]), np.zeros(4, int), np.array([[0], [1], [0], [2]]))
    tasks = partition("chain", files, task_rows=1, block_rows=1)
    assert [[span.episode for span in task] for task in tasks] == [[0, 1, 2], [3]]


@settings(deadline=None, max_examples=80)
@given(layouts(), st.integers(1, 40))
def test_sequential_tasks_are_equal_and_row_blocks_are_full(files, rows):
    equal = sizes(partition("sequential", files, task_rows=rows, block_rows=1))
    assert max(equal) - min(equal) <= 1
    assert max(equal) <= rows
    full = sizes(partition("row_block", files, task_rows=1, block_rows=rows))
    assert full[:-1] == [rows] * (len(full) - 1)


@pytest.fixture(scope="module")
def meta(dataset_v3):
    return load_meta(str(dataset_v3))


def made_selection(count: int) -> Selection:
    places = np.arange(count)
    return Selection(dataset=places // 20, position=places, length=10 + places)


def episode_rows(selection: Selection) -> list[tuple[int, int, int]]:
    columns = (selection.dataset.tolist(), selection.position.tolist(), selection.length.tolist())
    return list(zip(*columns, strict=True))


def test_all_episodes_of_all_datasets_in_order(meta):
    lengths = meta.episodes.length.tolist()
    selection = select_episodes([meta, meta], None)
    assert episode_rows(selection) == [(number, place, lengths[place]) for number in (0, 1) for place in range(7)]
    assert len(selection) == 14


def test_an_episode_is_selected_by_its_index_not_by_its_position(meta):
    shifted = replace(meta, episodes=replace(meta.episodes, index=meta.episodes.index + 10))
    assert select_episodes([shifted], [12]).position.tolist() == [2]
    with pytest.raises(
        ValueError, match=r"there is no episode 2; it has 7 episodes, 10 to 16; correct the list of episodes"
    ):
        select_episodes([shifted], [12, 2])


@given(st.integers(1, 60), st.floats(0, 0.99), st.integers(0, 2**40))
def test_held_out_and_training_episodes_are_disjoint_and_complete(count, share, seed):
    selection = made_selection(count)
    training, held = hold_out(selection, share, seed)
    assert sorted(episode_rows(training) + episode_rows(held)) == episode_rows(selection)
    assert episode_rows(training) == sorted(episode_rows(training), key=lambda row: row[1])
    assert len(training) >= 1
    if share == 0 or count == 1:
        assert len(held) == 0
    else:
        assert abs(len(held) - share * count) <= 1
        assert len(held) >= 1
