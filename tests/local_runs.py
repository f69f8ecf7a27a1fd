"""Training runs without Ray: the real worker in this process, or two of them over gloo, fed with the rows of the sample order."""

import gc
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich.style  # noqa: F401  # its import uses Python's random generator: not in the middle of a run
import torch
import torch.distributed as dist
from safetensors.numpy import load_file

from vlatune.batch import SLOT, STEP_ACTIONS, Columns
from vlatune.checkpoint.state import LOSSES, RNG
from vlatune.checkpoint.store import list_checkpoints
from vlatune.config.settings import RunConfig
from vlatune.data.order.sample_order import cursor_at, epoch_order, step_samples
from vlatune.data.reader import make_unit, read_units
from vlatune.data.transforms import apply_all
from vlatune.evaluate.held_out import read_chosen
from vlatune.feed.feed import StageTimes
from vlatune.feed.memory import Budget, StoreCounters
from vlatune.feed.plan import DataPlan, Share, count_actions
from vlatune.run.sinks import read_jsonl
from vlatune.run_setup import Setup
from vlatune.train.base_source import find_source
from vlatune.train.driver import launch, ray_nodes, ray_supervisor
from vlatune.train.driver.ray_cluster import Cluster, size_for_this_host
from vlatune.train.driver.resume_rules import ResumePoint, find_resume_point, open_run
from vlatune.train.heartbeat import Request
from vlatune.train.prefix_choice import choose_prefix
from vlatune.train.records import RunWriter
from vlatune.train.worker.device import make_transfer
from vlatune.train.worker.loop import DriverLink, Runtime, Worker
from vlatune.train.worker_job import WorkerJob

CPU = torch.device("cpu")
TIMEOUT_S = 300


class OrderedBatches:
    """The batches of a worker, read directly in the order of `sample_order.py`."""

    def __init__(self, plan: DataPlan, share: Share, steps: range) -> None:
        self.times = StageTimes()
        self._batches = _make_batches(plan, share, steps)

    def __iter__(self) -> Iterator[Columns]:
        return self

    def __next__(self) -> Columns:
        return next(self._batches)

    def close(self) -> None: ...


def _make_batches(plan: DataPlan, share: Share, steps: range) -> Iterator[Columns]:
    chosen = zip(plan.selection.dataset, plan.selection.position, plan.selection.length, strict=True)
    units = [
        make_unit(plan.metas[dataset], plan.specs[dataset], int(position), np.arange(length), np.arange(length))
        for dataset, position, length in chosen
    ]
    rows, order_of = read_units(plan.specs, units), cache(lambda epoch: epoch_order(plan.order, epoch))
    for step in steps:
        cursor = cursor_at(plan.order, step)
        [all_samples] = step_samples(plan.order, order_of(cursor.epoch), cursor.batch, cursor.batch + 1)
        samples = all_samples.reshape(share.num_workers, -1)[share.rank]
        per_step = share.slots_per_step(plan.order)
        slots = share.positions(plan.order, step * per_step + np.arange(per_step))  # the slots of a single worker
        for at in range(0, len(samples), plan.batch_size):
            part = slice(at, at + plan.batch_size)
            columns = {key: values[samples[part]] for key, values in rows.items()} | {SLOT: slots[part]}
            made = apply_all(plan.transforms, columns)
            yield made | {STEP_ACTIONS: count_actions(plan, all_samples[None])[0, made["dataset_index"]]}


class NoSpill:
    """The meter of an object store that does not exist."""

    peak_bytes = 0

    def latest(self) -> StoreCounters:
        return StoreCounters(0, 0, 0)

    close = latest


class NoDriver:
    """A driver without requests that writes nothing."""

    def progress(self, event: str) -> None: ...

    def send(self, file: str, record: dict[str, Any]) -> None: ...

    def wait_until_written(self) -> None: ...

    def take_request(self) -> Request:
        return Request.NOTHING


class WritingDriver:
    """Wraps a driver link; writes the records of its worker at once."""

    def __init__(self, driver: DriverLink, writer: RunWriter) -> None:
        self.progress, self.take_request, self._writer = driver.progress, driver.take_request, writer

    def send(self, file: str, record: dict[str, Any]) -> None:
        self._writer.write((self._writer.received, [(file, record)]))

    def wait_until_written(self) -> None: ...


class RequestAfter(NoDriver):
    """Makes a request after a number of steps; it is carried out after the next one."""

    def __init__(self, request: Request, steps: int) -> None:
        self._request, self._left = request, steps

    def take_request(self) -> Request:
        self._left -= 1
        return self._request if self._left == 0 else Request.NOTHING


def read_held_out(setup: Setup, batches: Mapping[int, np.ndarray]) -> Iterator[tuple[int, Columns]]:
    for number, frames in batches.items():
        yield number, read_chosen(setup, frames)


