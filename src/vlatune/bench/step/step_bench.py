"""`vlatune bench step`: what does a micro-step of a policy cost, LeRobot's way and ours?

Same weights, same rows, one run, alternating. LeRobot's way is `lerobot-train`'s own step with
its processor in the loop; ours is the worker's, whose samples are prepared by the readers on other cores. For every way
to train: seconds forward, backward, in the optimizer and on the host outside of them, peak memory of activations, host
syncs. The host's own time is also measured on the small model, where it shows most.
"""

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vlatune.batch import Columns, num_rows
from vlatune.bench.base_models import Base, make_base, make_rows, make_small_base
from vlatune.bench.harness import alternate, format_table, print_last, say
from vlatune.bench.options import StepBench
from vlatune.bench.step.host_sync import HostSyncSpy
from vlatune.bench.step.step_ways import (
    LeRobotWay,
    OurWay,
    StepTime,
    copies_hidden_share,
    load_lerobot,
    make_accelerator,
    peak_bytes,
    without_dropout,
)
from vlatune.pipeline.sizing import usable_cpus
from vlatune.policies.base import ModuleOptions
from vlatune.policies.registry import get_policy
from vlatune.train.worker.device import set_performance_flags

LEROBOT, OURS, KEPT = "LeRobot", "vlatune", "vlatune, kept features"
FROZEN_PREFIX = ("heads", "expert")
"""Where the prefix is computed once for all draws of an observation, and without gradients."""
Way = OurWay | LeRobotWay


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
    kept: WayFigures | None = None
    """Ours from kept features, where it is asked for and what looks at the pictures is frozen."""
    _: KW_ONLY
    look_s: float | None = None
    """Seconds to look at a sample's pictures, which kept features cost once."""
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
            "kept_speedup": self.lerobot.ratio("model_s", self.kept) if self.kept else None,
            "kept_step_speedup": self.lerobot.ratio("total_s", self.kept) if self.kept else None,
            "kept_over_ours": self.ours.ratio("total_s", self.kept) if self.kept else None,
            "look_s": self.look_s,
            "loss_difference": self.loss_difference,
            "copies_hidden_share": self.copies_hidden_share,
            "seconds": {name: self.ours.median(name) for name in TIMES},
            "lerobot_seconds": {name: self.lerobot.median(name) for name in TIMES},
        }


