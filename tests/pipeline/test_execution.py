"""What we set inside of Ray Data is there and is used."""

import inspect
import time

from ray.data._internal.execution.resource_manager import ResourceManager

from vlatune.pipeline.execution import LIMITS_EVERY_S, ask_for_limits_often


def test_ray_reads_the_interval_that_is_set(monkeypatch):
    """A Ray that has renamed it would go on as before, and every run would start a second later."""
    monkeypatch.setattr(ResourceManager, "GLOBAL_LIMITS_UPDATE_INTERVAL_S", 1)
    ask_for_limits_often()
    assert ResourceManager.GLOBAL_LIMITS_UPDATE_INTERVAL_S == LIMITS_EVERY_S
    manager = object.__new__(ResourceManager)
    manager._global_limits = "old"  # pyright: ignore[reportAttributeAccessIssue]
    manager._global_limits_last_update_time = time.time() - LIMITS_EVERY_S / 2
    assert manager.get_global_limits() == "old"
    assert "GLOBAL_LIMITS_UPDATE_INTERVAL_S" in inspect.getsource(ResourceManager.get_global_limits)
