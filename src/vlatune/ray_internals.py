"""[ray] Every private part of Ray that vlatune uses: what for, and what is done where a Ray of another version has none.

Nothing outside of this file names one, and nothing here imports Ray before it is called: not every process needs all of
it. What makes a run faster falls back on Ray's public way, with a warning. What a run's safety hangs on (bytes that
spill, a cluster that listens to this machine alone) has no fallback: there an error is better. What is changed in a
process is changed back, but for `start_none_unasked` and `print_through`, which a whole `vlatune train` needs.
tests/test_ray_internals.py fails when Ray changes one of these.
"""

import importlib
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from vlatune.console import warn

TESTED_VERSION = "2.60"

# A cluster of our own

FREE_SOON = {"free_objects_period_milliseconds": 100}
"""A raylet frees what nobody uses any more once a second by default: at 85 MB/s that is half of a store of 150 MB, dead and
still counted."""
ON_A_NETWORK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's variable for whether a node takes the machine's address; with 0 it takes 127.0.0.1, as it does on macOS."""
VITAL_PROCESSES = ("gcs_server", "raylet")
"""Names of the two that a cluster ends with. They are children of the process that started it."""
TRAIN_WORKER_TITLE, RAYLET_TITLE = "ray::RayTrainWorker", "/raylet/raylet"
"""In the titles of the processes of Ray Train's workers, and of the raylet."""


def init_options(*, folder: Path | None = None, niceness: int | None = None) -> dict[str, Any]:
    """For `ray.init`: free soon, Ray's files in a folder, and how far its workers give way (15 by default, those that train
    too). There are no public settings for the first and the last; RAY_TMPDIR would be the public way to the folder, but it
    holds for all that this process starts.
    """
    settings = FREE_SOON if niceness is None else FREE_SOON | {"worker_niceness": niceness}
    return {"_system_config": settings, "_temp_dir": str(folder) if folder else None}


@contextmanager
def ray_on_loopback() -> Iterator[None]:
    """A cluster that is started inside, and its processes, take 127.0.0.1 for this machine's address.

    Ray binds to it alone then; `_node_ip_address="127.0.0.1"` is replaced by the address on the network. No fallback.
    """
    from ray._private import ray_constants

    was_on, before = ray_constants.ENABLE_RAY_CLUSTER, os.environ.get(ON_A_NETWORK)
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[ON_A_NETWORK] = "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = was_on
        os.environ.pop(ON_A_NETWORK, None)
        if before is not None:
            os.environ[ON_A_NETWORK] = before


def asks_for_token() -> bool:
    """Whether this process, and with it the cluster that it started or joined, uses tokens. Where it cannot be told: no."""
    try:
        from ray._private.authentication.authentication_utils import is_token_auth_enabled
    except ImportError:
        return False
    return is_token_auth_enabled()


def count_gpus() -> int:
    """As many as Ray will find when it starts. The public way, `ray.cluster_resources`, needs a cluster; no fallback."""
    from ray._private.accelerators import get_accelerator_manager_for_resource

    manager: Any = get_accelerator_manager_for_resource("GPU")
    there, visible = manager.get_current_node_num_accelerators(), manager.get_current_process_visible_accelerator_ids()
    return there if visible is None else min(there, len(visible))


def start_none_unasked() -> Callable[[], None]:
    """Ray starts a cluster for any call that finds none. Ray Train's thread may make one after ours was ended by Ctrl-C, or
    while it is replaced; that cluster would be nobody's. RAY_ENABLE_AUTO_CONNECT is read when Ray is imported: too early.
    What it returns undoes it.
    """
    from ray._private import auto_init_hook

    undo = partial(setattr, auto_init_hook, "enable_auto_connect", auto_init_hook.enable_auto_connect)
    auto_init_hook.enable_auto_connect = False
    return undo