def run(options: StepBench) -> None:
    """Print a table and, as the last line, one JSON object."""
    options = replace(options, train=options.train or tuple(get_policy(options.policy.type).train_ways))
    _check(options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    flags = set_performance_flags(device, usable_cpus())
    with tempfile.TemporaryDirectory(prefix="vlatune-bench-") as scratch:
        say(f"making a model with random weights: {get_policy(options.policy.type).title}")
        base = make_base(Path(scratch) / "base", options)
        by_train = {train: measure(base, train, options, device) for train in options.train}
        small = measure_host(make_small_base(Path(scratch) / "small", options), options, device)
    print_report(options, by_train, small, flags)


def measure(base: Base, train: str, options: StepBench, device: torch.device) -> TrainFigures:
    """All figures of one way to train. What it loads is let go with its return: a model takes gigabytes."""
    gc.collect()
    rows = make_rows(base, options.batch_size, options.seed)
    module = _load(base, train, device)
    lerobot = LeRobotWay(load_lerobot(base, module), base, rows, make_accelerator(device))
    columns = base.columns(rows, flow_samples=1)
    ours = OurWay(module, base, columns, device)
    difference = _loss_difference(lerobot, ours, columns)
    ways: dict[str, Way] = {LEROBOT: lerobot, OURS: ours}
    draws, look_s = f"vlatune, {options.flow_samples} draws", None
    if train in FROZEN_PREFIX and "flow_samples" in get_policy(base.spec.type).settings:
        ways[draws] = _with_draws(module, train, base, rows, options.flow_samples, device)
    if options.keep_features and base.adapter.kept_feature(base.spec, _options(train)):
        kept, look_s = keep_features(base, train, columns, device)
        ways[KEPT] = OurWay(module, base, kept, device)
    timed = _time({f"{train}: {name}": way for name, way in ways.items()}, options.rounds, say=say)
    figures = dict(zip(ways, timed, strict=True))
    for name, way in ways.items():
        _count(way, figures[name], device)
    hidden = copies_hidden_share(ours.step) if device.type == "cuda" else None
    for way in ways.values():
        way.close()
    return TrainFigures(
        figures[LEROBOT],
        figures[OURS],
        figures.get(draws),
        figures.get(KEPT),
        look_s=look_s,
        loss_difference=difference,
        copies_hidden_share=hidden,
    )


def keep_features(base: Base, train: str, columns: Columns, device: torch.device) -> tuple[Columns, float]:
    """The columns with features in place of pictures, and the seconds that a sample's pictures took."""
    encoder = base.adapter.load_encoder(base.spec, _options(train), device)
    cameras = [target for _, target in base.binding.cameras]
    pictures = {name: torch.from_numpy(columns[name]).to(device) for name in cameras}
    encoder(pictures[cameras[0]])  # the first allocates
    begin_s = time.perf_counter()
    kept = {name: encoder(images).cpu().numpy() for name, images in pictures.items()}
    return columns | kept, (time.perf_counter() - begin_s) / num_rows(columns)


def measure_host(base: Base, options: StepBench, device: torch.device) -> WayFigures:
    """Ours on the small model: the device has little to do, so the host's share is at its largest."""
    rows = make_rows(base, options.small_batch_size, options.seed)
    module = _load(base, _small_train(options), device)
    ours = OurWay(module, base, base.columns(rows, flow_samples=1), device)
    say(f"the host's own time on the small model: {options.small_steps} micro-steps")
    (figures,) = _time({"small model: vlatune": ours}, options.small_steps, say=lambda _: None)
    _count(ours, figures, device)
    ours.close()
    return figures


def _small_train(options: StepBench) -> str:
    """What the small model trains."""
    ways = get_policy(options.policy.type).train_ways
    return "expert" if "expert" in ways else next(iter(ways))


def _load(base: Base, train: str, device: torch.device) -> Any:
    return base.adapter.load_module(base.spec, base.binding, _options(train), device, stats=base.stats()).train()


def _options(train: str) -> ModuleOptions:
    return ModuleOptions(train, "float32")  # one without the setting computes in float32 anyway


def _with_draws(module: Any, train: str, base: Base, rows: Columns, count: int, device: torch.device) -> OurWay:
    """Many draws per observation, on the same weights."""
    options = ModuleOptions(train, "float32", flow_samples=count)
    many = type(module)(module.policy, base.spec, base.binding, options).to(device).train()
    return OurWay(many, base, base.columns(rows, flow_samples=count), device)


def _time(ways: Mapping[str, Way], rounds: int, *, say: Callable[[str], None]) -> list[WayFigures]:
    """Every way once a round, in turn; the first step of each allocates and is not counted."""
    figures = {name: WayFigures() for name in ways}

    def timer(name: str, way: Way) -> Callable[[], float]:
        def run_once() -> float:
            taken = way.stopwatch.time(partial(_step, way))
            figures[name].times.append(taken)
            return taken.total_s

        return run_once

    for way in ways.values():
        way.step()
    alternate({name: timer(name, way) for name, way in ways.items()}, rounds, say=say)
    return list(figures.values())


def _count(way: Way, figures: WayFigures, device: torch.device) -> None:
    """What need not be timed: host syncs of one step, and peak memory of one forward and backward pass."""
    with HostSyncSpy(way.resident()) as spy:
        way.step()
    figures.sync_places = {f"{sync.what} at {sync.place}": times for sync, times in spy.table()}
    way.forward_backward()  # the gradients' own memory is there before the measurement
    figures.peak_bytes = peak_bytes(way.forward_backward, device)


def _step(way: Way) -> None:
    """On CUDA torch itself refuses every wait of ours."""
    if isinstance(way, LeRobotWay) or not torch.cuda.is_available():
        way.step()
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        way.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _loss_difference(lerobot: LeRobotWay, ours: OurWay, columns: Columns) -> float:
    with without_dropout(lerobot.policy), without_dropout(ours.policy):
        theirs = lerobot.loss(columns)
        return float((ours.loss() - theirs).abs() / theirs)


def _check(options: StepBench) -> None:
    card = get_policy(options.policy.type)
    known = card.train_ways
    if options.keep_features and "keep_features" not in card.settings:
        raise ValueError(f"--keep_features=true: {card.title} (--policy.type={card.type}) keeps none; leave it out")
    for train in options.train:
        if train not in known:
            raise ValueError(f"--train={train}: must be one of {', '.join(known)}")
    for name, value in vars(options).items():
        least = 0 if name == "seed" else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            raise ValueError(f"--{name}={value}: must be {least} or more")


def print_report(
    options: StepBench, by_train: Mapping[str, TrainFigures], small: WayFigures, flags: Mapping[str, object]
) -> None:
    rows = [row for train, figures in by_train.items() for row in _rows(train, figures, options)]
    rows.append(_row(_small_train(options), f"vlatune, small model, batch {options.small_batch_size}", small, ""))
    sys.stdout.write(format_table(HEADER, rows) + "\n")
    sys.stdout.write("speed: forward and backward, LeRobot's time by this one's, median of the rounds\n")
    sys.stdout.write(f"host share of a micro-step on the small model: {small.median('host_share'):.1%}\n")
    for train, one in by_train.items():
        if one.look_s is not None:
            sys.stdout.write(
                f"to look at a sample's pictures, which kept features cost once ({train}): {one.look_s:.4f} s\n"
            )
    for place, times in next(iter(by_train.values())).lerobot.sync_places.items():
        sys.stdout.write(f"LeRobot's host sync: {times} x {place}\n")
    print_last("step", _figures(options, by_train, small, flags), options)


def _figures(
    options: StepBench, by_train: Mapping[str, TrainFigures], small: WayFigures, flags: Mapping[str, object]
) -> dict[str, Any]:
    figures = {train: one.figures() for train, one in by_train.items()}
    draws_cost = max((one["draws_cost"] for one in figures.values() if one["draws_cost"]), default=None)
    speedups = {f"{train}_speedup": one["speedup"] for train, one in figures.items()}
    return {
        **dict.fromkeys(f"{train}_speedup" for train in FROZEN_PREFIX),  # None of a policy without a prefix
        **speedups,
        **{f"{train}_kept_speedup": one["kept_speedup"] for train, one in figures.items() if one["kept_speedup"]},
        "host_syncs_per_micro_step": max(
            way.host_syncs for one in by_train.values() for way in (one.ours, one.kept) if way
        ),
        "lerobot_host_syncs_per_micro_step": min(one.lerobot.host_syncs for one in by_train.values()),
        "host_overhead_share": small.median("host_share"),
        "flow_samples_8_cost": draws_cost if options.flow_samples == 8 else None,
        "flow_samples_cost": draws_cost,
        "by_train": figures,
        "performance_flags": dict(flags),
    }


def _rows(train: str, figures: TrainFigures, options: StepBench) -> list[list[str]]:
    by_way = {LEROBOT: figures.lerobot, OURS: figures.ours}
    if figures.many_draws:
        by_way[f"vlatune, {options.flow_samples} draws"] = figures.many_draws
    if figures.kept:
        by_way[KEPT] = figures.kept
    return [_row(train, name, way, f"{figures.lerobot.ratio('model_s', way):.2f} x") for name, way in by_way.items()]


def _row(train: str, name: str, way: WayFigures, speed: str) -> list[str]:
    seconds = [f"{way.median(time):.4f}" for time in TIMES]
    return [train, name, *seconds, f"{way.peak_bytes / 1e6:.1f}", str(way.host_syncs), speed]
