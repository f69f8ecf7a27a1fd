"""A run from outside: how far it is, and after a kill what it waits for until it makes steps again.

Only what a run leaves for everybody to see is read: metrics.jsonl, the times of its files, the titles of its
processes. Nothing in the run knows that it is watched.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vlatune.bench.resume_process import POLL_S, Session
from vlatune.checkpoint.local_store import LocalStore

WORKER = "ray::RayTrainWorker"


@dataclass(frozen=True)
class Mark:
    """A moment of a start that can be seen from outside."""

    name: str
    file: str = ""
    """Glob below the run folder: a file that is written at this moment."""
    title: str = ""
    """Or the beginning of the title that a process gets at this moment."""


WORKERS_BEGIN = (
    Mark("Ray Train's controller has a process", title="ray::TrainController"),
    Mark("workers have processes", title=WORKER),
    Mark("rank 0 is in the training function", file="logs/stacks-*-rank-0.txt"),
    Mark("model loaded, checkpoint restored", file="logs/worker.log"),
)
AFTER_WORKER = (Mark("the driver has noticed", file="logs/failure-*.txt"), *WORKERS_BEGIN)
AFTER_DRIVER = (Mark("the driver has checked and begins", file="config.json"), *WORKERS_BEGIN)
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


@dataclass
class MetricsFollower:
    """metrics.jsonl while it grows, is replaced by its own beginning after a kill, and goes on."""

    file: Path
    lines: list[bytes] = field(default_factory=list)
    """What it held before it was replaced."""
    _inode: int | None = None

    def last_step(self) -> int:
        """Of the newest whole line; 0 before the first."""
        self.first_new_step()
        return optimizer_step(self.lines[-1]) if self.lines else 0

    def first_new_step(self) -> int | None:
        """The step of the first line that was added after the file was replaced; None until then."""
        inode, now = self._read()
        if inode is None or self._inode in (None, inode):
            self._inode, self.lines = inode, now
            return None
        kept = count_kept(self.lines, now)
        return optimizer_step(now[kept]) if len(now) > kept else None

    def _read(self) -> tuple[int | None, list[bytes]]:
        """A line that is only half there is not read."""
        try:
            with self.file.open("rb") as file:
                return os.fstat(file.fileno()).st_ino, [line for line in file if line.endswith(b"\n")]
        except FileNotFoundError:
            return None, []


def optimizer_step(line: bytes) -> int:
    return json.loads(line)["optimizer_step"]


class RunWatch:
    """One start of a run's command. Every wait ends when the command does, or after `timeout_s`."""

    def __init__(self, session: Session, run_dir: Path, *, timeout_s: float) -> None:
        self._session, self._run_dir, self._timeout_s = session, run_dir, timeout_s
        self._store = LocalStore(run_dir / "checkpoints")
        self.metrics = MetricsFollower(run_dir / "metrics.jsonl")

    def wait_for_step(self, optimizer_step: int, *, checkpoint: int = 0) -> float:
        """Until a step is recorded and a checkpoint as new as this is there; returns when."""
        until_s = time.monotonic() + self._timeout_s
        while self.metrics.last_step() < optimizer_step or max(self._store.steps(), default=0) < checkpoint:
            self._wait(until_s, f"step {optimizer_step}")
        return time.time()

    def wait_for_comeback(self, marks: Sequence[Mark], begin_s: float, *, old_pids: Sequence[int]) -> Comeback:
        """Until the first new step after a kill; `old_pids` lived before it."""
        seen_s: dict[str, float | None] = {mark.name: None for mark in marks}
        until_s = time.monotonic() + self._timeout_s
        while (step := self.metrics.first_new_step()) is None:
            for mark in marks:
                if seen_s[mark.name] is None:
                    seen_s[mark.name] = self._look(mark, begin_s, old_pids)
            self._wait(until_s, "the first step after a kill")
        reached = optimizer_step(self.metrics.lines[-1])
        return Comeback(begin_s, seen_s, time.time(), reached_step=reached, resumed_step=step - 1)

    def wait_for_end(self) -> None:
        until_s = time.monotonic() + self._timeout_s
        while self._session.exit_code() is None:
            self._wait(until_s, "the end of the run")
        self._check()

    def _look(self, mark: Mark, begin_s: float, old_pids: Sequence[int]) -> float | None:
        """When the mark was reached, if it was."""
        if mark.title:
            return time.time() if set(self._session.find(mark.title)) - set(old_pids) else None
        written_s = [path.stat().st_mtime for path in self._run_dir.glob(mark.file)]
        return min((at_s for at_s in written_s if at_s > begin_s), default=None)

    def _wait(self, until_s: float, what: str) -> None:
        self._check()
        if time.monotonic() > until_s:
            raise RuntimeError(
                f"the run did not come to {what} within --timeout_s={self._timeout_s:g}; raise it, or look at the end of "
                f"its output: {self._session.tail()}"
            )
        time.sleep(POLL_S)

    def _check(self) -> None:
        """A run that has ended well is at its last step, for which nobody waits in vain."""
        code = self._session.exit_code()
        if code:
            raise RuntimeError(
                f"`vlatune train` ended with exit code {code} in the middle of the benchmark; its output ends with: "
                f"{self._session.tail()}"
            )
