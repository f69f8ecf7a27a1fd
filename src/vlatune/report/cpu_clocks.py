"""What Linux knows of the threads that train, and what follows from it: how much of the loop's time was computing.

One reading takes a system call and a short file per thread that computes, and /proc/stat; it is taken at log steps, on the
training thread, by no thread of its own. What the system does not tell is NaN, never a zero that nobody measured. CPU
seconds come from the threads' own clocks, which are exact at the moment of the call; the counters of /proc/self/task lag
by a tick, except for the run queue's, which nothing else has.

What follows is pure. The training thread is on a core, ready without a core, or asleep. Ready without a core is lost, and
the kernel counts it. Asleep, beside what the loop's stopwatches know (data, checkpoints), is a wait for the interpreter's
lock, a barrier, a peer or the device: it is charged to the process's other threads up to the CPU seconds that they took, and
no further: `kept` rather says too little than too much. On an accelerator all this holds for the thread that launches; the
device works off its queue meanwhile and need not have noticed, so there `kept` is the most that was lost. Trials:
docs/performance.md.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

UNKNOWN = math.nan
TURN_TAKERS = ("pt_autograd", "pt_gloo")
"""torch's names of threads for which the training thread waits: backward on an accelerator, the exchange of gradients on
CPUs."""
TEAM_LOOKS = 8
"""Of about 8 ms each; a foreign pool spun for 25 ms after it was made."""


@dataclass(frozen=True)
class ThreadTimes:
    cpu_s: float = 0.0
    queued_s: float = 0.0
    """Ready to run, and without a core."""
    runs: float = 0.0
    """How often it came to run."""

    def __add__(self, other: "ThreadTimes") -> "ThreadTimes":
        return ThreadTimes(self.cpu_s + other.cpu_s, self.queued_s + other.queued_s, self.runs + other.runs)

    def __sub__(self, other: "ThreadTimes") -> "ThreadTimes":
        return ThreadTimes(self.cpu_s - other.cpu_s, self.queued_s - other.queued_s, self.runs - other.runs)


NOT_TOLD = ThreadTimes(UNKNOWN, UNKNOWN, UNKNOWN)


@dataclass(frozen=True)
class Reading:
    """All clocks at one moment; each only grows, so that differences are what counts."""

    wall_s: float
    process_s: float
    """CPU seconds of all threads of the process, living or not."""
    training: ThreadTimes
    turn_takers: ThreadTimes
    """Threads that work while the training thread waits for them, added up."""
    team: tuple[ThreadTimes, ...]
    """Threads that compute together with the training thread."""
    idle_cpu_s: float
    """Seconds that the CPUs this process may use were idle, added up."""
    all_cpu_s: float
    """The same, idle or not."""

    def __sub__(self, before: "Reading") -> "Reading":
        return Reading(
            self.wall_s - before.wall_s,
            self.process_s - before.process_s,
            self.training - before.training,
            self.turn_takers - before.turn_takers,
            tuple(now - then for now, then in zip(self.team, before.team, strict=True)),
            self.idle_cpu_s - before.idle_cpu_s,
            self.all_cpu_s - before.all_cpu_s,
        )


class CpuClocks:
    """The clocks of the thread that makes this object, and of the `team` that computes with it; None: not known which."""

    def __init__(self, team: Collection[int] | None = (), *, proc: Path = Path("/proc")) -> None:
        self._training, self._team, self._proc = threading.get_native_id(), team, proc
        self._cpus = usable_cpus()
        self._names: dict[int, str] = {}
        self._last: dict[int, ThreadTimes] = {}

    @property
    def num_cores(self) -> int:
        return len(self._cpus)

    def read(self) -> Reading:
        """Call it on the thread that made this object."""
        idle_cpu_s, all_cpu_s = self._machine()
        return Reading(
            time.perf_counter(),
            time.process_time(),
            ThreadTimes(time.thread_time(), *self._queued(self._training)),
            sum((self._times(thread) for thread in self._turn_takers()), ThreadTimes()),
            (NOT_TOLD,) if self._team is None else tuple(self._times(thread) for thread in self._team),
            idle_cpu_s,
            all_cpu_s,
        )

    def _times(self, thread: int) -> ThreadTimes:
        """A thread that has ended keeps its last times."""
        try:
            self._last[thread] = ThreadTimes(thread_cpu_s(thread), *self._queued(thread))
        except OSError:
            self._last.setdefault(thread, NOT_TOLD)
        return self._last[thread]

    def _queued(self, thread: int) -> tuple[float, float]:
        """(seconds, runs): second and third number of schedstat. A kernel that does not count writes three zeros."""
        try:
            _, queued_ns, runs = (self._proc / f"self/task/{thread}/schedstat").read_text().split()
        except (OSError, ValueError):
            return UNKNOWN, UNKNOWN
        return (int(queued_ns) / 1e9, int(runs)) if int(runs) else (UNKNOWN, UNKNOWN)

    def _turn_takers(self) -> list[int]:
        """They start with the first backward pass, so each reading looks for new threads; names are read once."""
        for thread in threads_of_process(self._proc):
            if thread not in self._names:
                try:
                    self._names[thread] = (self._proc / f"self/task/{thread}/comm").read_text()
                except OSError:  # ended meanwhile
                    continue
        return [thread for thread, name in self._names.items() if name.startswith(TURN_TAKERS)]

    def _machine(self) -> tuple[float, float]:
        """(idle, all) CPU seconds of the usable CPUs; fields of a line: user nice system idle iowait irq softirq steal."""
        try:
            lines = (self._proc / "stat").read_text().splitlines()
            ticks_per_s = os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError):
            return UNKNOWN, UNKNOWN
        counts = {name: [int(n) for n in ticks[:8]] for name, *ticks in map(str.split, lines) if name[:3] == "cpu"}
        mine = [counts[f"cpu{cpu}"] for cpu in self._cpus if f"cpu{cpu}" in counts]
        if not mine:
            return UNKNOWN, UNKNOWN
        return sum(sum(cpu[3:5]) for cpu in mine) / ticks_per_s, sum(map(sum, mine)) / ticks_per_s


def usable_cpus() -> list[int]:
    """Numbers of the CPUs that this process may use; all, where the system has no affinity."""
    known = getattr(os, "sched_getaffinity", None)
    return sorted(known(0)) if known else list(range(os.cpu_count() or 1))


def threads_of_process(proc: Path = Path("/proc")) -> set[int]:
    """Native ids; empty where there is no /proc."""
    try:
        return {int(task.name) for task in (proc / "self/task").iterdir()}
    except OSError:
        return set()


def thread_cpu_s(thread: int) -> float:
    """CPU seconds of any thread of this process by its native id, as Linux numbers such clocks (pthread_getcpuclockid)."""
    return time.clock_gettime((~thread << 3) | 6)


def find_team(parallel_region: Callable[[], object], size: int) -> list[int] | None:
    """The `size` threads that work, beside the calling one, each time that `parallel_region` runs; None if too few do.

    Threads of Python's are left out: those of an OpenMP pool are not. It need not be known whether the pool was there
    before. Several looks, since other pools spin for some milliseconds after they were made: torch.set_num_threads makes one.
    """
    grown_s = [_grown_s(parallel_region) for _ in range(TEAM_LOOKS)]
    least_s = {thread: min(look.get(thread, 0.0) for look in grown_s) for thread in grown_s[-1]}
    busiest = sorted((thread for thread in least_s if least_s[thread] > 0), key=least_s.__getitem__, reverse=True)
    return busiest[:size] if len(busiest) >= size else None


def _grown_s(parallel_region: Callable[[], object]) -> dict[int, float]:
    """CPU seconds that each native thread took while `parallel_region` ran."""
    before_s = _native_threads_cpu_s()
    parallel_region()
    return {thread: cpu_s - before_s.get(thread, 0.0) for thread, cpu_s in _native_threads_cpu_s().items()}


def _native_threads_cpu_s() -> dict[int, float]:
    found: dict[int, float] = {}
    for thread in threads_of_process() - {one.native_id for one in threading.enumerate()}:
        try:
            found[thread] = thread_cpu_s(thread)
        except OSError:  # ended meanwhile
            continue
    return found


SPENT_CPU = (
    "loop",
    "train_thread",
    "compute_threads",
    "other_threads",
    "run_queue_wait",
    "kept_own",
    "kept_others",
    "idle_cpu",
    "all_cpu",
)
"""Seconds of a worker between two log steps; NaN where the system does not tell."""
HANDOVER_S = 20e-6
"""A thread that is woken, or hands its core to another of its team, queues this long: 15 and 17 us a run were seen where cores
were free, 50 to 3,000 us where they were contended."""
MOVERS_SHARE = 0.05
"""Of a core, taken by threads that move batches and hold the interpreter's lock only for moments: not charged."""
READERS_PART = 0.5
"""Readers are named as those who kept the trainer where they account for this part of what other processes took."""

