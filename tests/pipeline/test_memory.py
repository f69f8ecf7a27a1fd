"""The byte budget adds up, and the meter measures a real store."""

import re
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlatune.pipeline import memory
from vlatune.pipeline.memory import (
    CONSUMER_BLOCKS,
    FEED_BLOCK_BYTES,
    MAX_BLOCK_ROWS,
    MAX_TASK_BLOCKS,
    STORE_SHARE,
    Budget,
    SpillMeter,
    StoreCounters,
    plan_budget,
    read_counters,
)

MB = 1024 * 1024
unhurried = settings(deadline=None, max_examples=100)  # a deadline would be a timing assertion
machines = st.fixed_dictionaries(
    {
        "store_bytes": st.integers(80 * MB, 64 * 1024 * MB),
        "row_bytes": st.integers(1_000, FEED_BLOCK_BYTES),
        "num_workers": st.integers(1, 16),
        "num_cpus": st.integers(1, 128),
    }
)


def budget_or_message(machine: dict[str, int]) -> Budget | str:
    try:
        return plan_budget(**machine)
    except ValueError as error:
        return str(error)


@unhurried
@given(machines)
def test_what_is_in_flight_fits_the_share_of_all_workers(machine):
    budget = budget_or_message(machine)
    if isinstance(budget, str):
        return
    assert budget.readers == max(1, machine["num_cpus"] // machine["num_workers"])
    assert budget.limit_bytes * machine["num_workers"] <= STORE_SHARE * machine["store_bytes"]
    assert budget.block_bytes * (2 * budget.readers + CONSUMER_BLOCKS) <= budget.limit_bytes
    assert budget.block_bytes == budget.block_rows * machine["row_bytes"] <= FEED_BLOCK_BYTES
    assert 1 <= budget.block_rows <= MAX_BLOCK_ROWS
    assert 1 <= budget.task_blocks <= MAX_TASK_BLOCKS
    held = budget.readers * budget.task_blocks + CONSUMER_BLOCKS  # every reader's whole task, and the consumer's
    assert held * budget.block_bytes <= budget.limit_bytes


@unhurried
@given(machines)
def test_all_readers_of_all_workers_can_run_at_once(machine):
    """Or workers would wait for each other for ever: one for its reader, whose CPU another's holds, and that one in the exchange."""
    budget = budget_or_message(machine)
    if isinstance(budget, str):
        return
    assert 0 < budget.reader_cpus <= 1
    assert machine["num_workers"] * budget.readers * budget.reader_cpus <= machine["num_cpus"]


@unhurried
@given(machines)
def test_blocks_are_as_large_as_they_may_be(machine):
    budget = budget_or_message(machine)
    if isinstance(budget, str):
        return
    larger = budget.block_bytes + machine["row_bytes"]
    fits = larger * (2 * budget.readers + CONSUMER_BLOCKS) <= budget.limit_bytes
    assert not fits or larger > FEED_BLOCK_BYTES or budget.block_rows == MAX_BLOCK_ROWS


@unhurried
@given(machines)
def test_a_larger_store_never_makes_smaller_blocks(machine):
    budget = budget_or_message(machine)
    larger = budget_or_message(machine | {"store_bytes": 2 * machine["store_bytes"]})
    if isinstance(budget, str):
        return
    assert isinstance(larger, Budget)
    assert larger.block_rows >= budget.block_rows


@unhurried
@given(machines)
def test_the_store_that_a_refusal_asks_for_is_enough(machine):
    message = budget_or_message(machine)
    if isinstance(message, Budget):
        return
    asked = re.search(r"raise --ray.object_store_bytes to (\d+) or more", message)
    assert asked is not None
    budget = plan_budget(**machine | {"store_bytes": int(asked.group(1))})
    assert budget.block_rows >= 1


def test_a_row_that_does_not_fit_is_refused_with_all_its_numbers():
    message = (
        r"a sample of 10.0 MB does not fit the object store of 100 MB with 2 workers and 4 readers each; raise --ray"
    )
    with pytest.raises(ValueError, match=message):
        plan_budget(store_bytes=100_000_000, row_bytes=10_000_000, num_workers=2, num_cpus=8)


def test_a_row_larger_than_a_usual_block_fits_a_large_store():
    assert plan_budget(store_bytes=2**40, row_bytes=FEED_BLOCK_BYTES + 1, num_workers=1, num_cpus=1).block_rows == 1


def test_the_budget_says_how_it_came_about():
    budget = plan_budget(store_bytes=512 * MB, row_bytes=452_000, num_workers=2, num_cpus=4)
    assert (budget.readers, budget.limit_bytes, budget.block_rows, budget.task_blocks) == (
        2,
        int(0.45 * 256 * MB),
        26,
        2,
    )
    assert budget.reason(512 * MB, 2) == (
        "blocks of 26 rows (11.8 MB), 2 per read task, 2 readers and at most 121 MB in flight per worker: "
        "45% of a store of 537 MB over 2 workers"
    )


# The meter, on counters that are made up


@pytest.fixture
def readings(monkeypatch) -> list[StoreCounters | Exception]:
    """What the counters will say, one after the other, the last one for ever."""
    coming: list[StoreCounters | Exception] = []

    def read() -> StoreCounters:
        said = coming.pop(0) if len(coming) > 1 else coming[0]
        if isinstance(said, Exception):
            raise said
        return said

    monkeypatch.setattr(memory, "read_counters", read)
    monkeypatch.setattr(memory, "SAMPLE_EVERY_S", 0.0)
    return coming


def test_a_meter_counts_from_its_start_and_keeps_the_peak(readings):
    readings += [StoreCounters(100, 10, 50), StoreCounters(100, 10, 900), StoreCounters(130, 17, 60)]
    meter = SpillMeter()
    while len(readings) > 1:  # the meter's thread takes them
        meter.latest()
    assert meter.close() == meter.latest() == StoreCounters(spilled_bytes=30, fallback_bytes=7, used_bytes=60)
    assert meter.peak_bytes == 900


def test_a_meter_whose_thread_failed_says_so(readings):
    readings += [StoreCounters(0, 0, 0), RuntimeError("raylet gone")]
    meter = SpillMeter()
    for thread in threading.enumerate():
        if thread.name == "spill-meter":
            thread.join()
    with pytest.raises(RuntimeError, match="the spill meter stopped: raylet gone"):
        meter.latest()
    with pytest.raises(RuntimeError, match="raylet gone"):
        meter.close()


# The meter, on a real store


def wait_until_empty() -> None:
    """Ray frees objects a moment after the last reference to them is gone."""
    while read_counters().used_bytes > MB:
        pass


def test_the_meter_sees_objects_come_and_nothing_spill(ray_local):
    import ray

    wait_until_empty()
    meter = SpillMeter()
    kept = [ray.put(np.full(10 * MB, number, np.uint8)) for number in range(3)]
    after = meter.close()
    assert 30 * MB <= after.used_bytes <= 32 * MB
    assert meter.peak_bytes >= after.used_bytes
    assert (after.spilled_bytes, after.fallback_bytes) == (0, 0)
    assert all(ray.get(one)[0] == number for number, one in enumerate(kept))


def test_the_meter_sees_a_spill(ray_local):
    """A zero is only worth something from a meter that shows more when there is more."""
    import ray

    meter = SpillMeter()
    kept = [ray.put(np.zeros(70 * MB, np.uint8)) for _ in range(4)]  # 280 MB do not fit a store of 200 MB
    assert meter.close().spilled_bytes >= 70 * MB
    kept.clear()
    wait_until_empty()  # the store is shared with other tests


def test_counters_that_cannot_be_read_are_an_error(ray_local, monkeypatch):
    from ray._private import internal_api

    def fail(_state):
        raise ConnectionError("raylet gone")

    monkeypatch.setattr(internal_api, "get_memory_info_reply", fail)
    with pytest.raises(RuntimeError, match=r"cannot be read \(raylet gone\); without them a spill would go unseen"):
        read_counters()
