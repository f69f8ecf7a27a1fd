"""Run a command in its own session, and measure its steps and the CPU time of its processes.

Ray starts processes that may outlive the driver, lose their parent and change their title, but they
stay in the session of the command.

Training programs log a line every few optimizer steps: vlatune to metrics.jsonl, LeRobot to its
log. A step's time is when its line is seen, so the programs are not modified. Processes are
classified by all titles they ever had, because a Ray worker changes its title when idle. CPU time
of ended processes stays counted.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

POLL_S = 0.1
END_S = 30.0
"""Seconds that killed processes may take to end."""
TAIL_LINES = 15


def processes_in(session: int) -> dict[int, str]:
    """Return pid -> title of the live processes of a session."""
    titles = {}
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):  # ended
            if os.getsid(pid) == session and (process := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE:
                titles[pid] = " ".join(process.cmdline()).strip()
    return titles


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
def ends_in_order() -> Iterator[None]:
    """Convert SIGTERM and SIGHUP to KeyboardInterrupt, so that child processes are ended first."""
    if threading.current_thread() is not threading.main_thread():  # Python allows signal handlers only there
        yield
        return
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Session:
    """A command and all processes that it starts; `close` ends all of them. The command is not
    reaped before `close`, so that its session id cannot be reused."""

    def __init__(self, command: Sequence[str], output: Path, *, env: Mapping[str, str]) -> None:
        self._output = output
        self.begin_s = time.time()
        with output.open("ab") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, start_new_session=True
            )
        self.pid = self._process.pid

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def find(self, title: str) -> list[int]:
        """Return the pids of processes whose title contains `title`."""
        return [pid for pid, found in processes_in(self.pid).items() if title in found]

    def exit_code(self) -> int | None:
        """Return None while the command runs; negative numbers are signals."""
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def kill_command(self) -> None:
        """Send SIGKILL to the command only, as in a crash."""
        os.kill(self.pid, signal.SIGKILL)
        while self.exit_code() is None:
            time.sleep(0.01)

    def tail(self) -> str:
        return "\n".join(self._output.read_text(errors="replace").splitlines()[-TAIL_LINES:])

    def close(self) -> None:
        if self._process.returncode is not None:
            return
        until_s = time.monotonic() + END_S
        while left := processes_in(self.pid):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > until_s:
                raise RuntimeError(f"processes {sorted(left)} live {END_S:g} s after SIGKILL; end them")
            time.sleep(POLL_S)
        self._process.wait()


TRAINING, READERS, OTHERS = "training", "readers", "others"
"""Process groups: training; reading and decoding; Ray's processes, scheduler and driver."""
READER_TITLES = ("ray::Read", "ray::_read_blocks", "ray::MapBatches")
"""Prefixes of the titles of Ray tasks that read."""
LOADER_FLAG = "--multiprocessing-fork"
"""Part of the title of a torch DataLoader worker."""


@dataclass
class CpuMeter:
    """Measure the CPU time of a session's processes; `trainer` is part of the training process's title."""

    session: int
    trainer: str = ""
    titles: dict[int, set[str]] = field(default_factory=dict)
    at_s: list[float] = field(default_factory=list)
    """Monotonic times of the readings."""
    readings: list[Mapping[int, float]] = field(default_factory=list)
    """Cumulative CPU seconds by process."""

    def read(self) -> None:
        spent_s: dict[int, float] = {}
        for pid, title in processes_in(self.session).items():
            self.titles.setdefault(pid, set()).add(title)
            with contextlib.suppress(psutil.NoSuchProcess):  # ended
                spent_s[pid] = sum(psutil.Process(pid).cpu_times()[:2])
        self.at_s.append(time.monotonic())
        self.readings.append(spent_s)

    def cpu(self) -> "CpuSeries":
        """Return all readings by process group; an ended process keeps its last value."""
        groups = {group: np.zeros(len(self.at_s)) for group in (TRAINING, READERS, OTHERS)}
        for pid, titles in self.titles.items():
            groups[self._group(pid, titles)] += np.maximum.accumulate([one.get(pid, 0.0) for one in self.readings])
        return CpuSeries(np.array(self.at_s), groups)

    def _group(self, pid: int, titles: set[str]) -> str:
        if any(self.trainer in title for title in titles) if self.trainer else pid == self.session:
            return TRAINING
        reads = any(title.startswith(READER_TITLES) or LOADER_FLAG in title for title in titles)
        return READERS if reads else OTHERS


