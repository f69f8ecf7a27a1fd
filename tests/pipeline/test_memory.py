"""The byte budget adds up."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlatune.pipeline.memory import (
    CONSUMER_BLOCKS,
    FEED_BLOCK_BYTES,
    MAX_BLOCK_ROWS,
    MAX_TASK_BLOCKS,
    STORE_SHARE,
    Budget,
    plan_budget,
    plan_store_bytes,
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


@unhurried
@given(machines, st.integers(1, 512))
def test_a_store_planned_for_tasks_of_some_rows_gives_such_tasks(machine, task_rows):
    readers = max(1, machine["num_cpus"] // machine["num_workers"])
    sizes = {"row_bytes": machine["row_bytes"], "num_workers": machine["num_workers"]}
    store_bytes = plan_store_bytes(**sizes, readers=readers, task_rows=task_rows)
    budget = plan_budget(**sizes, store_bytes=store_bytes, num_cpus=machine["num_cpus"])
    assert budget.block_rows == min(MAX_BLOCK_ROWS, FEED_BLOCK_BYTES // machine["row_bytes"])
    assert budget.task_rows >= task_rows or budget.task_blocks == MAX_TASK_BLOCKS


@unhurried
@given(st.integers(1, 64), st.lists(st.integers(1, 8), min_size=1, max_size=8))
def test_readers_of_part_of_a_cpu_find_a_place_on_any_nodes(num_workers, cpus_of_nodes):
    """Two thirds of a CPU each would leave a third of every node unused."""
    budget = plan_budget(
        store_bytes=64 * 1024 * MB, row_bytes=1000, num_workers=num_workers, num_cpus=sum(cpus_of_nodes)
    )
    places = sum(int(cpus / budget.reader_cpus) for cpus in cpus_of_nodes)
    assert places >= num_workers * budget.readers
