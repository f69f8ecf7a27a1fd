"""The table of `vlatune bench train` and its last line."""

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vlatune.bench.harness import Results, format_table, last_line
from vlatune.bench.options import TrainBench
from vlatune.bench.train_case import TrainJob
from vlatune.bench.train_figures import Alone, RunFigures, share_of_ideal, share_of_predicted, sharing_explains
from vlatune.bench.train_quality import Course, over_lerobot, wanted_error
from vlatune.pipeline.host import usable_cpus
from vlatune.report.summary import Summary

OURS = "vlatune train"
PEERS = {"lerobot": "lerobot-train", "template": "the template's way"}
COLUMNS = (
    "way",
    "samples/s",
    "spread",
    "with the start",
    "first step",
    "compute",
    "other threads",
    "readers",
    "others",
)


@dataclass(frozen=True)
class OurRound:
    """What is known of our run beside what is seen from outside."""

    alone: Alone
    step_s: float
    """Per sample, in the run, without waiting for data."""
    summary: Summary


@dataclass
class Figures:
    results: Results
    by_way: Mapping[str, Sequence[RunFigures]]
    ours: Sequence[OurRound]
    errors: Mapping[str, float]
    """Way -> held-out action error after the same samples."""
    courses: dict[str, Course] = field(default_factory=dict)


def print_report(options: TrainBench, job: TrainJob, figures: Figures) -> None:
    config = job.config
    samples = config.steps * config.batch_size
    sys.stdout.write(f"{samples} samples in batches of {config.batch_size}; CPU in ms per sample, in steady state\n")
    sys.stdout.write(format_table(COLUMNS, [_row(way, runs, figures) for way, runs in figures.by_way.items()]) + "\n")
    for way, error in figures.errors.items():
        sys.stdout.write(f"held-out action error after the same samples: {way}: {error:.4f}\n")
    if figures.courses:
        sys.stdout.write("\n" + _quality_table(figures.courses, options) + "\n")
    sys.stdout.write(last_line(_last(options, figures), asdict(options) | _settings(job)) + "\n")


def _row(way: str, runs: Sequence[RunFigures], figures: Figures) -> list[str]:
    parts = ("compute_s", "other_threads_s", "readers_s", "others_s")
    cpu_ms = [1000 * _median(getattr(run.cpu, part) for run in runs) for part in parts]
    return [
        way,
        f"{_median(run.samples_per_s for run in runs):.1f}",
        figures.results.spread(way),
        f"{_median(run.whole_samples_per_s for run in runs):.1f}",
        f"{_median(run.first_step_s for run in runs):.1f} s",
        *(f"{value:.2f}" for value in cpu_ms),
    ]


def _quality_table(courses: dict[str, Course], options: TrainBench) -> str:
    error = wanted_error(courses, options.error)
    sooner = over_lerobot(courses, error, list(courses))
    rows = []
    for name, course in courses.items():
        seconds = course.seconds_to(error)
        times = ["not reached", ""] if seconds is None else [f"{one:.1f} s" for one in seconds]
        ratio = sooner[name]
        rows.append([name, f"{course.points[-1].error:.4f}", *times, f"{ratio:.2f} x" if ratio else ""])
    header = ["way", "last error", f"to {error:.4f}", "with the start", "sooner than lerobot-train"]
    return format_table(header, rows)


def _last(options: TrainBench, figures: Figures) -> dict[str, Any]:
    seen, results, cores = figures.by_way[OURS], figures.results, usable_cpus()
    rounds = list(zip(figures.ours, seen, strict=True))
    return {
        "samples_per_s": results.median(OURS),
        "over_lerobot": results.ratio(OURS, PEERS["lerobot"]),
        "over_template": results.ratio(OURS, PEERS["template"]),
        "share_of_ideal": _median(share_of_ideal(run.samples_per_s, own.alone, cores) for own, run in rounds),
        "share_of_predicted": _median(share_of_predicted(run.samples_per_s, own.alone, cores) for own, run in rounds),
        "step_in_run_over_alone": _median(own.step_s / own.alone.step_wall_s for own, _ in rounds),
        "sharing_explains": _median(sharing_explains(own.alone, run.cpu, cores) for own, run in rounds),
        "slowest_over_fastest": _median(run.slowest_over_fastest for run in seen),
        "other_threads_cpu_share": _median(run.other_threads_share for run in seen),
        "time_to_first_step_s": _median(run.first_step_s for run in seen),
        "held_out_error": dict(figures.errors),
        **_quality(options, figures.courses),
        "rounds": {way: [asdict(run) for run in runs] for way, runs in figures.by_way.items()},
        "alone": [asdict(own.alone) for own in figures.ours],
        "own_cpu": [own.summary.cpu for own in figures.ours],
        "spilled_bytes": max(own.summary.spilled_bytes for own in figures.ours),
        "not_run": results.not_run,
    }


def _quality(options: TrainBench, courses: dict[str, Course]) -> dict[str, Any]:
    """`time_to_quality_over_lerobot` is that of one draw per observation, or of the first number that was asked for."""
    ours = [name for name in courses if name != "lerobot"]
    if not ours:
        return {"time_to_quality_over_lerobot": None}
    error = wanted_error(courses, options.error)
    sooner = over_lerobot(courses, error, ours)
    seconds = {name: course.seconds_to(error) for name, course in courses.items()}
    return {
        "time_to_quality_over_lerobot": sooner.get("ours, 1 draws", sooner[ours[0]]),
        "time_to_quality_by_draws": sooner,
        "quality": {"error": error, "seconds": seconds} | {name: one.to_json() for name, one in courses.items()},
    }


def _settings(job: TrainJob) -> dict[str, Any]:
    """What the configuration stands for."""
    config = job.config
    return {
        "steps": config.steps,
        "batch_size": config.batch_size,
        "store_bytes": config.ray.object_store_bytes,
        "train": config.policy.train,
        "lr": config.optimizer.lr,
    }


def _median(values: Any) -> float:
    return statistics.median(list(values))