@dataclass(frozen=True)
class CpuSeries:
    """Cumulative CPU seconds over time, by process group."""

    at_s: np.ndarray
    groups: Mapping[str, np.ndarray]

    def spent_s(self, group: str, begin_s: float, end_s: float) -> float:
        begin, end = np.interp([begin_s, end_s], self.at_s, self.groups[group])
        return float(end - begin)

    def when(self, group: str, share: float) -> float:
        """Return the time at which a group had spent this share of its CPU time."""
        spent = self.groups[group]
        return float(self.at_s[np.searchsorted(spent, share * spent[-1])])


CPU_EVERY_S = 1.0
"""Interval of CPU readings; one takes a few milliseconds."""


@dataclass(frozen=True)
class Program:
    """A training program, and how to detect its steps."""

    command: Sequence[str]
    env: Mapping[str, str]
    output: Path
    """File for its output."""
    progress: Path
    """File with its progress; may be `output`."""
    is_mark: Callable[[bytes], bool]
    """True for lines of `progress` that appear every `log_freq` optimizer steps."""
    log_freq: int
    trainer: str = ""
    """Text in the training process's title (default: the command itself)."""
    begins_reading: Callable[[bytes], bool] = lambda line: False
    """True for the line of `progress` that appears just before the first batch is read."""


@dataclass(frozen=True)
class Mark:
    """Monotonic time at which an optimizer step was reached."""

    optimizer_step: int
    at_s: float


@dataclass(frozen=True)
class Seen:
    """Measurements of one run."""

    begin_s: float
    """Start of the command, monotonic time."""
    end_s: float
    marks: tuple[Mark, ...]
    cpu: CpuSeries
    data_begin_s: float | None = None
    """Time of the line before the first batch, if the program has such a line."""


class NewLines:
    """Return the complete lines that were added to a file since the last call."""

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
    """Run a program to its end; all its processes are ended afterwards."""
    marks: list[Mark] = []
    data_begin_s: float | None = None
    lines = NewLines(program.progress)
    begin_s = next_cpu_s = polled_s = time.monotonic()
    with Session(program.command, program.output, env=program.env) as session:
        meter = CpuMeter(session.pid, program.trainer)
        while True:
            code = session.exit_code()  # before reading, so that the last lines are not missed
            now_s = time.monotonic()
            taken = lines.take()
            new = sum(map(program.is_mark, taken))
            if data_begin_s is None and any(map(program.begins_reading, taken)):
                data_begin_s = now_s
            for number in range(1, new + 1):  # spread marks evenly since the last poll
                at_s = polled_s + (now_s - polled_s) * number / new
                marks.append(Mark((len(marks) + 1) * program.log_freq, at_s))
            polled_s = now_s
            if now_s >= next_cpu_s:
                meter.read()
                next_cpu_s = now_s + CPU_EVERY_S
            if code is not None:
                break
            if now_s - begin_s > timeout_s:
                raise RuntimeError(
                    f"{program.command[2]} did not end within {timeout_s:g} s (--timeout_s); its last lines:\n{session.tail()}"
                )
            time.sleep(POLL_S)
        if code != 0 or len(marks) < 2:
            raise RuntimeError(
                f"{program.command[2]} ended with code {code} after {len(marks)} lines of progress; its last lines:\n{session.tail()}"
            )
    return Seen(begin_s, now_s, tuple(marks), meter.cpu(), data_begin_s)