def make_writer(config: RunConfig, first_step: int | None) -> RunWriter:
    return RunWriter(config.run_dir, first_step or 0, log_samples=config.log_samples)


def make_job(config: RunConfig, start: ResumePoint, torch_threads: int = 1, restarts: int = 0) -> WorkerJob:
    with closing(make_writer(config, start.step)) as writer:
        recorded = writer.recorded
    return WorkerJob(
        config=config,
        setup=start.setup,
        budget=Budget(block_rows=1, block_bytes=1, readers=1, max_blocks=1),
        torch_threads=torch_threads,
        store_bytes=10**8,
        num_workers=config.num_workers,
        run_dir=str(config.run_dir),
        checkpoints=start.plan(config),
        restarts=restarts,
        recorded=recorded,
        base=find_source(config, start.setup.policy.folder),
    )


def make_worker(
    job: WorkerJob,
    share: Share,
    driver: DriverLink,
    change: Callable[[Columns], Columns] | None = None,
    device: torch.device = CPU,
) -> Worker:
    """Return the real worker; `change` is applied to its batches."""
    feed: Any = OrderedBatches(job.setup.data_plan, share, range(job.checkpoints.resume_step or 0, job.config.steps))
    if change:
        feed._batches = map(change, feed._batches)
    spill = None
    if share.rank == 0:
        spill, driver = NoSpill(), WritingDriver(driver, make_writer(job.config, job.checkpoints.resume_step))
    return Worker(
        job, Runtime(share, device, make_transfer(device), feed, driver, spill, read_held_out, job.base.folder)
    )


def run_locally(
    config: RunConfig,
    torch_threads: int = 1,
    driver: DriverLink | None = None,
    change: Callable[[Columns], Columns] | None = None,
) -> Path:
    """Start or resume a run until its end or a stop request, as `train` does, without its checks."""
    start = _start(config)
    open_run(config)
    with _restored_process():
        make_worker(make_job(config, start, torch_threads), Share(0, 1), driver or NoDriver(), change).run()
    return config.run_dir


def _start(config: RunConfig) -> ResumePoint:
    start = find_resume_point(config, say=lambda _: None)
    kept = choose_prefix(config, start.setup, start.fingerprints, on_gpu=False).settings
    return replace(start, setup=replace(start.setup, kept=kept))


@contextmanager
def _restored_process() -> Iterator[None]:
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def train_flags(dataset: Path, base: Path, *more: str) -> list[str]:
    """Return the flags of a short run with held-out episodes; a later flag replaces an earlier one."""
    return [
        f"--dataset.root={dataset}",
        "--dataset.eval_split=0.2",
        "--dataset.run_length=4",
        "--dataset.window_rows=8",
        f"--policy.path={base}",
        "--policy.train=heads",
        "--batch_size=4",
        "--log_freq=1",
        "--max_restarts=0",
        *more,
    ]


def threads_of(run_dir: Path) -> int:
    """Return the number of torch threads of a run's last worker, on which the rounding of sums depends."""
    return int(re.findall(r"\bthreads (\d+)", (run_dir / "logs" / "worker.log").read_text())[-1])


@contextmanager
def no_ray() -> Iterator[None]:
    """Make `vlatune train` in this process run its worker here, without a cluster."""

    @contextmanager
    def local_ray(config: RunConfig, _: object, shape: Any) -> Iterator[Cluster]:
        yield Cluster(size_for_this_host(config, shape), None, is_local=False)

    class LocalSupervisor:
        states = ()

        def __init__(self, config: object, folder: object, cluster: Any, *_: object, **__: object) -> None:
            self._sizing = cluster.sizing

        def wait_for_resources(self) -> Any:
            return self._sizing

        def run(self, job: WorkerJob, _: object) -> bool:
            with _restored_process():
                make_worker(job, Share(0, 1), NoDriver()).run()
            return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "local_ray", local_ray)
        patch.setattr(ray_supervisor, "Supervisor", LocalSupervisor)
        patch.setattr(ray_nodes, "check_nodes", lambda *_: ())
        yield


# Two workers that are killed on the way


@dataclass(frozen=True)
class Fault:
    """Ends a worker of one attempt at an event of its driver link, or before or after a step of its optimizer."""

    event: str
    count: int = 1
    """How many times the event happens in the attempt."""
    rank: int = 0
    signal: int = signal.SIGKILL
    pid: int | None = None
    """The process to signal, by default the worker."""


