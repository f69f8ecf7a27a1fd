"""`vlatune bench train`: the whole, end to end: `vlatune train`, `lerobot-train` and the template's way, taking turns.

Same base, dataset, batch size and number of samples; every program in processes of its own, watched from outside. In
each round the step and the reading of our run are also measured alone: together they say what the cores could do. The
table and the last line of JSON are made here, too.
"""

import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from vlatune.bench.harness import CannotRunError, Results, alternate, format_table, print_last, say
from vlatune.bench.options import TrainBench
from vlatune.bench.processes import Cores, Program, Seen, ends_in_order, run_on, split_cores, watch
from vlatune.bench.train import train_programs as ways
from vlatune.bench.train.time_to_quality import (
    Course,
    ErrorMeter,
    lerobot_folder,
    measure_quality,
    our_folder,
    over_lerobot,
    wanted_error,
    with_seeing_base,
)
from vlatune.bench.train.train_cases import TrainJob, case_name, find_case, make_job
from vlatune.bench.train.train_figures import (
    Alone,
    RunFigures,
    break_even_epochs,
    figures_of,
    share_of_ideal,
    share_of_predicted,
    sharing_explains,
    split_as_told,
    steady_window,
    step_in_run_s,
)
from vlatune.config_checks import validate
from vlatune.pipeline.sizing import usable_cpus
from vlatune.report.sinks import read_jsonl
from vlatune.report.summary import Summary, read_summary
from vlatune.run_setup import make_setup

OURS = "vlatune train"
PEERS = {
    "lerobot": "lerobot-train",
    "template": "the template's way",
    "augmented": "vlatune train, augmented",
    "kept": "vlatune train, kept features",
}
"""Beside ours; the last two are ours with LeRobot's default augmentation and from kept features, and the ratio to ours without is
what that costs or gains."""
COLUMNS = (
    "way",
    "samples/s",
    "spread",
    "ours by it",
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
    options = replace(options, config=case_name(options))
    with ExitStack() as stack:
        stack.enter_context(ends_in_order())
        folder = Path(options.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="vlatune-bench-")))
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        cores = split_cores(os.sched_getaffinity(0)) if options.pin else None
        job = make_job(options, folder)
        if options.quality and job.config.policy.train != "full":
            job = with_seeing_base(job, options, folder)
        meter = ErrorMeter(job, options.eval_samples)
        rounds = Rounds(job, options, folder / "runs", meter, cores)
        figures = rounds.measure()
        if options.quality:
            figures.courses = measure_quality(job, options, meter, rounds.clean_folder, say=say)
        shutil.rmtree(folder / "runs", ignore_errors=True)
    print_report(options, job, figures)


