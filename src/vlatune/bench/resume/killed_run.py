"""The small model's real run: `vlatune train`, killed twice, watched from outside.

    start ---- a checkpoint, half an interval more: kill a worker -- restarts by itself
          ---- two checkpoints, half an interval more: kill the driver
    start ---- goes on to the end: its summary has the checkpoints' part of the loop's time

After the worker's kill about half an interval of steps is made again. The workers of a killed driver go on for a second
or two, and may save once more, so there it is any part of the interval.

Only what a run leaves for everybody to see is read: metrics.jsonl, the times of its files, the titles of its processes.
Nothing in the run knows that it is watched.
"""

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from vlatune.batch import ACTION, STATE
from vlatune.bench.options import ResumeBench
from vlatune.bench.processes import POLL_S, Session, processes_in
from vlatune.checkpoint.local_store import LocalStore
from vlatune.dataset.meta.dataset_meta import load_meta
from vlatune.dataset.synthetic.generate import SyntheticSpec, make_dataset
from vlatune.policies.pi05.small import make_small_pi05
from vlatune.ray_internals import RAYLET_TITLE, TRAIN_WORKER_TITLE
from vlatune.report.sinks import read_jsonl
from vlatune.report.summary import read_summary


@dataclass(frozen=True)
class Mark:
    """A moment of a start that can be seen from outside."""

    name: str
    file: str = ""
    """Glob below the run folder: a file that is written at this moment."""
    title: str = ""
    """Or what the title of a process says from this moment on."""


WORKERS_BEGIN = (
    Mark("workers have processes", title=TRAIN_WORKER_TITLE),
    Mark("rank 0 is in the training function", file="logs/stacks-*-rank-0.txt"),
    Mark("model loaded, checkpoint restored, metrics opened", file="logs/worker.log"),
)
AFTER_WORKER = (Mark("the driver has noticed", file="logs/failure-*.txt"), *WORKERS_BEGIN)
AFTER_DRIVER = (
    Mark("the driver has checked and begins", file="config.json"),
    Mark("Ray's raylet has a process", title=RAYLET_TITLE),
    *WORKERS_BEGIN,
)
FIRST_STEP = "first optimizer step"


@dataclass(frozen=True)
class Comeback:
    """How a run came back to work."""

    begin_s: float
    """The kill of a worker, or the second start of the command; by the wall clock, as all times here."""
    seen_s: Mapping[str, float | None]
    """Mark -> when it was reached, in order; None for one that was not seen."""
    first_step_s: float
    reached_step: int
    """Last optimizer step that was recorded before."""
    resumed_step: int
    """Optimizer step of the checkpoint that it went on from; 0 when there was none."""

    @property
    def restart_s(self) -> float:
        return self.first_step_s - self.begin_s

    @property
    def redone_steps(self) -> int:
        return self.reached_step - self.resumed_step

    def profile(self) -> dict[str, float | None]:
        """Moment -> seconds since the beginning."""
        seen = {**self.seen_s, FIRST_STEP: self.first_step_s}
        return {name: None if at_s is None else at_s - self.begin_s for name, at_s in seen.items()}


def count_kept(before: Sequence[bytes], now: Sequence[bytes]) -> int:
    """Lines that a file which was cut back and goes on has from before."""
    pairs = zip(before, now, strict=False)
    return next((place for place, (old, new) in enumerate(pairs) if old != new), min(len(before), len(now)))


class MetricsFollower:
    """metrics.jsonl as it is now, while it still grows, is replaced by its own beginning, and goes on. Made before a kill."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._inode, self._lines = read_whole_lines(file)
        self._replaced = False

    def last_step(self) -> int:
        """Optimizer step of the last line that was there before the file was replaced."""
        return optimizer_step(self._lines[-1]) if self._lines else 0

    def first_new_step(self) -> int | None:
        """That of the first line that was added after it was replaced; None until then."""
        inode, now = read_whole_lines(self._file)
        self._replaced = self._replaced or inode != self._inode  # for good: the number may come back
        if not self._replaced:
            self._lines = now
            return None
        kept = count_kept(self._lines, now)
        return optimizer_step(now[kept]) if len(now) > kept else None


def read_whole_lines(file: Path) -> tuple[int, list[bytes]]:
    """The file's inode and lines; a last line that is only half there is left out. 0 and none without a file."""
    try:
        with file.open("rb") as opened:
            return os.fstat(opened.fileno()).st_ino, [line for line in opened if line.endswith(b"\n")]
    except FileNotFoundError:
        return 0, []


