"""The worker: build, resume, train, report.

Runs in every process of a worker group; rank 0 sends records to the driver. The loop only synchronises
with the device at log steps, validations and checkpoints. What Ray provides is passed in as a
`Runtime`.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from vlatune.batch import PREFIX, Columns
from vlatune.checkpoint.state import seed_all
from vlatune.config.settings import validates
from vlatune.feed.feed import StageTimes, queued_batches
from vlatune.feed.plan import Share
from vlatune.policies.base import ModuleOptions, trained_tensors
from vlatune.run.meters import STAGES, StepMeter
from vlatune.train.heartbeat import Request
from vlatune.train.worker.checkpointer import Checkpointer, Learning
from vlatune.train.worker.collectives import Consensus, mean_and_each
from vlatune.train.worker.device import deterministic_kernels, set_performance_flags, uses_compiler
from vlatune.train.worker.kept_prefix import FrozenPart, KeptPrefix
from vlatune.train.worker.metrics_logger import MetricsLogger, Spill
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
from vlatune.train.worker.sharding import shard_module
from vlatune.train.worker.transfer import DeviceBatch, Prefetcher, Transfer
from vlatune.train.worker.validation import ReadHeldOut, Validator, validation_options
from vlatune.train.worker_job import WorkerJob


class DriverLink(Protocol):
    """Reports progress and records to the driver and returns its requests."""

    def progress(self, event: str) -> None: ...
    def send(self, file: str, record: dict[str, Any]) -> None: ...
    def wait_until_written(self) -> None: ...
    def take_request(self) -> Request: ...


class Batches(Protocol):
    """The worker's micro-batches from the first step on, in host memory."""

    times: StageTimes

    def __iter__(self) -> Iterator[Columns]: ...
    def __next__(self) -> Columns: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Runtime:
    """Collaborators of a worker besides its job."""

    share: Share
    device: torch.device
    transfer: Transfer
    feed: Batches
    driver: DriverLink
    spill: Spill | None
    """Meter of the object store; on rank 0."""
    read_held_out: ReadHeldOut
    base_folder: str
    """Folder of the base model on this node."""


