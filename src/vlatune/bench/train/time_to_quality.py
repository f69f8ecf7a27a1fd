"""Seconds to a held-out action error, LeRobot's program and ours side by side.

Each run saves checkpoints on its way; they are evaluated afterwards, by the same function on the same samples. Saving
counts in a run's seconds, evaluating does not.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlatune.bench.harness import say
from vlatune.bench.options import TrainBench
from vlatune.bench.processes import Program, Seen, watch
from vlatune.bench.train import train_programs as ways
from vlatune.bench.train.train_figures import ErrorPoint, first_step_at, seconds_to_error
from vlatune.bench.train.train_programs import TrainJob
from vlatune.checkpoint.export import export_run
from vlatune.checkpoint.policy_files import TOKENIZER_FOLDER
from vlatune.checkpoint.store import list_checkpoints
from vlatune.config import EvalConfig, ExportConfig
from vlatune.evaluate.held_out import read_held_out
from vlatune.evaluate.predictions import predict
from vlatune.policies.base import ModuleOptions
from vlatune.policies.model_size import write_size
from vlatune.policies.pi05.size import read_size
from vlatune.run_setup import make_setup

ERROR_FACTOR = 1.25
"""Of LeRobot's last error: reached before the very end, where a curve is flat and seconds are chance."""


@dataclass(frozen=True)
class Course:
    """A run's error on its way."""

    points: tuple[ErrorPoint, ...]
    seen: Seen

    def seconds_to(self, error: float) -> tuple[float, float] | None:
        """From the first step, and from the command; None where the error was never reached."""
        at_s = seconds_to_error(self.points, self.seen.marks, error)
        return None if at_s is None else (at_s - first_step_at(self.seen.marks), at_s - self.seen.begin_s)

    def to_json(self) -> dict[str, Any]:
        return {"errors": [[point.optimizer_step, point.error] for point in self.points]}


def measure_quality(
    job: TrainJob, options: TrainBench, folder: Callable[[str], Path], *, say: Callable[[str], None]
) -> dict[str, Course]:
    """Way -> its course: LeRobot's, where it is among the peers, and ours with each number of draws."""
    save_freq = max(1, job.config.steps // options.checkpoints)
    start = ErrorPoint(0, held_out_error(job, Path(str(job.config.policy.path)), options.eval_samples))

    def run(name: str, program: Program, find: Callable[[Path], list[tuple[int, Path]]]) -> Course:
        say(f"{name}: a run with checkpoints")
        seen = watch(program, timeout_s=options.timeout_s)
        folders = find(program.output.parent)
        points = [ErrorPoint(step, held_out_error(job, one, options.eval_samples)) for step, one in folders]
        say(f"{name}: held-out error {points[-1].error:.4f} after {points[-1].optimizer_step} steps")
        return Course((start, *points), seen)

    courses = {}
    if "lerobot" in options.peers:
        courses["lerobot"] = run(
            "lerobot-train",
            ways.lerobot(job, folder("lerobot"), save_freq=save_freq),
            lambda at: lerobot_folders(job, at),
        )
    for draws in options.flow_samples:
        program = ways.ours(job, folder(f"ours-{draws}"), save_freq=save_freq, flow_samples=draws)
        courses[f"ours, {draws} draws"] = run(f"vlatune train, flow_samples={draws}", program, our_folders)
    return courses


def held_out_error(job: TrainJob, folder: Path, max_samples: int) -> float:
    """Mean absolute open-loop error of a LeRobot folder on the episodes that nobody trained on."""
    config = replace(job.config, policy=replace(job.config.policy, path=str(folder)))
    setup = make_setup(config)
    module = setup.adapter.load_module(setup.policy, setup.binding, ModuleOptions(config.policy.train, "float32"))
    rows = read_held_out(setup, max_samples)
    return predict(setup, module.eval(), rows, EvalConfig(max_samples=max_samples)).error()


def our_folders(at: Path) -> list[tuple[int, Path]]:
    """Optimizer step and LeRobot folder of every checkpoint, in order."""
    found = []
    for checkpoint in list_checkpoints(at / "run"):
        folder = at / "exports" / checkpoint.name
        folder.parent.mkdir(exist_ok=True)
        if not folder.exists():
            export_run(at / "run", folder, ExportConfig(checkpoint=checkpoint.name), warn=say)
        found.append((int(checkpoint.name), folder))
    return sorted(found)


def lerobot_folders(job: TrainJob, at: Path) -> list[tuple[int, Path]]:
    """The same of LeRobot's checkpoints; they do not know their size, and name the base's tokenizer by its path."""
    base = Path(str(job.config.policy.path))
    size = read_size(base)
    folders = [one / "pretrained_model" for one in (at / "run" / "checkpoints").iterdir() if one.name.isdecimal()]
    for folder in folders:
        if size is not None:
            write_size(folder, size)
        if (base / TOKENIZER_FOLDER).is_dir():
            shutil.copytree(base / TOKENIZER_FOLDER, folder / TOKENIZER_FOLDER, dirs_exist_ok=True)
    return sorted((int(folder.parent.name), folder) for folder in folders)


def wanted_error(courses: dict[str, Course], given: float | None) -> float:
    """The given one, else a little above LeRobot's last, or ours where LeRobot did not run."""
    if given is not None:
        return given
    reference = courses.get("lerobot") or next(iter(courses.values()))
    return ERROR_FACTOR * reference.points[-1].error


def over_lerobot(courses: dict[str, Course], error: float, names: Sequence[str]) -> dict[str, float | None]:
    """Way -> LeRobot's seconds by its own, from the first step on: how many times sooner it is there.

    None where one of them never came so far, or began there.
    """
    theirs = courses["lerobot"].seconds_to(error) if "lerobot" in courses else None
    ours = {name: courses[name].seconds_to(error) for name in names}
    return {name: theirs[0] / own[0] if theirs and own and own[0] > 0 else None for name, own in ours.items()}
