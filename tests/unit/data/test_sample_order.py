"""The order of samples: complete, reproducible, the same for every number of workers, and well mixed."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlatune.data.order.sample_order import (
    MAX_LANES,
    Mixture,
    OrderSpec,
    check_order,
    choose_lanes,
    cursor_at,
    epoch_order,
    group_sizes,
    micro_batch,
    step_samples,
    window_edges,
)
from vlatune.feed.plan import Share

PLAIN = OrderSpec(lengths=(30,) * 20, seed=7, global_batch=8, lanes=8, run_length=8, window_rows=16)


@st.composite
def mixtures(draw, episodes: int) -> Mixture:
    """Make up to three datasets, each with an episode and a sample."""
    count = draw(st.integers(1, min(3, episodes)))
    extra = draw(st.lists(st.integers(0, count - 1), min_size=episodes - count, max_size=episodes - count))
    return Mixture((*range(count), *extra), tuple(draw(st.lists(st.floats(0.3, 5), min_size=count, max_size=count))))


@st.composite
def specs(draw, *, lanes=(1, 2, 3, 4, 8, 16), weighted=(False,)):
    num_lanes = draw(st.sampled_from(lanes))
    spec = OrderSpec(
        lengths=tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))),
        seed=draw(st.integers(0, 2**40)),
        global_batch=num_lanes * draw(st.integers(1, 3)),
        lanes=num_lanes,
        run_length=draw(st.integers(1, 12)),
        window_rows=draw(st.integers(1, 20)),
        drop_last=draw(st.booleans()),
    )
    missing = max(spec.global_batch, 60) - spec.num_samples
    spec = spec if missing <= 0 else replace(spec, lengths=(*spec.lengths, missing))
    return replace(spec, mixture=draw(mixtures(len(spec.lengths)))) if draw(st.sampled_from(weighted)) else spec


def all_steps(spec: OrderSpec, epoch: int) -> np.ndarray:
    """Return the samples of all steps, (steps, global batch)."""
    order = epoch_order(spec, epoch)
    return np.concatenate([step_samples(spec, order, step, step + 1) for step in range(spec.batches_per_epoch)])


@given(specs(), st.integers(0, 5))
def test_an_epoch_has_every_frame_once_except_an_incomplete_batch(spec, epoch):
    check_order(spec)
    samples = all_steps(spec, epoch).reshape(-1)
    times = np.bincount(samples, minlength=spec.num_samples)
    assert len(times) == spec.num_samples
    if spec.drop_last:
        assert times.max() == 1
        assert np.count_nonzero(times == 0) == spec.num_samples % spec.global_batch
    else:
        assert times.min() == 1
        assert times.max() <= 2
        assert np.count_nonzero(times == 2) == -spec.num_samples % spec.global_batch


@given(specs(weighted=(True,)), st.integers(0, 5))
def test_each_dataset_has_its_share_of_an_epoch_except_an_incomplete_batch(spec, epoch):
    check_order(spec)
    samples = all_steps(spec, epoch).reshape(-1)
    dataset = np.repeat(spec.mixture.dataset, spec.lengths)[samples]
    shares = np.asarray(spec.mixture.weights) / sum(spec.mixture.weights)
    off = np.bincount(dataset, minlength=len(shares)) - shares * spec.num_samples
    assert np.abs(off).max() < spec.global_batch + 1
    assert abs(len(samples) - spec.num_samples) < spec.global_batch


@given(specs(), st.integers(0, 5))
def test_the_last_batch_is_filled_up_with_the_first_samples(spec, epoch):
    """The windows have one row, so the concatenated lanes are the epoch's samples, then its first ones again."""
    kept = epoch_order(replace(spec, window_rows=1, drop_last=False), epoch).reshape(-1)
    assert np.array_equal(kept[spec.num_samples :], kept[: len(kept) - spec.num_samples])


@given(specs(lanes=(8, 16, 24), weighted=(False, True)), st.integers(0, 3))
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


