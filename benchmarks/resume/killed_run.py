"""Run `vlatune train` on the tiny model, kill it twice, and measure from outside.

    start ---- one checkpoint and half an interval: kill a worker -- it restarts
          ---- two checkpoints and half an interval: kill the driver
    start ---- resumes and runs to the end; the summary has the time spent on checkpoints

After the worker is killed about half an interval of steps is repeated. Workers outlive a killed
driver briefly and may save again, so there it can be any part of the interval. Only public outputs
are read: metrics.jsonl and process titles.
"""

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.options import ResumeBench
from benchmarks.processes import POLL_S, Session, folder_bytes, processes_in
from vlatune.batch import ACTION, STATE
from vlatune.checkpoint.local_store import LocalStore
from vlatune.checkpoint.store import list_checkpoints
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.demo.generate import SyntheticSpec, make_dataset
from vlatune.policies.pi05.tiny import make_tiny_pi05
from vlatune.ray_internals import TRAIN_WORKER_TITLE
from vlatune.run.sinks import read_jsonl
from vlatune.run.summary import read_summary


@dataclass(frozen=True)
class Comeback:
    """Recovery of a run after a kill."""

    begin_s: float
    """Wall-clock time of the kill of a worker, or of the second start of the command."""
    first_step_s: float
    reached_step: int
    """Last optimizer step recorded before the kill."""
    resumed_step: int
    """Optimizer step of the restored checkpoint; 0 without a checkpoint."""

    @property
    def restart_s(self) -> float:
        return self.first_step_s - self.begin_s

    @property
    def redone_steps(self) -> int:
        return self.reached_step - self.resumed_step


def count_kept(before: Sequence[bytes], now: Sequence[bytes]) -> int:
    """Return the number of common leading lines after a file was truncated and extended."""
    pairs = zip(before, now, strict=False)
    return next((place for place, (old, new) in enumerate(pairs) if old != new), min(len(before), len(now)))


class MetricsFollower:
    """Follow metrics.jsonl across its truncation by a restart; create it before the kill."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._inode, self._lines = read_complete_lines(file)
        self._replaced = False

    def last_step(self) -> int:
        """Return the optimizer step of the last line before the file was replaced."""
        return optimizer_step(self._lines[-1]) if self._lines else 0

    def first_new_step(self) -> int | None:
        """Return the optimizer step of the first line after the replacement; None until then."""
        inode, now = read_complete_lines(self._file)
        self._replaced = self._replaced or inode != self._inode  # sticky, because inode numbers are reused
        if not self._replaced:
            self._lines = now
            return None
        kept = count_kept(self._lines, now)
        return optimizer_step(now[kept]) if len(now) > kept else None


def read_complete_lines(file: Path) -> tuple[int, list[bytes]]:
    """Return inode and complete lines of a file; (0, []) if it does not exist."""
    try:
        with file.open("rb") as opened:
            return os.fstat(opened.fileno()).st_ino, [line for line in opened if line.endswith(b"\n")]
    except FileNotFoundError:
        return 0, []


def optimizer_step(line: bytes) -> int:
    return json.loads(line)["optimizer_step"]


class RunWatch:
    """Observe one start of a run; waits fail when the command ends or after `timeout_s`."""

    def __init__(self, session: Session, run_dir: Path, *, timeout_s: float) -> None:
        self._session, self._run_dir, self._timeout_s = session, run_dir, timeout_s
        self._store = LocalStore(run_dir / "checkpoints")
        self._metrics = run_dir / "metrics.jsonl"

    def follow_metrics(self) -> MetricsFollower:
        return MetricsFollower(self._metrics)

    def wait_for_step(self, optimizer_step: int, *, checkpoint: int = 0) -> float:
        """Wait until the step and the checkpoint are recorded, and return the time."""
        until_s = time.monotonic() + self._timeout_s
        while self.follow_metrics().last_step() < optimizer_step or max(self._store.steps(), default=0) < checkpoint:
            self._require_running()
            self._pause(until_s, f"step {optimizer_step}")
        return time.time()

    def wait_for_comeback(self, begin_s: float, metrics: MetricsFollower) -> Comeback:
        """Wait for the first new step after a kill; `metrics` was created before it."""
        until_s = time.monotonic() + self._timeout_s
        while (step := metrics.first_new_step()) is None:
            self._require_running()
            self._pause(until_s, "the first step after a kill")
        return Comeback(begin_s, time.time(), reached_step=metrics.last_step(), resumed_step=step - 1)

    def wait_for_end(self) -> None:
        until_s = time.monotonic() + self._timeout_s
        while (code := self._session.exit_code()) is None:
            self._pause(until_s, "its end")
        if code:
            self._require_running()

    def _pause(self, until_s: float, what: str) -> None:
        if time.monotonic() > until_s:
            raise RuntimeError(
                f"the run did not reach {what} within --timeout_s={self._timeout_s:g}; raise it; the end of "
                f"its output:\n{self._session.tail()}"
            )
        time.sleep(POLL_S)

    def _require_running(self) -> None:
        code = self._session.exit_code()
        if code is not None:
            raise RuntimeError(
                f"`vlatune train` ended too early, with exit code {code}; its output ends with:\n{self._session.tail()}"
            )


WARM_UP_STEPS = 5
"""Steps excluded from the step time."""


@dataclass(frozen=True)
class RunFigures:
    start_s: float
    """Seconds from the command to its first optimizer step, without a checkpoint."""
    worker: Comeback
    driver: Comeback
    num_saves: int
    """Number of saves of the last start; `stall_s` and `step_s` refer to it, too."""
    stall_s: float
    """Seconds that a save blocks the loop, from the run's summary."""
    step_s: float
    """Median seconds of an optimizer step, including data wait."""
    checkpoint_bytes: int


