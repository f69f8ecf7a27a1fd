"""Where a worker's time goes, and how many samples it makes of it.

The loop tells the meter what it did: `first_batch`, `waited`, `stepped`, `saved`. What is neither waiting nor
saving is compute, so the parts always add up to the wall clock. Everything before the first batch is `start` and
counts in no rate: a short run is not judged by its start-up. One meter sees one rank and one attempt; taking the
slowest rank, and adding attempts up after a restart, is the trainer's business.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class _Span:
    """Sums over a stretch of wall time that began at `begin_s`."""

    begin_s: float
    wait_s: float = 0.0
    checkpoint_s: float = 0.0
    optimizer_steps: int = 0
    samples: int = 0

    def rates(self, now_s: float) -> dict[str, float]:
        wall_s = now_s - self.begin_s
        return {
            "samples_per_s": self.samples / wall_s if wall_s > 0 else 0.0,
            "wait_share": self.wait_s / wall_s if wall_s > 0 else 0.0,
            "step_s": wall_s / self.optimizer_steps if self.optimizer_steps else 0.0,
        }


class StepMeter:
    """Rates of the interval since the last log line, and of the whole run.

    >>> meter = StepMeter()         # when the worker starts
    >>> meter.first_batch()         # the loop begins
    >>> meter.waited(0.01); meter.stepped(8)
    >>> line = meter.take_interval() # every log_freq optimizer steps
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._born_s = clock()
        self._started_s: float | None = None
        self._interval = _Span(self._born_s)
        self._run = _Span(self._born_s)

    def first_batch(self) -> float:
        """The first batch is here: the loop's time begins now. Returns the seconds it took."""
        assert self._started_s is None, "first_batch is called once"
        self._started_s = self._clock()
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

    def stepped(self, samples: int) -> None:
        """One optimizer step over this many samples is done."""
        for span in (self._interval, self._run):
            span.optimizer_steps += 1
            span.samples += samples

    def take_interval(self) -> dict[str, float]:
        """samples_per_s, wait_share and step_s since the last call; the next interval begins."""
        now_s = self._clock()
        rates = self._interval.rates(now_s)
        self._interval = _Span(now_s)
        return rates

    def totals(self) -> dict[str, Any]:
        """The same three for the whole run, its counts, and `time_s` by what it was spent on."""
        now_s = self._clock()
        start_s = (self._started_s if self._started_s is not None else now_s) - self._born_s
        loop_s = now_s - self._born_s - start_s
        rates = self._run.rates(now_s) if self._started_s is not None else _Span(now_s).rates(now_s)
        time_s = {
            "start": start_s,
            "wait": self._run.wait_s,
            # The clock is read apart from the callers' stopwatches: rounding may leave a hair below zero.
            "compute": max(0.0, loop_s - self._run.wait_s - self._run.checkpoint_s),
            "checkpoint": self._run.checkpoint_s,
            "total": start_s + loop_s,
        }
        return {**rates, "optimizer_steps": self._run.optimizer_steps, "samples": self._run.samples, "time_s": time_s}
