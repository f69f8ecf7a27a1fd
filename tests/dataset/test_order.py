"""The order of samples: complete, reproducible, the same for every number of workers, and well mixed."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlatune.dataset.order import (
    MAX_LANES,
    Cursor,
    OrderSpec,
    check_order,
    choose_lanes,
    cursor_at,
    epoch_order,
    step_samples,
    window_edges,
)
from vlatune.pipeline.plan import Share

unhurried = settings(deadline=None, max_examples=60)  # a deadline would be a timing assertion
PLAIN = OrderSpec(lengths=(30,) * 20, seed=7, global_batch=8, lanes=8, run_length=8, window_rows=16)


@st.composite
def specs(draw, *, lanes=(1, 2, 3, 4, 8, 16)):
    num_lanes = draw(st.sampled_from(lanes))
    spec = OrderSpec(
        lengths=tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))),
        seed=draw(st.integers(0, 2**40)),
        global_batch=num_lanes * draw(st.integers(1, 3)),
        lanes=num_lanes,
        run_length=draw(st.integers(1, 12)),
        window_rows=draw(st.integers(1, 20)),
    )
    missing = spec.global_batch - spec.num_samples
    return spec if missing <= 0 else replace(spec, lengths=(*spec.lengths, missing))


def all_steps(spec: OrderSpec, epoch: int) -> np.ndarray:
    """(steps, global batch)"""
    order = epoch_order(spec, epoch)
    return np.stack([step_samples(spec, order, batch) for batch in range(spec.batches_per_epoch)])


@unhurried
@given(specs(), st.integers(0, 5))
def test_an_epoch_has_every_frame_at_most_once_and_drops_less_than_a_batch(spec, epoch):
    check_order(spec)
    samples = all_steps(spec, epoch).reshape(-1)
    assert len(np.unique(samples)) == len(samples)
    assert samples.min() >= 0
    assert samples.max() < spec.num_samples
    assert spec.num_samples - len(samples) < spec.global_batch


@unhurried
@given(specs(lanes=(8, 16, 24)), st.integers(0, 3))
def test_global_batches_are_the_same_for_1_2_4_and_8_workers(spec, epoch):
    order, expected = epoch_order(spec, epoch), all_steps(spec, epoch)
    for num_workers in (1, 2, 4, 8):
        shares = [Share(rank, num_workers) for rank in range(num_workers)]
        parts = [order[share.lanes(spec)].reshape(-1, *_steps_of(spec)) for share in shares]
        each = [part.transpose(1, 0, 2).reshape(spec.batches_per_epoch, -1) for part in parts]
        assert all(part.shape[1] == share.slots_per_step(spec) for part, share in zip(each, shares, strict=True))
        assert np.array_equal(np.concatenate(each, axis=1), expected)


def _steps_of(spec: OrderSpec) -> tuple[int, int]:
    return spec.batches_per_epoch, spec.samples_per_lane_step


@unhurried
@given(specs(), st.data())
def test_the_order_after_n_steps_is_the_tail_of_the_whole(spec, data):
    steps = 2 * spec.batches_per_epoch + 1
    done = data.draw(st.integers(0, steps - 1))
    whole = [batch for epoch in range(3) for batch in all_steps(spec, epoch)][:steps]
    tail = []
    for step in range(done, steps):
        cursor = cursor_at(spec, step)
        tail.append(step_samples(spec, epoch_order(spec, cursor.epoch), cursor.batch))
    assert np.array_equal(tail, whole[done:])


def test_a_cursor_counts_whole_epochs():
    assert PLAIN.batches_per_epoch == 75
    assert cursor_at(PLAIN, 0) == Cursor(0, 0)
    assert cursor_at(PLAIN, 74) == Cursor(0, 74)
    assert cursor_at(PLAIN, 75) == Cursor(1, 0)
    assert cursor_at(PLAIN, 2 * 75 + 3) == Cursor(2, 3)


@unhurried
@given(specs(), st.integers(0, 5))
def test_equal_specs_give_equal_orders(spec, epoch):
    assert np.array_equal(epoch_order(spec, epoch), epoch_order(replace(spec), epoch))


def test_the_order_is_the_one_that_runs_have_been_started_with():
    """Checkpoints store a step, not an order: another order for the same spec would repeat and skip samples."""
    spec = OrderSpec(lengths=(5, 9, 4), seed=1000, global_batch=4, lanes=2, run_length=3, window_rows=4)
    assert epoch_order(spec, 0).tolist() == [[7, 8, 3, 2, 13, 9, 0, 4], [1, 14, 6, 5, 12, 11, 10, 15]]
    assert epoch_order(spec, 1).tolist() == [[5, 6, 17, 10, 12, 11, 2, 13], [3, 7, 4, 8, 16, 15, 14, 9]]


@unhurried
@given(st.integers(0, 2**40), st.integers(1, 2**20), st.integers(0, 50), st.integers(1, 50))
def test_other_seeds_and_epochs_give_other_orders(seed, seeds_apart, epoch, epochs_apart):
    spec = replace(PLAIN, seed=seed)
    order = epoch_order(spec, epoch)
    for other in (epoch_order(replace(spec, seed=seed + seeds_apart), epoch), epoch_order(spec, epoch + epochs_apart)):
        assert np.mean(order == other) < 0.1  # by chance 1/600 of the places agree


def test_every_epoch_drops_other_frames():
    spec = replace(PLAIN, lengths=(29,) * 20)  # 580 frames: 4 are left over
    dropped = [set(range(580)) - set(epoch_order(spec, epoch).reshape(-1).tolist()) for epoch in range(4)]
    assert [len(one) for one in dropped] == [4] * 4
    assert len(set.union(*dropped)) > 8


@unhurried
@given(specs(), st.data())
def test_window_edges_partition_the_lane(spec, data):
    lane = data.draw(st.integers(0, spec.lanes - 1))
    edges = window_edges(spec, lane)
    assert edges[0] == 0
    assert edges[-1] == spec.batches_per_epoch * spec.samples_per_lane_step
    assert np.diff(edges).min() >= 1
    assert np.diff(edges).max() <= spec.window_rows


def test_windows_of_different_lanes_begin_at_different_steps():
    first_edges = [int(window_edges(PLAIN, lane)[1]) for lane in range(PLAIN.lanes)]
    assert first_edges == [2, 4, 6, 8, 10, 12, 14, 16]


@unhurried
@given(specs())
def test_mixing_stays_inside_the_windows(spec):
    """Without mixing, windows of one row, the same frames are in every window: decode needs no more than them."""
    mixed, plain = epoch_order(spec, 0), epoch_order(replace(spec, window_rows=1), 0)
    for lane in range(spec.lanes):
        for begin, end in itertools.pairwise(window_edges(spec, lane)):
            assert set(mixed[lane, begin:end].tolist()) == set(plain[lane, begin:end].tolist())


@unhurried
@given(specs())
def test_unmixed_lanes_are_runs_of_neighbours(spec):
    """Breaks between neighbours come at the ends of runs alone: one per run and one per lane at most."""
    plain = epoch_order(replace(spec, window_rows=1), 0).reshape(-1)
    runs = sum(1 + -(-length // spec.run_length) for length in spec.lengths)
    assert np.count_nonzero(np.diff(plain) != 1) < runs + spec.lanes


@unhurried
@given(st.integers(1, 512), st.sampled_from([1, 2, 3, 4, 6, 8, 16, 32]))
def test_lanes_divide_the_batch_and_the_workers_share_them(per_worker, num_workers):
    global_batch = per_worker * num_workers
    lanes = choose_lanes(global_batch, num_workers)
    assert global_batch % lanes == 0
    assert lanes % num_workers == 0
    assert lanes <= max(MAX_LANES, num_workers)


@unhurried
@given(st.integers(1, MAX_LANES))
def test_up_to_64_the_lanes_do_not_depend_on_the_workers(global_batch):
    workers = [n for n in range(1, global_batch + 1) if global_batch % n == 0]
    assert {choose_lanes(global_batch, num_workers) for num_workers in workers} == {global_batch}


def test_what_cannot_be_ordered_is_refused():
    with pytest.raises(ValueError, match=r"hold 600 frames, less than one global batch of 608; lower --batch_size"):
        check_order(replace(PLAIN, global_batch=608))
    with pytest.raises(ValueError, match="8 lanes do not divide the global batch of 12"):
        check_order(replace(PLAIN, global_batch=12))
    with pytest.raises(
        ValueError, match="3 workers cannot share 8 lanes evenly; use a number of workers that divides 8"
    ):
        Share(0, 3).lanes(PLAIN)


@pytest.mark.parametrize(("run_length", "window_rows"), [(8, 16), (32, 32), (32, 64)])
@pytest.mark.parametrize(("episodes", "length"), [(20, 50), (20, 400), (60, 90)])
def test_batches_are_nearly_as_mixed_as_a_permutation(episodes, length, run_length, window_rows):
    spec = OrderSpec((length,) * episodes, 3, 32, choose_lanes(32, 1), run_length, window_rows)
    ours = np.concatenate([all_steps(spec, epoch) for epoch in range(4)])
    rng = np.random.default_rng(0)
    shuffled = [rng.permutation(spec.num_samples)[: spec.batches_per_epoch * 32] for _ in range(4)]
    true = np.concatenate(shuffled).reshape(-1, 32)
    assert distinct_episodes(ours, length) >= 0.9 * distinct_episodes(true, length)
    assert neighbours(ours) <= 2 * neighbours(true) + 0.1


def distinct_episodes(batches: np.ndarray, length: int) -> float:
    """Mean number of episodes in a batch."""
    return float(np.mean([len(np.unique(batch // length)) for batch in batches]))


def neighbours(batches: np.ndarray) -> float:
    """Mean number of pairs in a batch that are one frame apart."""
    return float(np.mean([np.count_nonzero(np.diff(np.sort(batch)) == 1) for batch in batches]))
