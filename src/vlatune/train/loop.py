"""[ray] The worker: build, resume, loop, report.

Runs once in every process of a worker group. Rank 0 writes the run folder. Nothing in the loop waits for the device
except at log steps and checkpoints, where one transfer brings the numbers over.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import get_device
from torch import Tensor, nn

from vlatune.config import RunConfig, to_json
from vlatune.dataset.shuffle_meter import measure_shuffle
from vlatune.errors import RunStoppedError
from vlatune.pipeline.build import DataPlan
from vlatune.pipeline.feed import Feed, StageTimes
from vlatune.pipeline.memory import Budget, SpillMeter
from vlatune.pipeline.plan import Share
from vlatune.policies.base import ModuleOptions
from vlatune.report.meters import STAGES, StepMeter
from vlatune.report.sinks import MetricsFile, TensorBoardSink, read_jsonl, write_json
from vlatune.report.verdict import verdict
from vlatune.train.device import device_batches, set_performance_flags
from vlatune.train.ema import Ema
from vlatune.train.exchange import mean_and_each
from vlatune.train.finite import FiniteWatch
from vlatune.train.optim import learning_rate, make_optimizer, set_learning_rate
from vlatune.train.resume import CheckpointPlan
from vlatune.train.saving import Learning, Saving
from vlatune.train.setup import Setup
from vlatune.train.step import Batch, StepResult, Updater, make_parallel


@dataclass(frozen=True)
class WorkerJob:
    """What the driver sends to every worker."""

    config: RunConfig
    setup: Setup
    budget: Budget
    run_dir: str
    checkpoints: CheckpointPlan
    restarts: int


def run_worker(settings: dict[str, WorkerJob]) -> None:
    """The function that Ray Train calls on every rank."""
    job = settings["job"]
    context = ray.train.get_context()
    share = Share(context.get_world_rank(), context.get_world_size())
    worker = Worker(job, share, workers_here=context.get_local_world_size())
    try:
        worker.run()
    finally:
        worker.close()


class Worker:
    def __init__(self, job: WorkerJob, share: Share, *, workers_here: int) -> None:
        self.meter = StepMeter()
        self.job, self.config, self.share = job, job.config, share
        self.run_dir = Path(job.run_dir)
        self.device = get_device()
        flags = set_performance_flags(self.device, workers_here)
        torch.manual_seed(self.config.seed)
        options = ModuleOptions.of(self.config.policy)
        module = job.setup.adapter.load_module(job.setup.policy, job.setup.binding, options).to(self.device)
        module.train()
        self.trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.optimizer = make_optimizer(self.trainable.values(), self.config.optimizer)
        decay = self.config.optimizer.ema_decay
        self.ema = Ema(self.trainable, decay) if decay else None
        self.saving = self._make_saving()
        self.first_step, self.loss_sum, self.loss_count = self.saving.restore()
        parameters: list[nn.Parameter] = list(self.trainable.values())
        wrapped = make_parallel(module) if share.num_workers > 1 else module
        self.updater = Updater(wrapped, parameters, self.optimizer, clip_norm=self.config.optimizer.grad_clip_norm)
        self.watch = FiniteWatch()
        plan = DataPlan(
            metas=job.setup.metas,
            selection=job.setup.training,
            specs=job.setup.specs,
            order=job.setup.order,
            transforms=job.setup.transforms_of_epoch(),
            batch_size=self.config.batch_size,
        )
        self.feed = Feed(plan, share, job.budget, first_step=self.first_step, last_step=self.config.steps)
        self.batches = device_batches(self.feed, self.device, depth=self.config.prefetch_batches)
        self.recorder = Recorder(job, self.first_step, flags) if share.rank == 0 else None
        self.taken: list[np.ndarray] = []
        self.samples: list[np.ndarray] = []
        self.first_batch_s: float | None = None

    def run(self) -> None:
        """The loop: batches in, updates out, a line now and then."""
        self.saving.begin()
        for optimizer_step in range(self.first_step, self.config.steps):
            rate = learning_rate(optimizer_step, self.config.steps, self.config.optimizer.lr, self.config.scheduler)
            set_learning_rate(self.optimizer, rate)
            result = self.updater.update(self._take(), self.config.grad_accum)
            self.watch.remember(result.losses, result.grad_norm, self.taken)
            if self.config.log_samples:
                self.samples.append(np.concatenate(self.taken))
            if self.ema:
                self.ema.update()
            self.loss_sum, self.loss_count = self.loss_sum + result.loss, self.loss_count + 1
            self.saving.stepped(result.loss)
            self.meter.waited(self.batches.take_waited_s())
            self.meter.stepped(self.config.global_batch)
            done = optimizer_step + 1
            last = done == self.config.steps
            save_due = last or (self.config.save_freq > 0 and done % self.config.save_freq == 0)
            if done % self.config.log_freq == 0 or last:
                save_due |= self._log(done, result, rate)
            if save_due:
                self._save(done)
        self.saving.finish()
        if self.recorder:
            self.recorder.finish(self.meter.totals(), self.config.steps, self.first_batch_s)

    def close(self) -> None:
        self.feed.close()
        self.batches.close()  # after the feed, in which its thread may be waiting
        self.saving.close()
        if self.recorder:
            self.recorder.close()

    def _take(self) -> Iterator[Batch]:
        """An update's micro-batches, each when it is needed: the device holds one of them and what lies ahead."""
        self.taken = []
        for batch in islice(self.batches, self.config.grad_accum):
            if self.first_batch_s is None:
                self.first_batch_s = self.meter.first_batch(self._stages_s())
            self.taken.append(batch.samples)
            yield batch.tensors

    def _stages_s(self) -> dict[str, float]:
        """Seconds so far of what prepares this worker's batches beside the loop."""
        times = getattr(self.feed, "times", StageTimes())  # a stand-in for the feed need not have clocks
        fed_s = {"decode": times.decode_s, "transport": times.transport_s, "collate": times.collate_s}
        own_s = self.batches.stage_s()
        return {stage: fed_s.get(stage, 0.0) + own_s.get(stage, 0.0) for stage in STAGES}

    def _make_saving(self) -> Saving:
        averages = self.ema.tensors() if self.ema else None
        setup, learning = self.job.setup, Learning(self.trainable, self.optimizer, averages)
        return Saving(
            self.job.checkpoints,
            self.config,
            setup.order,
            setup.binding,
            learning=learning,
            rank=self.share.rank,
            device=self.device,
        )

    def _log(self, done: int, result: StepResult, rate: float) -> bool:
        """The one place, beside saving, where the host waits for the device. Returns whether a save is due by time."""
        mean_loss = self.loss_sum / self.loss_count
        save_due = torch.full_like(mean_loss, float(self.saving.is_due()))  # rank 0's clock decides for all
        numbers = torch.stack([mean_loss, result.grad_norm, self.updater.guard.skipped, save_due])
        spent_s = self.meter.take_spent(self._stages_s())
        (mean_loss, grad_norm, skipped, save_due), by_worker_s = mean_and_each(
            numbers, spent_s, self.share, dist.all_reduce
        )
        rates = self.meter.take_interval(by_worker_s)
        self.watch.look(skipped, done, self._gather)
        self.loss_sum, self.loss_count = torch.zeros_like(self.loss_sum), 0
        samples = self._gather_samples(done)
        if self.recorder:
            self.recorder.log(done, mean_loss, grad_norm, rate, rates)
            self.recorder.log_samples(samples)
        return save_due > 0

    def _save(self, done: int) -> None:
        begin = time.perf_counter()
        samples = self._gather_samples(done)
        (skipped,) = self._mean_over_workers(torch.stack([self.updater.guard.skipped]))
        self.watch.look(skipped, done, self._gather)
        if self.recorder:
            self.recorder.log_samples(samples)
        self.saving.save(done, self.loss_sum, self.loss_count, self._gather)
        self.meter.saved(time.perf_counter() - begin)

    def _mean_over_workers(self, values: Tensor) -> list[float]:
        if self.share.num_workers > 1:
            dist.all_reduce(values)
            values = values / self.share.num_workers
        return values.tolist()  # device sync

    def _gather_samples(self, done: int) -> list[dict[str, object]]:
        """Sample ids of the steps since the last call, all workers' in lane order, one record per optimizer step."""
        mine, self.samples = self.samples, []
        if not mine:
            return []
        everyone: list[list[np.ndarray]] = self._gather(mine)
        first = done - len(mine) + 1
        return [
            {"optimizer_step": first + place, "samples": np.concatenate(parts).tolist()}
            for place, parts in enumerate(zip(*everyone, strict=True))
        ]

    def _gather(self, mine: Any) -> list[Any]:
        """Every worker's value, by rank."""
        everyone = [mine] * self.share.num_workers
        if self.share.num_workers > 1:
            dist.all_gather_object(everyone, mine)
        return everyone


