"""The small model's real run: `vlatune train`, killed twice, watched from outside.

    start ---- a checkpoint, half an interval more: kill a worker -- restarts by itself
          ---- two checkpoints, half an interval more: kill the driver
    start ---- goes on to the end: its summary has the checkpoints' part of the loop's time

After the worker's kill about half an interval of steps is made again. The workers of a killed driver go on for a second
or two, and may save once more, so there it is any part of the interval.
"""

import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from vlatune.batch import ACTION, STATE
from vlatune.bench.options import ResumeBench
from vlatune.bench.resume_process import Session, processes_in
from vlatune.bench.resume_watch import AFTER_DRIVER, AFTER_WORKER, WORKER, Comeback, RunWatch
from vlatune.dataset.meta import load_meta
from vlatune.dataset.synthetic import SyntheticSpec, make_dataset
from vlatune.policies.pi05.small import make_small_pi05
from vlatune.report.sinks import read_jsonl
from vlatune.report.summary import read_summary

WARM_UP_STEPS = 5
"""Left out of the step time."""


@dataclass(frozen=True)
class RunFigures:
    start_s: float
    """From the command to its first optimizer step, with nothing to go on from."""
    worker: Comeback
    driver: Comeback
    num_saves: int
    """Of the last start, as `stall_s` and `step_s`."""
    stall_s: float
    """Seconds that the loop stands still for a save, by the run's own accounting."""
    step_s: float
    """Median seconds of an optimizer step, waiting for data included."""


def measure_run(folder: Path, options: ResumeBench, *, say: Callable[[str], None]) -> RunFigures:
    """Make dataset and model below `folder`, run, kill, and wait for the end; whatever was started is gone after it."""
    command, run_dir = make_command(folder, options), folder / "run"
    half, output = options.interval // 2, folder / "output.txt"
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with ExitStack() as stack:
        say("starting a run of the small model")
        first = stack.enter_context(Session(command, output, env=env))
        watch = RunWatch(first, run_dir, timeout_s=options.timeout_s)
        start_s = watch.wait_for_step(1) - first.begin_s
        watch.wait_for_step(options.interval + half, checkpoint=options.interval)
        say(f"first step after {start_s:.1f} s; killing a worker")
        worker = _kill_worker(first, watch)
        watch.wait_for_step(2 * options.interval + half, checkpoint=2 * options.interval)
        say(f"back at work after {worker.restart_s:.1f} s; killing the driver")
        metrics = watch.follow_metrics()
        first.kill_command()
        second = stack.enter_context(Session(command, output, env=env))
        watch = RunWatch(second, run_dir, timeout_s=options.timeout_s)
        driver = watch.wait_for_comeback(AFTER_DRIVER, second.begin_s, metrics=metrics)
        say(f"back at work after {driver.restart_s:.1f} s; the rest of the run")
        watch.wait_for_end()
    return _add_stall(run_dir, start_s, worker, driver, options)


def _kill_worker(session: Session, watch: RunWatch) -> Comeback:
    metrics, workers = watch.follow_metrics(), session.find(WORKER)
    if not workers:
        raise RuntimeError(
            f"no process below the driver has '{WORKER}' in its title, there are "
            f"{sorted(set(processes_in(session.pid).values()))}; this version of Ray names its workers differently"
        )
    begin_s = time.time()
    os.kill(workers[0], signal.SIGKILL)
    return watch.wait_for_comeback(AFTER_WORKER, begin_s, metrics=metrics, old_pids=workers)


def _add_stall(run_dir: Path, start_s: float, worker: Comeback, driver: Comeback, options: ResumeBench) -> RunFigures:
    """Summary and metrics of the last start."""
    summary = read_summary(run_dir)
    assert summary is not None  # the run has ended well
    num_saves = count_saves(driver.resumed_step, options.steps, options.interval)
    warm = driver.resumed_step + WARM_UP_STEPS
    lines = read_jsonl(run_dir / "metrics.jsonl")
    return RunFigures(
        start_s,
        worker,
        driver,
        num_saves=num_saves,
        stall_s=summary.time_s["checkpoint"] / num_saves,
        step_s=statistics.median(line["step_s"] for line in lines if line["optimizer_step"] > warm),
    )


def count_saves(after_step: int, last_step: int, interval: int) -> int:
    """Checkpoints of the steps after one and up to the last, which is always saved."""
    return last_step // interval - after_step // interval + (last_step % interval > 0)


def stall_share(stall_s: float, step_s: float, *, save_freq: int, save_every_s: float = 0.0) -> float:
    """Share of the loop's time that saves take: of the time from one to the next, whichever limit comes first.

    >>> stall_share(0.1, 0.5, save_freq=500, save_every_s=600.0)  # every 250.1 s
    0.0003998400639744102
    """
    by_steps_s = save_freq * step_s + stall_s
    return stall_s / (min(by_steps_s, save_every_s) if save_every_s else by_steps_s)


def make_command(folder: Path, options: ResumeBench) -> list[str]:
    """`vlatune train` on a dataset and a small PI0.5 that are made here."""
    dataset, base = folder / "dataset", folder / "base"
    make_dataset(dataset, SyntheticSpec(episodes=40, frames=25, seed=options.seed))
    meta = load_meta(str(dataset))
    make_small_pi05(
        base,
        cameras=meta.cameras,
        state_dim=meta.features[STATE].shape[0],
        action_dim=meta.features[ACTION].shape[0],
        horizon=8,
        image_size=48,
        tasks=meta.tasks,
        seed=options.seed,
    )
    flags = {
        "dataset.root": dataset,
        "policy.path": base,
        "policy.train": "heads",
        "output_dir": folder / "run",
        "steps": options.steps,
        "batch_size": options.batch_size,
        "num_workers": options.num_workers,
        "seed": options.seed,
        "log_freq": 1,
        "save_freq": options.interval,
        "save_every_s": 0,
    }
    return [sys.executable, "-m", "vlatune.cli", "train", *(f"--{name}={value}" for name, value in flags.items())]
