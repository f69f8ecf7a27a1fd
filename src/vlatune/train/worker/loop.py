"""[ray] The worker: build, resume, loop, report.

Runs once in every process of a worker group. Rank 0 writes the run folder. Nothing in the loop waits for the device
except at log steps and checkpoints, where one transfer brings the numbers over.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import get_device
from torch import Tensor, nn

from vlatune.checkpoint.state import seed_all
from vlatune.config import EvalConfig, validates
from vlatune.pipeline.feed import Feed, StageTimes, queued_batches
from vlatune.pipeline.plan import Share
from vlatune.policies.base import ModuleOptions, trained_tensors
from vlatune.report.cpu_clocks import CpuClocks
from vlatune.report.meters import STAGES, StepMeter
from vlatune.train.heartbeat import Heartbeat, Request
from vlatune.train.worker.checkpointer import Checkpointer, Learning
from vlatune.train.worker.collectives import Consensus, mean_and_each
from vlatune.train.worker.device import (
    deterministic_kernels,
    find_compute_threads,
    make_transfer,
    set_performance_flags,
)
from vlatune.train.worker.metrics_logger import MetricsLogger
from vlatune.train.worker.non_finite_guard import NonFiniteWatch
from vlatune.train.worker.optimizer import (
    Batch,
    Ema,
    LossTable,
    StepResult,
    Updater,
    learning_rate,
    make_groups,
    make_optimizer,
    make_parallel,
    set_learning_rate,
)
from vlatune.train.worker.transfer import Prefetcher
from vlatune.train.worker.validation import Validator
from vlatune.train.worker_job import WorkerJob


def run_worker(settings: dict[str, WorkerJob]) -> None:
    """The function that Ray Train calls on every rank."""
    job = settings["job"]
    context = ray.train.get_context()
    share = Share(context.get_world_rank(), context.get_world_size())
    heartbeat = Heartbeat(job.monitor, job.restarts, share.rank, Path(job.run_dir))
    one_node = sum(node["Alive"] for node in ray.nodes()) == 1
    try:
        worker = Worker(job, share, heartbeat, readers_here=one_node)
        gc.freeze()  # some 600,000 objects that stay: the loop's own garbage is looked for without them
        gc.enable()
        work(worker)
    finally:
        heartbeat.close()


def work(worker: "Worker") -> None:
    try:
        worker.run()
    finally:
        worker.close()


class DriverLink(Protocol):
    """Tells the driver that this worker goes on, and this worker what the driver asks for."""

    def moved(self) -> None: ...
    def take_request(self) -> Request: ...


class Worker:
    def __init__(self, job: WorkerJob, share: Share, heartbeat: DriverLink, *, readers_here: bool = False) -> None:
        self.meter = StepMeter(readers_here=readers_here)
        self.job, self.config, self.share, self.heartbeat = job, job.config, share, heartbeat
        self.consensus = Consensus(share)
        self.run_dir = Path(job.run_dir)
        self.device = get_device()
        self.while_running = ExitStack()
        if self.config.deterministic:
            self.while_running.enter_context(deterministic_kernels())
        flags = set_performance_flags(self.device, job.torch_threads)
        self.meter.watch_cpu(CpuClocks(find_compute_threads(self.device)))
        seed_all(self.config.seed)
        # The data first: its readers start while the model is loaded.
        transfer = make_transfer(self.device)
        self.feed = Feed(
            job.setup.data_plan,
            share,
            job.budget,
            first_step=job.checkpoints.resume_step or 0,
            last_step=self.config.steps,
            coordinator=job.coordinators[share.rank] if job.coordinators else None,
            empty=transfer.empty,
        )
        ahead = self.config.prefetch_batches + queued_batches(job.setup.data_plan.batch_size * job.budget.row_bytes)
        self.batches = Prefetcher(self.feed, transfer, depth=ahead)
        options = ModuleOptions.of(self.config.policy)
        module = job.setup.adapter.load_module(
            job.setup.policy, job.setup.binding, options, self.device, stats=job.setup.stats
        )
        module.train()
        self.trainable = trained_tensors(module)
        trained = {name: one for name, one in self.trainable.items() if isinstance(one, nn.Parameter)}
        factors = job.setup.adapter.rate_factors(job.setup.policy, self.config.optimizer.lr)
        groups = make_groups(trained, self.config.optimizer.lr, factors)
        self.optimizer = make_optimizer(groups, self.config.optimizer)
        decay = self.config.optimizer.ema_decay
        self.ema = Ema(self.trainable, decay) if decay else None
        self.losses = LossTable(job.setup.loss_groups, self.device)
        self.checkpointer = self._make_checkpointer()
        self.first_step, self.loss_sum, self.loss_count = self.checkpointer.restore()
        wrapped = make_parallel(module) if share.num_workers > 1 else module
        self.module = module
        self.updater = Updater(
            wrapped,
            list(trained.values()),
            self.optimizer,
            clip_norm=self.config.optimizer.grad_clip_norm,
            losses=self.losses,
        )
        self.watch = NonFiniteWatch()
        self.logger = MetricsLogger(job, self.first_step, flags) if share.rank == 0 else None
        self.last_step = self.config.steps
        self.validator = self._make_validator() if validates(self.config) and len(job.setup.held_out) else None
        self.taken: list[np.ndarray] = []
        self.samples: list[np.ndarray] = []
        self.first_batch_s: float | None = None

    def run(self) -> None:
        """The loop: batches in, updates out, a line now and then; until the last step, or until all agree to stop."""
        self.checkpointer.begin()
        done, agreed = self.first_step, Request.NOTHING
        while done < self.last_step and agreed < Request.STOP:
            rate = learning_rate(done, self.config.steps, self.config.optimizer.lr, self.config.scheduler)
            set_learning_rate(self.optimizer, rate)
            result = self.updater.update(self._take(), self.config.grad_accum)
            done += 1
            self._note(done, result)
            agreed = self.consensus.take()
            if self.validator and self.validator.is_due(done):
                self._validate(done, self.validator)
            if self._is_due(done, self.config.log_freq):
                self._log(done, result, rate)
            if agreed >= Request.SAVE or self._is_due(done, self.config.save_freq):
                self._save(done)
            self.consensus.give(self._request())
        by_rank = self.consensus.gather(self.losses.episodes_2E.cpu().numpy())  # device sync: the loop is over
        self.checkpointer.finish()
        if self.logger and done == self.last_step:
            self.logger.finish(self.meter.totals(), done, self.first_batch_s, np.sum(by_rank, axis=0))

    def close(self) -> None:
        self.feed.close()
        self.batches.close()  # after the feed, in which its thread may be waiting
        self.checkpointer.close()
        if self.validator:
            self.validator.close()
        if self.logger:
            self.logger.close()
        self.while_running.close()

    def _note(self, done: int, result: StepResult) -> None:
        """An update is made: count it, on the host and on the device."""
        self.watch.remember(result.losses, result.grad_norm, self.taken)
        if self.config.log_samples:
            self.samples.append(np.concatenate(self.taken))
        if self.ema:
            self.ema.update()
        self.loss_sum, self.loss_count = self.loss_sum + result.loss, self.loss_count + 1
        if done == self.config.steps // 2:
            self.losses.episodes_2E.zero_()  # what an episode cost before the model knew any says little of it
        self.checkpointer.stepped(result.loss)
        self.meter.waited(self.batches.take_waited_s())
        self.meter.stepped(self.config.global_batch)

    def _is_due(self, done: int, every: int) -> bool:
        return done == self.last_step or (every > 0 and done % every == 0)

    def _request(self) -> Request:
        """What rank 0 would have all do after the next step: what the driver asks for, and a save by the clock."""
        if self.share.rank > 0:
            return Request.NOTHING
        return max(self.heartbeat.take_request(), Request.SAVE if self.checkpointer.is_due() else Request.NOTHING)

    def _take(self) -> Iterator[Batch]:
        """An update's micro-batches, each when it is needed: the device holds one of them and what lies ahead."""
        self.taken = []
        for batch in islice(self.batches, self.config.grad_accum):
            if self.first_batch_s is None:
                self.first_batch_s = self.meter.first_batch(self._stages_s())
            self.taken.append(batch.samples)
            self.heartbeat.moved()
            yield batch.tensors

    def _stages_s(self) -> dict[str, float]:
        """Seconds so far of what prepares this worker's batches beside the loop."""
        times = getattr(self.feed, "times", StageTimes())  # a stand-in for the feed need not have clocks
        fed_s = {"decode": times.decode_s, "transport": times.transport_s, "collate": times.collate_s}
        own_s = self.batches.stage_s()
        return {stage: fed_s.get(stage, 0.0) + own_s.get(stage, 0.0) for stage in STAGES}

    def _make_checkpointer(self) -> Checkpointer:
        averages = self.ema.tensors() if self.ema else None
        setup = self.job.setup
        learning = Learning(self.trainable, self.optimizer, averages, self.losses.sums_2G)
        return Checkpointer(
            self.job.checkpoints,
            self.config,
            setup.order,
            setup.binding,
            learning=learning,
            rank=self.share.rank,
            device=self.device,
            on_phase=lambda _: self.heartbeat.moved(),
        )

    def _make_validator(self) -> Validator:
        """Begins to read held-out rows; knows the figures of all validations up to the checkpoint, as rank 0 wrote them down."""
        options = EvalConfig(max_samples=self.config.eval_samples)
        validator = Validator(self.job.setup, self.share, options, self.config.eval_freq)
        validator.errors = self.consensus.gather(self.logger.validation_errors() if self.logger else {})[0]
        return validator

    def _validate(self, done: int, validator: Validator) -> None:
        begin = time.perf_counter()
        with self.ema.in_place() if self.ema else nullcontext():
            found = validator.validate(
                done, self.module, self.consensus.gather, on_batch=lambda _: self.heartbeat.moved()
            )
        self.meter.validated(time.perf_counter() - begin)
        if self.logger:
            self.logger.log_validation(done, found.loss, found.action_error)
        if self.config.early_stop and validator.in_vain() >= self.config.early_stop:
            self.last_step = done

    def _log(self, done: int, result: StepResult, rate: float) -> None:
        """The one place, beside saving, where the host waits for the device."""
        three = torch.stack([self.loss_sum / self.loss_count, result.grad_norm, self.updater.guard.skipped])
        numbers = torch.cat([three, self.losses.interval_2I.flatten()])
        restarts = getattr(self.feed, "restarts", 0)  # a stand-in for the feed need not count
        spent_s = self.meter.take_spent(self._stages_s(), restarts)
        means, by_worker_s = mean_and_each(numbers, spent_s, self.share, dist.all_reduce)
        mean_loss, grad_norm, skipped, *by_group = means
        rates = self.meter.take_interval(by_worker_s)
        self.watch.look(skipped, done, self.consensus.gather)
        self.loss_sum, self.loss_count = torch.zeros_like(self.loss_sum), 0
        self.losses.interval_2I.zero_()
        samples = self._gather_samples(done)
        if self.logger:
            self.logger.log(done, mean_loss, grad_norm, rate, rates | self.job.setup.loss_groups.to_metrics(by_group))
            self.logger.log_samples(samples)

    def _save(self, done: int) -> None:
        begin = time.perf_counter()
        samples = self._gather_samples(done)
        (skipped,) = self._mean_over_workers(torch.stack([self.updater.guard.skipped]))
        self.watch.look(skipped, done, self.consensus.gather)
        if self.logger:
            self.logger.log_samples(samples)
            self.logger.log_event("checkpoint", done)
        error = self.validator.newest_error() if self.validator else None
        self.checkpointer.save(done, self.loss_sum, self.loss_count, self.consensus.gather, val_error=error)
        self.meter.saved(time.perf_counter() - begin)

    def _mean_over_workers(self, values: Tensor) -> list[float]:
        if self.share.num_workers > 1:
            dist.all_reduce(values)
            values = values / self.share.num_workers
        return values.tolist()  # device sync: a save must know whether updates were skipped

    def _gather_samples(self, done: int) -> list[dict[str, object]]:
        """Sample ids of the steps since the last call, all workers' in lane order, one record per optimizer step."""
        mine, self.samples = self.samples, []
        if not mine:
            return []
        everyone: list[list[np.ndarray]] = self.consensus.gather(mine)
        first = done - len(mine) + 1
        return [
            {"optimizer_step": first + place, "samples": np.concatenate(parts).tolist()}
            for place, parts in enumerate(zip(*everyone, strict=True))
        ]
