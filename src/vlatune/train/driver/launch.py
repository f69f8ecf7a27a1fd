"""[ray] The driver: validate the config, start Ray, run worker groups until the run is done.

All validation happens before Ray starts. A worker group that fails or hangs is restarted from the
latest checkpoint, up to `max_restarts` times in a row without a new checkpoint. Errors in the
user's input or data are not retried.
"""

import math
import traceback
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vlatune.config.settings import RunConfig
from vlatune.config.validate import validate
from vlatune.console import redacted, say
from vlatune.data.health.bad_episodes import skip_line
from vlatune.data.order.sample_order import group_sizes
from vlatune.findings import raise_failed
from vlatune.policies.base import ModuleOptions
from vlatune.report.html import write_report
from vlatune.run.kept_samples import FIRST_BATCH_FILE, save_samples
from vlatune.run.mirror import Mirror, mirrored
from vlatune.run.run_folder import DATA_FILE, SKIPPED_FILE, new_log
from vlatune.run.summary import read_summary
from vlatune.run.trackers import tracked
from vlatune.run_setup import Setup, load_metas, make_setup, write_skipped
from vlatune.storage.files import write_json, write_text
from vlatune.storage.lease import Lease
from vlatune.train.base_source import BaseSource, find_source, is_small, publish_base
from vlatune.train.cache_choice import USED, open_stores, with_cache
from vlatune.train.data_preview import describe_data, mixture_lines, read_first_batch
from vlatune.train.driver.progress import Progress
from vlatune.train.driver.ray_cluster import Cluster, has_gpus, local_ray, worker_resources
from vlatune.train.driver.resume_rules import (
    ResumePoint,
    check_lease_is_free,
    check_run,
    find_resume_point,
    open_run,
    restore_run,
    run_lease,
    run_lock,
    with_recorded_prefix,
)
from vlatune.train.driver.tiny_base import with_base
from vlatune.train.failures import FINAL, root_cause
from vlatune.train.prefix_choice import choose_prefix, prefix_levels, with_prefix

if TYPE_CHECKING:
    from vlatune.feed.sizing import RunShape, Sizing
    from vlatune.train.driver.ray_supervisor import Termination


def train(config: RunConfig) -> None:
    """Start or resume a training run; returns when it is finished and its report is written."""
    validate(config)
    check_lease_is_free(config)  # before the slow part
    metas = load_metas(config)
    config = with_recorded_prefix(with_base(config, metas, say=_say))
    folder = config.run_dir
    setup = make_setup(config, metas, preflight=True)  # needs no lock, so an invalid command changes nothing
    run_shape(config, setup)  # transforms a row, and so checks the tokenizer
    check_run(config)  # before the lock file is created in the folder
    with run_lock(folder), run_lease(config) as lease:
        restore_run(config, say=_say)
        start = find_resume_point(config, setup, say=_say)
        on_gpu = has_gpus()
        kept = choose_prefix(config, start.setup, start.fingerprints, on_gpu=on_gpu)
        config, start = with_prefix(config, kept), replace(start, setup=replace(start.setup, kept=kept.settings))
        _say(f"kept prefix: {kept.reason}")
        decision = USED if kept.settings else "off"
        stores = open_stores(
            config, start.setup, partial(prefix_levels, config, start.setup, on_gpu=on_gpu, decision=decision)
        )
        start = replace(start, setup=with_cache(start.setup, stores))
        for line in stores.lines():
            _say(line)
        open_run(config)
        if config.dataset.on_bad_episode == "skip":
            write_skipped(folder, start.setup.skipped)
        base = find_source(config, start.setup.policy.folder)
        name = {"base": base.content} if base.is_from_driver else {}
        write_json(folder / DATA_FILE, describe_data(start.setup) | {"stores": stores.to_json()} | name)
        if not (folder / FIRST_BATCH_FILE).exists():
            save_samples(folder, FIRST_BATCH_FILE, read_first_batch(start.setup))
        start.store.check_writable()
        check = lease.check if lease else lambda: None
        with mirrored(folder, config.storage_path, check) as mirror, tracked(config):
            try:
                with local_ray(config, folder, run_shape(config, start.setup)) as cluster:
                    _train_until_done(config, folder, start, base, cluster, lease, mirror)
            finally:  # failed runs get a report, too
                _say(f"report: {write_report(folder)}")
    summary = read_summary(folder)
    assert summary is not None  # rank 0 waits until it is written
    _say(f"finished: {summary.optimizer_steps} steps, loss {summary.final_loss:.4f}; {summary.verdict}")


