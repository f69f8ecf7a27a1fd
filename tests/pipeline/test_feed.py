"""The feed on real Ray: the rows of the reader and the transforms, in the order of `order.py`, however it is started."""

import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
from feeding import GLOBAL_BATCH, assert_same, joined, make_plan, on_thread, small_blocks
from ray.exceptions import GetTimeoutError

from vlatune.pipeline.coordinator import SegmentHead
from vlatune.pipeline.feed import Feed, StageTimes, assemble
from vlatune.pipeline.plan import Share, plan_segments
from vlatune.pipeline.source import READ_S

pytestmark = pytest.mark.ray


def feed_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("feed") and thread.is_alive()]


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
    batches = on_thread(feed)
    next(batches)
    assert feed_threads()
    feed.close()
    batches.close()
    assert feed_threads() == []
    feed.close()  # twice does no harm
    assert next(feed, None) is None
    again = Feed(plan, Share(0, 1), small_blocks(plan), first_step=3, last_step=4)
    feeds.append(again)
    assert_same(list(again), expected(3, 4))


def test_closing_lets_a_thread_go_that_waits_for_a_block(plan, feeds, monkeypatch):
    """Nothing comes out of the store any more: whoever waits there is let go, and is told of an end, not of an error."""
    asked = threading.Event()

    def nothing_comes(ref, timeout=None) -> None:
        asked.set()
        time.sleep(0.01)
        raise GetTimeoutError

    feed = Feed(plan, Share(0, 1), small_blocks(plan), first_step=0, last_step=1000)
    feeds.append(feed)
    with monkeypatch.context() as patched:
        patched.setattr(ray, "get", nothing_comes)
        batches = on_thread(feed)
        assert asked.wait(timeout=60)
        feed.close()
    assert list(batches) == []
    batches.close()
    assert feed_threads() == []


def test_a_damaged_video_ends_the_feed_with_its_episode_and_camera(dataset_v3, small_base, feeds, tmp_path):
    damaged = Path(shutil.copytree(dataset_v3, tmp_path / "damaged"))
    plan = make_plan(damaged, small_base)
    (meta,), position = plan.metas, int(plan.selection.position[0])
    file = meta.video_path(position, "observation.images.wrist")
    (damaged / file).write_bytes((damaged / file).read_bytes()[:600])
    feed = Feed(plan, Share(0, 1), small_blocks(plan), first_step=0, last_step=plan.order.batches_per_epoch)
    feeds.append(feed)
    batches = on_thread(feed)
    with pytest.raises(ValueError, match=rf"episode \d, camera 'observation.images.wrist', {file}: cannot be decoded"):
        list(batches)
    with pytest.raises(ValueError, match="cannot be decoded"):
        next(batches)
    feed.close()
    batches.close()
    assert feed_threads() == []


# What needs no Ray


def test_segments_cover_every_step_once_over_the_ends_of_epochs(plan):
    per_epoch, budget = plan.order.batches_per_epoch, small_blocks(plan)
    first, last = 3, 2 * per_epoch + 2
    (whole,) = plan_segments(plan, Share(0, 1), budget, first_step=first, last_step=last)
    assert first < per_epoch < 2 * per_epoch < last
    segments = list(
        plan_segments(replace(plan, segment_tasks=2), Share(0, 1), budget, first_step=first, last_step=last)
    )
    assert [step for one in segments for step in range(one.begin_step, one.end_step)] == list(range(first, last))
    for some in (segments, [whole]):
        slots = [piece.slots for one in some for piece in one.pieces]
        assert sorted(np.concatenate(slots)) == list(range(first * GLOBAL_BATCH, last * GLOBAL_BATCH))
    assert list(plan_segments(plan, Share(0, 1), budget, first_step=5, last_step=5)) == []


def test_data_that_ends_early_is_an_error_that_says_where(plan, expected):
    (segment,) = plan_segments(plan, Share(0, 1), small_blocks(plan), first_step=0, last_step=2)
    head = SegmentHead(0, 2, segment.reorder_rows)
    rows = joined(expected(0, 1)) | {READ_S: np.zeros(GLOBAL_BATCH, np.float32)}
    batches = assemble(plan, Share(0, 1), head, iter([rows]), StageTimes())
    assert_same([next(batches)], expected(0, 1))
    with pytest.raises(RuntimeError, match="the data ended early: optimizer step 1, sample 8 is missing"):
        next(batches)


def test_a_row_has_as_many_bytes_as_the_plan_says(plan, expected):
    rows = expected(0, 1)[0]
    assert plan.row_bytes() * GLOBAL_BATCH == sum(values.nbytes for values in rows.values())