def measure_run(folder: Path, options: ResumeBench, *, say: Callable[[str], None]) -> RunFigures:
    """Create dataset and model below `folder`, run and kill; all processes are ended afterwards."""
    command, run_dir = make_command(folder, options), folder / "run"
    half, output = options.interval // 2, folder / "output.txt"
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with ExitStack() as stack:
        say("starting a run of the tiny model")
        first = stack.enter_context(Session(command, output, env=env))
        watch = RunWatch(first, run_dir, timeout_s=options.timeout_s)
        start_s = watch.wait_for_step(1) - first.begin_s
        watch.wait_for_step(options.interval + half, checkpoint=options.interval)
        say(f"first step after {start_s:.1f} s; killing a worker")
        worker = _kill_worker(first, watch)
        watch.wait_for_step(2 * options.interval + half, checkpoint=2 * options.interval)
        say(f"resumed after {worker.restart_s:.1f} s; killing the driver")
        metrics = watch.follow_metrics()
        first.kill_command()
        second = stack.enter_context(Session(command, output, env=env))
        watch = RunWatch(second, run_dir, timeout_s=options.timeout_s)
        driver = watch.wait_for_comeback(second.begin_s, metrics)
        say(f"resumed after {driver.restart_s:.1f} s; the rest of the run")
        watch.wait_for_end()
    return _add_stall(run_dir, start_s, worker, driver, options)


def _kill_worker(session: Session, watch: RunWatch) -> Comeback:
    metrics, workers = watch.follow_metrics(), session.find(TRAIN_WORKER_TITLE)
    if not workers:
        raise RuntimeError(
            f"no process below the driver has '{TRAIN_WORKER_TITLE}' in its title, there are "
            f"{sorted(set(processes_in(session.pid).values()))}; this version of Ray names its workers differently"
        )
    begin_s = time.time()
    os.kill(workers[0], signal.SIGKILL)
    return watch.wait_for_comeback(begin_s, metrics)


def _add_stall(run_dir: Path, start_s: float, worker: Comeback, driver: Comeback, options: ResumeBench) -> RunFigures:
    """Add the figures of the last start from its summary and metrics."""
    summary = read_summary(run_dir)
    assert summary is not None  # the run has finished
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
        checkpoint_bytes=folder_bytes(list_checkpoints(run_dir)[-1]),
    )


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
