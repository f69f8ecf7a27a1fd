"""Select episodes by number, over several datasets, and hold out the same ones every time."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlatune.data.meta.dataset_meta import load_meta
from vlatune.data.order.partition import Selection, hold_out, select_episodes


@pytest.fixture(scope="module")
def meta(dataset_v3):
    return load_meta(str(dataset_v3))


def made_selection(count: int) -> Selection:
    places = np.arange(count)
    return Selection(dataset=places // 20, position=places, length=10 + places)


def rows(selection: Selection) -> list[tuple[int, int, int]]:
    columns = (selection.dataset.tolist(), selection.position.tolist(), selection.length.tolist())
    return list(zip(*columns, strict=True))


def test_all_episodes_of_all_datasets_in_order(meta):
    lengths = meta.episodes.length.tolist()
    selection = select_episodes([meta, meta], None)
    assert rows(selection) == [(number, place, lengths[place]) for number in (0, 1) for place in range(7)]
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
    assert sorted(rows(training) + rows(held)) == rows(selection)
    assert rows(training) == sorted(rows(training), key=lambda row: row[1])
    assert len(training) >= 1
    if share == 0 or count == 1:
        assert len(held) == 0
    else:
        assert abs(len(held) - share * count) <= 1
        assert len(held) >= 1
