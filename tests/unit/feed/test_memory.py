"""The byte budget adds up."""

from hypothesis import given
from hypothesis import strategies as st

from vlatune.feed.memory import (
    CONSUMER_BLOCKS,
    FEED_BLOCK_BYTES,
    MAX_BLOCK_ROWS,
    MAX_TASK_BLOCKS,
    STORE_SHARE,
    TASKS_PER_READER,
    Budget,
    plan_budget,
    plan_store_bytes,
)

MB = 1024 * 1024
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


@given(machines)
def test_blocks_in_flight_fit_the_share_of_all_workers(machine):
    budget = budget_or_message(machine)
    if isinstance(budget, str):
        return
    assert budget.readers == max(1, machine["num_cpus"] // machine["num_workers"])
    in_flight_bytes = (budget.max_blocks + CONSUMER_BLOCKS) * budget.block_bytes
    assert in_flight_bytes * machine["num_workers"] <= STORE_SHARE * machine["store_bytes"]
    assert budget.block_bytes == budget.block_rows * machine["row_bytes"] <= FEED_BLOCK_BYTES
    assert 1 <= budget.block_rows <= MAX_BLOCK_ROWS
    assert 1 <= budget.task_blocks <= MAX_TASK_BLOCKS
    assert TASKS_PER_READER * budget.readers * budget.task_blocks <= budget.max_blocks


@given(machines, st.integers(1, 512))
def test_a_store_planned_for_task_rows_gives_such_tasks(machine, task_rows):
    readers = max(1, machine["num_cpus"] // machine["num_workers"])
    sizes = {"row_bytes": machine["row_bytes"], "num_workers": machine["num_workers"]}
    store_bytes = plan_store_bytes(**sizes, readers=readers, task_rows=task_rows)
    budget = plan_budget(**sizes, store_bytes=store_bytes, num_cpus=machine["num_cpus"])
    assert budget.block_rows == min(MAX_BLOCK_ROWS, FEED_BLOCK_BYTES // machine["row_bytes"])
    assert budget.task_rows >= task_rows or budget.task_blocks == MAX_TASK_BLOCKS
