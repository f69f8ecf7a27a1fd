"""The shuffle meter: right by hand on small orders, and even with a permutation that is one."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlatune.dataset.order import shuffle_meter
from vlatune.dataset.order.sample_order import Mixture, OrderSpec
from vlatune.dataset.order.shuffle_meter import Shuffle, measure_batches, measure_shuffle

unhurried = settings(deadline=None, max_examples=30)  # a deadline would be a timing assertion


def permuted(samples: np.ndarray, batch: int, seed: int) -> np.ndarray:
    shuffled = np.random.default_rng(seed).permutation(samples)
    return shuffled[: len(shuffled) // batch * batch].reshape(-1, batch)


def test_figures_of_a_small_order_by_hand():
    """Episodes 0..3 and 4..5. 1 and 2 share a batch; so do 3 and 4, but over the edge of an episode."""
    found = measure_batches(np.array([[4, 0, 3], [2, 5, 1]]), (4, 2))
    assert found.distinct_episodes.order == 2
    assert found.neighbour_rate.order == pytest.approx(1 / 6)
    assert found.neighbour_steps.order == 1  # 1, 0, 1 and 1 steps
    assert (found.global_batch, found.batches) == (3, 2)


def test_a_permutations_figures_by_hand():
    """Two of four samples, all six pairs equally likely: four of them hold both episodes of two frames each."""
    found = measure_batches(np.array([[0, 1], [2, 3]]), (2, 2))
    assert found.distinct_episodes.permutation == pytest.approx(1 + 4 / 6)
    assert found.neighbour_rate.permutation == pytest.approx(2 / 6 / 2)  # two pairs are neighbours: one sample of two
    assert found.distance == pytest.approx(1 - 1 / 3)  # all neighbours share a step; of a permutation's pairs a third


@unhurried
@given(
    st.lists(st.integers(1, 60), min_size=8, max_size=30),
    st.sampled_from([2, 4, 8]),
    st.integers(1, 3),
    st.integers(0, 2**30),
)
def test_a_true_permutation_is_found_to_be_one(lengths, batch, copies, seed):
    frames = np.repeat(np.arange(sum(lengths)), copies)
    found = [measure_batches(permuted(frames, batch, seed + nth), tuple(lengths)) for nth in range(40)]
    for name in ("distinct_episodes", "neighbour_rate"):
        ours = np.array([getattr(one, name).order for one in found])
        true = np.mean([getattr(one, name).permutation for one in found])
        assert abs(ours.mean() - true) <= 6 * ours.std() / np.sqrt(len(ours)) + 0.02 * true + 1e-9


def test_a_permutation_is_near_and_recorded_order_is_far():
    lengths, frames = (300,) * 100, np.arange(30_000)
    near, far = (
        measure_batches(permuted(frames, 32, 0), lengths),
        measure_batches(frames[:29_984].reshape(-1, 32), lengths),
    )
    assert near.distance < 0.02
    assert near.neighbour_steps.order == pytest.approx(near.neighbour_steps.permutation, rel=0.03)
    assert far.distance > 0.99
    assert far.distinct_episodes.order < 1.2
    assert far.neighbour_rate.order > 0.9


def test_frames_that_come_several_times_do_not_make_a_permutation_look_far():
    frames = np.repeat(np.arange(9_000), np.repeat([1, 5], [6_000, 3_000]))
    assert measure_batches(permuted(frames, 32, 0), (300,) * 30).distance < 0.03


def test_a_buffer_of_rows_is_told_from_a_permutation():
    """Shuffling rows in a buffer of 1000 mixes batches and leaves neighbours close in time."""
    frames = np.random.default_rng(0).permuted(np.arange(30_000).reshape(-1, 1000), axis=1)
    found = measure_batches(frames[:, :992].reshape(-1, 32), (300,) * 100)
    assert found.distance > 0.9
    assert found.distinct_episodes.order < 0.2 * found.distinct_episodes.permutation


def test_episodes_of_one_frame_have_no_neighbours():
    found = measure_batches(permuted(np.arange(64), 8, 0), (1,) * 64)
    assert found.distinct_episodes.to_json() == {
        "order": 8.0,
        "permutation": pytest.approx(8.0),
        "ratio": pytest.approx(1),
    }
    assert found.neighbour_rate.to_json() == {"order": 0.0, "permutation": 0.0, "ratio": None}
    assert found.distance == 0


def test_long_epochs_are_looked_into_at_even_distances(monkeypatch):
    batches = permuted(np.arange(60_000), 32, 0)
    whole = measure_batches(batches, (300,) * 200)
    monkeypatch.setattr(shuffle_meter, "MAX_SAMPLES", 10_000)
    part = measure_batches(batches, (300,) * 200)
    assert part.distinct_episodes.order == pytest.approx(whole.distinct_episodes.order, rel=0.02)
    assert part.distinct_episodes.order != whole.distinct_episodes.order
    assert part.distinct_episodes.permutation == whole.distinct_episodes.permutation


@pytest.mark.parametrize("mixture", [None, Mixture((0,) * 10 + (1,) * 10, (3.0, 1.0))])
def test_a_runs_figures_fit_into_json(mixture):
    spec = OrderSpec((30,) * 20, 7, 8, 8, 8, 16, mixture=mixture, drop_last=False)
    found = measure_shuffle(spec)
    assert isinstance(found, Shuffle)
    kept = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert set(kept) == {
        "global_batch",
        "batches",
        "distinct_episodes",
        "neighbour_rate",
        "neighbour_steps",
        "distance",
    }
    assert kept["distinct_episodes"]["ratio"] == pytest.approx(
        found.distinct_episodes.order / found.distinct_episodes.permutation
    )