def optimizer_step(line: bytes) -> int:
    return json.loads(line)["optimizer_step"]


class RunWatch:
    """One start of a run's command. Every wait ends when the command does, or after `timeout_s`."""

    def __init__(self, session: Session, run_dir: Path, *, timeout_s: float) -> None:
        self._session, self._run_dir, self._timeout_s = session, run_dir, timeout_s
        self._store = LocalStore(run_dir / "checkpoints")
        self._metrics = run_dir / "metrics.jsonl"

    def follow_metrics(self) -> MetricsFollower:
        return MetricsFollower(self._metrics)

    def wait_for_step(self, optimizer_step: int, *, checkpoint: int = 0) -> float:
        """Until a step is recorded and a checkpoint as new as this is there; returns when."""
        until_s = time.monotonic() + self._timeout_s
        while self.follow_metrics().last_step() < optimizer_step or max(self._store.steps(), default=0) < checkpoint:
            self._require_running()
            self._pause(until_s, f"step {optimizer_step}")
        return time.time()

    def wait_for_comeback(
        self, marks: Sequence[Mark], begin_s: float, *, metrics: MetricsFollower, old_pids: Sequence[int] = ()
    ) -> Comeback:
        """Until the first new step after a kill; `metrics` and `old_pids` are of before it."""
        seen_s: dict[str, float | None] = {mark.name: None for mark in marks}
        until_s = time.monotonic() + self._timeout_s
        while True:
            step = metrics.first_new_step()  # before the look at the marks, which are all reached before it
            unseen = [mark for mark in marks if seen_s[mark.name] is None]
            seen_s |= {mark.name: self._look(mark, begin_s, old_pids) for mark in unseen}
            if step is not None:
                break
            self._require_running()
            self._pause(until_s, "the first step after a kill")
        return Comeback(begin_s, seen_s, time.time(), reached_step=metrics.last_step(), resumed_step=step - 1)

    def wait_for_end(self) -> None:
        until_s = time.monotonic() + self._timeout_s
        while (code := self._session.exit_code()) is None:
            self._pause(until_s, "its end")
        if code:
            self._require_running()

    def _look(self, mark: Mark, begin_s: float, old_pids: Sequence[int]) -> float | None:
        """When the mark was reached, if it was."""
        if mark.title:
            return time.time() if set(self._session.find(mark.title)) - set(old_pids) else None
        written_s = [_written_s(path) for path in self._run_dir.glob(mark.file)]
        return min((at_s for at_s in written_s if at_s > begin_s), default=None)

    def _pause(self, until_s: float, what: str) -> None:
        if time.monotonic() > until_s:
            raise RuntimeError(
                f"the run did not come to {what} within --timeout_s={self._timeout_s:g}; raise it, or look at the end of "
                f"its output:\n{self._session.tail()}"
            )
        time.sleep(POLL_S)

    def _require_running(self) -> None:
        code = self._session.exit_code()
        if code is not None:
            raise RuntimeError(
                f"`vlatune train` ended too early, with exit code {code}; its output ends with:\n{self._session.tail()}"
            )


def _written_s(path: Path) -> float:
    """0 for a file that is gone again."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


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
    metrics, workers = watch.follow_metrics(), session.find(TRAIN_WORKER_TITLE)
    if not workers:
        raise RuntimeError(
            f"no process below the driver has '{TRAIN_WORKER_TITLE}' in its title, there are "
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

    >>> round(stall_share(0.1, 0.5, save_freq=500, save_every_s=600.0), 6)  # every 250.1 s
    0.0004
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
