"""[ray] Start the workers of a run with Ray Train, as one torch process group.

Only the workers import torch.
"""

import contextlib
import gc
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import ray
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.exceptions import GetTimeoutError
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from vlatune.errors import RunStoppedError
from vlatune.gpu_driver import find_problem, read_gpu
from vlatune.train.worker_job import WorkerJob, missing_environment

TRAIN_SETTINGS = {
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",  # the driver writes the log
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # the driver watches the nodes
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_METRICS_ENABLED": "0",
}
"""Environment variables of Ray Train; the user's values take precedence."""
FORWARDED = ("OMP_", "KMP_", "MKL_", "OPENBLAS_", "GLOO_", "NCCL_", "TORCH_NCCL_")
"""Prefixes of the driver's variables that the workers of another's cluster get, too."""
LEAVE_S = 5.0
JOIN_S = 120.0
"""Maximum seconds for all workers to connect to each other; workers themselves wait longer."""
GROUP_S = 1800.0
"""Timeout of collective operations, as in Ray Train."""


def make_trainer(
    job: WorkerJob,
    monitor: Any,
    *,
    resources: dict[str, float],
    is_local: bool,
    name: str,
) -> Any:
    """Return a trainer that runs the workers of `job` once, in a process group."""
    for setting, value in TRAIN_SETTINGS.items():
        os.environ.setdefault(setting, value)
    use_gpu = "GPU" in resources
    # Workers of a local cluster inherit the driver's environment.
    forwarded = {} if is_local else {name: os.environ[name] for name in os.environ if name.startswith(FORWARDED)}
    return DataParallelTrainer(
        run_worker,
        train_loop_config={"job": job, "monitor": monitor},
        backend_config=TorchGroup("nccl" if use_gpu else "gloo", job.config.deterministic),
        scaling_config=ScalingConfig(num_workers=job.num_workers, use_gpu=use_gpu, resources_per_worker=resources),
        run_config=RunConfig(
            name=name,
            # Ray Train stores nothing for us, and must not need a disk that all nodes share.
            storage_path="vlatune",
            storage_filesystem=PyFileSystem(FSSpecHandler(MemoryFileSystem())),
            failure_config=FailureConfig(max_failures=0),
            worker_runtime_env={"env_vars": forwarded} if forwarded else None,
        ),
    )


def run_worker(settings: dict[str, Any]) -> None:
    """Run the training loop; called on every rank. Keeps torch out of the driver's imports."""
    # Objects created until the loop begins are long-lived, so collecting garbage is wasted time.
    gc.disable()
    try:
        from vlatune.train.worker import ray_worker

        ray_worker.run_worker(**settings)
    finally:
        gc.enable()


@dataclass
class TorchGroup(BackendConfig):
    """Backend config that creates a torch process group."""

    backend: str
    """nccl or gloo."""
    deterministic: bool
    join_s: float = JOIN_S

    @property
    def backend_cls(self) -> type[Backend]:
        return TorchGroupBackend

    @property
    def train_func_context(self) -> Any:
        return own_device


class TorchGroupBackend(Backend):
    """Runs in the controller; only the functions that the workers run import torch."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        assert isinstance(backend_config, TorchGroup)
        places: list[tuple[str, int]] = worker_group.execute(_prepare, backend_config)
        (address, port), size = places[0], len(places)
        joins: Any = [
            worker_group.execute_single_async(rank, _join, address, port, backend_config.backend, rank, size)
            for rank in range(size)
        ]
        try:
            ray.get(joins, timeout=backend_config.join_s)
        except GetTimeoutError:  # a restart would wait as long; of a dead worker, Ray reports the death
            done, _ = ray.wait(joins, num_returns=size, timeout=0)
            waiting = [f"rank {rank} on {places[rank][0]}" for rank, join in enumerate(joins) if join not in done]
            text = f"{', '.join(waiting)} {_not_joined(address, port)}"
            raise RunStoppedError(f"{text} (waited {backend_config.join_s:g} s)") from None

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        with contextlib.suppress(GetTimeoutError):  # if a worker died, the others may be stuck
            leaving: Any = worker_group.execute_async(_leave)
            ray.get(leaving, timeout=LEAVE_S)


def _prepare(group: TorchGroup) -> tuple[str, int]:
    """Set the worker's environment and import torch; return the node's address and a free port."""
    address = ray.util.get_node_ip_address()
    addresses = {name: [one.address for one in all_of] for name, all_of in psutil.net_if_addrs().items()}
    uses_gpu = group.backend == "nccl"
    os.environ |= missing_environment(os.environ, deterministic=group.deterministic, uses_gpu=uses_gpu)
    for name, value in interface_variables(address, addresses).items():
        os.environ.setdefault(name, value)
    if not {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT"} & os.environ.keys():
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"  # Ray Train's default
    from torch import distributed  # noqa: F401  (reads the environment)

    with _bound_socket(address, 0) as opened:
        return address, opened.getsockname()[1]


def interface_variables(address: str, addresses: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the variables that make gloo and NCCL use the interface with this address.

    gloo otherwise uses the address of the host name, which may be a loopback address (127.0.1.1 on
    Debian). `addresses` are the addresses of each interface; empty if none has the address.
    """
    found = (name for name, own in addresses.items() if address in [one.partition("%")[0] for one in own])
    name = next(found, None)
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {}


def _bound_socket(address: str, port: int) -> socket.socket:
    opened = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    opened.bind((address, port))
    return opened


def _join(address: str, port: int, backend: str, rank: int, size: int) -> None:
    if backend == "nccl" and (problem := find_problem(read_gpu())):
        raise RunStoppedError(problem)
    os.environ |= _place(address, port)
    try:
        join_group(address, port, backend, rank, size)
    except RuntimeError as error:  # of the store, gloo or NCCL
        own = ray.util.get_node_ip_address()
        raise RuntimeError(f"rank {rank} on {own} {_not_joined(address, port)}") from error


def _not_joined(address: str, port: int) -> str:
    return (
        f"did not join the process group at {address}:{port}; allow connections between the nodes "
        f"on all ports, or name their network interface with GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    )


def join_group(address: str, port: int, backend: str, rank: int, size: int) -> None:
    """Join with a rendezvous store on this address; torch's default store listens on all interfaces."""
    from torch import distributed

    listening = None
    if rank == 0:
        with _bound_socket(address, port) as opened:
            opened.listen()
            listening = opened.detach()  # the store closes it
    store = distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  (it is documented)
        address, port, size, rank == 0, timedelta(seconds=2 * JOIN_S), master_listen_fd=listening
    )
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=GROUP_S))


def _place(address: str, port: int) -> dict[str, str]:
    """Return torchrun's environment variables for this worker, and Accelerate's device."""
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


def _leave() -> None:
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def own_device() -> Iterator[None]:
    """Make this rank's GPU the current device while the worker function runs."""
    import torch
    from ray.train.torch import get_device

    device = get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    yield
