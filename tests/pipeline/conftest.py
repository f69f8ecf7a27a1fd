"""A plan over the small dataset, the batches that it should give, and feeds that are closed afterwards."""

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
from feeding import all_rows, make_plan

from vlatune.batch import Columns
from vlatune.dataset.order.sample_order import cursor_at, epoch_order, step_samples
from vlatune.pipeline.feed import Feed
from vlatune.pipeline.plan import DataPlan
from vlatune.pipeline.transforms import apply_all


@pytest.fixture(scope="module")
def plan(dataset_v3, small_base) -> DataPlan:
    return make_plan(dataset_v3, small_base)


@pytest.fixture(scope="module")
def expected(plan) -> Callable[[int, int], list[Columns]]:
    """Batches of steps [first, last) of the plan, made without the feed: rows picked as the order says."""
    rows = cache(lambda: all_rows(plan))

    @cache
    def batch_of(step: int) -> Columns:
        cursor = cursor_at(plan.order, step)
        samples = step_samples(plan.order, epoch_order(plan.order, cursor.epoch), cursor.batch)
        slots = step * len(samples) + np.arange(len(samples))
        return apply_all(plan.transforms, {key: values[samples] for key, values in rows().items()} | {"slot": slots})

    return lambda first, last: [batch_of(step) for step in range(first, last)]


@pytest.fixture
def feeds(ray_local) -> Iterator[list[Feed]]:
    """Feeds that are closed when the test ends, also when it fails."""
    opened: list[Feed] = []
    yield opened
    for feed in opened:
        feed.close()
