"""`python -m benchmarks train`: compare `vlatune train`, `lerobot-train` and the template end to
end.

All programs use the same base, dataset, batch size and number of samples, and are observed from
outside. Each round also measures the step and the reading of our run in isolation, which gives the
limit of the cores.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import CannotRunError, Results, alternate, format_table, print_last, say
from benchmarks.options import TrainBench
from benchmarks.processes import Program, ends_in_order, watch
from benchmarks.train import train_programs as programs
from benchmarks.train.time_to_quality import (
    Course,
    ErrorMeter,
    lerobot_folder,
    measure_quality,
    our_folder,
    over_lerobot,
    wanted_error,
)
from benchmarks.train.train_cases import TrainJob, case_name, find_case, make_job
from benchmarks.train.train_figures import RunFigures, figures_of, share_of_ideal
from vlatune.feed.sizing import usable_cpus
from vlatune.run.summary import read_summary

OURS = "vlatune train"
PEERS = {"lerobot": "lerobot-train", "template": "the template"}
COLUMNS = ("program", "samples/s", "spread", "ours over it", "with start-up", "first step")


@dataclass
class Figures:
    results: Results
    by_program: Mapping[str, Sequence[RunFigures]]
    share_of_ideal: Sequence[float]
    """Our rate relative to the cost of step and reading alone, by round."""
    spilled_bytes: int
    errors: Mapping[str, float]
    """Program -> held-out action error after the same samples."""
    courses: dict[str, Course] = field(default_factory=dict)


STEP_ALONE, READ_ALONE = "the step alone", "reading alone"


def run(options: TrainBench) -> None:
    """Print a table and a final JSON line."""
    _check(options)
    options = replace(options, config=case_name(options))
    with ExitStack() as stack:
        stack.enter_context(ends_in_order())
        folder = Path(options.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="vlatune-bench-")))
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        job = make_job(options, folder)
        if options.quality and job.config.policy.train != "full":
            raise ValueError(
                "--quality=true: the created base is random, so that frozen parts learn nothing; use a full --config"
            )
        meter = ErrorMeter(job, options.eval_samples)
        rounds = Rounds(job, options, folder / "runs", meter)
        figures = rounds.measure()
        if options.quality:
            figures.courses = measure_quality(job, options, meter, rounds.clean_folder)
        shutil.rmtree(folder / "runs", ignore_errors=True)
    print_report(options, job, figures)


@dataclass
class Rounds:
    """Run every program once per round."""

    job: TrainJob
    options: TrainBench
    runs_folder: Path
    meter: ErrorMeter
    by_program: dict[str, list[RunFigures]] = field(default_factory=dict)
    shares: list[float] = field(default_factory=list)
    spilled_bytes: int = 0
    alone_cpu_s: dict[str, float] = field(default_factory=dict)
    """CPU seconds per sample of the step and of reading alone, in the last round."""

    def measure(self) -> Figures:
        turns: dict[str, Callable[[], float]] = {
            STEP_ALONE: lambda: self._measure_alone(STEP_ALONE, "step", "wall_s"),
            READ_ALONE: lambda: self._measure_alone(READ_ALONE, "reading", "cpu_s"),
            OURS: self._run_ours,
        }
        peers = {"lerobot": self._run_lerobot, "template": self._run_template}
        turns |= {PEERS[peer]: peers[peer] for peer in self.options.peers}
        say("samples/s:")
        results = alternate(turns, self.options.rounds, say=say)
        return Figures(results, self.by_program, self.shares, self.spilled_bytes, self._errors())

    def clean_folder(self, name: str) -> Path:
        folder = self.runs_folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def _measure_alone(self, name: str, what: str, unit: str) -> float:
        command, env = programs.alone(self.job, self.clean_folder("alone"), what, self.options.alone_s)
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
        seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        self.alone_cpu_s[name] = seconds["cpu_s"]
        return 1 / seconds[unit]

    def _run_ours(self) -> float:
        folder = self.clean_folder("ours")
        rate = self._run(OURS, programs.ours(self.job, folder))
        summary = read_summary(folder / "run")
        assert summary is not None  # the run has finished
        self.spilled_bytes = max(self.spilled_bytes, summary.spilled_bytes)
        step_cpu_s, read_cpu_s = self.alone_cpu_s[STEP_ALONE], self.alone_cpu_s[READ_ALONE]
        self.shares.append(share_of_ideal(rate, step_cpu_s=step_cpu_s, read_cpu_s=read_cpu_s, cores=usable_cpus()))
        return rate

    def _run_lerobot(self) -> float:
        return self._run(PEERS["lerobot"], programs.lerobot(self.job, self.clean_folder("lerobot")))

    def _run_template(self) -> float:
        if self.job.config.policy.type != "pi05":
            raise CannotRunError("the template trains PI0.5 only")
        return self._run(PEERS["template"], programs.template(self.job, self.clean_folder("template")))

    def _run(self, name: str, program: Program) -> float:
        seen = watch(program, timeout_s=self.options.timeout_s)
        figures = figures_of(seen, batch_size=self.job.config.batch_size)
        self.by_program.setdefault(name, []).append(figures)
        return figures.samples_per_s

    def _errors(self) -> dict[str, float]:
        """Return the held-out errors of the last round, after the same number of samples."""
        steps = self.job.config.steps
        folders = {OURS: our_folder(self.runs_folder / "ours", steps)}
        if PEERS["lerobot"] in self.by_program:
            folders[PEERS["lerobot"]] = lerobot_folder(self.job, self.runs_folder / "lerobot", steps)
        return {program: self.meter.error_of(folder) for program, folder in folders.items()}


def _check(options: TrainBench) -> None:
    find_case(options)
    for peer in options.peers:
        if peer not in PEERS:
            raise ValueError(f"--peers={peer}: must be one of {', '.join(PEERS)}")
    if options.alone_s <= 0:
        raise ValueError(f"--alone_s={options.alone_s:g}: must be above 0")
    if not 0 < options.eval_split < 1:
        raise ValueError(
            f"--eval_split={options.eval_split}: must be above 0 and below 1, an error needs held-out episodes"
        )


def print_report(options: TrainBench, job: TrainJob, figures: Figures) -> None:
    config, last = job.config, _last(figures)
    samples = config.steps * config.batch_size
    sys.stdout.write(f"{samples} samples in batches of {config.batch_size}\n")
    rows = [_row(name, runs, figures) for name, runs in figures.by_program.items()]
    sys.stdout.write(format_table(COLUMNS, rows) + "\n")
    sys.stdout.write(
        f"share of the ideal, all cores at the cost of step and reading alone: {last['share_of_ideal']:.2f}\n"
    )
    for name, error in figures.errors.items():
        sys.stdout.write(f"held-out action error after the same samples: {name}: {error:.4f}\n")
    if figures.courses:
        sys.stdout.write("\n" + _quality_table(figures.courses) + "\n")
    print_last("train", last, options, _settings(job))


def _row(name: str, runs: Sequence[RunFigures], figures: Figures) -> list[str]:
    ratio = figures.results.ratio(OURS, name)
    return [
        name,
        f"{_median(run.samples_per_s for run in runs):.4g}",
        figures.results.spread(name),
        f"{ratio:.2f} x" if ratio and name != OURS else "",
        f"{_median(run.complete_samples_per_s for run in runs):.4g}",
        f"{_median(run.first_step_s for run in runs):.1f} s",
    ]


def _quality_table(courses: dict[str, Course]) -> str:
    error = wanted_error(courses)
    rows = []
    for name, course in courses.items():
        seconds = course.seconds_to(error)
        times = ["not reached", ""] if seconds is None else [f"{one:.1f} s" for one in seconds]
        rows.append([name, f"{course.points[-1].error:.4f}", *times])
    return format_table(["program", "last error", f"to {error:.4f}", "with start-up"], rows)


def _last(figures: Figures) -> dict[str, Any]:
    results = figures.results
    return {
        "samples_per_s": results.median(OURS),
        "over_lerobot": results.ratio(OURS, PEERS["lerobot"]),
        "over_template": results.ratio(OURS, PEERS["template"]),
        "share_of_ideal": _median(figures.share_of_ideal),
        "time_to_first_step_s": _median(run.first_step_s for run in figures.by_program[OURS]),
        "held_out_error": dict(figures.errors),
        **_quality(figures.courses),
        "rounds": {name: [asdict(run) for run in runs] for name, runs in figures.by_program.items()},
        "spilled_bytes": figures.spilled_bytes,
        "not_run": results.not_run,
    }


def _quality(courses: dict[str, Course]) -> dict[str, Any]:
    if not courses:
        return {"time_to_quality_over_lerobot": None}
    error = wanted_error(courses)
    seconds = {name: course.seconds_to(error) for name, course in courses.items()}
    return {
        "time_to_quality_over_lerobot": over_lerobot(courses, error),
        "quality": {"error": error, "seconds": seconds} | {name: one.to_json() for name, one in courses.items()},
    }


def _settings(job: TrainJob) -> dict[str, Any]:
    """Return the settings that the configuration implies."""
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