@given(specs(weighted=(False, True)), st.data())
def test_the_order_after_n_steps_is_the_tail_of_all_steps(spec, data):
    steps = 2 * spec.batches_per_epoch + 1
    done = data.draw(st.integers(0, steps - 1))
    steps_of_run = [batch for epoch in range(3) for batch in all_steps(spec, epoch)][:steps]
    tail = []
    for step in range(done, steps):
        cursor = cursor_at(spec, step)
        tail.append(step_samples(spec, epoch_order(spec, cursor.epoch, cursor.batch, cursor.batch + 1))[0])
    assert np.array_equal(tail, steps_of_run[done:])


def test_the_order_of_a_spec_does_not_change_between_versions():
    """Checkpoints store a step, not an order: another order for the same spec would repeat and skip samples."""
    spec = OrderSpec(lengths=(5, 9, 4), seed=1000, global_batch=4, lanes=2, run_length=3, window_rows=4)
    assert epoch_order(spec, 0).tolist() == [[7, 8, 13, 3, 9, 2, 4, 0], [1, 6, 5, 14, 11, 15, 10, 12]]
    assert epoch_order(spec, 1).tolist() == [[6, 5, 11, 17, 10, 12, 2, 13], [4, 8, 3, 7, 9, 14, 16, 15]]


@given(st.integers(0, 2**40), st.integers(1, 2**20), st.integers(0, 50), st.integers(1, 50))
def test_other_seeds_and_epochs_give_other_orders(seed, seeds_apart, epoch, epochs_apart):
    spec = replace(PLAIN, seed=seed)
    order = epoch_order(spec, epoch)
    for other in (epoch_order(replace(spec, seed=seed + seeds_apart), epoch), epoch_order(spec, epoch + epochs_apart)):
        assert np.mean(order == other) < 0.1  # by chance, 1/600 of the positions agree


@given(specs(), st.data())
def test_window_edges_partition_the_lane(spec, data):
    lane = data.draw(st.integers(0, spec.lanes - 1))
    edges = window_edges(spec, lane)
    assert edges[0] == 0
    assert edges[-1] == spec.batches_per_epoch * spec.samples_per_lane_step
    assert np.diff(edges).min() >= 1
    assert np.diff(edges).max() <= spec.window_rows


@given(specs())
def test_mixing_stays_inside_the_windows(spec):
    """Every window has the same frames as without mixing, so it needs no other frames to be decoded."""
    mixed, plain = epoch_order(spec, 0), epoch_order(replace(spec, window_rows=1), 0)
    for lane in range(spec.lanes):
        for begin, end in itertools.pairwise(window_edges(spec, lane)):
            assert set(mixed[lane, begin:end].tolist()) == set(plain[lane, begin:end].tolist())


