"""Run `vlatune train` on the tiny model, kill a worker, and measure from outside.

    start ---- one checkpoint and half an interval: kill a worker -- it restarts and runs to the end

Only public outputs are read: metrics.jsonl, which a restart replaces by a copy up to the checkpoint,
the summary, and process titles.
"""

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import say
from benchmarks.options import ResumeBench
from benchmarks.processes import POLL_S, Session
from vlatune.batch import ACTION, STATE
from vlatune.checkpoint.local_store import LocalStore
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.demo.generate import SyntheticSpec, make_dataset
from vlatune.policies.pi05.tiny import make_tiny_pi05
from vlatune.ray_internals import TRAIN_WORKER_TITLE
from vlatune.run.sinks import read_jsonl
from vlatune.run.summary import read_summary

WARM_UP_STEPS = 5
"""Steps excluded from the step time."""


@dataclass(frozen=True)
class RunFigures:
    start_s: float
    """Seconds from the command to its first optimizer step, without a checkpoint."""
    restart_s: float
    """Seconds from the kill of a worker to the next optimizer step."""
    redone_steps: int
    """Optimizer steps after the restored checkpoint that were taken before the kill."""
    num_saves: int
    """Number of saves after the restart; `stall_s` and `step_s` refer to it, too."""
    stall_s: float
    """Seconds that a save blocks the loop, from the run's summary."""
    step_s: float
    """Median seconds of an optimizer step, including data wait."""


def last_step(metrics: Path) -> tuple[int, int]:
    """Return the inode of metrics.jsonl and its last optimizer step; (0, 0) if it does not exist."""
    try:
        with metrics.open("rb") as file:
            lines = [line for line in file if line.endswith(b"\n")]
            return os.fstat(file.fileno()).st_ino, json.loads(lines[-1])["optimizer_step"] if lines else 0
    except FileNotFoundError:
        return 0, 0


def wait_until(session: Session, is_done: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Poll; raise if the command ends before, or after `timeout_s`."""
    until_s = time.monotonic() + timeout_s
    while not is_done():
        if (code := session.exit_code()) is not None:
            raise RuntimeError(f"`vlatune train` ended with exit code {code} before {what}:\n{session.tail()}")
        if time.monotonic() > until_s:
            raise RuntimeError(f"no {what} within --timeout_s={timeout_s:g}; raise it:\n{session.tail()}")
        time.sleep(POLL_S)


def measure_run(folder: Path, options: ResumeBench) -> RunFigures:
    """Create dataset and model below `folder`, run and kill; all processes are ended afterwards."""
    command, run_dir = make_command(folder, options), folder / "run"
    store, metrics = LocalStore(run_dir / "checkpoints"), run_dir / "metrics.jsonl"
    kill_at, timeout_s = options.interval + options.interval // 2, options.timeout_s
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    say("starting a run of the tiny model")
    with Session(command, folder / "output.txt", env=env) as session:
        wait_until(session, lambda: last_step(metrics)[1] > 0, "first step", timeout_s)
        start_s = time.time() - session.begin_s
        wait_until(session, lambda: last_step(metrics)[1] >= kill_at and bool(store.steps()), "checkpoint", timeout_s)
        say(f"first step after {start_s:.1f} s; killing a worker")
        worker, begin_s = session.find(TRAIN_WORKER_TITLE)[0], time.time()
        os.kill(worker, signal.SIGKILL)
        before, reached = last_step(metrics)
        wait_until(session, lambda: last_step(metrics)[0] != before, "restart", timeout_s)
        _, resumed = last_step(metrics)
        wait_until(session, lambda: last_step(metrics)[1] > resumed, "step after the kill", timeout_s)
        restart_s = time.time() - begin_s
        say(f"resumed after {restart_s:.1f} s; the rest of the run")
        wait_until(session, lambda: session.exit_code() == 0, "its end", timeout_s)
    summary = read_summary(run_dir)
    assert summary is not None  # the run has finished
    num_saves = count_saves(resumed, options.steps, options.interval)
    steps_s = [line["step_s"] for line in read_jsonl(metrics) if line["optimizer_step"] > resumed + WARM_UP_STEPS]
    stall_s = summary.time_s["checkpoint"] / num_saves
    return RunFigures(start_s, restart_s, reached - resumed, num_saves, stall_s, statistics.median(steps_s))


def count_saves(after_step: int, last_step: int, interval: int) -> int:
    """Count the checkpoints after a step up to the last step, which is always saved."""
    return last_step // interval - after_step // interval + (last_step % interval > 0)


def stall_share(stall_s: float, step_s: float, *, save_freq: int, save_every_s: float = 0.0) -> float:
    """Return the share of the loop's time spent saving, at the interval that is reached first.

    >>> round(stall_share(0.1, 0.5, save_freq=500, save_every_s=600.0), 6)  # every 250.1 s
    0.0004
    """
    by_steps_s = save_freq * step_s + stall_s
    return stall_s / (min(by_steps_s, save_every_s) if save_every_s else by_steps_s)


def make_command(folder: Path, options: ResumeBench) -> list[str]:
    """Create a dataset and a tiny PI0.5, and return the `vlatune train` command."""
    dataset, base = folder / "dataset", folder / "base"
    make_dataset(dataset, SyntheticSpec(episodes=40, frames=25, seed=options.seed))
    meta = load_meta(str(dataset))
    make_tiny_pi05(
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
    return [sys.executable, "-P", "-m", "vlatune.cli", "train", *(f"--{name}={value}" for name, value in flags.items())]
