"""The plan: every slot once, units that decode forward, and a reorder buffer that is exactly large enough."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlatune.dataset.order.sample_order import OrderSpec, _generator, cut_runs, epoch_order, step_samples
from vlatune.pipeline.plan import MAX_GAP, Piece, Share, plan_pieces, reorder_rows
from vlatune.pipeline.source import cut_units

unhurried = settings(deadline=None, max_examples=60)  # a deadline would be a timing assertion


@st.composite
def plans(draw) -> tuple[OrderSpec, Share, int, int]:
    """A spec, one worker's share of it, and a stretch of batches."""
    num_workers = draw(st.sampled_from([1, 2, 4]))
    lanes = num_workers * draw(st.integers(1, 4))
    spec = OrderSpec(
        lengths=tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=10))),
        seed=draw(st.integers(0, 2**30)),
        global_batch=lanes * draw(st.integers(1, 3)),
        lanes=lanes,
        run_length=draw(st.integers(1, 12)),
        window_rows=draw(st.integers(1, 24)),
    )
    missing = spec.global_batch - spec.num_samples
    spec = spec if missing <= 0 else replace(spec, lengths=(*spec.lengths, missing))
    begin = draw(st.integers(0, spec.batches_per_epoch - 1))
    end = draw(st.integers(begin + 1, spec.batches_per_epoch))
    return spec, Share(draw(st.integers(0, num_workers - 1)), num_workers), begin, end


def pieces_of(spec: OrderSpec, share: Share, begin: int, end: int, epoch: int = 0) -> list[Piece]:
    return plan_pieces(spec, epoch_order(spec, epoch), share, begin_batch=begin, end_batch=end)


def samples_by_slot(spec: OrderSpec, pieces: list[Piece]) -> dict[int, int]:
    """slot -> flat sample number"""
    starts = np.cumsum(spec.lengths) - spec.lengths
    found: dict[int, int] = {}
    for piece in pieces:
        samples = (starts[piece.episode] + piece.frames).tolist()
        assert not found.keys() & set(piece.slots.tolist())
        found |= dict(zip(piece.slots.tolist(), samples, strict=True))
    return found


@unhurried
@given(plans())
def test_pieces_cover_each_slot_of_the_stretch_exactly_once(plan):
    spec, share, begin, end = plan
    pieces, per_step = pieces_of(*plan), share.slots_per_step(spec)
    slots = np.concatenate([piece.slots for piece in pieces])
    assert sorted(slots.tolist()) == list(range(begin * per_step, end * per_step))


@unhurried
@given(plans())
def test_pieces_decode_forward_inside_one_episode(plan):
    spec = plan[0]
    for piece in pieces_of(*plan):
        assert len(piece.frames) == len(piece.slots) >= 1
        assert len(piece.frames) <= max(spec.run_length, spec.window_rows)
        assert piece.frames[0] >= 0
        assert piece.frames[-1] < spec.lengths[piece.episode]
        steps = np.diff(piece.frames)
        assert (steps >= 1).all()
        assert (steps <= MAX_GAP).all()


@unhurried
@given(plans())
def test_pieces_come_in_the_order_of_first_need(plan):
    first = [int(piece.slots.min()) for piece in pieces_of(*plan)]
    assert first == sorted(first)


@unhurried
@given(plans(), st.integers(0, 3))
def test_all_workers_slots_together_are_the_global_batches(plan, epoch):
    spec, share, begin, end = plan
    order = epoch_order(spec, epoch)
    per_step = share.slots_per_step(spec)
    shares = [Share(rank, share.num_workers) for rank in range(share.num_workers)]
    workers = [samples_by_slot(spec, pieces_of(spec, one, begin, end, epoch)) for one in shares]
    for step in range(begin, end):
        slots = range(step * per_step, (step + 1) * per_step)
        joined = [samples[slot] for samples in workers for slot in slots]
        assert joined == step_samples(spec, order, step).tolist()


@unhurried
@given(plans())
def test_a_later_start_is_the_tail_of_the_whole(plan):
    spec, share, begin, _ = plan
    whole = samples_by_slot(spec, pieces_of(spec, share, 0, spec.batches_per_epoch))
    tail = samples_by_slot(spec, pieces_of(spec, share, begin, spec.batches_per_epoch))
    first = begin * share.slots_per_step(spec)
    assert tail == {slot: sample for slot, sample in whole.items() if slot >= first}


