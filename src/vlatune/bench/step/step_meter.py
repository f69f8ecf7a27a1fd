"""Seconds by phase, peak memory, and how much of the copying hides behind computing.

On the CPU a phase is timed where it runs. On CUDA the host runs ahead of the device, so phases are timed by events on
the device's own clock and read once, after the step.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

PHASES = ("forward", "backward", "optimizer")
Interval = tuple[float, float]


@dataclass(frozen=True)
class StepTime:
    """Seconds of one micro-step; what is in no phase is the host's own."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    total_s: float

    @property
    def model_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def host_s(self) -> float:
        return max(0.0, self.total_s - self.forward_s - self.backward_s - self.optimizer_s)

    @property
    def host_share(self) -> float:
        return self.host_s / self.total_s


@dataclass
class Stopwatch:
    """`phase` around the parts of a step, `step` around the whole."""

    device: torch.device
    _spans: list[tuple[str, Any, Any]] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = self._now()
        yield
        self._spans.append((name, begin, self._now()))

    def time(self, step: Callable[[], object]) -> StepTime:
        self._spans = []
        begin_s = time.perf_counter()
        step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        total_s = time.perf_counter() - begin_s
        seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        for name, begin, end in self._spans:
            seconds[name] += begin.elapsed_time(end) / 1000 if self.device.type == "cuda" else end - begin
        return StepTime(seconds["forward"], seconds["backward"], seconds["optimizer"], total_s)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """The most memory that tensors took during `call`, above what they took before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        call()
    level = highest = 0
    for size in _allocations(profiler):
        level += size
        highest = max(highest, level)
    return highest


def _allocations(profiler: Any) -> list[int]:
    """Bytes of every allocation and, negative, of every release, in their order."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def copies_hidden_share(call: Callable[[], object]) -> float | None:
    """Of the time that copies to the device take, the share during which kernels run; None without copies. CUDA only."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    copies, kernels = [], []
    for event in profiler.events() or []:
        if event.device_type.name == "CUDA":
            span = (event.time_range.start, event.time_range.end)
            (copies if event.name.startswith("Memcpy HtoD") else kernels).append(span)
    return hidden_share(copies, kernels)


def hidden_share(copies: Sequence[Interval], kernels: Sequence[Interval]) -> float | None:
    """The share of the copies' time that lies inside kernels' time; intervals of one kind may overlap."""
    total = sum(end - begin for begin, end in _merged(copies))
    if total == 0:
        return None
    hidden = sum(
        max(0.0, min(end, kernel_end) - max(begin, kernel_begin))
        for begin, end in _merged(copies)
        for kernel_begin, kernel_end in _merged(kernels)
    )
    return hidden / total


def _merged(intervals: Sequence[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
