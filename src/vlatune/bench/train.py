"""`vlatune bench train`: the whole, end to end: `vlatune train`, `lerobot-train` and the template's way, taking turns.

Same base, dataset, batch size and number of samples; every program in processes of its own, watched from outside. In
each round the step and the reading of our run are also measured alone: together they say what the cores could do.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from vlatune.bench import train_ways as ways
from vlatune.bench.harness import alternate
from vlatune.bench.options import TrainBench
from vlatune.bench.resume_process import ends_in_order
from vlatune.bench.train_case import TrainJob, find_case, make_job
from vlatune.bench.train_figures import Alone, RunFigures, figures_of, split_as_told, steady_window, step_in_run_s
from vlatune.bench.train_quality import held_out_error, lerobot_folders, measure_quality, our_folders
from vlatune.bench.train_report import OURS, PEERS, Figures, OurRound, print_report
from vlatune.bench.train_watch import Program, Seen, watch
from vlatune.pipeline.host import usable_cpus
from vlatune.report.sinks import read_jsonl
from vlatune.report.summary import read_summary

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
            figures.courses = measure_quality(rounds.job, options, rounds.clean_folder, say=_say)
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
        _say("samples/s:")
        results = alternate(turns, self.options.rounds, say=_say)
        return Figures(results, self.by_way, self.ours, self._errors())

    def clean_folder(self, name: str) -> Path:
        folder = self.runs_folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def _measure_alone(self, name: str, what: str, unit: str) -> float:
        command, env = ways.alone(self.job, self.clean_folder("alone"), what)
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
    if not 0 < options.eval_split < 1:
        raise ValueError(
            f"--eval_split={options.eval_split}: must be above 0 and below 1, an error needs held-out episodes"
        )


def _say(text: str) -> None:
    sys.stderr.write(f"vlatune: {text}\n")
    sys.stderr.flush()
