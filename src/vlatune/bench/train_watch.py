"""A training program in a process of its own, watched from outside: when which step was made, and who used the cores.

Every program says in a file that it goes on, a line every so many optimizer steps: ours in metrics.jsonl, LeRobot's in
its log. The moment a line is seen is the moment of its step (lines seen at one look share the time since the look
before); nothing in the programs is changed for it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlatune.bench.resume_process import Session
from vlatune.bench.train_cpu import CpuMeter, CpuSeries

LOOK_EVERY_S = 0.1
CPU_EVERY_S = 1.0
"""Reading all processes' counters takes a few milliseconds."""


@dataclass(frozen=True)
class Program:
    """A training program, and how to see its steps."""

    command: Sequence[str]
    env: Mapping[str, str]
    output: Path
    """Where what it prints goes."""
    progress: Path
    """The file in which it says that it goes on; may be `output`."""
    is_mark: Callable[[bytes], bool]
    """Is this line of `progress` one that comes every `log_freq` optimizer steps?"""
    log_freq: int
    trainer: str = ""
    """In the title of the process that trains; empty for the command itself."""


@dataclass(frozen=True)
class Mark:
    """So many optimizer steps were made at this moment of the monotonic clock."""

    optimizer_step: int
    at_s: float


@dataclass(frozen=True)
class Seen:
    """What was seen of one run."""

    begin_s: float
    """The command's start, by the monotonic clock as all moments here."""
    end_s: float
    marks: tuple[Mark, ...]
    cpu: CpuSeries


class NewLines:
    """The whole lines of a file that were not there at the last look."""

    def __init__(self, file: Path) -> None:
        self._file, self._read, self._rest = file, 0, b""

    def take(self) -> list[bytes]:
        if not self._file.exists():
            return []
        with self._file.open("rb") as opened:
            opened.seek(self._read)
            new = opened.read()
        self._read += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        return lines


def watch(program: Program, *, timeout_s: float) -> Seen:
    """Run it to its end. Whatever it started is gone afterwards."""
    marks: list[Mark] = []
    lines = NewLines(program.progress)
    begin_s = next_cpu_s = looked_s = time.monotonic()
    with Session(program.command, program.output, env=program.env) as session:
        meter = CpuMeter(session.pid, program.trainer)
        while True:
            code = session.exit_code()  # asked first: what was written before the end is still read
            now_s = time.monotonic()
            new = sum(map(program.is_mark, lines.take()))
            marks += new_marks(len(marks), new, program.log_freq, looked_s, now_s)
            looked_s = now_s
            if now_s >= next_cpu_s:
                meter.read()
                next_cpu_s = now_s + CPU_EVERY_S
            if code is not None:
                break
            _check_time(now_s - begin_s, timeout_s, program, session)
            time.sleep(LOOK_EVERY_S)
        _check_end(code, marks, program, session)
    return Seen(begin_s, now_s, tuple(marks), meter.cpu())


def new_marks(seen: int, new: int, log_freq: int, looked_s: float, now_s: float) -> list[Mark]:
    """Of lines that came since the last look, no two at one moment: rates are steps by seconds.

    >>> new_marks(1, 2, 10, 4.0, 5.0)
    [Mark(optimizer_step=20, at_s=4.5), Mark(optimizer_step=30, at_s=5.0)]
    """
    return [Mark((seen + k) * log_freq, looked_s + k / new * (now_s - looked_s)) for k in range(1, new + 1)]


def _check_time(passed_s: float, timeout_s: float, program: Program, session: Session) -> None:
    if passed_s > timeout_s:
        raise RuntimeError(
            f"{program.command[2]} was not done after {timeout_s:g} s (--timeout_s); its last words:\n{session.tail()}"
        )


def _check_end(code: int, marks: Sequence[Mark], program: Program, session: Session) -> None:
    if code != 0 or len(marks) < 2:
        raise RuntimeError(
            f"{program.command[2]} ended with code {code} after {len(marks)} lines of progress; its last words:\n{session.tail()}"
        )
