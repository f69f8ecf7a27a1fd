"""The figures of `vlatune bench step`, and how they are printed: a table, then one line of JSON."""

import statistics
import sys
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any

from vlatune.bench.harness import format_table, last_line
from vlatune.bench.options import StepBench
from vlatune.bench.step_meter import StepTime

TIMES = ("forward_s", "backward_s", "optimizer_s", "host_s", "total_s")
HEADER = ("trained", "way", *(f"{name[:-2]} s" for name in TIMES), "activations MB", "host syncs", "speed")


@dataclass
class WayFigures:
    """One way to make a step: its times by round, and what is counted once."""

    times: list[StepTime] = field(default_factory=list)
    peak_bytes: int = 0
    """Most memory of a forward and backward pass whose gradients exist already."""
    sync_places: dict[str, int] = field(default_factory=dict)
    """What made the host wait, and where -> how often in one micro-step."""

    @property
    def host_syncs(self) -> int:
        return sum(self.sync_places.values())

    def median(self, name: str) -> float:
        return statistics.median(getattr(one, name) for one in self.times)

    def ratio(self, name: str, other: "WayFigures") -> float:
        """Median over the rounds of this way's time by the other's."""
        pairs = zip(self.times, other.times, strict=True)
        return statistics.median(getattr(mine, name) / getattr(theirs, name) for mine, theirs in pairs)


@dataclass
class TrainFigures:
    """LeRobot's way and ours, for one way to train."""

    lerobot: WayFigures
    ours: WayFigures
    many_draws: WayFigures | None = None
    """Ours with `flow_samples` draws per observation, where the prefix is frozen."""
    _: KW_ONLY
    loss_difference: float
    """Relative, on the same draws."""
    copies_hidden_share: float | None
    """Of the time of copies to the device, what kernels hide; None without CUDA."""

    def figures(self) -> dict[str, Any]:
        return {
            "speedup": self.lerobot.ratio("model_s", self.ours),
            "step_speedup": self.lerobot.ratio("total_s", self.ours),
            "activation_bytes": self.ours.peak_bytes,
            "lerobot_activation_bytes": self.lerobot.peak_bytes,
            "activation_share": self.ours.peak_bytes / self.lerobot.peak_bytes,
            "draws_cost": self.many_draws.ratio("model_s", self.ours) if self.many_draws else None,
            "loss_difference": self.loss_difference,
            "copies_hidden_share": self.copies_hidden_share,
            "seconds": {name: self.ours.median(name) for name in TIMES},
            "lerobot_seconds": {name: self.lerobot.median(name) for name in TIMES},
        }


def print_report(
    options: StepBench, by_train: Mapping[str, TrainFigures], small: WayFigures, flags: Mapping[str, object]
) -> None:
    rows = [row for train, figures in by_train.items() for row in _rows(train, figures, options)]
    rows.append(_row("expert", f"vlatune, small model, batch {options.small_batch_size}", small, ""))
    sys.stdout.write(format_table(HEADER, rows) + "\n")
    sys.stdout.write("speed: forward and backward, LeRobot's time by this one's, median of the rounds\n")
    sys.stdout.write(f"host share of a micro-step on the small model: {small.median('host_share'):.1%}\n")
    for place, times in next(iter(by_train.values())).lerobot.sync_places.items():
        sys.stdout.write(f"LeRobot's host sync: {times} x {place}\n")
    sys.stdout.write(last_line(_figures(options, by_train, small, flags), asdict(options)) + "\n")


def _figures(
    options: StepBench, by_train: Mapping[str, TrainFigures], small: WayFigures, flags: Mapping[str, object]
) -> dict[str, Any]:
    figures = {train: one.figures() for train, one in by_train.items()}
    draws_cost = max((one["draws_cost"] for one in figures.values() if one["draws_cost"]), default=None)
    return {
        **{f"{train}_speedup": one["speedup"] for train, one in figures.items()},
        "host_syncs_per_micro_step": max(one.ours.host_syncs for one in by_train.values()),
        "lerobot_host_syncs_per_micro_step": min(one.lerobot.host_syncs for one in by_train.values()),
        "host_overhead_share": small.median("host_share"),
        "flow_samples_8_cost": draws_cost if options.flow_samples == 8 else None,
        "flow_samples_cost": draws_cost,
        "by_train": figures,
        "performance_flags": dict(flags),
    }


def _rows(train: str, figures: TrainFigures, options: StepBench) -> list[list[str]]:
    by_way = {"LeRobot": figures.lerobot, "vlatune": figures.ours}
    if figures.many_draws:
        by_way[f"vlatune, {options.flow_samples} draws"] = figures.many_draws
    return [_row(train, name, way, f"{figures.lerobot.ratio('model_s', way):.2f} x") for name, way in by_way.items()]


def _row(train: str, name: str, way: WayFigures, speed: str) -> list[str]:
    seconds = [f"{way.median(time):.4f}" for time in TIMES]
    return [train, name, *seconds, f"{way.peak_bytes / 1e6:.1f}", str(way.host_syncs), speed]
