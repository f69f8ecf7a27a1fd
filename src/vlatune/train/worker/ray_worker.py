"""[ray] Run the training loop in a process of Ray Train, with what Ray provides to it."""

import contextlib
import gc
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import ray
import ray.train
from ray.exceptions import RayError
from ray.train.torch import get_device

from vlatune.batch import Columns
from vlatune.evaluate.held_out import read_chosen
from vlatune.feed.feed import Feed
from vlatune.feed.memory import SpillMeter, read_counters
from vlatune.feed.plan import Share
from vlatune.run_setup import Setup
from vlatune.train.base_source import local_base
from vlatune.train.failures import dump_stacks_on_signal, full_device_is_final, stop_dumping_stacks
from vlatune.train.heartbeat import Request
from vlatune.train.records import MAX_PARCEL, Mailbox
from vlatune.train.worker.device import make_transfer
from vlatune.train.worker.kept_prefix import open_prefix
from vlatune.train.worker.loop import Runtime, Worker
from vlatune.train.worker_job import WorkerJob

BEAT_S = 1.0
RETRY_S = 0.1
ANSWER_S = 10.0
WRITTEN_S = 300.0
"""Maximum wait for the driver to write records, before a checkpoint is committed and at the end."""
CLOSE_S = 10.0
"""The same for a worker that has failed."""


def run_worker(job: WorkerJob, monitor: Any) -> None:
    """Run the worker; called on every rank."""
    with connect(job, monitor) as runtime, full_device_is_final(job.config):
        worker = Worker(job, runtime)
        gc.freeze()  # exclude long-lived objects from garbage collection
        gc.enable()
        worker.run()


@contextlib.contextmanager
def connect(job: WorkerJob, monitor: Any) -> Iterator[Runtime]:
    """Provide the worker's rank, device, batches and link to the driver."""
    context, device = ray.train.get_context(), get_device()
    share, transfer = Share(context.get_world_rank(), context.get_world_size()), make_transfer(device)
    heartbeat = Heartbeat(monitor, job.restarts, share.rank)
    try:
        feed = Feed(
            job.setup.data_plan,
            share,
            job.budget,
            first_step=job.checkpoints.resume_step or 0,
            last_step=job.config.steps,
            empty=transfer.empty,
            split=open_prefix(kept, device, job.torch_threads).split if (kept := job.setup.kept) else None,
        )
        yield Runtime(
            share=share,
            device=device,
            transfer=transfer,
            feed=feed,
            driver=heartbeat,
            spill=SpillMeter(read_counters) if share.rank == 0 else None,
            read_held_out=read_held_out,
            base_folder=local_base(job.base, on_chunk=lambda: heartbeat.progress("base")),
        )
    finally:
        heartbeat.close()


def read_held_out(setup: Setup, batches: Mapping[int, np.ndarray]) -> Iterator[tuple[int, Columns]]:
    """Read batch by batch, and copy each out of the object store, which the feed needs."""
    shared = ray.put(setup)
    for number, frames in batches.items():
        rows = ray.get(_read_task.remote(shared, frames))
        yield number, {key: np.array(values) for key, values in rows.items()}


@ray.remote(num_cpus=0)
def _read_task(setup: Setup, frames: np.ndarray) -> Columns:
    return read_chosen(setup, frames)


class Heartbeat:
    """Counts progress and reports it to the monitor from a thread, with the records of the run."""

    def __init__(self, monitor: Any, attempt: int, rank: int) -> None:
        self._request, self._request_number = Request.NOTHING, 0
        self._monitor, self._attempt, self._rank = monitor, attempt, rank
        self._events, self._last_event = 0, "start"
        self._outbox, self._awaited = Mailbox(), 0
        self._ended, self._is_due = False, threading.Event()
        dump_stacks_on_signal()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def progress(self, event: str) -> None:
        """Record progress."""
        self._events, self._last_event = self._events + 1, event

    def take_request(self) -> Request:
        """Return and clear the driver's latest request."""
        request, self._request = self._request, Request.NOTHING
        return request

    def send(self, file: str, record: dict[str, Any]) -> None:
        """Send a record to the driver, which writes it to the run folder; does not wait."""
        self._outbox.append((file, record))

    def wait_until_written(self, timeout_s: float = WRITTEN_S) -> None:
        """Wait until the driver has written all records so far."""
        self._awaited = end = self._outbox.end
        self._is_due.set()
        if not self._outbox.wait(end, timeout_s):
            raise RuntimeError(f"the driver has not written the records of this run for {timeout_s:.0f} s")

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # of a worker that fails; the end of a run has waited before
            self.wait_until_written(CLOSE_S)
        self._ended = True
        self._is_due.set()
        self._thread.join()
        stop_dumping_stacks()

    def _beat(self) -> None:
        sender = (self._attempt, self._rank, os.getpid(), ray.get_runtime_context().get_node_id())
        wanted = 0
        while not self._ended:
            self._is_due.clear()
            try:
                parcel, awaited = self._outbox.parcel(wanted), self._awaited
                beat = self._monitor.beat.remote(*sender, self._events, self._last_event, parcel, awaited)
                (number, request), wanted, received = ray.get(beat, timeout=ANSWER_S)
            except RayError:  # monitor busy or gone; the next beat reports again
                self._is_due.wait(RETRY_S)
                continue
            if number > self._request_number:
                self._request_number, self._request = number, request
            self._outbox.acknowledge(received)
            if len(parcel[1]) < MAX_PARCEL:
                self._is_due.wait(RETRY_S if received < self._awaited else BEAT_S)
        self._monitor.leave.remote(self._attempt, self._rank)
