"""[ray] All private Ray APIs that vlatune uses, with their reasons and fallbacks.

No other file uses one, and Ray is imported only inside the functions. Where a run can do without
one, there is a fallback. Safety features (spill detection, a cluster on loopback, no imports from
the user's folders) raise an error instead. tests/unit/train/test_ray_internals.py fails if Ray
changes one of them.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

NETWORK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's variable for using the machine's network address; 0 uses 127.0.0.1, as on macOS."""
VITAL_PROCESSES = ("gcs_server", "raylet")
"""Processes that a cluster cannot survive without; children of the process that started it."""
TRAIN_WORKER_TITLE, RAYLET_TITLE = "ray::RayTrainWorker", "/raylet/raylet"
"""Process titles of Ray Train's workers and of the raylet."""
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable that Ray's job server sets for the driver of a job."""
STOP_VARIABLE, DEFAULT_STOP_S = "RAY_JOB_STOP_WAIT_TIME_S", 3
"""Seconds from SIGTERM to SIGKILL in `ray job stop`."""
RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Seconds that Ray's processes wait for a head that restarts; KubeRay sets it with fault tolerance."""
CALL_THREAD = "ray-call"
"""Name of the driver threads that call Ray and may block."""
CALL_END_S = 0.5
HEAD_LOST = threading.Event()
"""Set when the head of the cluster is gone, so that every call to Ray would block."""


def closed_job() -> Any:
    """Return a job config for `ray.init` that keeps driver folders off the workers' `sys.path`.

    Ray adds the driver's working directory before site-packages, and it may be an untrusted
    dataset. The public alternative, a `working_dir` in the runtime environment, uploads a folder
    and restarts every worker. No fallback: `check_closed` raises if Ray adds the folder anyway.
    """
    from ray.job_config import JobConfig

    class ClosedJob(JobConfig):
        def _runtime_env_has_working_dir(self) -> bool:
            return True  # Ray adds no folder to jobs with a working_dir

    return ClosedJob()


def check_closed() -> None:
    """Raise if the current Ray job lets workers import from a folder of the driver."""
    import ray
    from ray._private.worker import global_worker

    worker: Any = global_worker
    if added := list(worker.core_worker.get_job_config().py_driver_sys_path):
        raise RuntimeError(
            f"Ray {ray.__version__} lets its workers import code from {', '.join(added)}, which may hold untrusted files; "
            f"install a Ray version that vlatune is tested with"
        )


@contextmanager
def ray_on_loopback() -> Iterator[None]:
    """Make clusters started in this context bind to 127.0.0.1.

    Ray replaces `_node_ip_address="127.0.0.1"` by the network address. No fallback.
    """
    from ray._private import ray_constants

    was_on, before = ray_constants.ENABLE_RAY_CLUSTER, os.environ.get(NETWORK_VARIABLE)
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[NETWORK_VARIABLE] = "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = was_on
        os.environ.pop(NETWORK_VARIABLE)
        if before is not None:
            os.environ[NETWORK_VARIABLE] = before


def count_gpus() -> int:
    """Return the number of GPUs that Ray will detect; the public API needs a running cluster.

    Falls back to torch, which takes seconds to import.
    """
    try:
        from ray._private.accelerators import get_accelerator_manager_for_resource

        manager: Any = get_accelerator_manager_for_resource("GPU")
        visible = manager.get_current_process_visible_accelerator_ids()
        present = manager.get_current_node_num_accelerators()
    except (ImportError, AttributeError):
        import torch

        return torch.cuda.device_count()
    return present if visible is None else min(present, len(visible))


def redirect_errors(write: Callable[[str], None]) -> Callable[[], None]:
    """Redirect cluster errors, which Ray prints despite `log_to_driver`; return a function that undoes it.

    They may quote secrets. Without this function in Ray, they stay on the terminal.
    """
    import ray._private.worker as worker

    printing = getattr(worker, "print_to_stdstream", None)
    if printing is None:
        return lambda: None

    def write_lines(data: dict[str, Any], *_: object, **__: object) -> None:
        write("\n".join(data["lines"]))

    worker.print_to_stdstream = write_lines
    return lambda: setattr(worker, "print_to_stdstream", printing)


def store_counters() -> tuple[int, int, int]:
    """Return bytes spilled, bytes in fallback allocations and bytes in use, summed over all nodes.

    The raylet of this node is asked, because another one may be gone before Ray knows. The public
    API is a metrics endpoint, which a cluster may lack. No fallback: spilling must be detected.
    """
    import ray
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    context = ray.get_runtime_context()
    state = get_state_from_address(context.gcs_address)
    own = next(node for node in state.node_table() if node["NodeID"] == context.get_node_id())
    stats = get_memory_info_reply(state, own["NodeManagerAddress"], own["NodeManagerPort"]).store_stats
    return stats.spilled_bytes_total, stats.object_store_bytes_fallback, stats.object_store_bytes_used


def job_groups() -> set[str]:
    """Return the ids of this job's placement groups, which end with the id of the job.

    A controller of Ray Train that is killed leaves one that reserves the resources of all workers.
    Ray Train's own cleaner needs the dashboard.
    """
    import ray

    table, job = ray.util.placement_group_table(), ray.get_runtime_context().get_job_id()
    return {group for group, values in table.items() if group.endswith(job) and values["state"] != "REMOVED"}


def remove_group(group: str) -> None:
    """Remove a placement group by its id; the public API needs an object or a name."""
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group))))


def draining_nodes() -> set[str]:
    """Return the nodes that will be removed (preemption notice or `ray drain-node`), if known.

    Ray Train's watcher uses the same API. The public `ray.train.get_preemption_info` is a barrier of
    all workers. Without this API, the loss of a node is noticed when it happens.
    """
    try:
        from ray._private.state import state

        return set(state.get_draining_nodes())
    except (ImportError, AttributeError):
        return set()


def is_blocked() -> bool:
    """True if an aborted run has left a thread blocked in a call to Ray, or any call would block.

    Ray exits the process silently, with a different exit code, if a call is made after
    `ray.shutdown`.
    """
    threads = [thread for thread in threading.enumerate() if thread.name == CALL_THREAD]
    for thread in threads:
        thread.join(CALL_END_S)  # it may be about to finish
    return HEAD_LOST.is_set() or any(thread.is_alive() for thread in threads)