def peak_rows(pieces: list[Piece], batch_rows: int, block_rows: int) -> int:
    """Rows that a consumer holds at most when it takes batches as soon as they are complete."""
    blocks = cut_units(pieces, block_rows)  # pieces have frames and slots, all that cutting looks at
    total = sum(len(piece.frames) for piece in pieces)
    first = min(int(piece.slots.min()) for piece in pieces)
    here: set[int] = set()
    peak = 0
    for begin in range(first, first + total, batch_rows):
        batch = set(range(begin, begin + batch_rows))
        while not batch <= here:
            here |= {slot for piece in next(blocks) for slot in piece.slots.tolist()}
            peak = max(peak, len(here))
        here -= batch
    return peak


@unhurried
@given(plans(), st.integers(1, 40), st.data())
def test_the_reorder_buffer_is_large_enough_and_at_most_a_block_and_a_piece_too_large(plan, block_rows, data):
    spec, share, _, _ = plan
    pieces, per_step = pieces_of(*plan), share.slots_per_step(spec)
    batch_rows = data.draw(st.sampled_from([rows for rows in range(1, per_step + 1) if per_step % rows == 0]))
    longest = max(len(piece.frames) for piece in pieces)
    peak = peak_rows(pieces, batch_rows, block_rows)
    held = reorder_rows(pieces, batch_rows, block_rows)
    assert peak <= held <= peak + block_rows + longest
    assert held <= sum(len(piece.frames) for piece in pieces)


def test_a_stretch_of_nothing_needs_no_buffer():
    assert reorder_rows([], 4, 8) == 0


@pytest.mark.parametrize(("gap", "pieces"), [(MAX_GAP, 1), (MAX_GAP + 1, 2)])
def test_a_wide_gap_begins_a_new_piece(gap, pieces):
    spec = OrderSpec(lengths=(10, 20), seed=0, global_batch=2, lanes=1, run_length=8, window_rows=8)
    order = np.array([[12 + gap, 12]])  # frames 2 + gap and 2 of the second episode
    made = plan_pieces(spec, order, Share(0, 1), begin_batch=0, end_batch=1)
    assert len(made) == pieces
    assert {piece.episode for piece in made} == {1}
    assert samples_by_slot(spec, made) == {0: 12 + gap, 1: 12}


def test_neighbours_over_the_edge_of_an_episode_are_two_pieces():
    spec = OrderSpec(lengths=(10, 20), seed=0, global_batch=4, lanes=1, run_length=8, window_rows=8)
    made = plan_pieces(spec, np.array([[10, 9, 8, 11]]), Share(0, 1), begin_batch=0, end_batch=1)
    assert [(piece.episode, piece.frames.tolist(), piece.slots.tolist()) for piece in made] == [
        (1, [0, 1], [0, 3]),
        (0, [8, 9], [2, 1]),
    ]


def test_a_run_over_the_edge_of_a_window_is_read_once():
    """Runs of 8 in windows of 8, which never meet its edges: every run is one piece, and none is read in two."""
    spec = OrderSpec(lengths=(40, 40), seed=3, global_batch=1, lanes=1, run_length=8, window_rows=8)
    pieces = pieces_of(spec, Share(0, 1), 0, spec.batches_per_epoch)
    starts = sorted((piece.episode, int(piece.frames[0])) for piece in pieces)
    runs = len(cut_runs(np.array([0, 40]), np.array([40, 40]), 8, _generator(spec, 0))[0])
    assert len(starts) <= runs  # neighbours by chance are read together
    assert sum(len(piece.frames) for piece in pieces) == 80


def test_runs_of_one_episode_that_are_needed_at_other_times_stay_apart():
    spec = OrderSpec(lengths=(40,), seed=0, global_batch=1, lanes=1, run_length=4, window_rows=4)
    order = np.array([[*range(4), *range(20, 32), *range(4, 8)]])
    made = plan_pieces(spec, order, Share(0, 1), begin_batch=0, end_batch=20)
    assert [piece.frames.tolist() for piece in made] == [
        [0, 1, 2, 3],
        [20, 21, 22, 23],
        [24, 25, 26, 27],
        [28, 29, 30, 31],
        [4, 5, 6, 7],
    ]


def test_slots_count_step_by_step_and_lane_by_lane():
    """The sketch at the top of plan.py: two lanes, two samples per lane and step."""
    spec = OrderSpec(lengths=(8,), seed=0, global_batch=4, lanes=2, run_length=8, window_rows=8)
    order = np.array([[0, 1, 2, 3], [4, 5, 6, 7]])
    alone = plan_pieces(spec, order, Share(0, 1), begin_batch=0, end_batch=2)
    assert samples_by_slot(spec, alone) == {0: 0, 1: 1, 4: 2, 5: 3, 2: 4, 3: 5, 6: 6, 7: 7}
    second = plan_pieces(spec, order, Share(1, 2), begin_batch=0, end_batch=2)
    assert samples_by_slot(spec, second) == {0: 4, 1: 5, 2: 6, 3: 7}
