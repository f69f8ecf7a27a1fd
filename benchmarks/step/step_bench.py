"""`python -m benchmarks step`: compare a micro-step of LeRobot and of vlatune.

Both alternate with the same weights and rows. LeRobot's is the step of `lerobot-train` with its
processor in the loop; vlatune's is the worker's, whose samples are prepared by readers. For every
fine-tuning mode: seconds of forward, backward, optimizer and host, peak activation memory, and host
syncs. Modes with a frozen prefix have a third row: vlatune's step with --policy.keep_prefix, when
the prefix of every sample is kept and in host memory.
"""

import gc
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.base_models import Base, make_base, make_rows
from benchmarks.harness import alternate, format_table, print_last, say
from benchmarks.options import StepBench
from benchmarks.step.host_sync import HostSyncSpy
from benchmarks.step.step_ways import (
    LeRobotWay,
    OurWay,
    StepTime,
    load_lerobot,
    make_accelerator,
    peak_bytes,
    with_kept_prefix,
    without_dropout,
)
from vlatune.batch import Columns
from vlatune.feed.sizing import usable_cpus
from vlatune.policies.base import ModuleOptions
from vlatune.registry import get_policy_info
from vlatune.train.worker.device import set_performance_flags

LEROBOT, OURS, KEPT = "LeRobot", "vlatune", "vlatune, kept prefix"
FROZEN_PREFIX = ("heads", "expert")
"""Modes in which the prefix is computed without gradients."""
Way = OurWay | LeRobotWay


TIMES = ("forward_s", "backward_s", "optimizer_s", "host_s", "total_s")
HEADER = ("trained", "program", *(f"{name[:-2]} s" for name in TIMES), "activations MB", "host syncs", "speed")


@dataclass
class WayFigures:
    """Times by round of one implementation, and counts."""

    times: list[StepTime] = field(default_factory=list)
    peak_bytes: int = 0
    """Peak memory of a forward and backward pass with existing gradients."""
    sync_places: dict[str, int] = field(default_factory=dict)
    """Cause and location of host syncs -> count per micro-step."""

    @property
    def host_syncs(self) -> int:
        return sum(self.sync_places.values())

    def median(self, name: str) -> float:
        return statistics.median(getattr(one, name) for one in self.times)

    def ratio(self, name: str, other: "WayFigures") -> float:
        """Return the median over the rounds of this time / the other's."""
        pairs = zip(self.times, other.times, strict=True)
        return statistics.median(getattr(mine, name) / getattr(theirs, name) for mine, theirs in pairs)


@dataclass
class TrainFigures:
    """Figures of LeRobot and vlatune for one fine-tuning mode."""

    lerobot: WayFigures
    ours: WayFigures
    loss_difference: float
    """Relative difference with the same noise samples."""
    kept: WayFigures | None = None
    """vlatune with the prefix of every sample kept; None if the mode keeps nothing."""

    def figures(self) -> dict[str, Any]:
        kept = self.kept and {
            "kept_speedup": self.lerobot.ratio("model_s", self.kept),
            "kept_step_speedup": self.lerobot.ratio("total_s", self.kept),
            "kept_seconds": {name: self.kept.median(name) for name in TIMES},
        }
        return (kept or {}) | {
            "speedup": self.lerobot.ratio("model_s", self.ours),
            "step_speedup": self.lerobot.ratio("total_s", self.ours),
            "activation_bytes": self.ours.peak_bytes,
            "lerobot_activation_bytes": self.lerobot.peak_bytes,
            "loss_difference": self.loss_difference,
            "seconds": {name: self.ours.median(name) for name in TIMES},
            "lerobot_seconds": {name: self.lerobot.median(name) for name in TIMES},
        }


