"""A worker in this process: `worker_here` spares Ray Train and its imports, `no_ray` and `run_without_ray` all of Ray."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import rich.style  # noqa: F401  # imported, it draws from Python's own generator: not in the middle of a run
import torch
from pipeline.feeding import all_rows

from vlatune.batch import SLOT, Columns
from vlatune.config import RunConfig
from vlatune.dataset.order.sample_order import cursor_at, epoch_order, step_samples
from vlatune.evaluate.held_out import read_chosen
from vlatune.pipeline.memory import Budget
from vlatune.pipeline.plan import DataPlan, Share
from vlatune.pipeline.sizing import RunShape
from vlatune.pipeline.transforms import apply_all
from vlatune.report.run_folder import RunFolder
from vlatune.run_setup import Setup
from vlatune.train.driver import feature_stage, launch, supervisor, trainer
from vlatune.train.driver.cluster import Cluster, size_for_this_host
from vlatune.train.driver.resume_rules import find_resume_point, open_run
from vlatune.train.heartbeat import Request
from vlatune.train.worker import loop, metrics_logger, validation
from vlatune.train.worker_job import WorkerJob

CPU = torch.device("cpu")


@contextmanager
def worker_here() -> Iterator[None]:
    """A run's one worker is called in this process as Ray Train would call it in another; its reading is Ray's as ever."""
    context = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 1)
    with _own_threads(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.ray.train, "get_context", lambda: context)
        patch.setattr(loop, "get_device", lambda: CPU)
        patch.setattr(trainer, "make_trainer", lambda work, job, **_: SimpleNamespace(fit=lambda: work({"job": job})))
        yield


@contextmanager
def no_ray() -> Iterator[None]:
    """The same for `vlatune train`, which otherwise is the real one: no cluster, and the worker is fed with the rows of the
    order.
    """

    @contextmanager
    def local_ray(config: RunConfig, folder: RunFolder, run: RunShape) -> Iterator[Cluster]:
        yield Cluster(size_for_this_host(config, run), None, ours=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "local_ray", local_ray)
        patch.setattr(supervisor, "Supervisor", NoSupervisor)
        patch.setattr(feature_stage, "compute", compute_here)
        patch.setattr(trainer, "make_trainer", lambda _, job, **__: SimpleNamespace(fit=lambda: _work(job)))
        yield


def run_without_ray(config: RunConfig, torch_threads: int) -> None:
    """Make a run, or go on with it, to its end, with as many threads: what a driver does, without its checks."""
    start = find_resume_point(config, say=lambda _: None)
    open_run(config)
    _work(
        WorkerJob(
            config=config,
            setup=start.setup,
            budget=Budget(block_rows=1, block_bytes=1, readers=1, limit_bytes=1),
            torch_threads=torch_threads,
            run_dir=str(config.run_dir),
            checkpoints=start.plan(config),
            restarts=0,
        )
    )


def compute_here(stage: feature_stage.Stage, missing: Sequence[feature_stage.Part], *_: object) -> None:
    """Kept features, by an encoder in this process."""
    with _own_threads():
        encoder = feature_stage.Encoder(stage)
        for part in missing:
            encoder.keep(part, feature_stage.read_pictures(stage.setup.specs, part))


def threads_of(run_dir: Path) -> int:
    """As many as the last worker of a run computed with, by its log: with others sums may round otherwise."""
    return int(re.findall(r"\bthreads (\d+)", (run_dir / "logs" / "worker.log").read_text())[-1])


def _work(job: WorkerJob) -> None:
    """The real worker, alone."""
    with _own_threads(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "get_device", lambda: CPU)
        patch.setattr(loop, "Feed", OrderedBatches)
        patch.setattr(metrics_logger, "SpillMeter", NoSpills)
        patch.setattr(
            validation, "_read_batches", read_here
        )  # Ray would start a cluster for the call of a thread that has none
        loop.work(loop.Worker(job, Share(0, 1), NoDriver()))


def read_here(setup: Setup, batches: Mapping[int, np.ndarray]) -> Iterator[tuple[int, Columns]]:
    """Held-out rows, read by whoever asks for them."""
    for number, frames in batches.items():
        yield number, read_chosen(setup, frames)


@contextmanager
def _own_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class OrderedBatches:
    """Instead of the feed, for one dataset: what `sample_order.py` says, read directly."""

    def __init__(
        self, plan: DataPlan, share: Share, budget, *, first_step: int, last_step: int, coordinator=None, empty=None
    ) -> None:
        self._made = _batches(plan, share, range(first_step, last_step))

    def __iter__(self) -> Iterator[Columns]:
        return self

    def __next__(self) -> Columns:
        return next(self._made)

    def close(self) -> None: ...


def _batches(plan: DataPlan, share: Share, steps: range) -> Iterator[Columns]:
    rows, order_of = all_rows(plan), cache(lambda epoch: epoch_order(plan.order, epoch))
    for step in steps:
        cursor = cursor_at(plan.order, step)
        everyones = step_samples(plan.order, order_of(cursor.epoch), cursor.batch)
        samples = everyones.reshape(share.num_workers, -1)[share.rank]
        per_step = share.slots_per_step(plan.order)
        slots = share.places(plan.order, step * per_step + np.arange(per_step))  # as for the one worker of them all
        for at in range(0, len(samples), plan.batch_size):
            part = slice(at, at + plan.batch_size)
            columns = {key: values[samples[part]] for key, values in rows.items()} | {SLOT: slots[part]}
            yield apply_all(plan.transforms, columns)


class NoSpills:
    """Of a store that is not there."""

    peak_bytes = 0

    def latest(self) -> SimpleNamespace:
        return SimpleNamespace(spilled_bytes=0, fallback_bytes=0, used_bytes=0)

    close = latest


class NoSupervisor:
    """Nobody watches."""

    monitor, states = None, ()

    def __init__(self, *_: object, **__: object) -> None: ...

    def run(self, fit: Callable[[], object], attempt: int, *, cancel: Callable[[], None]) -> None:
        fit()


class NoDriver:
    """Nobody asks for anything."""

    def moved(self) -> None: ...

    def take_request(self) -> Request:
        return Request.NOTHING
