"""What we set inside of Ray Data is there, is used, and is the execution's own."""

import inspect
import time
from types import SimpleNamespace

import ray.data
from ray.data._internal.execution import streaming_executor, streaming_executor_state
from ray.data._internal.execution.resource_manager import ResourceManager

from vlatune.pipeline.execution import EAGER_S, LIMITS_EVERY_S, LOOK_EVERY_S, REST_S, Pace, act_soon, keep_pace


class Manager:
    GLOBAL_LIMITS_UPDATE_INTERVAL_S = 1


def an_executor() -> SimpleNamespace:
    told: list[int] = []
    return SimpleNamespace(
        _resource_manager=Manager(), _topology={}, set_external_consumer_bytes=told.append, told=told
    )


def test_tasks_are_looked_for_often(monkeypatch):
    monkeypatch.setattr(streaming_executor_state, "WAIT_FOR_TASK_COMPLETION_TIMEOUT_S", 1)
    act_soon()
    assert streaming_executor_state.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S == LOOK_EVERY_S


def test_limits_are_asked_for_often_at_first_then_as_ray_does():
    executor, pace = an_executor(), Pace()
    pace.before_execution_starts(executor)  # pyright: ignore[reportArgumentType]
    manager = executor._resource_manager
    assert manager.GLOBAL_LIMITS_UPDATE_INTERVAL_S == LIMITS_EVERY_S
    assert executor.told == [0]
    pace._began_s -= EAGER_S
    for _ in range(3):
        pace.on_execution_step(executor)  # pyright: ignore[reportArgumentType]
        assert manager.GLOBAL_LIMITS_UPDATE_INTERVAL_S == 1
    assert Manager.GLOBAL_LIMITS_UPDATE_INTERVAL_S == 1


def test_the_loop_rests_longer_while_nothing_happens(monkeypatch):
    rests: list[float] = []
    monkeypatch.setattr(time, "sleep", rests.append)
    queue: list[int] = []
    metrics = SimpleNamespace(num_tasks_submitted=1, num_task_outputs_generated=0)
    executor = an_executor()
    executor._topology = OneOperator(metrics, queue)
    pace = Pace()
    for _ in range(6):
        pace.on_execution_step(executor)  # pyright: ignore[reportArgumentType]
    assert rests[0] <= LOOK_EVERY_S < rests[-1] <= REST_S
    queue.append(1)
    pace.on_execution_step(executor)  # pyright: ignore[reportArgumentType]
    assert rests[-1] <= LOOK_EVERY_S


class OneOperator:
    """One operator; plain namespaces cannot be keys."""

    def __init__(self, metrics: object, queue: list[int]) -> None:
        self._one = (SimpleNamespace(metrics=metrics), SimpleNamespace(output_queue=queue))

    def items(self):
        return [self._one]


def test_a_dataset_gets_a_pace_of_its_own():
    context, other = ray.data.DataContext(), ray.data.DataContext()
    keep_pace(context)
    assert Pace in context.execution_callback_classes
    assert Pace not in other.execution_callback_classes


def test_ray_reads_what_is_set():
    """A Ray that has renamed them would go on as before, and every run would start later and read slower."""
    manager = object.__new__(ResourceManager)
    manager._global_limits = "old"  # pyright: ignore[reportAttributeAccessIssue]
    manager._global_limits_last_update_time = time.time() - LIMITS_EVERY_S / 2
    assert manager.get_global_limits() == "old"
    assert "self.GLOBAL_LIMITS_UPDATE_INTERVAL_S" in inspect.getsource(ResourceManager.get_global_limits)
    looking = inspect.getsource(streaming_executor_state.process_completed_tasks)
    assert "timeout=WAIT_FOR_TASK_COMPLETION_TIMEOUT_S" in looking
    running = inspect.getsource(streaming_executor.StreamingExecutor.run)
    assert "callback.on_execution_step(self)" in running
