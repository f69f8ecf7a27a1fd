"""A command in a session of its own: who belongs to it, when it made which step, who used the cores, and the end of all.

Ray starts a dozen processes below a driver, and some outlive it for seconds. They may lose their parent and change
their title, but they stay in the session that the command was started in.

A training program says in a file that it goes on, a line every so many optimizer steps: ours in metrics.jsonl, LeRobot's in
its log. The moment a line is seen is the moment of its step; nothing in the programs is changed for it. A process belongs
to a part of the program by the titles it ever had: a Ray worker reads for a while, then idles under another name. What a
process had taken before it ended stays counted.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

POLL_S = 0.1
END_S = 30.0
"""How long killed processes may take to be gone."""
TAIL_LINES = 15


def processes_in(session: int) -> dict[int, str]:
    """Pid -> title of what lives in a session, in the order of pids; the dead that nobody waited for are left out."""
    titles = {}
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):  # gone meanwhile
            if os.getsid(pid) == session and (process := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE:
                titles[pid] = " ".join(process.cmdline()).strip()
    return titles


@contextmanager
def ends_in_order() -> Iterator[None]:
    """Inside, a request to end (SIGTERM, a closed terminal) is a KeyboardInterrupt: what was started is ended first."""
    if threading.current_thread() is not threading.main_thread():  # python allows handlers there only
        yield
        return
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Session:
    """One start of a command, and everything that it starts in turn; `close` ends all of them.

    The command's own process is not waited for before that: so its number stays taken, and no stranger's session can
    have it.
    """

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
        """Pids of the processes that have this in their title."""
        return [pid for pid, found in processes_in(self.pid).items() if title in found]

    def exit_code(self) -> int | None:
        """None while the command runs; below 0 the signal that ended it."""
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def kill_command(self) -> None:
        """SIGKILL to the command alone; what it started is left as a crash would leave it."""
        os.kill(self.pid, signal.SIGKILL)
        while self.exit_code() is None:
            time.sleep(0.01)

    def tail(self) -> str:
        """The last lines of its output."""
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
                raise RuntimeError(f"processes {sorted(left)} live {END_S:g} s after SIGKILL; end them by hand")
            time.sleep(POLL_S)
        self._process.wait()


TRAINING, READERS, OTHERS = "training", "readers", "others"
"""The process with the training thread; what reads and decodes; Ray's own processes, the scheduler, and the driver."""
READER_TITLES = ("ray::Read", "ray::MapBatches", "--multiprocessing-fork")
"""Ray Data's tasks, and the workers of a torch DataLoader."""


@dataclass(frozen=True)
class Reading:
    """CPU seconds so far."""

    at_s: float
    """By the monotonic clock."""
    processes: Mapping[int, float]
    threads: Mapping[int, float]
    """Of the training process."""


@dataclass
class CpuMeter:
    """Reads the processes of one session. `trainer` is in the title of the training process; empty for the command itself."""

    session: int
    trainer: str = ""
    titles: dict[int, set[str]] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)

    def read(self) -> None:
        found = processes_in(self.session)
        for pid, title in found.items():
            self.titles.setdefault(pid, set()).add(title)
        trainers = [pid for pid in found if self._is_trainer(pid)]
        processes: dict[int, float] = {}
        threads: dict[int, float] = {}
        for pid in found:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just gone
                process = psutil.Process(pid)
                processes[pid] = sum(process.cpu_times()[:2])
                if pid in trainers:
                    threads |= {one.id: one.user_time + one.system_time for one in process.threads()}
        self.readings.append(Reading(time.monotonic(), processes, threads))

    def cpu(self) -> "CpuSeries":
        """All readings, by part."""
        parts = {pid: TRAINING if self._is_trainer(pid) else part_of(titles) for pid, titles in self.titles.items()}
        at_s = np.array([one.at_s for one in self.readings])
        by_pid = _grow([one.processes for one in self.readings])
        zero = np.zeros(len(at_s))
        by_part = {
            part: sum((seconds for pid, seconds in by_pid.items() if parts[pid] == part), zero)
            for part in (TRAINING, READERS, OTHERS)
        }
        return CpuSeries(at_s, by_part, _grow([one.threads for one in self.readings]))

    def pin(self, cores: "Cores") -> None:
        """The thread that trains, which has taken the most of its process so far, to its core, and every other thread of every
        process that was read to the rest; what they start later begins where they are.
        """
        spent_s = self.readings[-1].threads
        for pid in self.titles:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                threads = [thread.id for thread in psutil.Process(pid).threads()]
                busiest = max(threads, key=lambda one: spent_s.get(one, 0.0)) if self._is_trainer(pid) else None
                for thread in threads:
                    os.sched_setaffinity(thread, cores.training if thread == busiest else cores.rest)

    def _is_trainer(self, pid: int) -> bool:
        if not self.trainer:
            return pid == self.session
        return any(self.trainer in title for title in self.titles[pid])


