"""The plan: every slot once, units that decode forward, full blocks, a reorder buffer that is large enough."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlatune.data.order.sample_order import OrderSpec, epoch_order, step_samples
from vlatune.feed.plan import MAX_GAP, Piece, Share, cut_tasks, cut_units, plan_pieces, reorder_rows


@st.composite
def plans(draw) -> tuple[OrderSpec, Share, int, int]:
    """Return a spec, one worker's share of it, and a range of batches."""
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
    return plan_pieces(spec, epoch_order(spec, epoch, begin, end), share, begin)


def samples_by_slot(spec: OrderSpec, pieces: list[Piece]) -> dict[int, int]:
    """Return slot -> flat sample number."""
    starts = np.cumsum(spec.lengths) - spec.lengths
    found: dict[int, int] = {}
    for piece in pieces:
        samples = (starts[piece.episode] + piece.frames).tolist()
        assert not found.keys() & set(piece.slots.tolist())
        found |= dict(zip(piece.slots.tolist(), samples, strict=True))
    return found


@given(plans())
def test_pieces_cover_each_slot_once_and_decode_forward_in_order_of_need(plan):
    spec, share, begin, end = plan
    pieces, per_step = pieces_of(*plan), share.slots_per_step(spec)
    assert sorted(samples_by_slot(spec, pieces)) == list(range(begin * per_step, end * per_step))
    first = [int(piece.slots.min()) for piece in pieces]
    assert first == sorted(first)
    for piece in pieces:
        assert 1 <= len(piece.frames) <= max(spec.run_length, spec.window_rows)
        assert 0 <= piece.frames[0] <= piece.frames[-1] < spec.lengths[piece.episode]
        assert ((np.diff(piece.frames) >= 1) & (np.diff(piece.frames) <= MAX_GAP)).all()


@given(plans(), st.integers(0, 3))
def test_slots_of_all_workers_together_are_the_global_batches(plan, epoch):
    spec, share, begin, end = plan
    order = epoch_order(spec, epoch)
    per_step = share.slots_per_step(spec)
    shares = [Share(rank, share.num_workers) for rank in range(share.num_workers)]
    workers = [samples_by_slot(spec, pieces_of(spec, one, begin, end, epoch)) for one in shares]
    for step in range(begin, end):
        slots = range(step * per_step, (step + 1) * per_step)
        joined = [samples[slot] for samples in workers for slot in slots]
        assert joined == step_samples(spec, order, step, step + 1)[0].tolist()


def peak_rows(pieces: list[Piece], batch_rows: int, block_rows: int) -> int:
    """Return the maximum rows of a consumer that takes batches as soon as they are complete."""
    blocks = cut_units(pieces, block_rows)  # pyright: ignore[reportArgumentType]  pieces have frames and slots
    total = sum(len(piece.frames) for piece in pieces)
    first = min(int(piece.slots.min()) for piece in pieces)
    waiting: set[int] = set()
    peak = 0
    for begin in range(first, first + total, batch_rows):
        batch = set(range(begin, begin + batch_rows))
        while not batch <= waiting:
            waiting |= {slot for piece in next(blocks) for slot in piece.slots.tolist()}
            peak = max(peak, len(waiting))
        waiting -= batch
    return peak


@given(plans(), st.integers(1, 40), st.data())
def test_the_reorder_buffer_is_large_enough_and_not_much_larger(plan, block_rows, data):
    spec, share, _, _ = plan
    pieces, per_step = pieces_of(*plan), share.slots_per_step(spec)
    batch_rows = data.draw(st.sampled_from([rows for rows in range(1, per_step + 1) if per_step % rows == 0]))
    longest = max(len(piece.frames) for piece in pieces)
    peak = peak_rows(pieces, batch_rows, block_rows)
    held = reorder_rows(pieces, batch_rows, block_rows)
    assert peak <= held <= peak + block_rows + longest
    assert held <= sum(len(piece.frames) for piece in pieces)


def test_runs_of_one_episode_that_are_needed_at_different_times_are_separate_pieces():
    spec = OrderSpec(lengths=(40,), seed=0, global_batch=1, lanes=1, run_length=4, window_rows=4)
    order = np.array([[*range(4), *range(20, 32), *range(4, 8)]])
    made = plan_pieces(spec, order, Share(0, 1))
    assert [piece.frames.tolist() for piece in made] == [
        [0, 1, 2, 3],
        [20, 21, 22, 23],
        [24, 25, 26, 27],
        [28, 29, 30, 31],
        [4, 5, 6, 7],
    ]


@pytest.mark.parametrize(
    ("order", "pieces"),
    [
        ([12 + MAX_GAP, 12], [(1, [2, 2 + MAX_GAP], [1, 0])]),
        ([13 + MAX_GAP, 12], [(1, [3 + MAX_GAP], [0]), (1, [2], [1])]),
        ([10, 9, 8, 11], [(1, [0, 1], [0, 3]), (0, [8, 9], [2, 1])]),  # an episode's boundary
    ],
)
def test_pieces_end_at_wide_gaps_and_episode_boundaries(order, pieces):
    spec = OrderSpec(lengths=(10, 20), seed=0, global_batch=len(order), lanes=1, run_length=8, window_rows=8)
    made = plan_pieces(spec, np.array([order]), Share(0, 1))
    assert [(piece.episode, piece.frames.tolist(), piece.slots.tolist()) for piece in made] == pieces


@dataclass(frozen=True)
class Rows:
    """The part of a unit that cutting depends on."""

    number: int
    frames: range
    slots: range


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 30), st.integers(1, 12))
def test_tasks_have_full_blocks_end_with_a_unit_and_keep_the_order_of_rows(lengths, block_rows, task_blocks):
    units = [Rows(number, range(length), range(100, 100 + length)) for number, length in enumerate(lengths)]
    tasks = list(cut_tasks(units, block_rows, task_blocks))  # pyright: ignore[reportArgumentType]
    rows = [[(unit.number, frame) for block in task for unit in block for frame in unit.frames] for task in tasks]
    assert [row for task in rows for row in task] == [(unit.number, frame) for unit in units for frame in unit.frames]
    most = task_blocks * block_rows
    for task, taken, following in zip(tasks, rows, [*rows[1:], []], strict=True):
        sizes = [sum(len(unit.frames) for unit in block) for block in task]
        assert sizes[:-1] == [block_rows] * (len(sizes) - 1)
        assert 0 < sizes[-1] <= block_rows
        assert len(taken) <= most
        assert all([100 + at for at in unit.frames] == list(unit.slots) for block in task for unit in block)
        if following and following[0][1] > 0:  # continues a unit that is longer than a task
            assert len(taken) == most
            assert {number for number, _ in taken} == {following[0][0]}
        elif following:
            assert len(taken) + lengths[following[0][0]] > most