def _train_until_done(
    config: RunConfig,
    folder: Path,
    start: ResumePoint,
    base: BaseSource,
    cluster: Cluster,
    lease: Lease | None,
    mirror: Mirror | None,
) -> None:
    from vlatune.train.driver.ray_nodes import check_nodes
    from vlatune.train.driver.ray_supervisor import Termination, handle_signals

    _introduce(config, start, folder, cluster.sizing)
    if not cluster.is_local:
        raise_failed(check_nodes(config, start.setup, worker_resources(cluster.sizing)))
    if not cluster.is_local or is_small(base):  # others need it to evaluate the run
        publish_base(base)
    termination = Termination()
    termination.lease = lease
    with handle_signals(termination), closing(Progress(folder, config)) as progress:  # also between attempts
        _run_attempts(config, folder, start, base, cluster, termination, progress, mirror)


def _run_attempts(
    config: RunConfig,
    folder: Path,
    start: ResumePoint,
    base: BaseSource,
    cluster: Cluster,
    termination: "Termination",
    progress: Progress,
    mirror: Mirror | None,
) -> None:
    """Run worker groups until one finishes."""
    from vlatune.train.driver.ray_supervisor import Supervisor
    from vlatune.train.records import RunWriter
    from vlatune.train.worker_job import WorkerJob

    supervisor = Supervisor(config, folder, cluster, termination, say=_say)
    attempt = attempts_without_progress = 0
    while True:
        try:
            progress.begin(from_step=start.step or 0, restarts=attempt)
            with closing(RunWriter(folder, start.step or 0, mirror, log_samples=config.log_samples)) as writer:
                sizing = supervisor.wait_for_resources()
                num_workers, setup = sizing.run.num_workers, start.setup.for_workers(sizing.run.num_workers)
                if config.min_workers:
                    steps = setup.micro_steps(num_workers)
                    _say(
                        f"training with {num_workers} of {config.num_workers} workers: {steps} x {setup.batch_size} samples each"
                    )
                job = WorkerJob(
                    config=config,
                    setup=setup,
                    budget=sizing.budget,
                    torch_threads=sizing.torch_threads,
                    store_bytes=sizing.store_bytes,
                    num_workers=num_workers,
                    run_dir=str(folder.resolve()),
                    checkpoints=start.plan(config, termination.lease.id if termination.lease else None),
                    restarts=attempt,
                    recorded=writer.recorded,
                    base=base,
                )
                if supervisor.run(job, writer):
                    return
            start, attempt = find_resume_point(config, start.setup, say=_say), attempt + 1
        except Exception as error:
            log = new_log(folder, "failure")
            write_text(log, redacted("".join(traceback.format_exception(error))))
            reason = root_cause(error)
            if isinstance(reason, FINAL):
                raise reason from None
            before, start = start, find_resume_point(config, start.setup, say=_say)
            attempts_without_progress = attempts_without_progress + 1 if start.step == before.step else 1
            if attempts_without_progress > config.max_restarts:
                raise reason from None
            attempt += 1
            origin = "the beginning" if start.step is None else start.store.where(start.step)
            _say(
                f"worker group failed: {reason} (traceback: {log}); restarting from {origin} "
                f"({attempts_without_progress}/{config.max_restarts} without a new checkpoint)"
            )
            if cluster.renew():
                supervisor = Supervisor(config, folder, cluster, termination, say=_say)


def run_shape(config: RunConfig, setup: Setup) -> "RunShape":
    from vlatune.feed.sizing import RunShape, compute_share

    step_flops = setup.adapter.step_flops(setup.policy, setup.binding, ModuleOptions.of(config.policy))
    pixels = max(
        sum(math.prod(meta.features[camera.name].height_width) for camera in spec.cameras)
        for meta, spec in zip(setup.metas, setup.specs, strict=True)
    )
    return RunShape(
        config.num_workers,
        setup.data_plan.row_bytes(),
        run_rows=max(setup.order.run_length, setup.order.window_rows),  # as plan.py splits them
        compute_share=compute_share(step_flops=step_flops, pixels=pixels),
        torch_threads=config.torch_threads,
        sizes=group_sizes(setup.order.lanes, config.min_workers, config.num_workers) if config.min_workers else (),
    )


def _introduce(config: RunConfig, start: ResumePoint, folder: Path, sizing: "Sizing") -> None:
    setup, order = start.setup, start.setup.order
    _say(
        f"{len(setup.training)} episodes, {order.num_samples} frames; held out for evaluation: {len(setup.held_out)} episodes; "
        f"global batch {config.global_batch} in {order.lanes} lanes, {order.batches_per_epoch} steps an epoch"
    )
    if setup.skipped:
        selected = len(setup.training) + len(setup.held_out) + len(setup.skipped)
        _say(f"{skip_line(setup.skipped, selected)}; all of them in {folder}/{SKIPPED_FILE}")
    if setup.binding.missing_cameras:
        _say(f"cameras of the policy without data, masked: {', '.join(setup.binding.missing_cameras)}")
    for line in mixture_lines(setup):
        _say(line)
    for line in sizing.reasons():
        _say(line)
    for text in sizing.warnings:
        _say(f"warning: {text}")
    if start.step is not None:
        _say(f"resuming from {start.store.where(start.step)}")
    _say(f"run folder: {folder}")


def _say(text: str) -> None:
    say(f"vlatune: {text}")
