"""[ray] The driver: config -> checks -> Ray -> worker groups until the run is done.

Everything that can be refused is refused before Ray starts. A worker group that dies or hangs is started again from the
newest checkpoint, up to `max_restarts` times in a row without a new one; an error in the user's input or data is not
tried again.
"""

import math
import os
import traceback
from contextlib import closing
from typing import TYPE_CHECKING, Any

from vlatune.config import RunConfig
from vlatune.config_checks import validate
from vlatune.console import redacted, say
from vlatune.dataset.health.bad_episodes import skip_line
from vlatune.files import write_text
from vlatune.policies.base import ModuleOptions
from vlatune.report.html import write_report
from vlatune.report.kept_samples import FIRST_BATCH_FILE, save_first_batch
from vlatune.report.run_folder import SKIPPED_FILE, RunFolder, write_data
from vlatune.run_setup import Setup, load_metas, make_setup, write_skipped
from vlatune.train.data_preview import describe_data, mixture_lines, read_first_batch
from vlatune.train.driver.cluster import Cluster, local_ray, worker_resources
from vlatune.train.driver.feature_stage import keep_features
from vlatune.train.driver.progress import Progress
from vlatune.train.driver.resume_rules import ResumePoint, check_run, find_resume_point, only_one, open_run
from vlatune.train.driver.tiny_base import with_base
from vlatune.train.driver.trackers import tracked
from vlatune.train.failures import FINAL, root_cause

if TYPE_CHECKING:
    from vlatune.pipeline.sizing import RunShape, Sizing
    from vlatune.train.driver.supervisor import Ending, Supervisor
    from vlatune.train.worker_job import WorkerJob


def train(config: RunConfig) -> None:
    """Run or continue a training run; returns when it is finished and its report is written."""
    validate(config)
    metas = load_metas(config)
    config = with_base(config, metas, say=_say)
    folder = RunFolder(config.run_dir)
    setup = make_setup(config, metas, preflight=True)  # all that needs no lock: a wrong call touches nothing
    run_shape(config, setup)  # makes a row, and with it the tokenizer
    check_run(config)  # the lock is a file of its own, which a folder of somebody else's must not get
    with only_one(folder):
        check_run(config)
        start = find_resume_point(config, setup, say=_say)
        folder = open_run(config)
        if config.dataset.on_bad_episode == "skip":
            write_skipped(folder.path, start.setup.skipped)
        write_data(folder.path, describe_data(start.setup))
        if not (folder.path / FIRST_BATCH_FILE).exists():
            save_first_batch(folder.path, read_first_batch(start.setup))
        start.store.check_writable()
        with tracked(config):
            try:
                with local_ray(config, folder, run_shape(config, start.setup)) as cluster:
                    _train_until_done(config, folder, start, cluster)
            finally:  # a run that failed has a report, too
                _say(f"report: {write_report(folder.path)}")
    summary = folder.summary()
    assert summary is not None  # rank 0 writes it before the workers end
    _say(f"finished: {summary.optimizer_steps} steps, loss {summary.final_loss:.4f}; {summary.verdict}")


def _train_until_done(config: RunConfig, folder: RunFolder, start: ResumePoint, cluster: Cluster) -> None:
    from vlatune.train.driver.supervisor import Ending, signals_set

    _introduce(config, start, folder, cluster.sizing)
    terminated = Ending()
    if start.setup.kept:
        with signals_set(terminated):
            keep_features(
                config, start.setup, start.fingerprints, cluster, lambda: _go_on(terminated, cluster), say=_say
            )
    progress = Progress(folder, config, store_bytes=cluster.sizing.store_bytes)
    with signals_set(terminated), closing(progress):  # also between two attempts
        _try_until_done(config, folder, start, cluster, terminated, progress)


def _go_on(terminated: "Ending", cluster: Cluster) -> None:
    """Before the workers are there to be watched: raises what ends that."""
    if terminated.is_set():
        raise terminated.error(
            " before training began; the features that are computed stay, and the same command goes on with the rest"
        )
    if part := cluster.lost_part():
        raise RuntimeError(f"Ray's {part} died")


def _try_until_done(
    config: RunConfig,
    folder: RunFolder,
    start: ResumePoint,
    cluster: Cluster,
    terminated: "Ending",
    progress: Progress,
) -> None:
    from vlatune.train.driver.supervisor import Supervisor

    supervisor = Supervisor(config, folder, cluster, terminated, say=_say)
    attempt = in_vain = 0
    while True:
        try:
            progress.begin(supervisor, from_step=start.step or 0, restarts=attempt)
            _run_group(config, start, folder, cluster, supervisor, attempt)
            return
        except Exception as error:
            log = folder.new_log("failure")
            write_text(log, redacted("".join(traceback.format_exception(error))))
            reason = root_cause(error)
            if isinstance(reason, FINAL):
                raise reason from None
            before, start = start, find_resume_point(config, start.setup, say=_say)
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