class Recorder:
    """Rank 0's pen: metrics, samples, summary, and the watch over the object store."""

    def __init__(self, job: WorkerJob, first_step: int, performance_flags: dict[str, object]) -> None:
        self.job = job
        self.performance_flags = performance_flags
        self.run_dir = Path(job.run_dir)
        self.spill = SpillMeter()
        self.metrics = MetricsFile(self.run_dir / "metrics.jsonl")
        self.samples = MetricsFile(self.run_dir / "samples.jsonl") if job.config.log_samples else None
        self.board = TensorBoardSink(self.run_dir / "logs" / "tensorboard")
        for sink in (self.metrics, self.samples, self.board):
            if sink is not None:
                sink.keep_until(first_step)
        with (self.run_dir / "logs" / "worker.log").open("a") as file:
            file.write(
                f"performance flags: {', '.join(f'{name} {value}' for name, value in performance_flags.items())}\n"
            )
        recorded = read_jsonl(self.run_dir / "metrics.jsonl")
        self.last_loss = recorded[-1]["loss"] if recorded else float("nan")

    def log(self, done: int, loss: float, grad_norm: float, rate: float, rates: dict[str, float]) -> None:
        store = self.spill.latest()
        order = self.job.setup.order
        line = {
            "optimizer_step": done,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": rate,
            **rates,
            "spilled_bytes": store.spilled_bytes,
            "object_store_bytes": store.used_bytes,
            "epoch": (done - 1) // order.batches_per_epoch,
            "samples_seen": done * order.global_batch,
        }
        self.last_loss = loss
        self.metrics.append(line)
        self.board.append(line)
        allowed = self.job.config.max_spilled_bytes
        if store.spilled_bytes + store.fallback_bytes > allowed:
            raise RunStoppedError(
                f"the object store spilled {store.spilled_bytes} bytes and put {store.fallback_bytes} on disk, {allowed} are allowed "
                f"(--max_spilled_bytes); raise --ray.object_store_bytes"
            )

    def log_samples(self, records: list[dict[str, object]]) -> None:
        if self.samples is not None:
            for record in records:
                self.samples.append(record)

    def finish(self, totals: dict, steps: int, first_batch_s: float | None) -> None:
        store = self.spill.close()
        summary = {
            "finished": True,
            "optimizer_steps": steps,
            "final_loss": self.last_loss,
            "samples_per_s": totals["samples_per_s"],
            "wait_share": totals["wait_share"],
            "time_to_first_batch_s": first_batch_s,
            "spilled_bytes": store.spilled_bytes,
            "fallback_bytes": store.fallback_bytes,
            "peak_object_store_bytes": self.spill.peak_bytes,
            "restarts": self.job.restarts,
            "num_readers": self.job.budget.readers * self.job.config.num_workers,
            "wait_s_by_worker": totals["wait_s_by_worker"],
            "time_s": totals["time_s"],
            "performance_flags": self.performance_flags,
            "shuffle": measure_shuffle(self.job.setup.order).to_json(),
            "num_skipped_episodes": len(self.job.setup.skipped),
            "skipped_episodes": [bad.to_json() for bad in self.job.setup.skipped],
        }
        summary["verdict"] = verdict(summary, to_json(self.job.config))
        write_json(self.run_dir / "summary.json", summary)

    def close(self) -> None:
        for sink in (self.metrics, self.samples, self.board):
            if sink is not None:
                sink.close()