@dataclass
class Rounds:
    """Every way once a round, and what was seen of each."""

    job: TrainJob
    options: TrainBench
    runs_folder: Path
    meter: ErrorMeter
    cores: Cores | None
    """With --pin: who runs where."""
    by_way: dict[str, list[RunFigures]] = field(default_factory=dict)
    ours: list[OurRound] = field(default_factory=list)
    alone: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    def measure(self) -> Figures:
        cores = self.cores
        turns: dict[str, Callable[[], float]] = {
            STEP_ALONE: lambda: self._measure_alone(STEP_ALONE, "step", "wall_s", cores and cores.training),
            READ_ALONE: lambda: self._measure_alone(READ_ALONE, "reading", "cpu_s", cores and cores.rest),
            OURS: self._run_ours,
        }
        for peer in self.options.peers:
            runs = {"lerobot": self._run_lerobot, "template": self._run_template}
            runs |= {"augmented": self._run_augmented, "kept": self._run_kept}
            turns[PEERS[peer]] = runs[peer]
        say("samples/s:")
        results = alternate(turns, self.options.rounds, say=say)
        return Figures(results, self.by_way, self.ours, self._errors())

    def clean_folder(self, name: str) -> Path:
        folder = self.runs_folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def _measure_alone(self, name: str, what: str, unit: str, cores: frozenset[int] | None) -> float:
        command, env = ways.alone(self.job, self.clean_folder("alone"), what, self.options.alone_s)
        seconds: dict[str, float] = json.loads(run_on(command, env, cores).splitlines()[-1])
        self.alone.setdefault(name, []).append(seconds)
        return 1 / seconds[unit]

    def _run_ours(self) -> float:
        folder = self.clean_folder("ours")
        seen = self._watch(ways.ours(self.job, folder))
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
        if self.job.config.policy.type != "pi05":
            raise CannotRunError("the template trains PI0.5 alone")
        return self._run_peer("template", ways.template(self.job, self.clean_folder("template")))

    def _run_augmented(self) -> float:
        return self._run_peer("augmented", ways.ours(self.job, self.clean_folder("augmented"), augmented=True))

    def _run_kept(self) -> float:
        policy = replace(self.job.config.policy, keep_features=True)
        try:
            config = replace(self.job.config, policy=policy)
            validate(config)
            make_setup(config)
        except ValueError as error:
            raise CannotRunError(str(error)) from None
        return self._run_peer("kept", ways.ours(self.job, self.clean_folder("kept"), keep_features=True))

    def _run_peer(self, name: str, program: Program) -> float:
        threads = self.job.config.torch_threads or usable_cpus()
        return self._add(PEERS[name], self._watch(program), threads)

    def _watch(self, program: Program) -> Seen:
        return watch(program, timeout_s=self.options.timeout_s, cores=self.cores)

    def _add(self, way: str, seen: Seen, compute_threads: int, *, told: Mapping[str, float] | None = None) -> float:
        figures = figures_of(seen, batch_size=self.job.config.batch_size, compute_threads=compute_threads)
        if told:
            figures = split_as_told(figures, told)
        self.by_way.setdefault(way, []).append(figures)
        return figures.samples_per_s

    def _errors(self) -> dict[str, float]:
        """Held-out error of the last round's runs: each has seen the same number of samples."""
        steps = self.job.config.steps
        folders = {OURS: our_folder(self.runs_folder / "ours", steps)}
        if PEERS["kept"] in self.by_way:
            folders[PEERS["kept"]] = our_folder(self.runs_folder / "kept", steps)
        if PEERS["lerobot"] in self.by_way:
            folders[PEERS["lerobot"]] = lerobot_folder(self.job, self.runs_folder / "lerobot", steps)
        return {way: self.meter.error_of(folder) for way, folder in folders.items()}


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
    config, last = job.config, _last(options, figures, job.epoch_samples)
    samples = config.steps * config.batch_size
    sys.stdout.write(f"{samples} samples in batches of {config.batch_size}; CPU in ms per sample, in steady state\n")
    sys.stdout.write(format_table(COLUMNS, [_row(way, runs, figures) for way, runs in figures.by_way.items()]) + "\n")
    sys.stdout.writelines(f"{line}\n" for line in _sentences(last))
    if last["kept_over_plain"]:
        epochs = last["kept_break_even_epochs"]
        sys.stdout.write(
            f"kept features: {last['kept_over_plain']:.2f} x the samples/s; the first step after {last['kept_first_step_s']:.1f} s, "
            f"without them {last['time_to_first_step_s']:.1f} s: "
            + (
                "it never pays\n"
                if epochs is None
                else f"it pays from {epochs:.2g} epochs of {job.epoch_samples} samples on\n"
            )
        )
    for way, error in figures.errors.items():
        sys.stdout.write(f"held-out action error after the same samples: {way}: {error:.4f}\n")
    if figures.courses:
        sys.stdout.write("\n" + _quality_table(figures.courses, options) + "\n")
    print_last("train", last, options, _settings(job))


