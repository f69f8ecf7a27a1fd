"""[ray] What all our Ray Datasets share: how soon and how often they act, and blocks that stay as they are made.

An execution may run only one task, and read no output, until it has heard what it may use; it asks without waiting, so
the answer counts from its second question on. Ray asks once a second: that long every first row waits, and every core
but one is idle. And it looks for finished tasks ten times a second: a core whose task has ended is idle for half of
that. There are no public settings for either.

When its consumer is slow, an execution's loop never rests: every task has a block ready that may not be taken yet, so the
call that should wait for one returns at once. `Pace` lets it rest, through the hook that Ray calls on every turn.
"""

import time
from typing import TYPE_CHECKING

import ray.data
from ray.data._internal.execution import streaming_executor_state
from ray.data._internal.execution.execution_callback import ExecutionCallback

if TYPE_CHECKING:
    from ray.data._internal.execution.streaming_executor import StreamingExecutor

LIMITS_EVERY_S, EAGER_S = 0.1, 5.0
"""Limits are asked for so often during an execution's first seconds; each question costs three processes a millisecond."""
LOOK_EVERY_S = 0.03
"""Two cores were idle for 5 % of the time with it, for 8 to 10 % with Ray's 0.1 s."""
REST_S = 0.2
"""The longest rest between two turns, reached by doubling while nothing happens: a turn costs one to two milliseconds."""
TARGET_SHARE = 0.8
"""Ray's target over the size of our blocks: 1.25 times the target lies in the middle of what it neither joins nor splits."""


def act_soon() -> None:
    """For all executions of this process."""
    streaming_executor_state.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S = LOOK_EVERY_S


def keep_pace(context: ray.data.DataContext) -> None:
    """For the executions of one Dataset, whose context this is."""
    context.custom_execution_callback_classes = [*context.custom_execution_callback_classes, Pace]


class Pace(ExecutionCallback):
    """One per execution, called on the thread of its loop."""

    def __init__(self) -> None:
        self._began_s = self._turned_s = time.monotonic()
        self._rest_s = LOOK_EVERY_S
        self._seen: tuple[int, ...] = ()

    def before_execution_starts(self, executor: "StreamingExecutor") -> None:
        # Somebody outside takes the blocks: without this Ray reads what its tasks have ready, whatever the limit says.
        executor.set_external_consumer_bytes(0)
        executor._resource_manager.GLOBAL_LIMITS_UPDATE_INTERVAL_S = LIMITS_EVERY_S  # pyright: ignore

    def on_execution_step(self, executor: "StreamingExecutor") -> None:
        """Rest until the turn has lasted long enough: the longer, the longer nothing has happened."""
        seen = progress(executor)
        self._rest_s = LOOK_EVERY_S if seen != self._seen else min(REST_S, 2 * self._rest_s)
        self._seen = seen
        if self._began_s and time.monotonic() - self._began_s > EAGER_S:
            del executor._resource_manager.GLOBAL_LIMITS_UPDATE_INTERVAL_S  # pyright: ignore
            self._began_s = 0.0
        time.sleep(max(0.0, self._turned_s + self._rest_s - time.monotonic()))
        self._turned_s = time.monotonic()


def progress(executor: "StreamingExecutor") -> tuple[int, ...]:
    """Numbers that change when a task began, gave a block or ended, and when the consumer took one."""
    numbers: list[int] = []
    for op, state in (executor._topology or {}).items():
        metrics = op.metrics
        numbers += [metrics.num_tasks_submitted, metrics.num_task_outputs_generated, len(state.output_queue)]
    return tuple(numbers)
