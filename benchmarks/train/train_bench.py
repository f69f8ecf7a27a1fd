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
from benchmarks.processes import OTHERS, READERS, TRAINING, Program, ends_in_order, watch
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

OURS, CACHED = "vlatune train", "vlatune train, frame cache or kept prefix"
PEERS = {"lerobot": "lerobot-train", "template": "the template"}
COLUMNS = (
    "program",
    "samples/s",
    "spread",
    "ours over it",
    "by epoch",
    "with start-up",
    "first step",
    *(TRAINING, READERS, OTHERS),
)


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
            figures.courses = measure_quality(job, options, meter, rounds.clean_folder, say=say)
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
        if self.job.cache_epochs:
            turns[CACHED] = self._run_cached
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

    def _run_cached(self) -> float:
        """Return the rate from the second epoch on, when all frames are cached or all prefixes kept."""
        self._run(CACHED, programs.ours_cached(self.job, self.clean_folder("cached")))
        last = self.by_program[CACHED][-1]
        later = last.by_epoch[1:] or last.by_epoch
        self.by_program[CACHED][-1] = replace(last, samples_per_s=statistics.harmonic_mean(later))
        return self.by_program[CACHED][-1].samples_per_s

    def _run_lerobot(self) -> float:
        return self._run(PEERS["lerobot"], programs.lerobot(self.job, self.clean_folder("lerobot")))

    def _run_template(self) -> float:
        if self.job.config.policy.type != "pi05":
            raise CannotRunError("the template trains PI0.5 only")
        return self._run(PEERS["template"], programs.template(self.job, self.clean_folder("template")))

    def _run(self, name: str, program: Program) -> float:
        seen = watch(program, timeout_s=self.options.timeout_s)
        figures = figures_of(seen, batch_size=self.job.config.batch_size, steps_per_epoch=self.job.steps_per_epoch)
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
    for name, value in vars(options).items():
        least = 0 if name in ("seed", "num_workers", "cache_epochs") else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            raise ValueError(f"--{name}={value}: must be {least} or more")
    if options.alone_s <= 0:
        raise ValueError(f"--alone_s={options.alone_s:g}: must be above 0")
    if not 0 < options.eval_split < 1:
        raise ValueError(
            f"--eval_split={options.eval_split}: must be above 0 and below 1, an error needs held-out episodes"
        )


def print_report(options: TrainBench, job: TrainJob, figures: Figures) -> None:
    config, last = job.config, _last(options, figures)
    samples = config.steps * config.batch_size
    sys.stdout.write(f"{samples} samples in batches of {config.batch_size}; CPU in ms per sample, in steady state\n")
    rows = [_row(name, runs, figures) for name, runs in figures.by_program.items()]
    sys.stdout.write(format_table(COLUMNS, rows) + "\n")
    sys.stdout.write(
        f"share of the ideal, all cores at the cost of step and reading alone: {last['share_of_ideal']:.2f}\n"
    )
    for name, error in figures.errors.items():
        sys.stdout.write(f"held-out action error after the same samples: {name}: {error:.4f}\n")
    if figures.courses:
        sys.stdout.write("\n" + _quality_table(figures.courses, options) + "\n")
    print_last("train", last, options, _settings(job))


def _row(name: str, runs: Sequence[RunFigures], figures: Figures) -> list[str]:
    ratio = figures.results.ratio(OURS, name)
    return [
        name,
        f"{_median(run.samples_per_s for run in runs):.4g}",
        figures.results.spread(name),
        f"{ratio:.2f} x" if ratio and name != OURS else "",
        " ".join(f"{_median(rates):.4g}" for rates in zip(*(run.by_epoch for run in runs), strict=False)),
        f"{_median(run.complete_samples_per_s for run in runs):.4g}",
        f"{_median(run.first_step_s for run in runs):.1f} s",
        *(f"{1000 * _median(run.cpu_s[group] for run in runs):.2f}" for group in (TRAINING, READERS, OTHERS)),
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
    return format_table(
        ["program", "last error", f"to {error:.4f}", "with start-up", "sooner than lerobot-train"], rows
    )


def _last(options: TrainBench, figures: Figures) -> dict[str, Any]:
    results = figures.results
    return {
        "samples_per_s": results.median(OURS),
        "over_lerobot": results.ratio(OURS, PEERS["lerobot"]),
        "over_template": results.ratio(OURS, PEERS["template"]),
        "share_of_ideal": _median(figures.share_of_ideal),
        "time_to_first_step_s": _median(run.first_step_s for run in figures.by_program[OURS]),
        "held_out_error": dict(figures.errors),
        **_cached(figures),
        **_quality(options, figures.courses),
        "rounds": {name: [asdict(run) for run in runs] for name, runs in figures.by_program.items()},
        "spilled_bytes": figures.spilled_bytes,
        "not_run": results.not_run,
    }


def _cached(figures: Figures) -> dict[str, Any]:
    """Return the figures of the run with the frame cache, from its second epoch on."""
    firsts = [run.by_epoch[0] for run in figures.by_program.get(CACHED, ()) if run.by_epoch]
    uncached = [run.samples_per_s for run in figures.by_program[OURS]]
    first = _median(a / b for a, b in zip(firsts, uncached, strict=False)) if firsts else None
    return {
        "cached_over_uncached": figures.results.ratio(CACHED, OURS),
        "cached_over_lerobot": figures.results.ratio(CACHED, PEERS["lerobot"]),
        "first_epoch_over_uncached": first,
    }


def _quality(options: TrainBench, courses: dict[str, Course]) -> dict[str, Any]:
    """Return the quality figures; the main one uses one noise sample, or the first number given."""
    ours = [name for name in courses if name != "lerobot"]
    if not ours:
        return {"time_to_quality_over_lerobot": None}
    error = wanted_error(courses, options.error)
    sooner = over_lerobot(courses, error, ours)
    seconds = {name: course.seconds_to(error) for name, course in courses.items()}
    main = "ours, 1 noise samples" if "ours, 1 noise samples" in ours else ours[0]
    return {
        "time_to_quality_over_lerobot": sooner[main],
        "time_to_quality_by_noise_samples": sooner,
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