class Worker:
    def __init__(self, job: WorkerJob, runtime: Runtime) -> None:
        self.job, self.config, self.share, self.driver = job, job.config, runtime.share, runtime.driver
        self.device, self.feed = runtime.device, runtime.feed
        self.meter = StepMeter()
        self.consensus = Consensus(self.share)
        self.while_running = ExitStack()
        if self.config.deterministic:
            self.while_running.enter_context(deterministic_kernels())
        compiles = uses_compiler(self.config, self.device)
        flags = set_performance_flags(self.device, job.torch_threads) | {"compile": compiles}
        seed_all(self.config.seed)
        setup, optimizer = job.setup, self.config.optimizer
        self.micro_steps = setup.micro_steps(self.share.num_workers)
        source, row_bytes, self.kept = iter(self.feed), job.budget.row_bytes, None
        if setup.kept:
            empty = runtime.transfer.empty
            self.kept = KeptPrefix(setup.kept, setup.data_plan, self.device, job.torch_threads, empty)
            source, row_bytes = self.kept.read(source), row_bytes + setup.kept.layout.max_bytes
        # Create the prefetcher first: reading starts while the model is loaded.
        ahead = 1 + queued_batches(setup.data_plan.batch_size * row_bytes)
        self.batches = Prefetcher(source, runtime.transfer, depth=ahead)
        options = replace(ModuleOptions.of(self.config.policy), compile=compiles)
        spec = replace(setup.policy, folder=runtime.base_folder)
        module = setup.adapter.load_module(spec, setup.binding, options, self.device, stats=setup.stats)
        module.train()
        if self.config.fsdp:
            shard_module(module, self.device, self.share.num_workers)
        self.module, trainable = module, trained_tensors(module)
        self.frozen = FrozenPart(module, self.device)
        trained = {name: one for name, one in trainable.items() if isinstance(one, nn.Parameter)}
        groups = make_groups(trained, optimizer.lr, setup.adapter.rate_factors(setup.policy, optimizer.lr))
        self.optimizer = make_optimizer(groups, optimizer)
        self.ema = Ema(trainable, optimizer.ema_decay) if optimizer.ema_decay else None
        self.losses = LossTable(setup.loss_groups, self.device)
        averages = self.ema.tensors() if self.ema else None
        self.checkpointer = Checkpointer(
            job.checkpoints,
            self.config,
            setup.order,
            setup.binding,
            learning=Learning(trainable, self.optimizer, averages, self.losses.sums_2G),
            share=self.share,
            device=self.device,
            on_phase=self._on_save,
        )
        self.first_step, self.loss_sum, self.loss_count = self.checkpointer.restore()
        is_parallel = self.share.num_workers > 1 and not self.config.fsdp
        # A frozen prefix does not depend on the update before: computing it hides the exchange of gradients.
        self.prefix_ahead = is_parallel and setup.adapter.kept_prefix(setup.policy, setup.binding, options) is not None
        self.updater = Updater(
            make_parallel(module, accumulates=self.micro_steps > 1) if is_parallel else module,
            list(trained.values()),
            self.optimizer,
            clip_norm=optimizer.grad_clip_norm,
            losses=self.losses,
        )
        self.watch = NonFiniteWatch()
        self.logger: MetricsLogger | None = None
        if runtime.spill:
            self.logger = MetricsLogger(job, self.first_step, flags, runtime.spill, self.driver.send)
        self.last_step = self.config.steps
        self.validator: Validator | None = None
        if validates(self.config) and len(setup.held_out):
            options = validation_options(self.config, self.device)
            self.validator = Validator(setup, self.share, options, self.config.eval_freq, runtime.read_held_out)
            self.validator.errors = dict(job.recorded.validation_errors)
        self.ahead: list[DeviceBatch] = []
        self.taken: list[np.ndarray] = []
        self.samples: list[np.ndarray] = []
        self.cached_rows = (0.0, 0)
        self.first_batch_s: float | None = None

    def run(self) -> None:
        """Train until the last step, or until all workers agree to stop."""
        try:
            self._train()
        finally:
            self._close()

    def _train(self) -> None:
        self.checkpointer.begin()
        done, agreed = self.first_step, Request.NOTHING
        while done < self.last_step and agreed < Request.STOP:
            rate = learning_rate(done, self.config.steps, self.config.optimizer.lr, self.config.scheduler)
            set_learning_rate(self.optimizer, rate)
            ahead = self._look_ahead if self.prefix_ahead else None
            result = self.updater.update(self._take(), self.micro_steps, ahead)
            done += 1
            self._count(done, result)
            agreed = self.consensus.take()
            logs = self._is_due(done, self.config.log_freq)
            saves = agreed >= Request.SAVE or self._is_due(done, self.config.save_freq)
            validator = self.validator if self.validator and self.validator.is_due(done) else None
            if logs:
                self._log(done, result, rate)
            if saves:  # before the validation, which may fail
                self._save(done, awaits_error=validator is not None)
            if validator:
                is_best = self._validate(done, validator)
                if done == self.last_step and not logs:  # stopped early
                    self._log(done, result, rate)
                if (is_best or done == self.last_step) and not saves:
                    self._save(done, awaits_error=True)
                self.checkpointer.validated(validator.errors[done])
            self.consensus.give(self._request())
        by_rank = self.consensus.gather(self.losses.episodes_2E.cpu().numpy())  # device sync: the loop is over
        totals = self.meter.totals()
        if self.kept:
            self.kept.close()  # writes waiting rows: the driver may end the workers of a finished run
            rows, kept = np.sum(self.consensus.gather((self.kept.rows, self.kept.kept_rows)), axis=0).tolist()
            totals |= {"kept_prefix_samples": kept, "kept_prefix_share": kept / max(1, rows)}
        self.checkpointer.finish()
        if self.logger and done == self.last_step:
            self.logger.finish(totals, done, self.first_batch_s, np.sum(by_rank, axis=0))
            self.driver.wait_until_written()

    def _close(self) -> None:
        self.feed.close()
        self.batches.close()  # after the feed, in which its thread may be waiting
        self.checkpointer.close()
        if self.kept:
            self.kept.close()
        if self.validator:
            self.validator.close()
        self.while_running.close()

    def _count(self, done: int, result: StepResult) -> None:
        """Update counters and averages after an optimizer step."""
        self.watch.record(result.losses, result.grad_norm, self.taken)
        if self.config.log_samples:
            self.samples.append(np.concatenate(self.taken))
        if self.ema:
            self.ema.update()
        self.loss_sum, self.loss_count = self.loss_sum + result.loss, self.loss_count + 1
        if done == self.config.steps // 2:
            self.losses.episodes_2E.zero_()  # report episode losses of the second half only
        self.checkpointer.stepped(result.loss)
        self.meter.waited(self.batches.take_waited_s())
        self.meter.stepped(self.config.global_batch)

    def _is_due(self, done: int, every: int) -> bool:
        return done == self.last_step or (every > 0 and done % every == 0)

    def _request(self) -> Request:
        """Return rank 0's request for after the next step: the driver's, or a save by the timer."""
        if self.share.rank > 0:
            return Request.NOTHING
        return max(self.driver.take_request(), Request.SAVE if self.checkpointer.is_due() else Request.NOTHING)

    def _take(self) -> Iterator[Batch]:
        """Yield the micro-batches of an update lazily, so that the device holds few of them."""
        self.taken = []
        while len(self.taken) < self.micro_steps and (self.ahead or self._look_ahead()):
            if self.first_batch_s is None:
                self.first_batch_s = self.meter.first_batch(self._stages_s())
            self.taken.append(self.ahead[0].samples)
            self.driver.progress("batch")
            yield self.ahead.pop().tensors

    def _look_ahead(self) -> bool:
        """Take and prepare a batch; False after the last one."""
        for batch in islice(self.batches, 1):
            tensors = batch.tensors
            if self.kept:
                tensors = self.kept.complete(tensors, self.frozen.compute)
            elif self.prefix_ahead:
                tensors |= {PREFIX: self.frozen.compute(tensors)}
            self.ahead.append(DeviceBatch(tensors, batch.samples))
        return bool(self.ahead)

    def _stages_s(self) -> dict[str, float]:
        """Return the seconds so far of each stage that prepares this worker's batches."""
        times = self.feed.times
        fed_s = {"decode": times.decode_s, "transport": times.transport_s, "collate": times.collate_s}
        own_s = self.batches.stage_s()
        return {stage: fed_s.get(stage, 0.0) + own_s.get(stage, 0.0) for stage in STAGES}

    def _validate(self, done: int, validator: Validator) -> bool:
        """Evaluate on held-out samples; True if the weights are among the best, to be saved."""
        begin = time.perf_counter()
        with self.frozen.present(), self.ema.in_place() if self.ema else nullcontext():
            found = validator.validate(
                done, self.module, self.consensus.gather, on_batch=lambda _: self.driver.progress("validation")
            )
        if isinstance(self.module, FSDPModule):
            self.module.reshard()  # the next forward must not use weights that were gathered before a change
        self.meter.validated(time.perf_counter() - begin)
        if self.logger:
            self.logger.log_validation(done, found.loss, found.action_error, found.int8_loss)
        if self.config.early_stop and validator.without_progress() >= self.config.early_stop:
            self.last_step = done
        return done in validator.best_steps()[: self.config.kept_best]

    def _log(self, done: int, result: StepResult, rate: float) -> None:
        """Log the metrics of an interval, with a device sync."""
        three = torch.stack([self.loss_sum / self.loss_count, result.grad_norm, self.updater.guard.skipped])
        numbers = torch.cat([three, self.losses.interval_2I.flatten()])
        spent_s = self.meter.take_spent(self._stages_s())
        means, by_worker_s = mean_and_each(numbers, spent_s, self.share, dist.all_reduce)
        mean_loss, grad_norm, skipped, *by_group = means
        rates = self.meter.take_interval(by_worker_s)
        self.watch.check(skipped, done, self.consensus.gather)
        self.loss_sum, self.loss_count = torch.zeros_like(self.loss_sum), 0
        self.losses.interval_2I.zero_()
        samples = self._gather_samples(done)
        if self.logger:
            rates["cached_share"] = self._take_cached_share()
            if self.kept:
                rates["kept_prefix_share"] = self.kept.take_share()
            self.logger.log(done, mean_loss, grad_norm, rate, rates | self.job.setup.loss_groups.to_metrics(by_group))
            self.logger.log_samples(samples)
        self.driver.progress("log")
        if self.kept and self.kept.has_all:
            self.frozen.leave()

    def _take_cached_share(self) -> float:
        """Return the share of this worker's images since the last call that came from the frame cache."""
        before, self.cached_rows = self.cached_rows, (self.feed.times.cached_rows, self.feed.times.rows)
        cached, rows = (now - then for now, then in zip(self.cached_rows, before, strict=True))
        return cached / rows if rows else self.cached_rows[0] / max(1, self.cached_rows[1])

    def _save(self, done: int, *, awaits_error: bool = False) -> None:
        begin = time.perf_counter()
        samples = self._gather_samples(done)
        (skipped,) = self._mean_over_workers(torch.stack([self.updater.guard.skipped]))
        self.watch.check(skipped, done, self.consensus.gather)
        if self.logger:
            self.logger.log_samples(samples)
            self.logger.log_event("checkpoint", done)
        gather = self.consensus.gather
        self.checkpointer.save(done, self.loss_sum, self.loss_count, gather, awaits_error=awaits_error)
        self.meter.saved(time.perf_counter() - begin)

    def _on_save(self, phase: str) -> None:
        """Report a phase of a save, on its thread."""
        if phase == "synced":  # a resumed run needs the records up to its checkpoint
            self.driver.wait_until_written()
        self.driver.progress(f"save: {phase}")

    def _mean_over_workers(self, values: Tensor) -> list[float]:
        if self.share.num_workers > 1:
            dist.all_reduce(values)
            values = values / self.share.num_workers
        return values.tolist()  # device sync: a save must know whether updates were skipped

    def _gather_samples(self, done: int) -> list[dict[str, object]]:
        """Return one record per step since the last call: all workers' sample ids in lane order."""
        mine, self.samples = self.samples, []
        if not mine:
            return []
        everyone: list[list[np.ndarray]] = self.consensus.gather(mine)
        first = done - len(mine) + 1
        return [
            {"optimizer_step": first + place, "samples": np.concatenate(parts).tolist()}
            for place, parts in enumerate(zip(*everyone, strict=True))
        ]
