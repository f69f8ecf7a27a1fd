"""Several datasets by weight: integer quotas, and all frames of a dataset equally often."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlatune.batch import SLOT
from vlatune.config.settings import DatasetConfig, PolicyConfig, RunConfig
from vlatune.data.features import camera_spec, vector_spec
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.data.order.sample_order import (
    Mixture,
    OrderSpec,
    check_mixture,
    choose_lanes,
    concatenate_runs,
    epoch_order,
    mixed_runs,
    quotas,
    step_samples,
    take_stretch,
)
from vlatune.data.reader import ReadSpec, make_unit, read_unit
from vlatune.feed.plan import Share, plan_pieces
from vlatune.run_setup import make_setup

LENGTHS = np.array([30, 10, 25, 15])
MIXED = Mixture(dataset=(0, 1, 0, 1), weights=(0.9, 0.1))  # of 80 frames, 55 and 25


def samples_of(epoch: int, *, mixture: Mixture = MIXED, seed: int = 5, run_length: int = 6) -> np.ndarray:
    return concatenate_runs(mixed_runs(mixture, LENGTHS, run_length, seed=seed, epoch=epoch))


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(1, 10_000))
def test_quotas_are_rounded_shares_of_the_epoch(weights, num_samples):
    found = np.asarray(quotas(Mixture((), tuple(weights)), num_samples))
    assert found.sum() == num_samples
    assert np.abs(found - np.asarray(weights) / sum(weights) * num_samples).max() < 1


@given(st.floats(0.02, 50), st.integers(0, 2**40), st.integers(1, 9), st.integers(1, 12))
def test_after_any_epoch_the_frames_of_a_dataset_were_used_equally_often(weight, seed, epochs, run_length):
    mixture = Mixture(MIXED.dataset, (1.0, weight))
    taken = [samples_of(epoch, mixture=mixture, seed=seed, run_length=run_length) for epoch in range(epochs)]
    assert [len(one) for one in taken] == [80] * epochs
    times = np.bincount(np.concatenate(taken), minlength=80)
    dataset = np.repeat(MIXED.dataset, LENGTHS)
    for number in (0, 1):
        assert np.ptp(times[dataset == number]) <= 1


@pytest.mark.parametrize("how", ["fixed", "size", "temperature"])
@pytest.mark.parametrize("global_batch", [8, 32, 64])
def test_shares_are_the_weights_in_every_ten_thousand_samples(global_batch, how):
    """Shares are within 1 % of the weights, also for datasets with far longer epochs and across epochs."""
    episodes, length = np.array([40, 120, 80]), 300
    frames = episodes * length
    weights = {"fixed": np.array([0.2, 0.5, 0.3]), "size": frames / frames.max(), "temperature": frames ** (1 / 3)}[how]
    dataset = np.repeat(np.arange(3), episodes)
    for seed in range(3):
        spec = OrderSpec(
            lengths=(length,) * len(dataset),
            seed=seed,
            global_batch=global_batch,
            lanes=choose_lanes(global_batch, 1),
            run_length=32,
            window_rows=32,
            mixture=Mixture(tuple(dataset.tolist()), tuple(weights.tolist())),
        )
        taken = np.concatenate([step_samples(spec, epoch_order(spec, epoch)).ravel() for epoch in (0, 1)]) // length
        for begin in range(0, len(taken) - 10_000, 5_000):
            shares = np.bincount(dataset[taken[begin : begin + 10_000]], minlength=3) / 10_000
            np.testing.assert_allclose(shares, weights / weights.sum(), atol=0.01)


@given(st.floats(0.02, 50), st.booleans(), st.integers(1, 12), st.sampled_from([(1, 1), (4, 2), (12, 12), (40, 40)]))
def test_lanes_hold_the_epochs_samples_except_an_incomplete_batch(weight, drop_last, run_length, batch):
    mixture = Mixture(MIXED.dataset, (1.0, weight))
    spec = OrderSpec(tuple(LENGTHS.tolist()), 5, *batch, run_length, 8, mixture, drop_last=drop_last)
    order = epoch_order(spec, 2)
    assert order.shape == (spec.lanes, spec.samples_per_lane)
    taken = np.bincount(order.ravel(), minlength=80)
    given_ = np.bincount(samples_of(2, mixture=mixture, run_length=run_length), minlength=80)
    extra = order.size - 80
    assert abs(extra) < spec.global_batch
    assert (taken - given_).clip(min=0).sum() == max(0, extra)
    assert (given_ - taken).clip(min=0).sum() == max(0, -extra)


def test_by_size_a_dataset_that_is_completely_held_out_gives_no_samples():
    mixture = Mixture((0, 0, 2, 2), (1.0, 0.0, 1.0))
    check_mixture(mixture, tuple(LENGTHS.tolist()))
    spec = OrderSpec(tuple(LENGTHS.tolist()), 5, 8, 8, 6, 8, mixture)
    assert sorted(epoch_order(spec, 0).ravel().tolist()) == list(range(80))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_a_stretch_of_runs_is_a_slice_of_their_samples(sizes, data):
    begin = 100 * np.arange(len(sizes))
    runs = (begin, begin + sizes)
    first = data.draw(st.integers(-3, sum(sizes)))
    last = data.draw(st.integers(first, sum(sizes) + 3))
    assert np.array_equal(
        concatenate_runs(take_stretch(runs, first, last)), concatenate_runs(runs)[max(first, 0) : max(last, 0)]
    )


@given(st.floats(0.02, 50), st.booleans(), st.sampled_from([1, 2, 4]), st.integers(1, 40))
def test_the_plan_reads_a_repeated_frame_into_every_slot(weight, drop_last, num_workers, window_rows):
    """A frame that occurs twice in a window stays in one piece and fills both slots."""
    spec = OrderSpec(
        tuple(LENGTHS.tolist()), 5, 12, 4, 6, window_rows, Mixture(MIXED.dataset, (1.0, weight)), drop_last=drop_last
    )
    order, starts = epoch_order(spec, 1), np.cumsum(LENGTHS) - LENGTHS
    filled = np.full((spec.batches_per_epoch, num_workers, 12 // num_workers), -1)
    for rank in range(num_workers):
        pieces = plan_pieces(spec, order, Share(rank, num_workers))
        for piece in pieces:
            assert (np.diff(piece.frames) >= 0).all()
            step, slot = np.divmod(piece.slots, 12 // num_workers)
            assert (filled[step, rank, slot] == -1).all()
            filled[step, rank, slot] = starts[piece.episode] + piece.frames
    assert np.array_equal(filled.reshape(-1, 12), step_samples(spec, order))


def test_a_frame_that_a_unit_repeats_is_delivered_twice(dataset_v3):
    meta = load_meta(str(dataset_v3))
    cameras = tuple(camera_spec(meta, name, (32, 32)) for name in meta.cameras)
    vectors = (vector_spec(meta, "action", is_float32=True, offsets=(0, 1)),)
    spec = ReadSpec(
        root=meta.root, dataset_index=0, tolerance_s=1e-4, cameras=cameras, vectors=vectors, tasks=meta.tasks
    )
    rows = read_unit(spec, make_unit(meta, spec, 1, np.array([2, 3, 3, 4, 4]), np.arange(5)))
    once = read_unit(spec, make_unit(meta, spec, 1, np.array([2, 3, 4]), np.array([0, 1, 3])))
    for name in rows.keys() - {SLOT}:
        assert np.array_equal(rows[name], once[name][[0, 1, 1, 2, 2]]), name


def test_the_order_of_a_run_has_its_weights_and_last_batch(dataset_v3, small_base):
    root = (str(dataset_v3), str(dataset_v3))
    dataset = DatasetConfig(root=root, weight=(3.0, 1.0), drop_last=False, eval_split=0.0)
    order = make_setup(RunConfig(dataset=dataset, policy=PolicyConfig(path=str(small_base)))).order
    assert order.mixture == Mixture((0,) * 7 + (1,) * 7, (3.0, 1.0))
    assert not order.drop_last
    plain = DatasetConfig(root=root, eval_split=0.0)
    order = make_setup(RunConfig(dataset=plain, policy=PolicyConfig(path=str(small_base)))).order
    assert order.mixture == Mixture((0,) * 7 + (1,) * 7, (1.0, 1.0))
    alone = replace(plain, root=root[:1])
    assert make_setup(RunConfig(dataset=alone, policy=PolicyConfig(path=str(small_base)))).order.mixture is None
