"""`vlatune bench train`: the whole, end to end: `vlatune train`, `lerobot-train` and the template's way, taking turns.

Same base, dataset, batch size and number of samples; every program in processes of its own, watched from outside. In
each round the step and the reading of our run are also measured alone: together they say what the cores could do. The
table and the last line of JSON are made here, too.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vlatune.bench.harness import Results, alternate, format_table, last_line, say
from vlatune.bench.options import TrainBench
from vlatune.bench.processes import ends_in_order
from vlatune.bench.train import train_programs as ways
from vlatune.bench.train.time_to_quality import (
    Course,
    held_out_error,
    lerobot_folders,
    measure_quality,
    our_folders,
    over_lerobot,
    wanted_error,
)
from vlatune.bench.train.train_figures import (
    Alone,
    RunFigures,
    figures_of,
    share_of_ideal,
    share_of_predicted,
    sharing_explains,
    split_as_told,
    steady_window,
    step_in_run_s,
)
from vlatune.bench.train.train_programs import TrainJob, find_case, make_job
from vlatune.bench.train.watched_program import Program, Seen, watch
from vlatune.pipeline.host import usable_cpus
from vlatune.report.sinks import read_jsonl
from vlatune.report.summary import Summary, read_summary

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


STEP_ALONE, READ_ALONE = "the step alone", "reading alone"


def run(options: TrainBench) -> None:
    """Print a table and, as the last line, one JSON object."""
    _check(options)
    with ExitStack() as stack:
        stack.enter_context(ends_in_order())
        folder = Path(options.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="vlatune-bench-")))
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        rounds = Rounds(make_job(options, folder), options, folder / "runs")
        figures = rounds.measure()
        if options.quality:
            figures.courses = measure_quality(rounds.job, options, rounds.clean_folder, say=say)
        shutil.rmtree(folder / "runs", ignore_errors=True)
    print_report(options, rounds.job, figures)


@dataclass
class Rounds:
    """Every way once a round, and what was seen of each."""

    job: TrainJob
    options: TrainBench
    runs_folder: Path
    by_way: dict[str, list[RunFigures]] = field(default_factory=dict)
    ours: list[OurRound] = field(default_factory=list)
    alone: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    def measure(self) -> Figures:
        turns: dict[str, Callable[[], float]] = {
            STEP_ALONE: lambda: self._measure_alone(STEP_ALONE, "step", "wall_s"),
            READ_ALONE: lambda: self._measure_alone(READ_ALONE, "reading", "cpu_s"),
            OURS: self._run_ours,
        }
        for peer in self.options.peers:
            turns[PEERS[peer]] = {"lerobot": self._run_lerobot, "template": self._run_template}[peer]
        say("samples/s:")
        results = alternate(turns, self.options.rounds, say=say)
        return Figures(results, self.by_way, self.ours, self._errors())

    def clean_folder(self, name: str) -> Path:
        folder = self.runs_folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def _measure_alone(self, name: str, what: str, unit: str) -> float:
        command, env = ways.alone(self.job, self.clean_folder("alone"), what, self.options.alone_s)
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
        seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        self.alone.setdefault(name, []).append(seconds)
        return 1 / seconds[unit]

    def _run_ours(self) -> float:
        folder = self.clean_folder("ours")
        seen = watch(ways.ours(self.job, folder), timeout_s=self.options.timeout_s)
        summary = read_summary(folder / "run")
        assert summary is not None  # the run has ended well
        threads = int(summary.performance_flags["threads"] or 1)
        step, reading = self.alone[STEP_ALONE][-1], self.alone[READ_ALONE][-1]
        alone = Alone(step["wall_s"], step["cpu_s"], reading["cpu_s"])
        step_s = step_in_run_s(read_jsonl(folder / "run" / ways.METRICS), steady_window(seen.marks, seen.cpu))
        self.ours.append(OurRound(alone, step_s / self.job.config.batch_size, summary))
        told = {name: value for name, value in (summary.cpu or {}).items() if value is not None}
        is_whole = len(told) == len(summary.cpu or {})  # this system tells all of it
        return self._add(OURS, seen, threads, told=told if is_whole else None)

    def _run_lerobot(self) -> float:
        return self._run_peer("lerobot", ways.lerobot(self.job, self.clean_folder("lerobot")))

    def _run_template(self) -> float:
        return self._run_peer("template", ways.template(self.job, self.clean_folder("template")))

    def _run_peer(self, name: str, program: Program) -> float:
        return self._add(PEERS[name], watch(program, timeout_s=self.options.timeout_s), usable_cpus())

    def _add(self, way: str, seen: Seen, compute_threads: int, *, told: Mapping[str, float] | None = None) -> float:
        figures = figures_of(seen, batch_size=self.job.config.batch_size, compute_threads=compute_threads)
        if told:
            figures = split_as_told(figures, told)
        self.by_way.setdefault(way, []).append(figures)
        return figures.samples_per_s

    def _errors(self) -> dict[str, float]:
        """Held-out error of the last round's runs: each has seen the same number of samples."""
        folders = {OURS: our_folders(self.runs_folder / "ours")[-1]}
        if PEERS["lerobot"] in self.by_way:
            folders[PEERS["lerobot"]] = lerobot_folders(self.job, self.runs_folder / "lerobot")[-1]
        samples = self.options.eval_samples
        return {way: held_out_error(self.job, folder, samples) for way, (_, folder) in folders.items()}


def _check(options: TrainBench) -> None:
    find_case(options)
    for peer in options.peers:
        if peer not in PEERS:
            raise ValueError(f"--peers={peer}: must be one of {', '.join(PEERS)}")
    for name, value in vars(options).items():
        least = 0 if name in ("seed", "num_workers") else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            raise ValueError(f"--{name}={value}: must be {least} or more")
    if options.alone_s <= 0:
        raise ValueError(f"--alone_s={options.alone_s:g}: must be above 0")
    if not 0 < options.eval_split < 1:
        raise ValueError(
            f"--eval_split={options.eval_split}: must be above 0 and below 1, an error needs held-out episodes"
        )


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