class FaultyDriver:
    """Wraps a driver link; sends the signal at the fault's event."""

    def __init__(self, driver: DriverLink, fault: Fault | None) -> None:
        self._driver, self._fault, self._left = driver, fault, fault.count if fault else 0

    def progress(self, event: str) -> None:
        self._driver.progress(event)
        self.reach(event)

    def send(self, file: str, record: dict[str, Any]) -> None:
        self._driver.send(file, record)

    def wait_until_written(self) -> None:
        self._driver.wait_until_written()

    def take_request(self) -> Request:
        self.reach("request")
        return self._driver.take_request()

    def reach(self, event: str) -> None:
        if self._fault and event == self._fault.event:
            self._left -= 1
            if self._left == 0:
                os.kill(self._fault.pid or os.getpid(), self._fault.signal)

    def watch_torch(self) -> None:
        """Also count forward passes and optimizer steps of this process."""
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        register_module_forward_pre_hook(lambda module, _: self.reach(type(module).__name__))
        register_optimizer_step_pre_hook(lambda *_: self.reach("optimizer begin"))
        register_optimizer_step_post_hook(lambda *_: self.reach("optimizer end"))


def fault_of(faults: Sequence[Fault], restarts: int, rank: int) -> Fault | None:
    """Return the fault of this attempt: each attempt has one, until none is left."""
    fault = faults[restarts] if restarts < len(faults) else None
    return fault if fault and fault.rank == rank else None


_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["local_runs", "vlatune.policies.pi05.weights", "vlatune.policies.pi05.model"])


def run_pair(
    config: RunConfig,
    faults: Sequence[Fault] = (),
    torch_threads: int = 1,
    after: Callable[[Worker], None] | None = None,
) -> int:
    """Run the workers in processes, with restarts as by the driver; return the number of restarts.

    `after` is called with each worker that has ended, in its process.
    """
    start = _start(config)
    open_run(config)
    for restarts in range(len(faults) + 2):
        if restarts:
            start = find_resume_point(config, start.setup, say=lambda _: None)
        job = make_job(config, start, torch_threads, restarts)
        pair = [
            _server.Process(target=_run_rank, args=(job, tuple(faults), rank, after), daemon=True)
            for rank in range(config.num_workers)
        ]
        for process in pair:
            process.start()
        wait([process.sentinel for process in pair], TIMEOUT_S)
        if any(process.exitcode for process in pair):
            for process in pair:
                process.kill()
        for process in pair:
            process.join(TIMEOUT_S)
            assert process.exitcode is not None, f"rank {pair.index(process)} did not end within {TIMEOUT_S} s"
        if not any(process.exitcode for process in pair):
            return restarts
    raise RuntimeError(f"{config.run_dir}: not finished after {len(faults) + 2} starts")


def _run_rank(job: WorkerJob, faults: Sequence[Fault], rank: int, after: Callable[[Worker], None] | None) -> None:
    gc.freeze()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rendezvous = f"file://{job.run_dir}/.rendezvous-{job.restarts}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=job.config.num_workers)
    driver = FaultyDriver(NoDriver(), fault_of(faults, job.restarts, rank))
    driver.watch_torch()
    worker = make_worker(job, Share(rank, job.config.num_workers), driver)
    worker.run()
    if after:
        after(worker)
    os._exit(0)


def run_faulty_worker(faults: Sequence[Fault], environment: Mapping[str, str], settings: dict[str, Any]) -> None:
    """Run a worker of Ray Train that meets its faults; used instead of `ray_trainer.run_worker`."""
    from vlatune.train.worker import ray_worker

    os.environ.update(environment)
    job = settings["job"]
    with ray_worker.connect(job, settings["monitor"]) as runtime:
        driver = FaultyDriver(runtime.driver, fault_of(faults, job.restarts, runtime.share.rank))
        driver.watch_torch()
        Worker(job, replace(runtime, driver=driver)).run()


def assert_same_run(run_dir: Path, other: Path) -> None:
    """Compare losses, validations, samples, weights, optimizer and random states to the last bit."""
    ours, theirs = (read_jsonl(folder / "metrics.jsonl") for folder in (run_dir, other))
    keys = ("optimizer_step", "loss", "loss_by_task", "loss_by_dim", "grad_norm", "lr", "epoch", "samples_seen")
    assert [{key: line[key] for key in keys} for line in ours] == [{key: line[key] for key in keys} for line in theirs]
    for name in ("samples.jsonl", "validation.jsonl"):
        assert ((run_dir / name).exists(), (other / name).exists()) in ((True, True), (False, False)), name
        assert not (run_dir / name).exists() or read_jsonl(run_dir / name) == read_jsonl(other / name), name
    assert stored_tensors(run_dir) == stored_tensors(other)


def stored_tensors(run_dir: Path) -> dict[str, bytes]:
    """Return the tensors of the newest checkpoint without the sums of losses, which depend on --steps."""
    newest = list_checkpoints(run_dir)[-1]
    files = {file.name: file.read_bytes() for file in newest.glob("*.safetensors") if file.name not in (RNG, LOSSES)}
    return files | {name: values.tobytes() for name, values in load_file(newest / RNG).items()}
