"""What we set inside of Ray Data is there and is used."""

import inspect
import time

from ray.data._internal.execution import streaming_executor_state
from ray.data._internal.execution.resource_manager import ResourceManager

from vlatune.pipeline.execution import LIMITS_EVERY_S, LOOK_EVERY_S, act_soon


def test_limits_are_asked_for_and_tasks_looked_for_often(monkeypatch):
    monkeypatch.setattr(ResourceManager, "GLOBAL_LIMITS_UPDATE_INTERVAL_S", 1)
    monkeypatch.setattr(streaming_executor_state, "WAIT_FOR_TASK_COMPLETION_TIMEOUT_S", 1)
    act_soon()
    assert ResourceManager.GLOBAL_LIMITS_UPDATE_INTERVAL_S == LIMITS_EVERY_S
    assert streaming_executor_state.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S == LOOK_EVERY_S


def test_ray_reads_what_is_set():
    """A Ray that has renamed them would go on as before, and every run would start later and read slower."""
    manager = object.__new__(ResourceManager)
    manager._global_limits = "old"  # pyright: ignore[reportAttributeAccessIssue]
    manager._global_limits_last_update_time = time.time() - LIMITS_EVERY_S / 2
    assert manager.get_global_limits() == "old"
    assert "GLOBAL_LIMITS_UPDATE_INTERVAL_S" in inspect.getsource(ResourceManager.get_global_limits)
    looking = inspect.getsource(streaming_executor_state.process_completed_tasks)
    assert "timeout=WAIT_FOR_TASK_COMPLETION_TIMEOUT_S" in looking
