"""Runs of two workers without Ray, restarted until they are done: `python forked_runs.py` takes a line of JSON after the other.

The workers are the real ones, over gloo, each in a process that is forked from this one, so that a start costs a
second. Only what Ray would bring is stood in for: the feed hands out ready batches, held-out rows are read in the worker, the
object store is not metered.
A group whose worker dies is ended and started again, as the driver does. A line: [{"config", "faults"}, ...]; with
"threads", a worker has as many and is fed with the rows that the order names, as one with Ray. Answers with an empty line.
"""

import gc
import json
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from faults import Fault, Faults, arm
from without_ray import NoDriver, NoSpills, OrderedBatches, read_here

from vlatune.batch import Columns
from vlatune.config import EvalConfig, RunConfig
from vlatune.dataset.reader import make_unit, read_unit
from vlatune.flags import config_from_dict
from vlatune.pipeline.memory import Budget
from vlatune.pipeline.plan import Share
from vlatune.pipeline.transforms import apply_all
from vlatune.policies.pi05 import load as pi05_load
from vlatune.policies.pi05 import module as pi05_module
from vlatune.train.driver.resume_rules import find_resume_point, open_run
from vlatune.train.worker import loop, metrics_logger, validation
from vlatune.train.worker_job import WorkerJob

WORKERS = 2
BEFORE_FORKING = (pi05_load, pi05_module)
"""Imported once here; a worker would import them when it loads the model, ten seconds each time."""


class ReadyBatches:
    """Neighbouring frames of episode 1, other ones for each micro-step and worker."""

    def __init__(
        self, plan, share: Share, budget, *, first_step: int, last_step: int, coordinator=None, empty=None
    ) -> None:
        self._made = self._make(plan, share, range(first_step, last_step))

    def _make(self, plan, share: Share, steps: range) -> Iterator[Columns]:
        for step in steps:
            frames = np.arange(plan.batch_size) + (2 * step + share.rank) % 6
            rows = read_unit(plan.specs[0], make_unit(plan.metas[0], plan.specs[0], 1, frames, frames))
            yield apply_all(plan.transforms, rows)

    def __iter__(self) -> Iterator[Columns]:
        return self

    def __next__(self) -> Columns:
        return next(self._made)

    def close(self) -> None: ...


def run(config: RunConfig, faults: tuple[Fault, ...], threads: int) -> int:
    """Until the run is done; how many groups were lost on the way."""
    start = find_resume_point(config, say=lambda _: None)
    open_run(config)
    most = len(faults) + 2
    for restarts in range(most):
        if restarts:  # as the driver does, whose set-up stays
            start = find_resume_point(config, start.setup, say=lambda _: None)
        job = WorkerJob(
            config=config,
            setup=start.setup,
            budget=Budget(block_rows=1, block_bytes=1, readers=1, limit_bytes=1),
            torch_threads=threads,
            run_dir=str(config.run_dir),
            checkpoints=start.plan(config),
            restarts=restarts,
        )
        pids = [fork_rank(job, faults, rank) for rank in range(WORKERS)]
        ended, status = os.wait()
        if status:  # the driver ends what is left of a group
            os.kill(next(pid for pid in pids if pid != ended), signal.SIGKILL)
        status |= os.wait()[1]
        if status == 0:
            return restarts
    raise RuntimeError(f"{config.run_dir}: not done after {most} starts")


def fork_rank(job: WorkerJob, faults: tuple[Fault, ...], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        rendezvous = f"file://{job.run_dir}/.rendezvous-{job.restarts}"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORKERS)
        arm(Faults(faults, job.config.run_dir.parent, rank))
        loop.work(loop.Worker(job, Share(rank, WORKERS), NoDriver()))
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    gc.freeze()  # a child that looked for garbage in all that is imported would copy the memory it lies in
    torch.set_num_threads(1)
    loop.get_device = lambda: torch.device("cpu")
    loop.find_compute_threads = lambda _: []  # as it finds with one thread, by a tenth of a second of work
    metrics_logger.SpillMeter = NoSpills
    validation._read_batches = read_here
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what LeRobot prints is no answer
        for line in sys.stdin:
            make(json.loads(line))
            answers.write("\n")
            answers.flush()


def make(runs: list[dict[str, Any]]) -> None:
    for one in runs:
        as_with_ray = "threads" in one
        loop.Feed = OrderedBatches if as_with_ray else ReadyBatches
        loop.EvalConfig = EvalConfig if as_with_ray else partial(EvalConfig, batch_size=2)  # each worker has several
        config = config_from_dict(RunConfig, one["config"], "the test")
        restarts = run(config, tuple(Fault(**fault) for fault in one["faults"]), one.get("threads", 1))
        (config.run_dir / "restarts").write_text(str(restarts))


if __name__ == "__main__":
    main()
