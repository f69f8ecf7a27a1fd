"""[ray] What all our Ray Datasets share: how soon they act, and blocks that stay as they are made.

An execution may run only one task, and read no output, until it has heard what it may use; it asks without waiting, so
the answer counts from its second question on. Ray asks once a second: that long every first row waits, and every core
but one is idle. And it looks for finished tasks ten times a second: a core whose task has ended is idle for half of
that. There are no public settings for either.
"""

from ray.data._internal.execution import streaming_executor_state
from ray.data._internal.execution.resource_manager import ResourceManager

LIMITS_EVERY_S = 0.1
LOOK_EVERY_S = 0.03
"""Two cores were idle for 5 % of the time with it, for 8 to 10 % with Ray's 0.1 s."""
TARGET_SHARE = 0.8
"""Ray's target over the size of our blocks: 1.25 times the target lies in the middle of what it neither joins nor splits."""


def act_soon() -> None:
    """For all executions of this process."""
    ResourceManager.GLOBAL_LIMITS_UPDATE_INTERVAL_S = LIMITS_EVERY_S  # pyright: ignore[reportAttributeAccessIssue]
    streaming_executor_state.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S = LOOK_EVERY_S
