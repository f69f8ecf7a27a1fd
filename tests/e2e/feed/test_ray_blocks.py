"""Read tasks on real Ray: killed readers, the byte budget, errors, priority."""

import os
import random
import time
from contextlib import suppress
from dataclasses import replace

import numpy as np
import psutil
import pytest
from feeding import assert_same, on_thread, small_blocks

from vlatune.batch import Columns, num_rows
from vlatune.feed.feed import Feed
from vlatune.feed.plan import Segment, Share
from vlatune.feed.ray_blocks import IDLE_POLICY, READER_NICENESS, BlockStream


def readers() -> list[psutil.Process]:
    """Return the reader processes of this test's cluster."""
    return [process for process in psutil.Process().children(recursive=True) if "ray::_read_blocks" in cmdline(process)]


def cmdline(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""


def kill_readers() -> int:
    killed = 0
    for process in readers():
        with suppress(psutil.NoSuchProcess):
            process.kill()
            killed += 1
    return killed


def test_killed_readers_do_not_change_the_batches(plan, expected, feeds):
    """Kill before the first block and at three later batches, within and at the end of segments."""

    class Slow:
        def __call__(self, columns: Columns) -> Columns:
            time.sleep(0.05)  # so that a kill meets a running task
            return columns

    slowed = replace(plan, segment_tasks=2, transforms=(*plan.transforms, Slow()))
    last = plan.order.batches_per_epoch + 3
    feed = Feed(slowed, Share(0, 1), small_blocks(plan), first_step=1, last_step=last)
    feeds.append(feed)
    stream = on_thread(feed)
    deadline_s = time.monotonic() + 60
    while not readers() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    moments = {0, *random.Random(3).sample(range(1, last - 1), 3)}
    batches, killed = [], 0
    for number in range(last - 1):
        if number in moments:
            killed += kill_readers()
        batches.append(next(stream))
    assert killed
    assert_same(batches, expected(1, last))
    assert next(stream, None) is None


def test_blocks_follow_their_segment_within_the_budget(plan, ray_local):
    short, budget = replace(plan, segment_tasks=2), small_blocks(plan)
    stream = BlockStream(short, Share(0, 1), budget, first_step=0, last_step=6)
    segments, rows = [], 0
    for item in stream:
        if isinstance(item, Segment):
            segments.append((item.begin_step, item.end_step))
        else:
            rows += num_rows(item)
            assert stream.open_blocks <= budget.max_blocks
    assert len(segments) > 1
    assert [begin for begin, _ in segments] == [0, *(end for _, end in segments[:-1])]
    assert segments[-1][1] == 6
    assert rows == 6 * plan.order.global_batch
    assert stream.open_blocks == 0


def test_an_error_in_a_read_task_reaches_the_consumer(plan, feeds):
    class Broken:
        def __call__(self, columns: Columns) -> Columns:
            raise ValueError("this row is not for training")

    broken = replace(plan, transforms=(Broken(),))
    feed = Feed(broken, Share(0, 1), small_blocks(plan), first_step=0, last_step=4)
    feeds.append(feed)
    with pytest.raises(Exception, match="this row is not for training"):
        next(feed)


def test_readers_run_at_low_priority(plan, feeds):
    class Schedule:
        def __call__(self, columns: Columns) -> Columns:
            found = [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)]
            return columns | {"schedule": np.tile(found, (num_rows(columns), 1))}

    watched = replace(plan, transforms=(*plan.transforms, Schedule()))
    feed = Feed(watched, Share(0, 1), small_blocks(plan), first_step=0, last_step=2)
    feeds.append(feed)
    assert {tuple(row) for row in next(feed)["schedule"].tolist()} == {(READER_NICENESS, IDLE_POLICY)}
