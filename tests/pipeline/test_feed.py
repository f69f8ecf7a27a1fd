"""The feed on real Ray: the rows of the reader and the transforms, in the order of `order.py`, however it is started."""

import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from vlatune.batch import Columns
from vlatune.config import DatasetConfig, PolicyConfig, RunConfig
from vlatune.dataset.order import cursor_at, epoch_order, step_samples
from vlatune.dataset.reader import make_unit, read_unit
from vlatune.pipeline.build import DataPlan, plan_segments
from vlatune.pipeline.feed import Feed, StageTimes, assemble
from vlatune.pipeline.memory import CONSUMER_BLOCKS, STORE_SHARE, Budget, plan_budget
from vlatune.pipeline.plan import Share
from vlatune.pipeline.source import READ_S
from vlatune.pipeline.transforms import apply_all
from vlatune.train.setup import make_setup

GLOBAL_BATCH = 8


def make_plan(dataset: Path, base: Path, *, batch_size: int = GLOBAL_BATCH, grad_accum: int = 1) -> DataPlan:
    """The plan of a run with batches of 8 samples, over as many workers as `batch_size * grad_accum` leaves."""
    config = RunConfig(
        dataset=DatasetConfig(root=(str(dataset),), eval_split=0.2, run_length=4, window_rows=6),
        policy=PolicyConfig(path=str(base)),
        batch_size=batch_size,
        grad_accum=grad_accum,
        num_workers=GLOBAL_BATCH // (batch_size * grad_accum),
        seed=11,
    )
    setup = make_setup(config)
    return DataPlan(
        metas=setup.metas,
        selection=setup.training,
        specs=setup.specs,
        order=setup.order,
        transforms=setup.transforms_of_epoch(),
        batch_size=batch_size,
    )


def small_blocks(plan: DataPlan, *, num_workers: int = 1) -> Budget:
    """Blocks of a few rows, so that a batch comes out of several."""
    row_bytes = plan.row_bytes()
    readers = 2 // num_workers
    store_bytes = int(5 * row_bytes * (2 * readers + CONSUMER_BLOCKS) * num_workers / STORE_SHARE) + 1
    return plan_budget(store_bytes=store_bytes, row_bytes=row_bytes, num_workers=num_workers, num_cpus=2)


def all_rows(plan: DataPlan, epoch: int) -> Columns:
    """Every row of the selected episodes, read directly, in the order of flat sample numbers, as `epoch` sees them."""
    (meta,), (spec,) = plan.metas, plan.specs
    units = [
        make_unit(meta, spec, int(position), np.arange(length), np.arange(length))
        for position, length in zip(plan.selection.position, plan.selection.length, strict=True)
    ]
    return joined([apply_all(plan.transforms(epoch), read_unit(spec, unit)) for unit in units])


def assert_same(batches: list[Columns], wanted_batches: list[Columns]) -> None:
    assert len(batches) == len(wanted_batches)
    for ours, wanted in zip(batches, wanted_batches, strict=True):
        assert ours.keys() == wanted.keys()
        for key, values in wanted.items():
            assert ours[key].dtype == values.dtype, key
            assert np.array_equal(ours[key], values), key


def joined(parts: list[Columns]) -> Columns:
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def feed_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("feed") and thread.is_alive()]


@pytest.fixture(scope="module")
def plan(dataset_v3, small_base) -> DataPlan:
    return make_plan(dataset_v3, small_base)


@pytest.fixture(scope="module")
def expected(plan) -> Callable[[int, int], list[Columns]]:
    """Batches of steps [first, last) of the plan, made without the feed: rows picked as the order says."""
    rows_of_epoch = cache(lambda epoch: all_rows(plan, epoch))

    def batch_of(step: int) -> Columns:
        cursor = cursor_at(plan.order, step)
        samples = step_samples(plan.order, epoch_order(plan.order, cursor.epoch), cursor.batch)
        slots = step * len(samples) + np.arange(len(samples))
        return {key: values[samples] for key, values in rows_of_epoch(cursor.epoch).items()} | {"slot": slots}

    return lambda first, last: [batch_of(step) for step in range(first, last)]


@pytest.fixture
def feeds(ray_local) -> Iterator[list[Feed]]:
    """Feeds that are closed when the test ends, also when it fails."""
    opened: list[Feed] = []
    yield opened
    for feed in opened:
        feed.close()


def test_one_worker_gets_the_rows_of_the_order_through_two_epochs(plan, expected, feeds):
    """From the first batch over the end of the epoch, where noise and order change, into the next."""
    steps = plan.order.batches_per_epoch + 2
    feed = Feed(plan, Share(0, 1), small_blocks(plan), first_step=0, last_step=steps)
    feeds.append(feed)
    batches = list(feed)
    assert_same(batches, expected(0, steps))
    assert list(feed) == []  # the end is met again, not waited for
    seen = np.concatenate([batch["index"] for batch in batches[: plan.order.batches_per_epoch]])
    assert len(np.unique(seen)) == len(seen) > 40


