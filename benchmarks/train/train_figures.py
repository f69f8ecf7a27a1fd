"""Compute rates and the time to an error from an observed run.

Steady state is from a quarter of the steps to the last one; before it, the store fills and caches
warm up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.processes import Mark, Seen

WARM_SHARE = 0.25
"""Share of steps excluded as warm-up; they take more samples than the object store holds."""


@dataclass(frozen=True)
class RunFigures:
    samples_per_s: float
    """Rate in steady state."""
    complete_samples_per_s: float
    """Rate of the complete run, including start-up."""
    first_step_s: float


def figures_of(seen: Seen, *, batch_size: int) -> RunFigures:
    marks, last = seen.marks, seen.marks[-1]
    warm = [mark for mark in marks if mark.optimizer_step >= WARM_SHARE * last.optimizer_step]
    first = (warm if len(warm) > 1 else marks[-2:])[0]
    return RunFigures(
        samples_per_s=(last.optimizer_step - first.optimizer_step) * batch_size / (last.at_s - first.at_s),
        complete_samples_per_s=last.optimizer_step * batch_size / (last.at_s - seen.begin_s),
        first_step_s=first_step_at(marks) - seen.begin_s,
    )


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


def seconds_to_error(points: Sequence[ErrorPoint], marks: Sequence[Mark], wanted: float) -> float | None:
    """Interpolate the time at which the error first reached `wanted`; None if it never did."""
    known = [Mark(1, first_step_at(marks)), *marks]
    steps, moments = [mark.optimizer_step for mark in known], [mark.at_s for mark in known]
    at_s = np.interp([point.optimizer_step for point in points], steps, moments).tolist()
    first = next((place for place, point in enumerate(points) if point.error <= wanted), None)
    if not first:  # never, or from the start
        return None if first is None else at_s[0]
    before, after = points[first - 1].error, points[first].error
    return at_s[first - 1] + (before - wanted) / (before - after) * (at_s[first] - at_s[first - 1])
