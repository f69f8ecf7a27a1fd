"""[ray] What all our Ray Datasets share: how soon they start, and blocks that stay as they are made.

An execution may run only one task, and read no output, until it has heard what it may use; it asks without waiting, so
the answer counts from its second question on. Ray asks once a second: that long every first row waits, and every core
but one is idle. There is no public setting for it.
"""

from ray.data._internal.execution.resource_manager import ResourceManager

LIMITS_EVERY_S = 0.1
TARGET_SHARE = 0.8
"""Ray's target over the size of our blocks: 1.25 times the target lies in the middle of what it neither joins nor splits."""


def ask_for_limits_often() -> None:
    """For all executions of this process: one small call to an actor every 0.1 s while one runs."""
    ResourceManager.GLOBAL_LIMITS_UPDATE_INTERVAL_S = LIMITS_EVERY_S  # pyright: ignore[reportAttributeAccessIssue]
