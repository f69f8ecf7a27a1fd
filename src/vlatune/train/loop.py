"""[ray] The worker: build, resume, loop, report.

Runs once in every process of a worker group. Rank 0 writes the run folder. Nothing in the loop waits for the device
except at log steps and checkpoints, where one transfer brings the numbers over.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import get_device
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vlatune.checkpoint.state import TrainState, load_optimizer, load_trainable, read_state, write_state
from vlatune.checkpoint.store import prune, write_checkpoint
from vlatune.config import RunConfig, to_json
from vlatune.errors import RunStoppedError
from vlatune.pipeline.build import DataPlan
from vlatune.pipeline.feed import Feed
from vlatune.pipeline.memory import Budget, SpillMeter
from vlatune.pipeline.plan import Share
from vlatune.report.meters import StepMeter
from vlatune.report.sinks import MetricsFile, TensorBoardSink, write_json
from vlatune.report.verdict import verdict
from vlatune.train.device import DeviceBatch, device_batches, set_performance_flags
from vlatune.train.optim import learning_rate, make_optimizer, set_learning_rate
from vlatune.train.setup import Setup
from vlatune.train.step import StepResult, Updater


@dataclass(frozen=True)
class WorkerJob:
    """What the driver sends to every worker."""

    config: RunConfig
    setup: Setup
    budget: Budget
    run_dir: str
    resume_from: str | None
    """Checkpoint folder to continue from."""
    restarts: int
    fingerprints: dict[str, str]


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
        set_performance_flags(self.device, workers_here)
        torch.manual_seed(self.config.seed)
        module = job.setup.adapter.load_module(
            job.setup.policy, job.setup.binding, train=self.config.policy.train, dtype=self.config.policy.dtype
        ).to(self.device)
        module.train()
        self.trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.optimizer = make_optimizer(self.trainable.values(), self.config.optimizer)
        self.first_step, self.loss_sum, self.loss_count = self._restore()
        parameters: list[nn.Parameter] = list(self.trainable.values())
        wrapped = DistributedDataParallel(module) if share.num_workers > 1 else module
        self.updater = Updater(wrapped, parameters, self.optimizer, clip_norm=self.config.optimizer.grad_clip_norm)
        plan = DataPlan(
            metas=job.setup.metas,
            selection=job.setup.training,
            specs=job.setup.specs,
            order=job.setup.order,
            transforms=job.setup.transforms_of_epoch(),
            batch_size=self.config.batch_size,
        )
        self.feed = Feed(plan, share, job.budget, first_step=self.first_step, last_step=self.config.steps)
        self.recorder = Recorder(job, self.first_step) if share.rank == 0 else None
        self.samples: list[np.ndarray] = []
        self.first_batch_s: float | None = None

    def run(self) -> None:
        """The loop: batches in, updates out, a line now and then."""
        batches = device_batches(self.feed, self.device)
        for optimizer_step in range(self.first_step, self.config.steps):
            micro_batches = self._take(batches)
            rate = learning_rate(optimizer_step, self.config.steps, self.config.optimizer.lr, self.config.scheduler)
            set_learning_rate(self.optimizer, rate)
            result = self.updater.update((batch.tensors for batch in micro_batches), self.config.grad_accum)
            self.loss_sum, self.loss_count = self.loss_sum + result.loss, self.loss_count + 1
            self.meter.stepped(self.config.global_batch)
            done = optimizer_step + 1
            last = done == self.config.steps
            if done % self.config.log_freq == 0 or last:
                self._log(done, result, rate)
            if last or (self.config.save_freq and done % self.config.save_freq == 0):
                self._save(done)
        if self.recorder:
            self.recorder.finish(self.meter.totals(), self.config.steps, self.first_batch_s)

    def close(self) -> None:
        self.feed.close()
        if self.recorder:
            self.recorder.close()

    def _take(self, batches) -> list[DeviceBatch]:
        waited_before = self.feed.wait_s
        taken = [next(batches) for _ in range(self.config.grad_accum)]
        if self.first_batch_s is None:
            self.first_batch_s = self.meter.first_batch()
        else:
            self.meter.waited(self.feed.wait_s - waited_before)
        if self.config.log_samples:
            self.samples.append(np.concatenate([batch.samples for batch in taken]))
        return taken

    def _restore(self) -> tuple[int, Tensor, int]:
        zero = torch.zeros((), device=self.device)
        if self.job.resume_from is None:
            return 0, zero, 0
        folder = Path(self.job.resume_from)
        state = read_state(folder)
        load_trainable(folder, self.trainable)
        load_optimizer(folder, list(self.trainable), self.optimizer)
        return state.optimizer_step, zero + state.loss_sum, state.loss_count

    def _log(self, done: int, result: StepResult, rate: float) -> None:
        """The one place, beside saving, where the host waits for the device."""
        mean_loss, grad_norm = self._mean_over_workers(torch.stack([self.loss_sum / self.loss_count, result.grad_norm]))
        self.loss_sum, self.loss_count = torch.zeros_like(self.loss_sum), 0
        samples = self._gather_samples(done)
        if self.recorder:
            self.recorder.log(done, mean_loss, grad_norm, rate, self.meter.take_interval())
            self.recorder.log_samples(samples)

    def _save(self, done: int) -> None:
        begin = time.perf_counter()
        samples = self._gather_samples(done)
        (loss_sum,) = self._mean_over_workers(self.loss_sum.reshape(1))
        if self.recorder:
            self.recorder.log_samples(samples)
            state = TrainState(done, self.job.setup.order.lanes, loss_sum, self.loss_count, self.job.fingerprints)
            write_checkpoint(
                self.run_dir, done, lambda folder: write_state(folder, state, self.trainable, self.optimizer)
            )
            prune(self.run_dir, self.config.keep_checkpoints)
        if self.share.num_workers > 1:
            dist.barrier()  # no rank runs ahead of a checkpoint that may yet fail
        self.loss_sum = torch.full_like(self.loss_sum, loss_sum)
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
        everyone: list[list[np.ndarray]] = [mine]
        if self.share.num_workers > 1:
            everyone = [[] for _ in range(self.share.num_workers)]
            dist.all_gather_object(everyone, mine)
        first = done - len(mine) + 1
        return [
            {"optimizer_step": first + place, "samples": np.concatenate(parts).tolist()}
            for place, parts in enumerate(zip(*everyone, strict=True))
        ]


class Recorder:
    """Rank 0's pen: metrics, samples, summary, and the watch over the object store."""

    def __init__(self, job: WorkerJob, first_step: int) -> None:
        self.job = job
        self.run_dir = Path(job.run_dir)
        self.spill = SpillMeter()
        self.metrics = MetricsFile(self.run_dir / "metrics.jsonl")
        self.samples = MetricsFile(self.run_dir / "samples.jsonl") if job.config.log_samples else None
        self.board = TensorBoardSink(self.run_dir / "logs" / "tensorboard")
        for sink in (self.metrics, self.samples, self.board):
            if sink is not None:
                sink.keep_until(first_step)
        self.last_loss = float("nan")

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
            "time_s": totals["time_s"],
        }
        summary["verdict"] = verdict(summary, to_json(self.job.config))
        write_json(self.run_dir / "summary.json", summary)

    def close(self) -> None:
        for sink in (self.metrics, self.samples, self.board):
            if sink is not None:
                sink.close()