def run(options: StepBench) -> None:
    """Print a table and a final JSON line."""
    options = replace(options, train=options.train or tuple(get_policy_info(options.policy.type).train_modes))
    _check(options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    flags = set_performance_flags(device, usable_cpus())
    with tempfile.TemporaryDirectory(prefix="vlatune-bench-") as scratch:
        say(f"making a model with random weights: {get_policy_info(options.policy.type).title}")
        base = make_base(Path(scratch) / "base", options)
        by_train = {train: measure(base, train, options, device) for train in options.train}
    print_report(options, by_train, flags)


def measure(base: Base, train: str, options: StepBench, device: torch.device) -> TrainFigures:
    """Measure one fine-tuning mode; its models are freed on return."""
    gc.collect()
    rows = make_rows(base, options.batch_size, options.seed)
    module = _load(base, train, device)
    lerobot = LeRobotWay(load_lerobot(base, module), base, rows, make_accelerator(device))
    columns = base.columns(rows)
    ours = OurWay(module, base, columns, device)
    difference = _loss_difference(lerobot, ours, columns)
    programs: dict[str, Way] = {LEROBOT: lerobot, OURS: ours}
    if base.adapter.kept_prefix(base.spec, base.binding, _options(train)):
        programs[KEPT] = OurWay(module, base, with_kept_prefix(module, base, columns, device), device)
    figures = _time({f"{train}: {name}": program for name, program in programs.items()}, options.rounds)
    for program, one in zip(programs.values(), figures, strict=True):
        _count(program, one, device)
        program.close()
    theirs, mine, *kept = figures
    return TrainFigures(theirs, mine, difference, kept[0] if kept else None)


def _load(base: Base, train: str, device: torch.device) -> Any:
    return base.adapter.load_module(base.spec, base.binding, _options(train), device, stats=base.stats()).train()


def _options(train: str) -> ModuleOptions:
    return ModuleOptions(train, "float32")  # policies without this setting use float32, too


def _time(programs: Mapping[str, Way], rounds: int) -> list[WayFigures]:
    """Run every implementation once per round, after an uncounted warm-up step."""
    figures = {name: WayFigures() for name in programs}

    def timer(name: str, program: Way) -> Callable[[], float]:
        def run_once() -> float:
            taken = program.stopwatch.time(partial(_step, program))
            figures[name].times.append(taken)
            return taken.total_s

        return run_once

    for program in programs.values():
        program.step()
    alternate({name: timer(name, program) for name, program in programs.items()}, rounds, say=say)
    return list(figures.values())


def _count(program: Way, figures: WayFigures, device: torch.device) -> None:
    """Count the host syncs of a step, and the peak memory of a forward and backward pass."""
    with HostSyncSpy(program.resident()) as spy:
        program.step()
    figures.sync_places = {f"{sync.what} at {sync.place}": times for sync, times in spy.table()}
    program.forward_backward()  # allocates gradients before the measurement
    figures.peak_bytes = peak_bytes(program.forward_backward, device)


def _step(program: Way) -> None:
    """Run a step; on CUDA torch raises on any sync of ours."""
    if isinstance(program, LeRobotWay) or not torch.cuda.is_available():
        program.step()
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        program.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _loss_difference(lerobot: LeRobotWay, ours: OurWay, columns: Columns) -> float:
    with without_dropout(lerobot.policy), without_dropout(ours.policy):
        theirs = lerobot.loss(columns)
        return float((ours.loss() - theirs).abs() / theirs)


def _check(options: StepBench) -> None:
    known = get_policy_info(options.policy.type).train_modes
    for train in options.train:
        if train not in known:
            raise ValueError(f"--train={train}: must be one of {', '.join(known)}")


def print_report(options: StepBench, by_train: Mapping[str, TrainFigures], flags: Mapping[str, object]) -> None:
    rows = [
        _row(train, name, program, f"{figures.lerobot.ratio('model_s', program):.2f} x")
        for train, figures in by_train.items()
        for name, program in ((LEROBOT, figures.lerobot), (OURS, figures.ours), (KEPT, figures.kept))
        if program is not None
    ]
    sys.stdout.write(format_table(HEADER, rows) + "\n")
    sys.stdout.write("speed: LeRobot's time of forward and backward divided by this one's, median of the rounds\n")
    for place, times in next(iter(by_train.values())).lerobot.sync_places.items():
        sys.stdout.write(f"LeRobot's host sync: {times} x {place}\n")
    figures = {train: one.figures() for train, one in by_train.items()}
    last = {
        **dict.fromkeys(f"{train}_speedup" for train in FROZEN_PREFIX),  # None for policies without a prefix
        **{f"{train}_speedup": one["speedup"] for train, one in figures.items()},
        **{f"{train}_kept_speedup": one["kept_speedup"] for train, one in figures.items() if "kept_speedup" in one},
        "host_syncs_per_micro_step": max(one.ours.host_syncs for one in by_train.values()),
        "lerobot_host_syncs_per_micro_step": min(one.lerobot.host_syncs for one in by_train.values()),
        "by_train": figures,
        "performance_flags": dict(flags),
    }
    print_last("step", last, options)


def _row(train: str, name: str, program: WayFigures, speed: str) -> list[str]:
    seconds = [f"{program.median(time):.4f}" for time in TIMES]
    return [train, name, *seconds, f"{program.peak_bytes / 1e6:.1f}", str(program.host_syncs), speed]