def print_through(write: Callable[[str], None]) -> Callable[[], None]:
    """Errors of the cluster, screens long, are printed whatever `log_to_driver` says; from here on `write` gets them.

    What it returns undoes it.
    """
    import ray._private.worker

    def write_lines(data: dict[str, Any], *_: object, **__: object) -> None:
        write("\n".join(data["lines"]))

    undo = partial(setattr, ray._private.worker, "print_to_stdstream", ray._private.worker.print_to_stdstream)
    ray._private.worker.print_to_stdstream = write_lines
    return undo


def store_counters() -> tuple[int, int, int]:
    """Bytes spilled, bytes that went to the disk for want of room, bytes in use; of all nodes, from their raylets.

    The public way is a metrics endpoint, which a cluster need not have. No fallback: a spill must not go unseen.
    """
    import ray
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    stats = get_memory_info_reply(get_state_from_address(ray.get_runtime_context().gcs_address)).store_stats
    return stats.spilled_bytes_total, stats.object_store_bytes_fallback, stats.object_store_bytes_used


def draining_nodes() -> set[str]:
    """Nodes that Ray knows will be taken away: a preemption notice, or `ray drain-node`. Ray Train's own watcher asks here,
    too. Without an answer a node's end is noticed when it has come.
    """
    try:
        from ray._private.state import state

        return set(state.get_draining_nodes())
    except (ImportError, AttributeError):
        return set()


# Ray Data

LIMITS_EVERY_S, EAGER_S = 0.1, 5.0
"""An execution may run only one task, and read no output, until it has heard what it may use; it asks without waiting, so the
answer counts from its second question on. Ray asks once a second: that long every first row waits, and every core but one
is idle. Here it asks so often during its first seconds; each question costs three processes a millisecond."""
LOOK_EVERY_S = 0.03
"""Ray looks for finished tasks ten times a second: a core whose task has ended is idle for half of that. Two cores were idle
for 5 % of the time with this, for 8 to 10 % with Ray's 0.1 s."""
REST_S = 0.2
"""The longest rest between two turns, reached by doubling while they find all tasks held back: a turn costs one to two
milliseconds."""


def keep_pace(context: Any) -> None:
    """For the executions of one Dataset, whose context this is. Without Ray's private parts they go at Ray's own pace."""
    hooks = getattr(context, "custom_execution_callback_classes", None)
    if hooks is not None and has_parts(PACE_PARTS, "reading goes at Ray's own pace"):
        context.custom_execution_callback_classes = [*hooks, Pace]


PACE_PARTS = (
    "ray.data._internal.execution.streaming_executor_state:WAIT_FOR_TASK_COMPLETION_TIMEOUT_S",
    "ray.data._internal.execution.resource_manager:ResourceManager.GLOBAL_LIMITS_UPDATE_INTERVAL_S",
    "ray.data._internal.execution.streaming_executor:StreamingExecutor.set_external_consumer_bytes",
    "ray.data._internal.execution.streaming_executor:StreamingExecutor._scheduling_loop_step",
)


@cache
def has_parts(parts: tuple[str, ...], then: str) -> bool:
    """Whether this Ray has all of them, found out once a process; `then` says what follows where it has not."""
    missing = [part for part in parts if not _is_there(*part.split(":"))]
    if missing:
        import ray

        warn(
            f"vlatune: warning: Ray {ray.__version__} has no {', '.join(missing)}: {then}; Ray {TESTED_VERSION} is the one that "
            f"vlatune is tested with"
        )
    return not missing


def _is_there(module: str, path: str) -> bool:
    try:
        operator.attrgetter(path)(importlib.import_module(module))
    except (ImportError, AttributeError):
        return False
    return True


