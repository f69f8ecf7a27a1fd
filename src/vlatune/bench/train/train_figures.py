"""What follows from a run that was watched: rates, windows, shares, seconds to an error. Pure.

Steady state is the window from a quarter of the samples to the moment at which the readers were through with theirs:

    start | store fills, caches warm |        steady        | readers have ended: all cores compute | end
          0 %                       25 %                    98 % of the readers' CPU time
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vlatune.bench.processes import OTHERS, READERS, TRAINING, CpuSeries, Mark, Seen

WARM_SHARE = 0.25
"""Of the samples, before which nothing counts: by then more was consumed than the store can hold."""
PARTS = 10
READERS_DONE = 0.98
"""Share of their CPU time after which readers count as done; what idle processes take is less than the rest."""


@dataclass(frozen=True)
class Window:
    """From one mark of a run to another."""

    begin: Mark
    end: Mark

    @property
    def seconds(self) -> float:
        return self.end.at_s - self.begin.at_s

    @property
    def optimizer_steps(self) -> int:
        return self.end.optimizer_step - self.begin.optimizer_step


@dataclass(frozen=True)
class CpuPerSample:
    """CPU seconds per sample in steady state, by part."""

    compute_s: float
    """The training thread and its pool."""
    other_threads_s: float
    """All other threads of the training process."""
    readers_s: float
    others_s: float
    """Ray's own processes, the scheduler, and the driver."""


@dataclass(frozen=True)
class RunFigures:
    samples_per_s: float
    """In steady state."""
    whole_samples_per_s: float
    """All samples by all seconds, the start included."""
    first_step_s: float
    cpu: CpuPerSample
    other_threads_share: float
    """CPU time of the training process' other threads, in cores."""
    steady_share: float
    """Share of the samples that lies in the window."""
    slowest_over_fastest: float
    """Of the tenths of the run, from its first mark to its last."""


def figures_of(seen: Seen, *, batch_size: int, compute_threads: int) -> RunFigures:
    window = steady_window(seen.marks, seen.cpu)
    samples = window.optimizer_steps * batch_size
    compute_s, rest_s = split_threads(seen.cpu, window, compute_threads)
    readers_s, others_s = (seen.cpu.spent_s(part, window.begin.at_s, window.end.at_s) for part in (READERS, OTHERS))
    steps = seen.marks[-1].optimizer_step
    return RunFigures(
        samples_per_s=samples / window.seconds,
        whole_samples_per_s=steps * batch_size / (seen.marks[-1].at_s - seen.begin_s),
        first_step_s=first_step_at(seen.marks) - seen.begin_s,
        cpu=CpuPerSample(compute_s / samples, rest_s / samples, readers_s / samples, others_s / samples),
        other_threads_share=rest_s / window.seconds,
        steady_share=window.optimizer_steps / steps,
        slowest_over_fastest=slowest_over_fastest(seen.marks),
    )


def steady_window(marks: Sequence[Mark], cpu: CpuSeries) -> Window:
    """Never shorter than one interval: a run too short for a steady state is measured over its last quarter at least."""
    warm = [mark for mark in marks if mark.optimizer_step >= WARM_SHARE * marks[-1].optimizer_step]
    begin, *later = warm if len(warm) > 1 else marks[-2:]
    readers_end_s = cpu.when(READERS, READERS_DONE)
    fed = [mark for mark in later if mark.at_s <= readers_end_s]
    return Window(begin, (fed or later)[-1])


def slowest_over_fastest(marks: Sequence[Mark]) -> float:
    """Rates of the tenths of a run, each from a mark to a mark.

    >>> slowest_over_fastest([Mark(10, 1.0), Mark(20, 2.0), Mark(30, 4.0)])
    0.5
    """
    places = np.unique(np.linspace(0, len(marks) - 1, PARTS + 1).round().astype(int))
    steps = np.diff([marks[place].optimizer_step for place in places])
    rates = steps / np.diff([marks[place].at_s for place in places])
    return float(rates.min() / rates.max())


def first_step_at(marks: Sequence[Mark]) -> float:
    """The moment of the first optimizer step, from the first two marks.

    >>> first_step_at([Mark(10, 21.0), Mark(20, 31.0)])
    12.0
    """
    first, second = marks[:2]
    step_s = (second.at_s - first.at_s) / (second.optimizer_step - first.optimizer_step)
    return first.at_s - (first.optimizer_step - 1) * step_s


def split_threads(cpu: CpuSeries, window: Window, compute_threads: int) -> tuple[float, float]:
    """CPU seconds of the training thread with its pool, and of the process' other threads.

    From outside threads have no names: as many as compute are the busiest ones.
    """
    spent = cpu.threads_spent_s(window.begin.at_s, window.end.at_s)
    whole_s = cpu.spent_s(TRAINING, window.begin.at_s, window.end.at_s)
    compute_s = sum(spent[:compute_threads])
    return compute_s, max(0.0, whole_s - compute_s)


