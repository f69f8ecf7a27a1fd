"""Records of rank 0 for the run folder: metrics, samples, summary. Also detects spilling."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vlatune.checkpoint.store import best_first, open_store
from vlatune.config.settings import to_json
from vlatune.errors import RunStoppedError
from vlatune.feed.memory import StoreCounters
from vlatune.run.run_folder import EVENTS_FILE, METRICS_FILE, SAMPLES_FILE, SUMMARY_FILE, VALIDATIONS_FILE
from vlatune.run.summary import Scalar, Summary
from vlatune.run.verdict import judge
from vlatune.storage.files import require_finite
from vlatune.train.fingerprint import versions_in
from vlatune.train.records import WORKER_LOG
from vlatune.train.worker_job import WorkerJob

Send = Callable[[str, dict[str, Any]], None]
"""Sends a record for a file of the run folder to the driver, without waiting."""


class Spill(Protocol):
    """Meter of the object store."""

    peak_bytes: int

    def latest(self) -> StoreCounters: ...
    def close(self) -> StoreCounters: ...


class MetricsLogger:
    def __init__(
        self, job: WorkerJob, first_step: int, performance_flags: Mapping[str, Scalar], spill: Spill, send: Send
    ) -> None:
        self.job, self.performance_flags, self.spill, self._send_checked = job, performance_flags, spill, send
        self.last_loss, self.validation_errors = job.recorded.last_loss, dict(job.recorded.validation_errors)
        self.log_event("start", first_step)
        self._send(WORKER_LOG, dict(performance_flags))

    def log(self, done: int, loss: float, grad_norm: float, rate: float, rates: dict[str, Any]) -> None:
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
        self._send(METRICS_FILE, line)
        allowed = self.job.config.max_spilled_bytes
        if store.spilled_bytes + store.fallback_bytes > allowed:
            raise RunStoppedError(
                f"the object store spilled {store.spilled_bytes} bytes and put {store.fallback_bytes} on disk, {allowed} are allowed "
                f"(--max_spilled_bytes); raise --ray.object_store_bytes"
            )

    def log_validation(self, done: int, loss: float, action_error: float, int8_loss: float | None) -> None:
        self.validation_errors[done] = action_error
        line = {"optimizer_step": done, "val_loss": loss, "val_action_error": action_error}
        self._send(VALIDATIONS_FILE, line if int8_loss is None else line | {"val_loss_int8": int8_loss})

    def log_event(self, event: str, done: int) -> None:
        """Record an event of the run's timeline: a start, a checkpoint, the end."""
        self._send(EVENTS_FILE, {"event": event, "optimizer_step": done, "time_s": time.time()})

    def log_samples(self, records: list[dict[str, object]]) -> None:
        for record in records:
            self._send(SAMPLES_FILE, record)

    def finish(self, totals: dict, steps: int, first_batch_s: float | None, by_episode_2E: np.ndarray) -> None:
        """Send the summary; `by_episode_2E` are loss sums and counts of all workers."""
        self.log_event("end", steps)
        store = self.spill.close()
        summary = Summary(
            optimizer_steps=steps,
            final_loss=self.last_loss,
            samples_per_s=totals["samples_per_s"],
            wait_share=totals["wait_share"],
            time_to_first_batch_s=first_batch_s,
            spilled_bytes=store.spilled_bytes,
            fallback_bytes=store.fallback_bytes,
            peak_object_store_bytes=self.spill.peak_bytes,
            restarts=self.job.restarts,
            object_store_capacity_bytes=self.job.store_bytes,
            num_readers=self.job.budget.readers * self.job.num_workers,
            time_s=totals["time_s"],
            other_process_share=totals["other_process_share"],
            kept_prefix_samples=totals.get("kept_prefix_samples"),
            kept_prefix_share=totals.get("kept_prefix_share"),
            performance_flags=dict(self.performance_flags),
            best_validation=self._best_validation(),
            loss_by_episode=self.job.setup.loss_groups.worst_episodes(by_episode_2E),
            versions=versions_in(self.job.checkpoints.fingerprints),
            **self._checkpoints(),
            num_skipped_episodes=len(self.job.setup.skipped),
            skipped_episodes=tuple(asdict(bad) for bad in self.job.setup.skipped),
        )
        summary = replace(summary, verdict=judge(summary, to_json(self.job.config)).line)
        self._send(SUMMARY_FILE, asdict(summary))

    def _best_validation(self) -> dict[str, int | float] | None:
        errors = self.validation_errors
        best = min(errors, key=lambda step: (errors[step], step), default=None)
        return None if best is None else {"optimizer_step": best, "action_error": errors[best]}

    def _checkpoints(self) -> dict[str, Any]:
        """Return location, steps and best of the checkpoints; tolerates an unavailable store."""
        store = open_store(Path(self.job.run_dir), self.job.checkpoints.storage_path)
        try:
            steps = tuple(store.steps())
            best = next(iter(best_first(store, steps)), None)
        except (OSError, RuntimeError):
            steps = best = None
        return {"checkpoint_place": store.root.url, "checkpoints": steps, "best_checkpoint": best}

    def _send(self, file: str, record: dict[str, Any]) -> None:
        require_finite(record, file)
        self._send_checked(file, record)
