"""[ray] The workers of a run: processes of one torch process group, started by Ray Train.

Only they import torch. The trainer is Ray Train's without what a run of ours does not use (`ray_internals.py`).
"""

import contextlib
import gc
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.backend import Backend, BackendConfig

from vlatune.ray_internals import TRAIN_SETTINGS, lean_trainer

LEAVE_S = 5.0
JOIN_S = 1800.0
"""As long as Ray Train waits for a collective operation."""
LOOPBACK = "127.0.0.1"


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
) -> Any:
    """What runs `work({"job": job})` in so many processes of one process group, once.

    `environment` is set in them before anything starts CUDA, but for what they have already.
    """
    for setting, value in TRAIN_SETTINGS.items():
        os.environ.setdefault(setting, value)
    use_gpu = "GPU" in resources
    return lean_trainer(own_cluster=own_cluster)(
        work,
        train_loop_config={"job": job},
        backend_config=TorchGroup("nccl" if use_gpu else "gloo", dict(environment or {})),
        scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=use_gpu, resources_per_worker=resources),
        run_config=RunConfig(name=name, storage_path=storage_path, failure_config=FailureConfig(max_failures=0)),
    )


def run_worker(settings: dict[str, Any]) -> None:
    """What every rank runs. The driver names it, and would import torch, seconds of CPU, with the worker's own module."""
    # All that is imported and built until the loop begins stays: to look for garbage in it costs 1.5 s of 10. The loop looks again.
    gc.disable()
    from vlatune.train.worker import loop

    loop.run_worker(settings)


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

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        assert isinstance(backend_config, TorchGroup)
        address, port = worker_group.execute_single(0, _find_address)
        size = len(worker_group)
        joins: Any = [
            worker_group.execute_single_async(rank, _join, address, port, backend_config, rank, size)
            for rank in range(size)
        ]
        ray.get(joins)

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        with contextlib.suppress(GetTimeoutError):  # where a worker died, the others may be stuck
            leaving: Any = worker_group.execute_async(_leave)
            ray.get(leaving, timeout=LEAVE_S)


def _find_address() -> tuple[str, int]:
    """Of this node, with a port that is free."""
    address = ray.util.get_node_ip_address()
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as opened:
        opened.bind(("", 0))
        return address, opened.getsockname()[1]


def _join(address: str, port: int, group: TorchGroup, rank: int, size: int) -> None:
    for name, value in group.environment.items():
        os.environ.setdefault(name, value)
    from torch import distributed

    os.environ |= _place(address, port)
    if not {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT"} & os.environ.keys():
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"  # as Ray Train has it
    if address == LOOPBACK:
        _join_on_loopback(port, group.backend, rank, size)
    else:
        wait = timedelta(seconds=JOIN_S)
        distributed.init_process_group(group.backend, "env://", rank=rank, world_size=size, timeout=wait)


def _place(address: str, port: int) -> dict[str, str]:
    """This worker's place in the group, under the names that torchrun gives; Accelerate reads the last."""
    from ray.train.torch import get_device

    context = get_context()
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "NODE_RANK": str(context.get_node_rank()),
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "ACCELERATE_TORCH_DEVICE": str(get_device()),
    }


def _join_on_loopback(port: int, backend: str, rank: int, size: int) -> None:
    """The same, but that the store by which the workers find each other is not open to the network: torch's would be."""
    from torch import distributed

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
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def own_device() -> Iterator[None]:
    """Around the worker's function: this rank's own GPU is the current one."""
    import torch
    from ray.train.torch import get_device

    device = get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    yield
