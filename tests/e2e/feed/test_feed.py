"""The feed on real Ray: rows of the reader and the transforms, in sample order, from any first step."""

import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from feeding import GLOBAL_BATCH, assert_same, joined, make_plan, on_thread, small_blocks

from vlatune.batch import STEP_ACTIONS
from vlatune.feed.feed import Feed, StageTimes, assemble
from vlatune.feed.plan import Share, plan_segment
from vlatune.feed.ray_blocks import CACHED, READ_S


def feed_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("feed") and thread.is_alive()]


def test_one_worker_gets_the_sample_order_of_two_epochs(plan, expected, feeds):
    steps = plan.order.batches_per_epoch + 2
    feed = Feed(plan, Share(0, 1), small_blocks(plan), first_step=0, last_step=steps)
    feeds.append(feed)
    batches = list(feed)
    assert_same(batches, expected(0, steps))
    assert list(feed) == []
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
        for key in wanted.keys() - {"slot", STEP_ACTIONS}:  # slots are numbered per worker
            assert np.array_equal(step[key], wanted[key]), key
        assert np.array_equal(step[STEP_ACTIONS] * 4, wanted[STEP_ACTIONS])  # of one of four micro-batches


def test_a_later_start_gives_the_remaining_batches(plan, expected, feeds):
    """One read task per segment: segments end within shuffle windows."""
    plan = replace(plan, segment_tasks=1)
    budget = small_blocks(plan)
    first, last = plan.order.batches_per_epoch - 3, plan.order.batches_per_epoch + 1
    assert plan_segment(plan, Share(0, 1), budget, first, last)[0].end_step == first + 1
    feed = Feed(plan, Share(0, 1), budget, first_step=first, last_step=last)
    feeds.append(feed)
    assert_same(list(feed), expected(first, last))


def test_closing_early_ends_the_thread_and_the_next_feed_works(plan, expected, feeds):
    feed = Feed(plan, Share(0, 1), small_blocks(plan), first_step=0, last_step=1000)
    feeds.append(feed)
    batches = on_thread(feed)
    next(batches)
    assert feed_threads()
    feed.close()
    batches.close()
    assert feed_threads() == []
    feed.close()
    assert next(feed, None) is None
    again = Feed(plan, Share(0, 1), small_blocks(plan), first_step=3, last_step=4)
    feeds.append(again)
    assert_same(list(again), expected(3, 4))


def test_closing_releases_a_thread_that_waits_for_a_block(plan, feeds):
    """The read task hangs; its consumer ends without an error."""

    class Hangs:
        def __call__(self, columns):
            time.sleep(3600)

    feed = Feed(replace(plan, transforms=(Hangs(),)), Share(0, 1), small_blocks(plan), first_step=0, last_step=1000)
    feeds.append(feed)
    batches = on_thread(feed)
    feed.close()
    assert list(batches) == []
    batches.close()
    assert feed_threads() == []


def test_a_damaged_video_raises_with_its_episode_and_camera(dataset_v3, small_base, feeds, tmp_path):
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


def test_missing_data_is_an_error_that_names_the_step(plan, expected):
    segment, _ = plan_segment(plan, Share(0, 1), small_blocks(plan), 0, 2)
    rows = joined(expected(0, 1)) | {name: np.zeros(GLOBAL_BATCH, np.float32) for name in (CACHED, READ_S)}
    batches = assemble(plan, Share(0, 1), iter([segment, rows]), StageTimes())
    assert_same([next(batches)], expected(0, 1))
    with pytest.raises(RuntimeError, match="optimizer step 1, sample 8 is missing"):
        next(batches)


def test_planned_row_bytes_equal_the_rows_bytes(plan, expected):
    rows = expected(0, 1)[0]
    assert plan.row_bytes() * GLOBAL_BATCH == sum(values.nbytes for key, values in rows.items() if key != STEP_ACTIONS)
