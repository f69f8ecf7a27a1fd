"""[ray] The driver: config -> checks -> Ray -> worker groups until the run is done.

Everything that can be refused is refused before Ray starts. A worker group that dies is started again from the newest
checkpoint, up to `max_restarts` times; an error in the user's input or data is not tried again. Ray's own words go to
`logs/`, the person sees ours.
"""

import logging
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vlatune.config import RunConfig, validate
from vlatune.dataset.health import skip_line
from vlatune.errors import RunStoppedError
from vlatune.report.html import write_report
from vlatune.train.folder import RunFolder, check_run, only_one, open_run
from vlatune.train.progress import Progress
from vlatune.train.resume import Start, find_start
from vlatune.train.setup import Setup, make_setup
from vlatune.train.skipping import SKIPPED_FILE, keep_skipped

TRAINER_RESOURCE = "vlatune_trainer"
"""Custom resource of the local cluster: a training worker takes one of these and no CPU, which the readers need."""


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
            with local_ray(config, folder):
                _train_until_done(config, folder, start)
        finally:  # a run that failed has a report, too
            _say(f"report: {write_report(folder.path)}")
    summary = folder.summary()
    assert summary is not None  # rank 0 writes it before the workers end
    _say(f"finished: {summary['optimizer_steps']} steps, loss {summary['final_loss']:.4f}; {summary['verdict']}")


def _train_until_done(config: RunConfig, folder: RunFolder, start: Start) -> None:
    for attempt in range(config.max_restarts + 1):
        if attempt == 0:
            _introduce(config, start, folder)
        else:
            start = find_start(config, say=_say)
        try:
            _run_group(config, start, folder, restarts=attempt)
            return
        except Exception as error:
            (folder.logs / f"failure-{attempt}.txt").write_text("".join(traceback.format_exception(error)))
            reason = root_cause(error)
            if isinstance(reason, ValueError | RunStoppedError) or attempt == config.max_restarts:
                raise reason from None
            _say(
                f"a worker failed ({reason}; all of it in {folder.logs}/failure-{attempt}.txt); "
                f"restart {attempt + 1} of {config.max_restarts} from the newest checkpoint"
            )


def _run_group(config: RunConfig, start: Start, folder: RunFolder, *, restarts: int) -> None:
    from ray.train import FailureConfig, ScalingConfig
    from ray.train import RunConfig as RayRunConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from vlatune.train.loop import WorkerJob, run_worker

    use_gpu = _has_gpus()
    job = WorkerJob(
        config=config,
        setup=start.setup,
        budget=make_budget(config, start.setup),
        run_dir=str(folder.path.resolve()),
        checkpoints=start.plan(config),
        restarts=restarts,
    )
    trainer = TorchTrainer(
        run_worker,
        train_loop_config={"job": job},
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=config.num_workers, use_gpu=use_gpu, resources_per_worker=_worker_resources(use_gpu)
        ),
        run_config=RayRunConfig(
            name=f"attempt-{os.getpid()}-{restarts}",
            storage_path=str((folder.logs / "ray_train").resolve()),
            failure_config=FailureConfig(max_failures=0),
        ),
    )
    progress = Progress(folder.metrics, config.steps, from_step=start.step or 0)
    try:
        _interruptible(trainer.fit)
    finally:
        progress.close()


def _interruptible(call: Callable[[], object]) -> None:
    """Run `call` on a thread and wait here. On the main thread Ray Train would catch Ctrl-C itself and take its time."""
    outcome: queue.Queue[BaseException | None] = queue.Queue()

    def run() -> None:
        try:
            call()
            outcome.put(None)
        except BaseException as error:  # carried over to the waiting thread
            outcome.put(error)

    threading.Thread(target=run, name="ray-train", daemon=True).start()
    while True:
        try:
            error = outcome.get(timeout=0.2)  # with a timeout, so that Python gets to see the signal
        except queue.Empty:
            continue
        if error is not None:
            raise error
        return


def make_budget(config: RunConfig, setup: Setup):
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
        num_cpus=int(resources["CPU"]),
    )


@contextmanager
def local_ray(config: RunConfig, folder: RunFolder) -> Iterator[None]:
    """A cluster for the time of the run: the one that RAY_ADDRESS names, or one of our own on this machine."""
    import ray

    _quiet(folder)
    # Training and decoding share the cores: threads that spin while they wait for each other make a step 10 x slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if ray.is_initialized():  # a caller, such as a test, has its own
        yield
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    else:
        ray.init(
            address="local",
            num_cpus=config.ray.num_cpus or os.cpu_count(),
            object_store_memory=config.ray.object_store_bytes,
            resources={TRAINER_RESOURCE: config.num_workers},
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    try:
        yield
    finally:
        ray.shutdown()


def root_cause(error: BaseException) -> Exception:
    """The first error that is in our own words, out of Ray's layers around it."""
    for found in _unwrap(error):
        if type(found) in (ValueError, RuntimeError, RunStoppedError):
            return found  # pyright: ignore[reportReturnType]
    lines = str(error).strip().splitlines() or ["no message"]
    first_sentence = lines[-1].split(". ")[0][:200]  # Ray goes on for paragraphs; all of it is in logs/
    return RuntimeError(f"{type(error).__name__}: {first_sentence}")


def _unwrap(error: BaseException) -> Iterator[BaseException]:
    """Innermost first: Ray keeps the worker's error in `worker_failures`, `cause`, or Python's own chain."""
    inner = [*getattr(error, "worker_failures", {}).values(), getattr(error, "cause", None), error.__cause__]
    for each in inner:
        if isinstance(each, BaseException) and each is not error:
            yield from _unwrap(each)
    yield error


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


def _worker_resources(use_gpu: bool) -> dict[str, float]:
    import ray

    if use_gpu:
        return {"GPU": 1, "CPU": 0}
    if TRAINER_RESOURCE in ray.cluster_resources():
        return {TRAINER_RESOURCE: 1, "CPU": 0}
    return {"CPU": 1}


def _has_gpus() -> bool:
    import ray

    return ray.cluster_resources().get("GPU", 0) > 0


def _quiet(folder: RunFolder) -> None:
    """Ray's loggers write to logs/driver.log instead of the terminal."""
    folder.logs.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder.logs / "driver.log")
    for name in ("ray", "ray.data", "ray.train", "ray.tune"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False


def _say(text: str) -> None:
    sys.stdout.write(f"vlatune: {text}\n")
    sys.stdout.flush()
