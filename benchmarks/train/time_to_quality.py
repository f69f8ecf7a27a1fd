"""Measure the seconds to a held-out action error for LeRobot and vlatune.

Each run saves evenly spaced checkpoints, which are evaluated afterwards by the same function on the
same samples. Saving counts in a run's time, evaluation does not.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.harness import say
from benchmarks.options import TrainBench
from benchmarks.processes import Program, Seen, watch
from benchmarks.train import train_programs as programs
from benchmarks.train.train_cases import TrainJob
from benchmarks.train.train_figures import ErrorPoint, first_step_at, seconds_to_error
from vlatune.batch import Columns
from vlatune.checkpoint.store import list_checkpoints
from vlatune.config.settings import EvalConfig, ExportConfig
from vlatune.evaluate.held_out import read_held_out
from vlatune.evaluate.predictions import predict
from vlatune.export.export import export_run
from vlatune.export.policy_files import TOKENIZER_FOLDER
from vlatune.policies.base import ModuleOptions
from vlatune.policies.model_size import SIZE_FILE
from vlatune.run_setup import make_setup

LEROBOT, OURS = "lerobot", "ours"
CHECKPOINTS = 8
"""Evenly spaced checkpoints of a run whose errors are measured."""
ERROR_FACTOR = 1.1
"""Target relative to LeRobot's last error; above 1, because a curve's end is flat and noisy."""


@dataclass(frozen=True)
class Course:
    """Errors of a run over time."""

    points: tuple[ErrorPoint, ...]
    """Measured errors; the first is the base's."""
    seen: Seen

    def seconds_to(self, error: float) -> tuple[float, float] | None:
        """Return seconds from the first step and from the command; None if never reached."""
        at_s = seconds_to_error(self.points, self.seen.marks, error)
        return None if at_s is None else (at_s - first_step_at(self.seen.marks), at_s - self.seen.begin_s)

    def to_json(self) -> dict[str, Any]:
        return {"errors": [[point.optimizer_step, point.error] for point in self.points]}


class ErrorMeter:
    """Compute the open-loop error of LeRobot folders on held-out episodes, which are read once."""

    def __init__(self, job: TrainJob, max_samples: int) -> None:
        self._job, self._options = job, EvalConfig(max_samples=max_samples)

    def error_of(self, folder: Path) -> float:
        config = replace(self._job.config, policy=replace(self._job.config.policy, path=str(folder)))
        setup = make_setup(config)
        options = ModuleOptions(config.policy.train, "float32")
        module = setup.adapter.load_module(setup.policy, setup.binding, options, stats=setup.stats)
        return predict(setup, module.eval(), self._rows, self._options).error()

    @cached_property
    def _rows(self) -> Columns:
        return read_held_out(make_setup(self._job.config), self._options.max_samples)


def measure_quality(
    job: TrainJob, options: TrainBench, meter: ErrorMeter, folder: Callable[[str], Path]
) -> dict[str, Course]:
    """Return the courses of LeRobot, if selected, and of vlatune."""
    steps = job.config.steps
    save_freq = max(1, steps // CHECKPOINTS)
    start = ErrorPoint(0, meter.error_of(Path(str(job.config.policy.path))))
    wanted = [*range(save_freq, steps, save_freq), steps]  # both programs also save after the last step

    def run(name: str, program: Program, find: Callable[[Path, int], Path]) -> Course:
        say(f"{name}: a run with checkpoints")
        seen = watch(program, timeout_s=options.timeout_s)
        points = [ErrorPoint(step, meter.error_of(find(program.output.parent, step))) for step in wanted]
        say(f"{name}: held-out error {points[-1].error:.4f} after {points[-1].optimizer_step} steps")
        return Course((start, *points), seen)

    courses = {}
    if "lerobot" in options.peers:
        program = programs.lerobot(job, folder("lerobot"), save_freq=save_freq)
        courses[LEROBOT] = run("lerobot-train", program, lambda at, step: lerobot_folder(job, at, step))
    courses[OURS] = run("vlatune train", programs.ours(job, folder("ours"), save_freq=save_freq), our_folder)
    return courses


def our_folder(at: Path, step: int) -> Path:
    """Export the checkpoint of an optimizer step to a LeRobot folder."""
    found = next(one for one in list_checkpoints(at / "run") if int(one.name) == step)
    folder = at / "exports" / found.name
    folder.parent.mkdir(exist_ok=True)
    if not folder.exists():
        export_run(at / "run", folder, ExportConfig(checkpoint=found.name), warn=say)
    return folder


def lerobot_folder(job: TrainJob, at: Path, step: int) -> Path:
    """Return LeRobot's checkpoint folder, with size and tokenizer of the base added."""
    saved = (at / "run" / "checkpoints").iterdir()
    folder = next(one for one in saved if one.name.isdecimal() and int(one.name) == step) / "pretrained_model"
    base = Path(str(job.config.policy.path))
    if (base / SIZE_FILE).exists():
        shutil.copy(base / SIZE_FILE, folder / SIZE_FILE)
    if (base / TOKENIZER_FOLDER).is_dir():
        shutil.copytree(base / TOKENIZER_FOLDER, folder / TOKENIZER_FOLDER, dirs_exist_ok=True)
    return folder


def wanted_error(courses: dict[str, Course]) -> float:
    """Return a target slightly above LeRobot's (else vlatune's) last error."""
    return ERROR_FACTOR * next(iter(courses.values())).points[-1].error


def over_lerobot(courses: dict[str, Course], error: float) -> float | None:
    """Return how many times sooner than LeRobot our run reaches the error, from the first step.
    None if one of them never reached it or started below it."""
    theirs = courses[LEROBOT].seconds_to(error) if LEROBOT in courses else None
    ours = courses[OURS].seconds_to(error)
    return theirs[0] / ours[0] if theirs and ours and ours[0] > 0 else None
