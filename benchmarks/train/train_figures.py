"""Compute rates, windows, shares and time to an error from an observed run.

Steady state is the window from a quarter of the samples until the readers are done:

    start | store fills, caches warm |        steady        | readers done: all cores compute | end
          0 %                       25 %                    98 % of the readers' CPU time
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.processes import READERS, CpuSeries, Mark, Seen

WARM_SHARE = 0.25
"""Share of samples excluded as warm-up; more than the object store holds."""
READERS_DONE = 0.98
"""Readers count as done after this share of their CPU time; idle processes use the rest."""


@dataclass(frozen=True)
class Window:
    """Interval between two marks of a run."""

    begin: Mark
    end: Mark

    @property
    def seconds(self) -> float:
        return self.end.at_s - self.begin.at_s

    @property
    def optimizer_steps(self) -> int:
        return self.end.optimizer_step - self.begin.optimizer_step


@dataclass(frozen=True)
class RunFigures:
    samples_per_s: float
    """Rate in steady state."""
    complete_samples_per_s: float
    """Rate of the complete run, including start-up."""
    first_step_s: float
    cpu_s: Mapping[str, float]
    """CPU seconds per sample in steady state, by process group."""
    steady_share: float
    """Share of the samples inside the steady-state window."""
    by_epoch: tuple[float, ...] = ()
    """Samples/s of each complete epoch, or of a part of the first one."""


def figures_of(seen: Seen, *, batch_size: int, steps_per_epoch: int) -> RunFigures:
    window = steady_window(seen.marks, seen.cpu)
    samples, steps = window.optimizer_steps * batch_size, seen.marks[-1].optimizer_step
    return RunFigures(
        samples_per_s=samples / window.seconds,
        complete_samples_per_s=steps * batch_size / (seen.marks[-1].at_s - seen.begin_s),
        first_step_s=first_step_at(seen.marks) - seen.begin_s,
        cpu_s={one: seen.cpu.spent_s(one, window.begin.at_s, window.end.at_s) / samples for one in seen.cpu.groups},
        steady_share=window.optimizer_steps / steps,
        by_epoch=tuple(batch_size * rate for rate in steps_per_s(seen.marks, steps_per_epoch)),
    )


def steps_per_s(marks: Sequence[Mark], steps_per_epoch: int) -> list[float]:
    """Return the rate of each complete epoch; of the complete run if it is shorter than an epoch.

    >>> steps_per_s([Mark(10, 10.0), Mark(20, 20.0), Mark(30, 25.0), Mark(40, 30.0)], 20)
    [1.0, 2.0]
    """
    last = marks[-1].optimizer_step
    ends = [1, *range(steps_per_epoch, last + 1, steps_per_epoch)]
    ends = ends if len(ends) > 1 else [1, last]
    return [
        (end - begin) / (seconds_at(marks, end) - seconds_at(marks, begin)) for begin, end in itertools.pairwise(ends)
    ]


def steady_window(marks: Sequence[Mark], cpu: CpuSeries) -> Window:
    """Return the steady-state window, at least one interval; short runs use their last quarter."""
    warm = [mark for mark in marks if mark.optimizer_step >= WARM_SHARE * marks[-1].optimizer_step]
    begin, *later = warm if len(warm) > 1 else marks[-2:]
    readers_end_s = cpu.when(READERS, READERS_DONE)
    fed = [mark for mark in later if mark.at_s <= readers_end_s]
    return Window(begin, (fed or later)[-1])


def first_step_at(marks: Sequence[Mark]) -> float:
    """Extrapolate the time of the first optimizer step from the first two marks.

    >>> first_step_at([Mark(10, 21.0), Mark(20, 31.0)])
    12.0
    """
    first, second = marks[:2]
    step_s = (second.at_s - first.at_s) / (second.optimizer_step - first.optimizer_step)
    return first.at_s - (first.optimizer_step - 1) * step_s


def share_of_ideal(samples_per_s: float, *, step_cpu_s: float, read_cpu_s: float, cores: int) -> float:
    """Return the rate relative to all cores doing nothing but reading and computing.

    >>> share_of_ideal(200.0, step_cpu_s=0.006, read_cpu_s=0.002, cores=2)
    0.8
    """
    return samples_per_s * (step_cpu_s + read_cpu_s) / cores


@dataclass(frozen=True)
class ErrorPoint:
    """Held-out error at an optimizer step."""

    optimizer_step: int
    error: float


def seconds_at(marks: Sequence[Mark], optimizer_step: int) -> float:
    """Interpolate the time of an optimizer step between marks."""
    known = [Mark(1, first_step_at(marks)), *marks]
    steps, moments = [mark.optimizer_step for mark in known], [mark.at_s for mark in known]
    return float(np.interp(optimizer_step, steps, moments))


def seconds_to_error(points: Sequence[ErrorPoint], marks: Sequence[Mark], wanted: float) -> float | None:
    """Interpolate the time at which the error first reached `wanted`; None if it never did."""
    at_s = [seconds_at(marks, point.optimizer_step) for point in points]
    first = first_at(points, wanted)
    if not first:  # never, or from the start
        return None if first is None else at_s[0]
    before, after = points[first - 1].error, points[first].error
    share = (before - wanted) / (before - after)
    return at_s[first - 1] + share * (at_s[first] - at_s[first - 1])


def first_at(points: Sequence[ErrorPoint], wanted: float) -> int | None:
    """Return the index of the first point with at most this error.

    >>> first_at([ErrorPoint(0, 0.9), ErrorPoint(10, 0.5)], 0.5)
    1
    """
    return next((place for place, point in enumerate(points) if point.error <= wanted), None)


def falling(points: Sequence[ErrorPoint]) -> tuple[ErrorPoint, ...]:
    """Return the isotonic regression of the errors (never rising), to ignore single lucky
    checkpoints.

    >>> [point.error for point in falling([ErrorPoint(0, 0.9), ErrorPoint(1, 0.4), ErrorPoint(2, 0.6), ErrorPoint(3, 0.3)])]
    [0.9, 0.5, 0.5, 0.3]
    """
    levels: list[list[float]] = []
    for point in points:
        levels.append([point.error])
        while len(levels) > 1 and statistics.fmean(levels[-2]) < statistics.fmean(levels[-1]):
            levels[-2:] = [levels[-2] + levels[-1]]
    errors = [statistics.fmean(level) for level in levels for _ in level]
    return tuple(ErrorPoint(point.optimizer_step, error) for point, error in zip(points, errors, strict=True))


def measured_checkpoints(count: int) -> list[int]:
    """Return the checkpoints, numbered from 1, at which the error is measured; denser at the start.

    >>> measured_checkpoints(16)
    [1, 2, 3, 4, 6, 8, 11, 16]
    >>> measured_checkpoints(5)
    [1, 2, 3, 4, 5]
    """
    steps = itertools.takewhile(lambda number: number < count, (round(2 ** (place / 2)) for place in itertools.count()))
    return sorted({*steps, count})