Keeper = Literal["own process", "readers", "other load"]


def split(spent: Reading, wait_s: float, checkpoint_s: float) -> dict[str, float]:
    """SPENT_CPU of an interval: `spent` is the difference of two readings, the others are stopwatches of the loop."""
    compute_threads_s = spent.turn_takers.cpu_s + sum(one.cpu_s for one in spent.team)
    other_s = _at_least_zero(spent.process_s - spent.training.cpu_s - compute_threads_s)
    computing_s = _at_least_zero(spent.wall_s - wait_s - checkpoint_s)
    foreign_s = _at_least_zero(spent.all_cpu_s - spent.idle_cpu_s - spent.process_s)
    own_s, others_s = _kept(spent, computing_s, other_s, foreign_s)
    return {
        "loop": spent.wall_s,
        "train_thread": spent.training.cpu_s,
        "compute_threads": compute_threads_s,
        "other_threads": other_s,
        "run_queue_wait": spent.training.queued_s,
        "kept_own": own_s,
        "kept_others": others_s,
        "idle_cpu": spent.idle_cpu_s,
        "all_cpu": spent.all_cpu_s,
    }


def cpu_summary(spent: Mapping[str, float], num_cores: int) -> dict[str, float | None]:
    """What summary.json says under "cpu"."""
    named = {f"{name}_s": _known(spent[name]) for name in SPENT_CPU[1:7]}
    return named | {
        "loop_s": _known(spent["loop"]),
        "idle_share": _ratio(spent["idle_cpu"], spent["all_cpu"]),
        "cores": num_cores,
    }


