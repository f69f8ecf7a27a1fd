"""Files that rank 0 writes to the run folder: metrics, samples, summary. Also detects spilling."""

import fcntl
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from vlatune.checkpoint.store import best_first, open_store
from vlatune.config.settings import to_json
from vlatune.errors import RunStoppedError
from vlatune.feed.memory import StoreCounters
from vlatune.run.run_folder import (
    EVENTS_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    VALIDATIONS_FILE,
    WRITER_LOCK,
    read_validation_errors,
)
from vlatune.run.sinks import MetricsFile, read_jsonl
from vlatune.run.summary import Scalar, Summary, write_summary
from vlatune.run.verdict import judge
from vlatune.storage.files import make_folder, open_to_append
from vlatune.train.fingerprint import versions_in
from vlatune.train.worker_job import WorkerJob

LOCK_WAIT_S, LOCK_POLL_S = 60.0, 0.1


class Spill(Protocol):
    """Meter of the object store."""

    peak_bytes: int

    def latest(self) -> StoreCounters: ...
    def close(self) -> StoreCounters: ...


class MetricsLogger:
    def __init__(self, job: WorkerJob, first_step: int, performance_flags: Mapping[str, Scalar], spill: Spill) -> None:
        self.job = job
        self.performance_flags = performance_flags
        self.run_dir = Path(job.run_dir)
        self.writer_lock = hold_writer_lock(self.run_dir)
        self.spill = spill
        self.metrics, self.validations = (MetricsFile(self.run_dir / name) for name in (METRICS_FILE, VALIDATIONS_FILE))
        self.samples = MetricsFile(self.run_dir / SAMPLES_FILE) if job.config.log_samples else None
        for file in self._files():
            file.keep_until(first_step)
        self.events = MetricsFile(self.run_dir / EVENTS_FILE)  # never truncated: failed starts are recorded, too
        self.log_event("start", first_step)
        with open_to_append(make_folder(self.run_dir, "logs") / "worker.log") as file:
            file.write(
                f"performance flags: {', '.join(f'{name} {value}' for name, value in performance_flags.items())}\n"
            )
        recorded = read_jsonl(self.run_dir / METRICS_FILE)
        self.last_loss = recorded[-1]["loss"] if recorded else float("nan")

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
        self.metrics.append(line)
        allowed = self.job.config.max_spilled_bytes
        if store.spilled_bytes + store.fallback_bytes > allowed:
            raise RunStoppedError(
                f"the object store spilled {store.spilled_bytes} bytes and put {store.fallback_bytes} on disk, {allowed} are allowed "
                f"(--max_spilled_bytes); raise --ray.object_store_bytes"
            )

    def log_validation(self, done: int, loss: float, action_error: float, int8_loss: float | None) -> None:
        line = {"optimizer_step": done, "val_loss": loss, "val_action_error": action_error}
        self.validations.append(line if int8_loss is None else line | {"val_loss_int8": int8_loss})

    def log_event(self, event: str, done: int) -> None:
        """Record an event of the run's timeline: a start, a checkpoint, the end."""
        self.events.append({"event": event, "optimizer_step": done, "time_s": time.time()})

    def validation_errors(self) -> dict[int, float]:
        """Return optimizer step -> action error of the validations up to this start."""
        return read_validation_errors(self.run_dir)

    def log_samples(self, records: list[dict[str, object]]) -> None:
        if self.samples is not None:
            for record in records:
                self.samples.append(record)

    def finish(self, totals: dict, steps: int, first_batch_s: float | None, by_episode_2E: np.ndarray) -> None:
        """Write the summary; `by_episode_2E` are loss sums and counts of all workers."""
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
            num_readers=self.job.budget.readers * self.job.config.num_workers,
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
        write_summary(self.run_dir, replace(summary, verdict=judge(summary, to_json(self.job.config)).line))

    def _best_validation(self) -> dict[str, int | float] | None:
        errors = self.validation_errors()
        best = min(errors, key=lambda step: (errors[step], step), default=None)
        return None if best is None else {"optimizer_step": best, "action_error": errors[best]}

    def _checkpoints(self) -> dict[str, Any]:
        """Return location, steps and best of the checkpoints; tolerates an unavailable store."""
        store = open_store(self.run_dir, self.job.checkpoints.storage_path)
        try:
            steps = tuple(store.steps())
            best = next(iter(best_first(store, steps)), None)
        except (OSError, RuntimeError):
            steps = best = None
        return {"checkpoint_place": store.root.url, "checkpoints": steps, "best_checkpoint": best}

    def close(self) -> None:
        for file in (*self._files(), self.events):
            file.close()
        self.writer_lock.close()

    def _files(self) -> list[MetricsFile]:
        return [self.metrics, self.validations, *([self.samples] if self.samples else [])]


def hold_writer_lock(run_dir: Path, *, wait_s: float = LOCK_WAIT_S) -> IO[str]:
    """Acquire the writer lock of a run folder, released when the process ends.

    After the driver died, the previous rank 0 may live for some seconds; wait for it to exit.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    file = open_to_append(run_dir / WRITER_LOCK)
    until_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError:
            if time.monotonic() > until_s:
                file.close()
                raise RuntimeError(
                    f"run folder '{run_dir}' is still written to by a worker of an earlier start after {wait_s:.0f} s; "
                    f"end that process, then start the same command again"
                ) from None
        time.sleep(LOCK_POLL_S)
