"""Where a worker's time goes, and how many samples it makes of it.

The loop tells the meter what it did: `first_batch`, `waited`, `stepped`, `saved`, `validated`. What is none of waiting,
saving and validating is compute, so the parts always add up to the wall clock. Everything before the first batch is `start` and
counts in no rate: a short run is not judged by its start-up. One meter sees one rank and one attempt. At log steps it
is told what every worker spent, and reports the one that waited longest and the one that was kept from computing most: all
others wait for them in turn. The stages that prepare data run beside the loop, on other threads and machines; their seconds
are added up over all workers and are no part of the wall clock.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vlatune.report.cpu_clocks import SPENT_CPU, UNKNOWN, CpuClocks, Reading, cpu_rates, cpu_summary, keeper, split

STAGES = ("decode", "transport", "collate", "copy")
"""What happens to a batch before the trainer has it, in this order."""
READER_RESTARTS = "reader_restarts"
SPENT = ("wait", *STAGES, *SPENT_CPU, READER_RESTARTS)
"""What a worker tells the others at a log step: seconds, and how often the process that schedules its reading began anew."""
STAGE_COLUMNS = slice(1, 1 + len(STAGES))


@dataclass
class _Span:
    """Sums over a stretch of wall time that began at `begin_s`."""

    begin_s: float
    wait_s: float = 0.0
    checkpoint_s: float = 0.0
    validation_s: float = 0.0
    optimizer_steps: int = 0
    samples: int = 0

    def rates(self, now_s: float) -> dict[str, float]:
        wall_s = now_s - self.begin_s
        return {
            "samples_per_s": self.samples / wall_s if wall_s > 0 else 0.0,
            "wait_share": self.wait_s / wall_s if wall_s > 0 else 0.0,
            "step_s": wall_s / self.optimizer_steps if self.optimizer_steps else 0.0,
            "wait_s": self.wait_s / self.optimizer_steps if self.optimizer_steps else 0.0,
        }


class StepMeter:
    """Rates of the interval since the last log line, and of the whole run.

    >>> meter = StepMeter()         # when the worker starts
    >>> start_s = meter.first_batch() # the loop begins
    >>> meter.waited(0.01); meter.stepped(8)
    >>> line = meter.take_interval() # every log_freq optimizer steps
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter, readers_here: bool = False):
        self._clock, self._readers_here = clock, readers_here
        self._cpu_clocks: CpuClocks | None = None
        self._cpu_before: Reading | None = None
        self._born_s = clock()
        self._started_s: float | None = None
        self._interval = _Span(self._born_s)
        self._run = _Span(self._born_s)
        self._stages_s: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._reader_restarts = 0
        self._by_worker: np.ndarray | None = None

    def watch_cpu(self, clocks: CpuClocks) -> None:
        """From here on the meter also says what kept the training thread; call it on that thread."""
        self._cpu_clocks = clocks

    def first_batch(self, stages_s: Mapping[str, float] | None = None) -> float:
        """The first batch is here: the loop's time begins now. Returns the seconds it took.

        `stages_s` are the readings of the stages' clocks, which only grow.
        """
        assert self._started_s is None, "first_batch is called once"
        self._started_s = self._clock()
        self._stages_s.update(stages_s or {})
        self._cpu_before = self._cpu_clocks.read() if self._cpu_clocks else None
        self._interval = _Span(self._started_s)
        self._run = _Span(self._started_s)
        return self._started_s - self._born_s

    def waited(self, seconds: float) -> None:
        """The loop stood still for data."""
        self._interval.wait_s += seconds
        self._run.wait_s += seconds

    def saved(self, seconds: float) -> None:
        """The loop stood still for a checkpoint; the background part of saving does not count."""
        self._interval.checkpoint_s += seconds
        self._run.checkpoint_s += seconds

    def validated(self, seconds: float) -> None:
        """The loop looked at held-out samples."""
        self._interval.validation_s += seconds
        self._run.validation_s += seconds

    def stepped(self, samples: int) -> None:
        """One optimizer step over this many samples is done."""
        for span in (self._interval, self._run):
            span.optimizer_steps += 1
            span.samples += samples

    def take_spent(self, stages_s: Mapping[str, float], reader_restarts: int = 0) -> list[float]:
        """This worker's part since the last log step, as SPENT names it; the arguments are counts that only grow."""
        grown = [stages_s[stage] - self._stages_s[stage] for stage in STAGES]
        self._stages_s.update(stages_s)
        anew, self._reader_restarts = reader_restarts - self._reader_restarts, reader_restarts
        return [self._interval.wait_s, *grown, *self._take_cpu().values(), float(anew)]

    def _take_cpu(self) -> dict[str, float]:
        """Seconds as SPENT_CPU names them, since the last log step."""
        if self._cpu_clocks is None or self._cpu_before is None:
            return dict.fromkeys(SPENT_CPU, UNKNOWN)
        before, self._cpu_before = self._cpu_before, self._cpu_clocks.read()
        return split(self._cpu_before - before, self._interval.wait_s, self._interval.checkpoint_s)

    def take_interval(self, by_worker_s: Sequence[Sequence[float]] | None = None) -> dict[str, Any]:
        """Rates and wait per step since the last call; the next interval begins.

        `by_worker_s` is every worker's `take_spent`; without it, this worker speaks for all.
        """
        now_s = self._clock()
        cpu: dict[str, Any] = {}
        if by_worker_s is not None:
            spent = np.array(by_worker_s, dtype=np.float64)
            self._by_worker = spent if self._by_worker is None else self._by_worker + spent
            self._interval.wait_s = float(spent[:, 0].max())
            cpu = cpu_rates(_most_hindered(spent), _decode_s(spent), readers_here=self._readers_here)
        rates = self._interval.rates(now_s)
        self._interval = _Span(now_s)
        return rates | cpu

    def totals(self) -> dict[str, Any]:
        """The same for the whole run, its counts, and `time_s` by what it was spent on.

        start, wait, compute, kept_own, kept_others (where known), checkpoint and validation add up to total; the stages ran beside them.
        """
        now_s = self._clock()
        spent = np.array([[self._run.wait_s, *[0.0] * len(STAGES), *[UNKNOWN] * len(SPENT_CPU), 0.0]])
        spent = spent if self._by_worker is None else self._by_worker
        waits_s, stages_s = spent[:, 0].tolist(), spent[:, STAGE_COLUMNS].sum(axis=0)
        slowest, hindered = replace(self._run, wait_s=max(waits_s)), _most_hindered(spent)
        return {
            **(slowest.rates(now_s) if self._started_s is not None else _Span(now_s).rates(now_s)),
            "optimizer_steps": self._run.optimizer_steps,
            "samples": self._run.samples,
            "wait_s_by_worker": waits_s,
            "time_s": self._wall_s(now_s, slowest.wait_s, hindered) | dict(zip(STAGES, stages_s.tolist(), strict=True)),
            "cpu": cpu_summary(hindered, self._cpu_clocks.num_cores) if self._cpu_clocks else None,
            "kept_by": keeper(hindered, _decode_s(spent), readers_here=self._readers_here),
            READER_RESTARTS: int(spent[:, SPENT.index(READER_RESTARTS)].sum()),
        }

    def _wall_s(self, now_s: float, wait_s: float, hindered: Mapping[str, float]) -> dict[str, float]:
        """The slowest worker's wait and the most hindered one's kept seconds need not be one worker's: computing gives way."""
        start_s = (self._started_s if self._started_s is not None else now_s) - self._born_s
        loop_s = now_s - self._born_s - start_s
        # The clock is read apart from the callers' stopwatches: rounding may leave a hair below zero.
        left_s = max(0.0, loop_s - wait_s - self._run.checkpoint_s - self._run.validation_s)
        kept_s = {name: hindered[name] for name in ("kept_own", "kept_others") if np.isfinite(hindered[name])}
        shrink = min(1.0, left_s / sum(kept_s.values())) if any(kept_s.values()) else 1.0
        kept_s = {name: seconds * shrink for name, seconds in kept_s.items()}
        return {
            "start": start_s,
            "wait": wait_s,
            "compute": left_s - sum(kept_s.values()),
            **kept_s,
            "checkpoint": self._run.checkpoint_s,
            "validation": self._run.validation_s,
            "total": start_s + loop_s,
        }


def _most_hindered(spent: np.ndarray) -> dict[str, float]:
    """SPENT_CPU of the worker that was kept from computing longest; of rank 0 where no worker knows."""
    by_name = {name: spent[:, SPENT.index(name)] for name in SPENT_CPU}
    worst = int(np.nan_to_num(by_name["kept_own"] + by_name["kept_others"], nan=-1.0).argmax())
    return {name: float(seconds[worst]) for name, seconds in by_name.items()}


def _decode_s(spent: np.ndarray) -> float:
    return float(spent[:, SPENT.index("decode")].sum())
