"""[ray] The driver: config -> checks -> Ray -> worker groups until the run is done.

Everything that can be refused is refused before Ray starts. A worker group that dies or hangs is started again from the
newest checkpoint, up to `max_restarts` times in a row without a new one; an error in the user's input or data is not
tried again.
"""

import os
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vlatune.config import RunConfig, validate
from vlatune.dataset.health import skip_line
from vlatune.report.html import write_report
from vlatune.train.cluster import Cluster, local_ray, worker_resources
from vlatune.train.failures import FINAL, root_cause
from vlatune.train.folder import RunFolder, check_run, only_one, open_run
from vlatune.train.progress import Progress
from vlatune.train.resume import Start, find_start
from vlatune.train.setup import Setup, make_setup
from vlatune.train.skipping import SKIPPED_FILE, keep_skipped

if TYPE_CHECKING:
    from vlatune.pipeline.memory import Budget
    from vlatune.train.supervise import Supervisor


def train(config: RunConfig) -> None:
    """Run or continue a training run; returns when it is finished and its report is written."""
    validate(config)
    folder = RunFolder(config.run_dir)
    make_setup(config, preflight=True)  # all checks that need no lock, so that a wrong call touches nothing
    with only_one(folder):
        check_run(config)
        start = find_start(config, say=_say)
        folder = open_run(config)
        if config.dataset.on_bad_episode == "skip":
            keep_skipped(folder.path, start.setup.skipped)
        start.store.check_writable()
        try:
            with local_ray(config, folder) as cluster:
                _train_until_done(config, folder, start, cluster)
        finally:  # a run that failed has a report, too
            _say(f"report: {write_report(folder.path)}")
    summary = folder.summary()
    assert summary is not None  # rank 0 writes it before the workers end
    _say(f"finished: {summary['optimizer_steps']} steps, loss {summary['final_loss']:.4f}; {summary['verdict']}")


def _train_until_done(config: RunConfig, folder: RunFolder, start: Start, cluster: Cluster) -> None:
    from vlatune.train.supervise import sigterm_sets

    _introduce(config, start, folder)
    terminated = threading.Event()
    with sigterm_sets(terminated):  # also between two attempts
        _try_until_done(config, folder, start, cluster, terminated)


def _try_until_done(
    config: RunConfig, folder: RunFolder, start: Start, cluster: Cluster, terminated: threading.Event
) -> None:
    from vlatune.train.supervise import Supervisor

    supervisor = Supervisor(config, folder, cluster, terminated, say=_say)
    attempt = in_vain = 0
    while True:
        try:
            _run_group(config, start, folder, cluster, supervisor, attempt)
            return
        except Exception as error:
            log = folder.new_log("failure")
            log.write_text("".join(traceback.format_exception(error)))
            reason = root_cause(error)
            if isinstance(reason, FINAL):
                raise reason from None
            before, start = start, find_start(config, say=_say)
            in_vain = in_vain + 1 if start.step == before.step else 1
            if in_vain > config.max_restarts:
                raise reason from None
            attempt += 1
            _say(
                f"broken off ({reason}; all of it in {log}); restart {in_vain} of at most "
                f"{config.max_restarts} without a new checkpoint, from {_name(start)}"
            )
            if cluster.renew():
                supervisor = Supervisor(config, folder, cluster, terminated, say=_say)


def _name(start: Start) -> str:
    return "the beginning" if start.step is None else start.store.where(start.step)


def _run_group(
    config: RunConfig, start: Start, folder: RunFolder, cluster: Cluster, supervisor: "Supervisor", attempt: int
) -> None:
    from vlatune.train.job import WorkerJob
    from vlatune.train.loop import run_worker
    from vlatune.train.trainer import make_trainer

    job = WorkerJob(
        config=config,
        setup=start.setup,
        budget=make_budget(config, start.setup),
        run_dir=str(folder.path.resolve()),
        checkpoints=start.plan(config),
        restarts=attempt,
        lookout=supervisor.lookout,
    )
    trainer = make_trainer(
        run_worker,
        job,
        num_workers=config.num_workers,
        resources=worker_resources(),
        name=f"attempt-{os.getpid()}-{attempt}",
        storage_path=str((folder.logs / "ray_train").resolve()),
        own_cluster=cluster.ours,
    )
    progress = Progress(folder.metrics, config.steps, from_step=start.step or 0)
    try:
        supervisor.run(trainer.fit, attempt)
    finally:
        progress.close()


def make_budget(config: RunConfig, setup: Setup) -> "Budget":
    import ray

    from vlatune.pipeline.build import DataPlan
    from vlatune.pipeline.memory import plan_budget

    resources = ray.cluster_resources()
    plan = DataPlan(
        setup.metas, setup.training, setup.specs, setup.order, setup.transforms_of_epoch(), config.batch_size
    )
    return plan_budget(
        store_bytes=int(resources["object_store_memory"]),
        row_bytes=plan.row_bytes(),
        num_workers=config.num_workers,
        num_cpus=_cpus_for_readers(config, resources),
    )


def _cpus_for_readers(config: RunConfig, resources: Mapping[str, float]) -> int:
    """What the workers leave; on a cluster of ours, and where they have GPUs, they take none."""
    there, taken = resources.get("CPU", 0), config.num_workers * worker_resources()["CPU"]
    if there - taken < 1:
        raise ValueError(
            f"the cluster has {there:g} CPUs and {config.num_workers} workers take {taken:g} of them: none is left to decode; "
            f"add CPUs or lower --num_workers"
        )
    return int(there - taken)


def _introduce(config: RunConfig, start: Start, folder: RunFolder) -> None:
    import ray

    setup, order = start.setup, start.setup.order
    store = int(ray.cluster_resources()["object_store_memory"])
    _say(
        f"{len(setup.training)} episodes, {order.num_samples} frames; held out for evaluation: {len(setup.held_out)} episodes; "
        f"global batch {config.global_batch} in {order.lanes} lanes, {order.batches_per_epoch} steps an epoch"
    )
    if setup.skipped:
        selected = len(setup.training) + len(setup.held_out) + len(setup.skipped)
        _say(f"{skip_line(setup.skipped, selected)}; all of them in {folder.path}/{SKIPPED_FILE}")
    if setup.binding.missing_cameras:
        _say(f"cameras of the policy without data, masked: {', '.join(setup.binding.missing_cameras)}")
    _say(f"object store: {make_budget(config, setup).reason(store, config.num_workers)}")
    if start.step is not None:
        _say(f"continuing from {start.store.where(start.step)}")
    _say(f"run folder: {folder.path}")


def _say(text: str) -> None:
    sys.stdout.write(f"vlatune: {text}\n")
    sys.stdout.flush()
