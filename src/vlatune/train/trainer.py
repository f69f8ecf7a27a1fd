"""[ray] Ray Train's trainer without what a run of ours does not use, which costs time at every start.

Ray Train starts an actor for its controller, one for its datasets, one that watches for preemption and one that removes
placement groups after a crash; each imports ray.train, five seconds of CPU, and the workers are not started before the
controller is. Here the controller runs in the driver, which has all of that loaded: one process less that could die.
Our data has its own way to the workers, `supervise.py` watches the nodes, and a cluster of our own goes with its
placement groups. Only the workers import torch; what joins them to a process group is Ray Train's own code.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig
from ray.train._internal.base_worker_group import BaseWorkerGroup
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.worker_group import Worker, WorkerGroup
from ray.train.v2.api.callback import RayTrainCallback
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

SETTINGS = {
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",  # the driver's log is ours
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_METRICS_ENABLED": "0",
}
LEAVE_S = 5.0
JOIN_S = 1800.0
"""As long as Ray Train waits for a collective operation."""
LOOPBACK = "127.0.0.1"
UNUSED = (DatasetsCallback,)
UNUSED_ON_OUR_OWN = (DatasetsCallback, PlacementGroupCleanerCallback)


def make_trainer(
    work: Callable[[dict[str, Any]], None],
    job: object,
    *,
    num_workers: int,
    resources: dict[str, float],
    name: str,
    storage_path: str,
    own_cluster: bool,
    environment: Mapping[str, str] | None = None,
) -> DataParallelTrainer:
    """What runs `work({"job": job})` in so many processes of one process group, once.

    `environment` is set in them before anything starts CUDA, but for what they have already.
    """
    for setting, value in SETTINGS.items():
        os.environ.setdefault(setting, value)
    use_gpu = "GPU" in resources
    return LeanTrainer(
        work,
        train_loop_config={"job": job},
        backend_config=TorchGroup("nccl" if use_gpu else "gloo", dict(environment or {})),
        scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=use_gpu, resources_per_worker=resources),
        run_config=RunConfig(name=name, storage_path=storage_path, failure_config=FailureConfig(max_failures=0)),
        unused=UNUSED_ON_OUR_OWN if own_cluster else UNUSED,
    )


class LeanTrainer(DataParallelTrainer):
    def __init__(self, *args: Any, unused: tuple[type[RayTrainCallback], ...], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unused = unused

    def _create_default_callbacks(self) -> list[RayTrainCallback]:
        return [one for one in super()._create_default_callbacks() if not isinstance(one, self._unused)]

    def _initialize_and_run_controller(self, **settings: Any) -> Result:
        controller = DriversController(**settings)
        asyncio.run(controller.run())
        return controller.get_result()


class DriversWorkerGroup(WorkerGroup):
    def _init_train_context_on_workers(
        self, workers: list[Worker], sync_actor: ActorHandle, train_context_args: dict[str, list[Any]]
    ) -> None:
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


@dataclass
class TorchGroup(BackendConfig):
    """The workers form a torch process group."""

    backend: str
    """nccl or gloo."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def backend_cls(self) -> type[Backend]:
        return TorchGroupBackend

    @property
    def train_func_context(self) -> Any:
        return own_device


class TorchGroupBackend(Backend):
    """Runs in the controller; nothing here imports torch but the functions that the workers run."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: BaseWorkerGroup, backend_config: BackendConfig) -> None:
        from ray.train._internal.utils import get_address_and_port

        assert isinstance(backend_config, TorchGroup)
        address, port = worker_group.execute_single(0, get_address_and_port)
        size = len(worker_group)
        joins: Any = [
            worker_group.execute_single_async(rank, _join, address, port, backend_config, rank, size)
            for rank in range(size)
        ]
        ray.get(joins)

    def on_shutdown(self, worker_group: BaseWorkerGroup, backend_config: BackendConfig) -> None:
        with contextlib.suppress(GetTimeoutError):  # where a worker died, the others may be stuck
            leaving: Any = worker_group.execute_async(_leave)
            ray.get(leaving, timeout=LEAVE_S)


def _join(address: str, port: int, group: TorchGroup, rank: int, size: int) -> None:
    for name, value in group.environment.items():
        os.environ.setdefault(name, value)
    from ray.train.torch import config

    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    config._set_torch_distributed_env_vars()
    if address == LOOPBACK:
        _join_on_loopback(port, group.backend, rank, size)
    else:
        config._setup_torch_process_group(group.backend, rank, size, "env://")


def _join_on_loopback(port: int, backend: str, rank: int, size: int) -> None:
    """The same, but that the store by which the workers find each other is not open to the network: torch's would be."""
    from torch import distributed

    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as Ray Train has it
    listening = None
    if rank == 0:
        with socket.socket() as opened:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind((LOOPBACK, port))
            opened.listen()
            listening = opened.detach()  # the store closes it
    wait = timedelta(seconds=JOIN_S)
    store = distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  (it is documented)
        LOOPBACK, port, size, rank == 0, wait, master_listen_fd=listening
    )
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)


def _leave() -> None:
    from ray.train.torch import config

    config._shutdown_torch(destroy_process_group=True)


def own_device() -> Any:
    """Around the worker's function: this rank's own GPU is the current one."""
    from ray.train.torch.config import TorchConfigContextManager

    return TorchConfigContextManager()