class Pace:
    """How soon and how often an execution acts. One per execution, called on the thread of its loop, through Ray's hooks.

    When its consumer is slow, an execution's loop never rests: every task has a block ready that may not be taken yet, so
    the call that should wait for one returns at once. Here it rests.
    """

    def __init__(self) -> None:
        self._began_s = self._turned_s = time.monotonic()
        self._rest_s = LOOK_EVERY_S
        self._seen: tuple[int, ...] = ()

    def before_execution_starts(self, executor: Any) -> None:
        # Somebody outside takes the blocks: without this Ray reads what its tasks have ready, whatever the limit says.
        executor.set_external_consumer_bytes(0)
        if (manager := getattr(executor, "_resource_manager", None)) is not None:
            manager.GLOBAL_LIMITS_UPDATE_INTERVAL_S = LIMITS_EVERY_S
        executor._scheduling_loop_step = _looking_often(executor._scheduling_loop_step)

    def on_execution_step(self, executor: Any) -> None:
        """Rest until the turn has lasted long enough: the longer, the longer turns were short and nothing has happened.

        A turn that has waited for a task does not spin, and the next is not put off: the core of a task that ends would be
        idle for so long (of two cores 4 % of a run that decoding decides, instead of 9).
        """
        seen = progress(executor)
        spins = time.monotonic() - self._turned_s < LOOK_EVERY_S / 2 and seen == self._seen
        self._rest_s = min(REST_S, 2 * self._rest_s) if spins else LOOK_EVERY_S
        self._seen = seen
        if self._began_s and time.monotonic() - self._began_s > EAGER_S:
            if (manager := getattr(executor, "_resource_manager", None)) is not None:
                del manager.GLOBAL_LIMITS_UPDATE_INTERVAL_S
            self._began_s = 0.0
        time.sleep(max(0.0, self._turned_s + self._rest_s - time.monotonic()))
        self._turned_s = time.monotonic()

    def after_execution_succeeds(self, executor: Any) -> None:
        """All is in the execution itself, and goes with it."""

    def after_execution_fails(self, executor: Any, error: Exception) -> None:
        """As above."""


def _looking_often(turn: Callable[..., bool]) -> Callable[..., bool]:
    """A turn of one execution's loop, which looks for finished tasks as often as ours should. It does not keep the execution."""
    own = weakref.WeakMethod(turn)

    def look_often(*args: Any) -> bool:
        method = own()
        assert method is not None  # the thread that calls is the execution
        with OFTEN:
            return method(*args)

    return look_often


class Often:
    """While a turn of ours is under way Ray looks often; before and after it, as ever.

    The setting is Ray's for all executions of a process. Turns of several threads may overlap: the first one in changes
    it, the last one out changes it back. An execution of others looks more often for as long as one of ours does.
    """

    def __init__(self) -> None:
        self._lock, self._turns, self._usual_s = threading.Lock(), 0, 0.0

    def __enter__(self) -> None:
        from ray.data._internal.execution import streaming_executor_state

        with self._lock:
            self._turns += 1
            if self._turns == 1:
                self._usual_s = streaming_executor_state.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S
                streaming_executor_state.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S = LOOK_EVERY_S

    def __exit__(self, *_: object) -> None:
        from ray.data._internal.execution import streaming_executor_state

        with self._lock:
            self._turns -= 1
            if not self._turns:
                streaming_executor_state.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S = self._usual_s


OFTEN = Often()


def progress(executor: Any) -> tuple[int, ...]:
    """Numbers that change when a task began, gave a block or ended, and when the consumer took one.

    Where a Ray of another version does not tell, they always change, and no rest is long.
    """
    numbers: list[int] = []
    try:
        for op, state in (executor._topology or {}).items():
            metrics = op.metrics
            numbers += [metrics.num_tasks_submitted, metrics.num_task_outputs_generated, len(state.output_queue)]
    except AttributeError:
        return (time.monotonic_ns(),)
    return tuple(numbers)


def make_block(row: dict[str, Any]) -> Any:
    """A block of one row, as the template's Datasource builds it; for benchmarks alone."""
    from ray.data._internal.delegating_block_builder import DelegatingBlockBuilder

    builder = DelegatingBlockBuilder()
    builder.add(row)
    return builder.build()


# Ray Train

FIT_THREAD = "ray-train"
"""Name of the driver's thread in which Ray Train runs."""
SOON_S = 0.5


def is_asked() -> bool:
    """Whether a run that was broken off has left that thread inside of Ray, as one that waits for workers which do not answer
    cannot be ended. Ray ends a process, without a word and with a code of its own, that asks it something after `ray.shutdown`.
    """
    threads = [thread for thread in threading.enumerate() if thread.name == FIT_THREAD]
    for thread in threads:
        thread.join(SOON_S)  # it may be on its last line
    return any(thread.is_alive() for thread in threads)


