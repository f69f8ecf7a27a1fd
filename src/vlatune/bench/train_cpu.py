"""CPU seconds of a command's processes and of its training process' threads, from outside. Linux: /proc is asked.

A process belongs to a part of the program by the titles it ever had: a Ray worker reads for a while, then idles under
another name. What a process had taken before it ended stays counted.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vlatune.bench.resume_process import processes_in

TRAINING, READERS, OTHERS = "training", "readers", "others"
"""The process with the training thread; what reads and decodes; Ray's own processes, the scheduler, and the driver."""
READER_TITLES = ("ray::Read", "ray::MapBatches", "--multiprocessing-fork")
"""Ray Data's tasks, and the workers of a torch DataLoader."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


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
        processes = {pid: cpu_s(Path(f"/proc/{pid}/stat")) for pid in found}
        threads = {int(path.parent.name): cpu_s(path) for pid in trainers for path in _thread_stats(pid)}
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

    def _is_trainer(self, pid: int) -> bool:
        if not self.trainer:
            return pid == self.session
        return any(self.trainer in title for title in self.titles[pid])


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


def cpu_s(stat: Path) -> float:
    """User and system time of a process or thread; 0 for one that has just gone."""
    try:
        after_name = stat.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(after_name[11]) + int(after_name[12])) / TICKS_PER_S


def _thread_stats(pid: int) -> list[Path]:
    try:
        return [task / "stat" for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def _grow(readings: Sequence[Mapping[int, float]]) -> dict[int, np.ndarray]:
    """Number -> its seconds at every reading: 0 before it was there, its last value after it has gone."""
    numbers = {number for one in readings for number in one}
    return {number: np.maximum.accumulate([one.get(number, 0.0) for one in readings]) for number in sorted(numbers)}