def _row(way: str, runs: Sequence[RunFigures], figures: Figures) -> list[str]:
    parts = ("compute_s", "other_threads_s", "readers_s", "others_s")
    cpu_ms = [1000 * _median(getattr(run.cpu, part) for run in runs) for part in parts]
    ratio = figures.results.ratio(OURS, way)
    return [
        way,
        f"{_median(run.samples_per_s for run in runs):.4g}",
        figures.results.spread(way),
        f"{ratio:.2f} x" if ratio and way != OURS else "",
        f"{_median(run.whole_samples_per_s for run in runs):.4g}",
        f"{_median(run.first_step_s for run in runs):.1f} s",
        *(f"{value:.2f}" for value in cpu_ms),
    ]


def _sentences(last: Mapping[str, Any]) -> list[str]:
    return [
        f"of what the step and reading alone allow together: {last['share_of_predicted']:.2f}; of the ideal, all cores at their cost: "
        f"{last['share_of_ideal']:.2f}",
        f"a step in the run by the same alone: {last['step_in_run_over_alone']:.2f}; sharing the cores explains "
        f"{last['sharing_explains']:.2f}",
    ]


def _quality_table(courses: dict[str, Course], options: TrainBench) -> str:
    error = wanted_error(courses, options.error)
    sooner = over_lerobot(courses, error, list(courses))
    rows = []
    for name, course in courses.items():
        seconds = course.seconds_to(error)
        times = ["not reached", ""] if seconds is None else [f"{one:.1f} s" for one in seconds]
        ratio, rough = sooner[name], "rough" if course.is_rough(error) else ""
        rows.append([name, f"{course.points[-1].error:.4f}", *times, f"{ratio:.2f} x" if ratio else "", rough])
    header = ["way", "last error", f"to {error:.4f}", "with the start", "sooner than lerobot-train", ""]
    legend = "rough: reached before the first checkpoint, so the seconds lie on a straight line from the start to it; more --checkpoints, or a smaller --error, would tell"
    is_rough = any(course.is_rough(error) for course in courses.values())
    return format_table(header, rows) + (f"\n{legend}" if is_rough else "")


def _last(options: TrainBench, figures: Figures, epoch_samples: int) -> dict[str, Any]:
    kept = figures.by_way.get(PEERS["kept"], ())
    seen, results, cores = figures.by_way[OURS], figures.results, usable_cpus()
    rounds, pinned = list(zip(figures.ours, seen, strict=True)), options.pin
    return {
        "samples_per_s": results.median(OURS),
        "over_lerobot": results.ratio(OURS, PEERS["lerobot"]),
        "over_template": results.ratio(OURS, PEERS["template"]),
        "augmented_over_plain": results.ratio(PEERS["augmented"], OURS),
        "kept_over_plain": results.ratio(PEERS["kept"], OURS),
        "kept_first_step_s": _median(run.first_step_s for run in kept) if kept else None,
        "kept_break_even_epochs": break_even_epochs(seen, kept, epoch_samples) if kept else None,
        "share_of_ideal": _median(share_of_ideal(run.samples_per_s, own.alone, cores) for own, run in rounds),
        "share_of_predicted": _median(
            share_of_predicted(run.samples_per_s, own.alone, cores, pinned=pinned) for own, run in rounds
        ),
        "step_in_run_over_alone": _median(own.step_s / own.alone.step_wall_s for own, _ in rounds),
        "sharing_explains": _median(sharing_explains(own.alone, run.cpu, cores, pinned=pinned) for own, run in rounds),
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
    rough = [name for name, course in courses.items() if course.is_rough(error)]
    told = "ours, 1 draws" if "ours, 1 draws" in ours else ours[0]
    return {
        "time_to_quality_over_lerobot": sooner[told],
        "time_to_quality_by_draws": sooner,
        "time_to_quality_is_rough": not {"lerobot", told}.isdisjoint(rough),
        "quality": {"error": error, "seconds": seconds, "rough": rough}
        | {name: one.to_json() for name, one in courses.items()},
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