@dataclass(frozen=True)
class Cores:
    """Who runs where."""

    training: frozenset[int]
    """Of the thread that trains."""
    rest: frozenset[int]
    """Of all others, of its own process and of its session."""


def split_cores(usable: Iterable[int]) -> Cores:
    """One core to train on, the others for the rest.

    >>> split_cores([4, 2, 3]).training
    frozenset({2})
    """
    first, *others = sorted(usable)
    if not others:
        raise ValueError("--pin=true: this process may use one core alone, and readers need another; leave it out")
    return Cores(frozenset([first]), frozenset(others))


def run_on(command: Sequence[str], env: Mapping[str, str], cores: frozenset[int] | None) -> str:
    """What a command that ends well prints; on these cores from its beginning, or wherever it likes."""
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        if cores is not None:
            os.sched_setaffinity(process.pid, cores)  # it has one thread yet
        output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{command[2]} ended with code {process.returncode}; its words are above")
    return output


@dataclass(frozen=True)
class CpuSeries:
    """CPU seconds at moments, which only grow."""

    at_s: np.ndarray
    parts: Mapping[str, np.ndarray]
    threads: Mapping[int, np.ndarray]
    """Of the training process."""

    def spent_s(self, part: str, begin_s: float, end_s: float) -> float:
        return self._between(self.parts[part], begin_s, end_s)

    def threads_spent_s(self, begin_s: float, end_s: float) -> list[float]:
        """Of every thread of the training process, the busiest first."""
        return sorted((self._between(one, begin_s, end_s) for one in self.threads.values()), reverse=True)

    def when(self, part: str, share: float) -> float:
        """The moment at which a part had spent this share of all its CPU time."""
        spent = self.parts[part]
        return float(self.at_s[np.searchsorted(spent, share * spent[-1])])

    def _between(self, spent: np.ndarray, begin_s: float, end_s: float) -> float:
        begin, end = np.interp([begin_s, end_s], self.at_s, spent)
        return float(end - begin)


def part_of(titles: set[str]) -> str:
    """Of a process that does not train."""
    reads = any(title.startswith(READER_TITLES[:2]) or READER_TITLES[2] in title for title in titles)
    return READERS if reads else OTHERS


def _grow(readings: Sequence[Mapping[int, float]]) -> dict[int, np.ndarray]:
    """Number -> its seconds at every reading: 0 before it was there, its last value after it has gone."""
    numbers = {number for one in readings for number in one}
    return {number: np.maximum.accumulate([one.get(number, 0.0) for one in readings]) for number in sorted(numbers)}


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


def watch(program: Program, *, timeout_s: float, cores: Cores | None = None) -> Seen:
    """Run it to its end. Whatever it started is gone afterwards.

    With `cores` everything is pinned from the first mark on: before it, programs look how many cores there are.
    """
    marks: list[Mark] = []
    lines = NewLines(program.progress)
    begin_s = next_cpu_s = looked_s = time.monotonic()
    with Session(program.command, program.output, env=program.env) as session:
        meter = CpuMeter(session.pid, program.trainer)
        while True:
            code = session.exit_code()  # asked first: what was written before the end is still read
            now_s = time.monotonic()
            new = sum(map(program.is_mark, lines.take()))
            for number in range(1, new + 1):  # those of one look are spread over the time since the last
                at_s = looked_s + (now_s - looked_s) * number / new
                marks.append(Mark((len(marks) + 1) * program.log_freq, at_s))
            looked_s = now_s
            if now_s >= next_cpu_s:
                meter.read()
                if cores is not None and marks:
                    meter.pin(cores)
                next_cpu_s = now_s + CPU_EVERY_S
            if code is not None:
                break
            _check_time(now_s - begin_s, timeout_s, program, session)
            time.sleep(LOOK_EVERY_S)
        _check_end(code, marks, program, session)
    return Seen(begin_s, now_s, tuple(marks), meter.cpu())


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
