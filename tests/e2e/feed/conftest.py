"""A plan over the small dataset, its expected batches, and feeds that are closed afterwards."""

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
from feeding import all_rows, make_plan

from vlatune.batch import ACTION_IS_PAD, STEP_ACTIONS, Columns
from vlatune.data.order.sample_order import cursor_at, epoch_order, step_samples
from vlatune.data.transforms import apply_all
from vlatune.feed.feed import Feed
from vlatune.feed.plan import DataPlan


@pytest.fixture(scope="module")
def plan(dataset_v3, small_base) -> DataPlan:
    return make_plan(dataset_v3, small_base)


@pytest.fixture(scope="module")
def expected(plan) -> Callable[[int, int], list[Columns]]:
    """Return a function that makes the batches of steps [first, last) without the feed."""
    rows = cache(lambda: all_rows(plan))

    @cache
    def batch_of(step: int) -> Columns:
        cursor = cursor_at(plan.order, step)
        order = epoch_order(plan.order, cursor.epoch)
        [samples] = step_samples(plan.order, order, cursor.batch, cursor.batch + 1)
        slots = step * len(samples) + np.arange(len(samples))
        made = apply_all(plan.transforms, {key: values[samples] for key, values in rows().items()} | {"slot": slots})
        return made | {STEP_ACTIONS: np.full(len(samples), (~made[ACTION_IS_PAD]).sum(), np.float32)}

    return lambda first, last: [batch_of(step) for step in range(first, last)]


@pytest.fixture
def feeds(ray_local) -> Iterator[list[Feed]]:
    """Return a list of feeds that are closed when the test ends."""
    opened: list[Feed] = []
    yield opened
    for feed in opened:
        feed.close()