TRAIN_SETTINGS = {
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",  # the driver's log is ours
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # the driver watches the nodes itself
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_METRICS_ENABLED": "0",
}
"""Variables that Ray Train reads; a user's own go before them."""


def lean_trainer(*, own_cluster: bool) -> Any:
    """Ray Train's trainer class without what a run of ours does not use, which costs time at every start.

    Ray Train starts an actor for its controller, one for its datasets, and one that removes placement groups after a crash;
    each imports ray.train, five seconds of CPU, and the workers are not started before the controller is. Here the
    controller runs in the driver, which has all of that loaded: one process less that could die. Our data has its own way
    to the workers, and a cluster of our own goes with its placement groups. The fallback is Ray Train's own class: slower
    to start, but the same run.
    """
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    if not has_parts(LEAN_PARTS, "a run starts some seconds later"):
        return DataParallelTrainer
    return _make_lean(DataParallelTrainer, own_cluster)


LEAN_PARTS = (
    "ray.train.v2.api.data_parallel_trainer:DataParallelTrainer._create_default_callbacks",
    "ray.train.v2.api.data_parallel_trainer:DataParallelTrainer._initialize_and_run_controller",
    "ray.train.v2._internal.execution.controller:TrainController.worker_group_cls",
    "ray.train.v2._internal.execution.worker_group:WorkerGroup._init_train_context_on_workers",
    "ray.train.v2._internal.execution.worker_group:WorkerGroup._decorate_worker_log_file_paths",
    "ray.train.v2._internal.callbacks:DatasetsCallback",
    "ray.train.v2._internal.callbacks.placement_group_callback:PlacementGroupCleanerCallback",
)


def _make_lean(base: Any, own_cluster: bool) -> Any:
    import asyncio

    import ray
    from ray.train.v2._internal.callbacks import DatasetsCallback
    from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
    from ray.train.v2._internal.execution.controller import TrainController
    from ray.train.v2._internal.execution.worker_group import WorkerGroup

    unused = (DatasetsCallback, PlacementGroupCleanerCallback) if own_cluster else (DatasetsCallback,)

    class DriversWorkerGroup(WorkerGroup):
        def _init_train_context_on_workers(self, workers: Any, sync_actor: Any, train_context_args: Any) -> None:
            """As Ray Train does it, but for the handle of a controller that is no actor: nothing of ours asks it anything."""
            told = []
            for number, worker in enumerate(workers):
                more = {name: values[number] for name, values in train_context_args.items()}
                told.append(
                    worker.actor.init_train_context.remote(
                        train_run_context=self._train_run_context,
                        distributed_context=worker.distributed_context,
                        synchronization_actor=sync_actor,
                        storage_context=self._storage_context,
                        worker_callbacks=self._worker_callbacks_to_propagate,
                        controller_actor=None,
                        **more,
                    )
                )
            ray.get(told)
            self._decorate_worker_log_file_paths(workers)

    class DriversController(TrainController):
        worker_group_cls = DriversWorkerGroup

    class LeanTrainer(base):
        _cancel: Callable[[], object] | None = None
        _is_cancelled = False

        def _create_default_callbacks(self) -> list[Any]:
            return [one for one in super()._create_default_callbacks() if not isinstance(one, unused)]

        def _initialize_and_run_controller(self, **settings: Any) -> Any:
            controller = DriversController(**settings)

            async def run() -> None:
                task, loop = asyncio.current_task(), asyncio.get_running_loop()
                assert task is not None  # this is one
                self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
                if self._is_cancelled:  # before it had begun
                    raise asyncio.CancelledError
                await controller.run()

            asyncio.run(run())
            return controller.get_result()

        def cancel(self) -> None:
            """From another thread than the one in `fit`: it ends at its next look at the workers, and asks Ray nothing more."""
            self._is_cancelled = True
            if self._cancel is not None:
                with suppress(RuntimeError):  # its loop has just ended
                    self._cancel()

    return LeanTrainer