def _name(start: ResumePoint) -> str:
    return "the beginning" if start.step is None else start.store.where(start.step)


def _run_group(
    config: RunConfig, start: ResumePoint, folder: RunFolder, cluster: Cluster, supervisor: "Supervisor", attempt: int
) -> None:
    from vlatune.pipeline.coordinator import end_coordinators
    from vlatune.train.worker_job import WorkerJob

    checkpoints = start.plan(config)
    job = WorkerJob(
        config=config,
        setup=start.setup,
        budget=cluster.sizing.budget,
        torch_threads=cluster.sizing.torch_threads,
        store_bytes=cluster.sizing.store_bytes,
        run_dir=str(folder.path.resolve()),
        checkpoints=checkpoints,
        restarts=attempt,
        coordinators=_start_reading(config, start, cluster, checkpoints.resume_step or 0),
        monitor=supervisor.monitor,
    )
    try:
        _fit(config, folder, cluster, supervisor, job)
    finally:
        if not cluster.lost_part():  # which takes all its processes along, and would not answer
            end_coordinators(job.coordinators)


def _start_reading(config: RunConfig, start: ResumePoint, cluster: Cluster, first_step: int) -> tuple[Any, ...]:
    """Ahead of the workers, where it is known on which node they will be."""
    from vlatune.pipeline.coordinator import start_ahead

    if not cluster.ours:
        return ()
    return start_ahead(
        start.setup.data_plan,
        config.num_workers,
        cluster.sizing.budget,
        first_step=first_step,
        last_step=config.steps,
    )


def _fit(config: RunConfig, folder: RunFolder, cluster: Cluster, supervisor: "Supervisor", job: "WorkerJob") -> None:
    from vlatune.train.driver.trainer import make_trainer, run_worker
    from vlatune.train.worker_job import DETERMINISTIC_ENVIRONMENT

    trainer = make_trainer(
        run_worker,
        job,
        num_workers=config.num_workers,
        resources=worker_resources(cluster.sizing),
        name=f"attempt-{os.getpid()}-{job.restarts}",
        storage_path=str((folder.logs / "ray_train").resolve()),
        own_cluster=cluster.ours,
        environment=DETERMINISTIC_ENVIRONMENT if config.deterministic else {},
    )
    supervisor.run(trainer.fit, job.restarts, cancel=getattr(trainer, "cancel", lambda: None))


def run_shape(config: RunConfig, setup: Setup) -> "RunShape":
    from vlatune.pipeline.sizing import RunShape, compute_share

    step_flops = setup.adapter.step_flops(setup.policy, setup.binding, ModuleOptions.of(config.policy))
    pixels = max(
        sum(math.prod(meta.features[camera.name].height_width) for camera in spec.cameras if not setup.kept)
        for meta, spec in zip(setup.metas, setup.specs, strict=True)
    )
    return RunShape(
        config.num_workers,
        setup.data_plan.row_bytes(),
        run_rows=max(setup.order.run_length, setup.order.window_rows),  # as plan.py cuts them
        compute_share=compute_share(step_flops=step_flops, pixels=pixels),
        torch_threads=config.torch_threads,
    )


def _introduce(config: RunConfig, start: ResumePoint, folder: RunFolder, sizing: "Sizing") -> None:
    setup, order = start.setup, start.setup.order
    _say(
        f"{len(setup.training)} episodes, {order.num_samples} frames; held out for evaluation: {len(setup.held_out)} episodes; "
        f"global batch {config.global_batch} in {order.lanes} lanes, {order.batches_per_epoch} steps an epoch"
    )
    if setup.skipped:
        selected = len(setup.training) + len(setup.held_out) + len(setup.skipped)
        _say(f"{skip_line(setup.skipped, selected)}; all of them in {folder.path}/{SKIPPED_FILE}")
    if setup.binding.missing_cameras:
        _say(f"cameras of the policy without data, masked: {', '.join(setup.binding.missing_cameras)}")
    for line in mixture_lines(setup):
        _say(line)
    for line in sizing.reasons():
        _say(line)
    for text in sizing.warnings:
        _say(f"warning: {text}")
    if start.step is not None:
        _say(f"continuing from {start.store.where(start.step)}")
    _say(f"run folder: {folder.path}")


def _say(text: str) -> None:
    say(f"vlatune: {text}")