def cpu_rates(spent: Mapping[str, float], decode_s: float, *, readers_here: bool) -> dict[str, float | str | None]:
    """What a line of metrics.jsonl says."""
    kept_s = spent["kept_own"] + spent["kept_others"]
    return {
        "other_threads_share": _ratio(spent["other_threads"], spent["loop"]),
        "kept_share": _ratio(kept_s, spent["loop"]),
        "kept_by": keeper(spent, decode_s, readers_here=readers_here),
        "idle_share": _ratio(spent["idle_cpu"], spent["all_cpu"]),
    }


def keeper(spent: Mapping[str, float], decode_s: float, *, readers_here: bool) -> Keeper | None:
    """Who kept the training thread most; None where that is not known, or nobody did.

    `decode_s` are the readers' seconds in the same stretch. They are a stopwatch's, so that readers who are kept from
    decoding count in full.
    """
    if not spent["kept_own"] + spent["kept_others"] > 0:
        return None
    if spent["kept_own"] >= spent["kept_others"]:
        return "own process"
    took_s = sum(spent[name] for name in ("train_thread", "compute_threads", "other_threads"))
    foreign_s = spent["all_cpu"] - spent["idle_cpu"] - took_s
    return "readers" if readers_here and decode_s >= READERS_PART * foreign_s else "other load"


def _kept(spent: Reading, computing_s: float, other_s: float, foreign_s: float) -> tuple[float, float]:
    """Seconds in which the step did not go on: through this process's other threads, through other processes.

    Threads of a team meet at barriers all the time, so the step goes on only while all of them run: the product of their
    shares. Their CPU seconds per step would say nothing, as whoever waits at a barrier burns CPU.
    """
    line, turns = spent.training, spent.turn_takers
    asleep_s = _at_least_zero(computing_s - line.cpu_s - line.queued_s - turns.cpu_s - turns.queued_s)
    if computing_s <= 0:
        return 0.0, 0.0
    charged_s = _at_least_zero(other_s - MOVERS_SHARE * computing_s)
    locked_s = min(asleep_s, charged_s) if math.isfinite(asleep_s + charged_s) else math.nan
    going_share = _share(computing_s - locked_s - _held_s(line) - _held_s(turns), computing_s)
    for one in spent.team:
        going_share *= _share(computing_s - _held_s(one), computing_s)
    queued_s = _at_least_zero(computing_s * (1 - going_share) - locked_s)
    took_s = other_s + foreign_s
    own_part = other_s / took_s if took_s else 0.0
    return locked_s + queued_s * own_part, queued_s * (1 - own_part)


def _held_s(times: ThreadTimes) -> float:
    """Seconds that a thread queued behind others, without what it would have queued alone."""
    return _at_least_zero(times.queued_s - times.runs * HANDOVER_S)


def _at_least_zero(seconds: float) -> float:
    """Clocks are read one after the other, and some lag by a tick. NaN stays NaN, which max() would hide."""
    return seconds if not seconds < 0 else 0.0


def _share(part_s: float, whole_s: float) -> float:
    return _at_least_zero(part_s) / whole_s


def _known(seconds: float) -> float | None:
    return None if math.isnan(seconds) else seconds


def _ratio(part: float, whole: float) -> float | None:
    return None if math.isnan(part / whole if whole else math.nan) else part / whole
