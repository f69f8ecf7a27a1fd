"""Measure where a worker's time goes, and its throughput.

The training loop reports what it did: `first_batch`, `waited`, `stepped`, `saved`, `validated`.
Compute is the remainder, so the parts add up to the wall clock. Time before the first batch is
`start` and counts in no rate. At log steps rank 0 gets the seconds of all workers and reports the
longest wait, because all workers wait for the slowest. The stages that prepare data run in parallel
to the loop; their seconds are summed over all workers.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

STAGES = ("decode", "transport", "collate", "copy")
"""Stages that prepare a batch for the trainer, in order."""


class CpuTimes(NamedTuple):
    """CPU seconds so far; the last two are summed over the CPUs that this process may use."""

    process_s: float
    busy_s: float
    total_s: float


def read_cpu_times(stat: Path = Path("/proc/stat")) -> CpuTimes | None:
    """Return None on systems without /proc/stat. Its fields are user nice system idle iowait irq
    softirq steal, in ticks."""
    try:
        lines, usable = stat.read_text().splitlines(), {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
    except (OSError, AttributeError):
        return None
    ticks = [[int(number) for number in fields[:8]] for name, *fields in map(str.split, lines) if name in usable]
    tick_s, idle, total = 1 / os.sysconf("SC_CLK_TCK"), sum(sum(cpu[3:5]) for cpu in ticks), sum(map(sum, ticks))
    return CpuTimes(time.process_time(), (total - idle) * tick_s, total * tick_s)


@dataclass
class _Span:
    """Accumulate counts and durations since `begin_s`."""

    begin_s: float
    cpu: CpuTimes | None = None
    wait_s: float = 0.0
    checkpoint_s: float = 0.0
    validation_s: float = 0.0
    optimizer_steps: int = 0
    samples: int = 0

    def rates(self, now_s: float, cpu: CpuTimes | None) -> dict[str, float | None]:
        wall_s, steps = now_s - self.begin_s, self.optimizer_steps
        return {
            "samples_per_s": self.samples / wall_s if wall_s > 0 else 0.0,
            "wait_share": self.wait_s / wall_s if wall_s > 0 else 0.0,
            "step_s": wall_s / steps if steps else 0.0,
            "wait_s": self.wait_s / steps if steps else 0.0,
            "other_process_share": self._other_process_share(cpu),
        }

    def _other_process_share(self, cpu: CpuTimes | None) -> float | None:
        """Return the share of the usable CPUs' time that other processes used; None if unknown."""
        if cpu is None or self.cpu is None or cpu.total_s <= self.cpu.total_s:
            return None
        own_s, busy_s, total_s = (now - then for now, then in zip(cpu, self.cpu, strict=True))
        return max(0.0, busy_s - own_s) / total_s


@dataclass
class StepMeter:
    """Compute rates since the last log line, and totals of the run.

    >>> meter = StepMeter()         # when the worker starts
    >>> start_s = meter.first_batch() # the loop begins
    >>> meter.waited(0.01); meter.stepped(8)
    >>> line = meter.take_interval() # every log_freq optimizer steps
    """

    clock: Callable[[], float] = time.perf_counter
    read_cpu: Callable[[], CpuTimes | None] = read_cpu_times
    _stages_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    _by_worker: np.ndarray | None = None

    def __post_init__(self) -> None:
        self._born_s = self.clock()
        self._started_s: float | None = None
        self._interval = self._run = _Span(self._born_s)

    def first_batch(self, stages_s: Mapping[str, float] | None = None) -> float:
        """Start the loop's clock and return the seconds until the first batch. `stages_s` are
        cumulative readings of the stage clocks."""
        assert self._started_s is None, "first_batch is called once"
        self._started_s, cpu = self.clock(), self.read_cpu()
        self._stages_s.update(stages_s or {})
        self._interval, self._run = _Span(self._started_s, cpu), _Span(self._started_s, cpu)
        return self._started_s - self._born_s

    def waited(self, seconds: float) -> None:
        """Record seconds spent waiting for data."""
        self._interval.wait_s += seconds
        self._run.wait_s += seconds

    def saved(self, seconds: float) -> None:
        """Record seconds that saving a checkpoint blocked the loop, without its background part."""
        self._run.checkpoint_s += seconds

    def validated(self, seconds: float) -> None:
        """Record seconds spent on validation."""
        self._run.validation_s += seconds

    def stepped(self, samples: int) -> None:
        """Record one optimizer step over `samples` samples."""
        for span in (self._interval, self._run):
            span.optimizer_steps += 1
            span.samples += samples

    def take_spent(self, stages_s: Mapping[str, float]) -> list[float]:
        """Return this worker's seconds since the last log step: the wait, then STAGES."""
        grown = [stages_s[stage] - self._stages_s[stage] for stage in STAGES]
        self._stages_s.update(stages_s)
        return [self._interval.wait_s, *grown]

    def take_interval(self, by_worker_s: Sequence[Sequence[float]] | None = None) -> dict[str, Any]:
        """Return rates since the last call, and start the next interval.

        `by_worker_s` has the result of `take_spent` of every worker; without it, only this worker
        counts.
        """
        now_s, cpu = self.clock(), self.read_cpu()
        if by_worker_s is not None:
            spent = np.array(by_worker_s, dtype=np.float64)
            self._by_worker = spent if self._by_worker is None else self._by_worker + spent
            self._interval.wait_s = float(spent[:, 0].max())
        rates = self._interval.rates(now_s, cpu)
        self._interval = _Span(now_s, cpu)
        return rates

    def totals(self) -> dict[str, Any]:
        """Return the rates of the run, and `time_s` by activity: start, wait, compute, checkpoint
        and validation add up to total; the data stages ran in parallel to them."""
        now_s, run, stages_s = self.clock(), self._run, np.zeros(len(STAGES))
        if self._by_worker is not None:
            run.wait_s, stages_s = float(self._by_worker[:, 0].max()), self._by_worker[:, 1:].sum(axis=0)
        start_s = (now_s if self._started_s is None else self._started_s) - self._born_s
        total_s = now_s - self._born_s
        # Callers use their own stopwatches, so the remainder may be slightly negative.
        compute_s = max(0.0, total_s - start_s - run.wait_s - run.checkpoint_s - run.validation_s)
        time_s = {
            "start": start_s,
            "wait": run.wait_s,
            "compute": compute_s,
            "checkpoint": run.checkpoint_s,
            "validation": run.validation_s,
            "total": total_s,
            **dict(zip(STAGES, stages_s.tolist(), strict=True)),
        }
        return run.rates(now_s, self.read_cpu()) | {"time_s": time_s}
