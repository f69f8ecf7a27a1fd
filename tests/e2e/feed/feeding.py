"""Plans and rows for the tests of the feed."""

from pathlib import Path

import numpy as np

from vlatune.batch import Columns
from vlatune.bounded_queue import ReadAhead
from vlatune.config.settings import DatasetConfig, PolicyConfig, RunConfig
from vlatune.data.reader import make_unit, read_unit
from vlatune.feed.feed import Feed
from vlatune.feed.memory import CONSUMER_BLOCKS, STORE_SHARE, TASKS_PER_READER, Budget, plan_budget
from vlatune.feed.plan import DataPlan
from vlatune.run_setup import make_setup

GLOBAL_BATCH = 8


def make_plan(dataset: Path, base: Path, *, batch_size: int = GLOBAL_BATCH, grad_accum: int = 1) -> DataPlan:
    """Return the plan of a run with global batches of 8 samples."""
    config = RunConfig(
        dataset=DatasetConfig(root=(str(dataset),), eval_split=0.2, run_length=4, window_rows=6),
        policy=PolicyConfig(path=str(base)),
        batch_size=batch_size,
        grad_accum=grad_accum,
        num_workers=GLOBAL_BATCH // (batch_size * grad_accum),
        seed=11,
    )
    setup = make_setup(config)
    return setup.data_plan


def small_blocks(plan: DataPlan, *, num_workers: int = 1) -> Budget:
    """Return a budget with blocks of a few rows, so that a batch needs several."""
    row_bytes = plan.row_bytes()
    readers = 2 // num_workers
    store_bytes = int(5 * row_bytes * (TASKS_PER_READER * readers + CONSUMER_BLOCKS) * num_workers / STORE_SHARE) + 1
    return plan_budget(store_bytes=store_bytes, row_bytes=row_bytes, num_workers=num_workers, num_cpus=2)


def on_thread(feed: Feed) -> ReadAhead:
    """Return the batches of a feed that runs on its own thread, as in training."""
    return ReadAhead(feed, depth=2, name="feed")


def all_rows(plan: DataPlan) -> Columns:
    """Read every row of the selected episodes directly, by flat sample number, untransformed."""
    (meta,), (spec,) = plan.metas, plan.specs
    units = [
        make_unit(meta, spec, int(position), np.arange(length), np.arange(length))
        for position, length in zip(plan.selection.position, plan.selection.length, strict=True)
    ]
    return joined([read_unit(spec, unit) for unit in units])


def assert_same(batches: list[Columns], wanted_batches: list[Columns]) -> None:
    assert len(batches) == len(wanted_batches)
    for ours, wanted in zip(batches, wanted_batches, strict=True):
        assert ours.keys() == wanted.keys()
        for key, values in wanted.items():
            assert ours[key].dtype == values.dtype, key
            assert np.array_equal(ours[key], values), key


def joined(parts: list[Columns]) -> Columns:
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