@given(specs())
def test_unmixed_lanes_are_runs_of_neighbours(spec):
    """Neighbours are separated only at ends of runs and lanes, and by samples that fill the last batch."""
    plain = epoch_order(replace(spec, window_rows=1), 0).reshape(-1)
    runs = sum(1 + -(-length // spec.run_length) for length in spec.lengths)
    filled = max(0, plain.size - spec.num_samples)
    assert np.count_nonzero(np.diff(plain) != 1) < runs + spec.lanes + filled


@given(st.integers(1, 512), st.sampled_from([1, 2, 3, 4, 6, 8, 16, 32]))
def test_lanes_divide_the_batch_and_the_workers_share_them(per_worker, num_workers):
    global_batch = per_worker * num_workers
    lanes = choose_lanes(global_batch, num_workers)
    assert global_batch % lanes == 0
    assert lanes % num_workers == 0
    assert lanes <= max(MAX_LANES, num_workers)


@given(st.integers(1, MAX_LANES))
def test_up_to_512_the_lanes_do_not_depend_on_the_workers(global_batch):
    workers = [n for n in range(1, global_batch + 1) if global_batch % n == 0]
    assert {choose_lanes(global_batch, num_workers) for num_workers in workers} == {global_batch}


def test_invalid_orders_are_rejected():
    with pytest.raises(ValueError, match=r"hold 600 frames, less than one global batch of 608; lower --batch_size"):
        check_order(replace(PLAIN, global_batch=608))
    with pytest.raises(ValueError, match="8 lanes do not divide the global batch of 12"):
        check_order(replace(PLAIN, global_batch=12))
    with pytest.raises(ValueError, match=r"dataset 1 has the weight 2.0 and no episode to train on; lower --dataset"):
        check_order(replace(PLAIN, mixture=Mixture((0,) * 20, (1.0, 2.0))))
    with pytest.raises(
        ValueError, match="3 workers cannot share 8 lanes evenly; use a number of workers that divides 8"
    ):
        Share(0, 3).lanes(PLAIN)


@pytest.mark.parametrize(("run_length", "window_rows"), [(8, 16), (32, 32), (32, 64)])
@pytest.mark.parametrize(("episodes", "length"), [(20, 50), (20, 400), (60, 90)])
def test_batches_of_32_are_nearly_as_mixed_as_a_permutation(episodes, length, run_length, window_rows):
    spec = OrderSpec((length,) * episodes, 3, 32, choose_lanes(32, 1), run_length, window_rows)
    for epoch in range(3):
        check_mixed(spec, epoch)


@pytest.mark.parametrize("global_batch", [32, 64, 128, 256, 512])
def test_large_batches_are_as_mixed_as_small_ones(global_batch):
    """200 episodes: a permutation's batch of 256 holds 145 of them, lanes of four samples a step would hold 87."""
    check_mixed(OrderSpec((300,) * 200, 3, global_batch, choose_lanes(global_batch, 1), 32, 32), 0)


def check_mixed(spec: OrderSpec, epoch: int) -> None:
    """Compare the mean number of episodes in a batch, and of pairs of neighbouring frames, with a permutation."""
    batches = step_samples(spec, epoch_order(spec, epoch))
    permutation = np.random.default_rng(0).permutation(spec.num_samples)[: batches.size].reshape(batches.shape)
    assert num_episodes(batches, spec) >= 0.95 * num_episodes(permutation, spec)
    assert num_neighbours(batches) <= num_neighbours(permutation) + 0.05


def num_episodes(batches: np.ndarray, spec: OrderSpec) -> float:
    return float(np.mean([len(np.unique(batch // spec.lengths[0])) for batch in batches]))


def num_neighbours(batches: np.ndarray) -> float:
    return float(np.mean([np.isin(batch + 1, batch).sum() for batch in batches]))


@pytest.mark.parametrize("num_workers", [1, 2, 4, 8, 16])
def test_the_windows_of_many_lanes_begin_evenly_for_every_worker(num_workers):
    """Otherwise a worker would need many rows at one step and none for long after it."""
    spec = OrderSpec((300,) * 200, 3, 256, 256, 32, 32)
    for rank in range(num_workers):
        first = [int(window_edges(spec, lane)[1]) for lane in Share(rank, num_workers).lanes(spec)]
        begins = np.bincount(np.asarray(first) - 1, minlength=spec.window_rows)
        assert begins.max() <= 2 * spec.lanes / num_workers / spec.window_rows + 1


@pytest.mark.parametrize(
    ("batch", "accum", "smallest", "largest", "sizes"),
    [
        (4, 1, 2, 8, (8, 4, 2)),
        (2, 3, 1, 6, (6, 4, 3, 2, 1)),
        (1, 1, 2, 3, (3,)),
        (8, 1, 2, 3, (3, 2)),
        (1, 1, 1, 1, (1,)),
    ],
)
def test_groups_of_every_size_serve_the_same_batches(batch, accum, smallest, largest, sizes):
    global_batch = batch * accum * largest
    lanes = choose_lanes(global_batch, largest)
    assert group_sizes(lanes, smallest, largest) == sizes
    for size in sizes:
        micro = micro_batch(global_batch, size, batch)
        assert micro <= batch
        assert global_batch % (size * micro) == 0
    assert micro_batch(global_batch, largest, batch) == batch