def split_as_told(figures: RunFigures, told: Mapping[str, float]) -> RunFigures:
    """The training process' CPU time split as the run itself tells (`cpu` in summary.json): it knows its threads by name."""
    compute_s, other_s = told["train_thread_s"] + told["compute_threads_s"], told["other_threads_s"]
    whole_s = figures.cpu.compute_s + figures.cpu.other_threads_s
    share = other_s / (compute_s + other_s)
    cpu = replace(figures.cpu, compute_s=(1 - share) * whole_s, other_threads_s=share * whole_s)
    return replace(figures, cpu=cpu, other_threads_share=other_s / told["loop_s"])


def break_even_epochs(plain: Sequence[RunFigures], kept: Sequence[RunFigures], epoch_samples: int) -> float | None:
    """After how many epochs kept features have made up for the later first step; None where a step gains nothing."""
    plain_s, kept_s = (statistics.median(1 / run.samples_per_s for run in runs) for runs in (plain, kept))
    later_s = [statistics.median(run.first_step_s for run in runs) for runs in (plain, kept)]
    if kept_s >= plain_s:
        return None
    return max(0.0, later_s[1] - later_s[0]) / (epoch_samples * (plain_s - kept_s))


@dataclass(frozen=True)
class Alone:
    """What a sample costs where nothing else runs."""

    step_wall_s: float
    step_cpu_s: float
    read_cpu_s: float


def share_of_ideal(samples_per_s: float, alone: Alone, cores: int) -> float:
    """Of the rate at which all cores do nothing but reading and computing, at the cost that both have alone.

    >>> share_of_ideal(200.0, Alone(0.003, 0.006, 0.002), cores=2)
    0.8
    """
    return samples_per_s * (alone.step_cpu_s + alone.read_cpu_s) / cores


def share_of_predicted(samples_per_s: float, alone: Alone, cores: int, *, pinned: bool = False) -> float:
    """Of what the parts' own figures allow together: the step is never faster than alone, with the threads that it has.
    `pinned`: it has one core to itself, and reading the others.

    >>> share_of_predicted(200.0, Alone(0.004, 0.004, 0.001), cores=2)
    0.8
    """
    read_s = alone.read_cpu_s / (cores - 1) if pinned else (alone.step_cpu_s + alone.read_cpu_s) / cores
    return samples_per_s * max(alone.step_wall_s, read_s)


def step_in_run_s(metrics: Sequence[Mapping[str, Any]], window: Window) -> float:
    """Seconds of an optimizer step without its wait for data: the median of the window's log lines."""
    begin, end = window.begin.optimizer_step, window.end.optimizer_step
    inside = [line for line in metrics if begin < line["optimizer_step"] <= end]
    return statistics.median(line["step_s"] - line["wait_s"] for line in inside)


def sharing_explains(alone: Alone, cpu: CpuPerSample, cores: int, *, pinned: bool = False) -> float:
    """How much longer than alone a step must take on cores that also do all the rest: `step_in_run_over_alone` at best.
    `pinned`: nothing else is on the step's core.

    >>> round(sharing_explains(Alone(0.004, 0.006, 0.002), CpuPerSample(0.006, 0.0, 0.003, 0.001), cores=2), 3)
    1.25
    """
    if pinned:
        return 1.0
    work_s = alone.step_cpu_s + cpu.other_threads_s + cpu.readers_s + cpu.others_s
    return max(1.0, work_s / cores / alone.step_wall_s)


@dataclass(frozen=True)
class ErrorPoint:
    """Held-out error of the weights after so many optimizer steps."""

    optimizer_step: int
    error: float


def seconds_at(marks: Sequence[Mark], optimizer_step: int) -> float:
    """The moment of an optimizer step, between the marks."""
    known = [Mark(1, first_step_at(marks)), *marks]
    steps, moments = [mark.optimizer_step for mark in known], [mark.at_s for mark in known]
    return float(np.interp(optimizer_step, steps, moments))


def seconds_to_error(points: Sequence[ErrorPoint], marks: Sequence[Mark], wanted: float) -> float | None:
    """The moment at which the error fell to `wanted` for the first time, between two points; None if it never did."""
    at_s = [seconds_at(marks, point.optimizer_step) for point in points]
    place = first_at(points, wanted)
    if not place:  # never, or from the start on
        return None if place is None else at_s[0]
    before, after = points[place - 1].error, points[place].error
    share = (before - wanted) / (before - after)
    return at_s[place - 1] + share * (at_s[place] - at_s[place - 1])


def first_at(points: Sequence[ErrorPoint], wanted: float) -> int | None:
    """The first point with this error or less.

    >>> first_at([ErrorPoint(0, 0.9), ErrorPoint(10, 0.5)], 0.5)
    1
    """
    return next((place for place, point in enumerate(points) if point.error <= wanted), None)


def falling(points: Sequence[ErrorPoint]) -> tuple[ErrorPoint, ...]:
    """The curve nearest to the points that never rises: neighbours that rise get their mean (isotonic regression), so that one lucky
    checkpoint is not taken for an error that was reached.

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
    """Of evenly spaced checkpoints, numbered from 1, those at which an error is measured: dense where curves are steep.

    >>> measured_checkpoints(16)
    [1, 2, 3, 4, 6, 8, 11, 16]
    >>> measured_checkpoints(5)
    [1, 2, 3, 4, 5]
    """
    steps = itertools.takewhile(lambda number: number < count, (round(2 ** (place / 2)) for place in itertools.count()))
    return sorted({*steps, count})