def test_two_workers_together_get_the_same_global_batches(plan, expected, dataset_v3, small_base, feeds):
    """Each with two micro-batches of two samples a step."""
    shared = make_plan(dataset_v3, small_base, batch_size=2, grad_accum=2)
    assert shared.order == plan.order
    budget = small_blocks(shared, num_workers=2)
    feeds += [Feed(shared, Share(rank, 2), budget, first_step=1, last_step=4) for rank in range(2)]
    first, second = (list(feed) for feed in feeds)
    assert [len(batch["index"]) for batch in first + second] == [2] * 12
    steps = [joined(first[at : at + 2] + second[at : at + 2]) for at in range(0, 6, 2)]
    for step, wanted in zip(steps, expected(1, 4), strict=True):
        for key in wanted.keys() - {"slot"}:  # slots are numbered per worker
            assert np.array_equal(step[key], wanted[key]), key


def test_a_later_start_gives_the_tail_also_in_short_segments(plan, expected, feeds):
    """One read task per execution: a segment ends in the middle of windows, and the next one begins there."""
    plan = replace(plan, segment_tasks=1)
    budget = small_blocks(plan)
    first, last = plan.order.batches_per_epoch - 3, plan.order.batches_per_epoch + 1
    segments = list(plan_segments(plan, Share(0, 1), budget, first_step=first, last_step=last))
    assert len(segments) == 4
    feed = Feed(plan, Share(0, 1), budget, first_step=first, last_step=last)
    feeds.append(feed)
    assert_same(list(feed), expected(first, last))


def test_closing_in_the_middle_ends_the_thread_and_the_next_feed_works(plan, expected, feeds):
    feed = Feed(plan, Share(0, 1), small_blocks(plan), first_step=0, last_step=1000)
    feeds.append(feed)
    next(feed)
    assert feed_threads()
    feed.close()
    assert feed_threads() == []
    feed.close()  # twice does no harm
    assert next(feed, None) is None
    again = Feed(plan, Share(0, 1), small_blocks(plan), first_step=3, last_step=4)
    feeds.append(again)
    assert_same(list(again), expected(3, 4))


def test_a_damaged_video_ends_the_feed_with_its_episode_and_camera(dataset_v3, small_base, feeds, tmp_path):
    damaged = Path(shutil.copytree(dataset_v3, tmp_path / "damaged"))
    plan = make_plan(damaged, small_base)
    (meta,), position = plan.metas, int(plan.selection.position[0])
    file = meta.video_path(position, "observation.images.wrist")
    (damaged / file).write_bytes((damaged / file).read_bytes()[:600])
    feed = Feed(plan, Share(0, 1), small_blocks(plan), first_step=0, last_step=plan.order.batches_per_epoch)
    feeds.append(feed)
    with pytest.raises(ValueError, match=rf"episode \d, camera 'observation.images.wrist', {file}: cannot be decoded"):
        list(feed)
    with pytest.raises(ValueError, match="cannot be decoded"):
        next(feed)
    feed.close()
    assert feed_threads() == []


# What needs no Ray


def test_segments_cover_every_step_once_over_the_ends_of_epochs(plan):
    per_epoch, budget = plan.order.batches_per_epoch, small_blocks(plan)
    first, last = 3, 2 * per_epoch + 2
    (whole,) = plan_segments(plan, Share(0, 1), budget, first_step=first, last_step=last)
    assert [part.epoch for part in whole.parts] == [0, 1, 2]
    segments = list(
        plan_segments(replace(plan, segment_tasks=2), Share(0, 1), budget, first_step=first, last_step=last)
    )
    assert [step for one in segments for step in range(one.begin_step, one.end_step)] == list(range(first, last))
    for some in (segments, [whole]):
        slots = [piece.slots for one in some for part in one.parts for piece in part.pieces]
        assert sorted(np.concatenate(slots)) == list(range(first * GLOBAL_BATCH, last * GLOBAL_BATCH))
    assert list(plan_segments(plan, Share(0, 1), budget, first_step=5, last_step=5)) == []


def test_data_that_ends_early_is_an_error_that_says_where(plan, expected):
    (segment,) = plan_segments(plan, Share(0, 1), small_blocks(plan), first_step=0, last_step=2)
    rows = joined(expected(0, 1)) | {READ_S: np.zeros(GLOBAL_BATCH, np.float32)}
    batches = assemble(plan, Share(0, 1), segment, iter([rows]), StageTimes())
    assert_same([next(batches)], expected(0, 1))
    with pytest.raises(RuntimeError, match="the data ended early: optimizer step 1, sample 8 is missing"):
        next(batches)


def test_a_row_has_as_many_bytes_as_the_plan_says(plan, expected):
    rows = expected(0, 1)[0]
    assert plan.row_bytes() * GLOBAL_BATCH == sum(values.nbytes for values in rows.values())
