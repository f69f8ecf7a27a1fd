"""Measure the seconds to a held-out action error for LeRobot and vlatune.

Each run saves evenly spaced checkpoints; some of them, denser at the start, are evaluated
afterwards by the same function on the same samples. Saving counts in a run's time, evaluation does
not. Errors are noisy between checkpoints, so the time is taken from the nearest curve that never
rises. A target that is reached before the first checkpoint is interpolated from the start and
marked as rough.

A random frozen part would provide no usable features, so with frozen parts the base is first
trained in full on another dataset.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.harness import say
from benchmarks.options import TrainBench
from benchmarks.processes import Program, Seen, watch
from benchmarks.train import train_programs as programs
from benchmarks.train.train_cases import TrainJob
from benchmarks.train.train_figures import (
    ErrorPoint,
    falling,
    first_step_at,
    measured_checkpoints,
    seconds_to_error,
)
from vlatune.batch import Columns
from vlatune.checkpoint.store import list_checkpoints
from vlatune.config.settings import EvalConfig, ExportConfig
from vlatune.evaluate.held_out import read_held_out
from vlatune.evaluate.predictions import predict_all
from vlatune.export.export import export_run
from vlatune.export.policy_files import TOKENIZER_FOLDER
from vlatune.policies.base import ModuleOptions
from vlatune.policies.model_size import SIZE_FILE
from vlatune.registry import get_policy_info
from vlatune.run_setup import make_setup

ERROR_FACTOR = 1.1
"""Target relative to LeRobot's last error; above 1, because a curve's end is flat and noisy."""


@dataclass(frozen=True)
class Course:
    """Errors of a run over time."""

    points: tuple[ErrorPoint, ...]
    """Measured errors; the first is the base's."""
    seen: Seen

    @cached_property
    def curve(self) -> tuple[ErrorPoint, ...]:
        """Return the errors without rises."""
        return falling(self.points)

    def seconds_to(self, error: float) -> tuple[float, float] | None:
        """Return seconds from the first step and from the command; None if never reached."""
        at_s = seconds_to_error(self.curve, self.seen.marks, error)
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
        return predict_all(setup, module.eval(), self._rows, self._options)["none"].error()

    @cached_property
    def _rows(self) -> Columns:
        return read_held_out(make_setup(self._job.config), self._options.max_samples)


def measure_quality(
    job: TrainJob, options: TrainBench, meter: ErrorMeter, folder: Callable[[str], Path], *, say: Callable[[str], None]
) -> dict[str, Course]:
    """Return the course of LeRobot, if selected, and of vlatune by number of noise samples."""
    save_freq = max(1, job.config.steps // options.checkpoints)
    start = ErrorPoint(0, meter.error_of(Path(str(job.config.policy.path))))
    before = measured_checkpoints(job.config.steps // save_freq)[:-1]
    wanted = [
        *(save_freq * number for number in before),
        job.config.steps,
    ]  # both programs also save after the last step

    def run(name: str, program: Program, find: Callable[[Path, int], Path]) -> Course:
        say(f"{name}: a run with checkpoints")
        seen = watch(program, timeout_s=options.timeout_s)
        points = [ErrorPoint(step, meter.error_of(find(program.output.parent, step))) for step in wanted]
        say(f"{name}: held-out error {points[-1].error:.4f} after {points[-1].optimizer_step} steps")
        return Course((start, *points), seen)

    courses = {}
    if "lerobot" in options.peers:
        program = programs.lerobot(job, folder("lerobot"), save_freq=save_freq)
        courses["lerobot"] = run("lerobot-train", program, lambda at, step: lerobot_folder(job, at, step))
    for samples in noise_samples(job, options):
        program = programs.ours(job, folder(f"ours-{samples}"), save_freq=save_freq, flow_samples=samples)
        courses[f"ours, {samples} noise samples"] = run(f"vlatune train, flow_samples={samples}", program, our_folder)
    if job.cache_epochs:
        program = programs.ours_cached(job, folder("ours-cached"), steps=job.config.steps, save_freq=save_freq)
        courses["ours, frame cache"] = run("vlatune train, frame cache", program, our_folder)
    return courses


def noise_samples(job: TrainJob, options: TrainBench) -> tuple[int, ...]:
    return options.flow_samples if "flow_samples" in get_policy_info(job.config.policy.type).settings else (1,)


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


def wanted_error(courses: dict[str, Course], given: float | None) -> float:
    """Return the given target, or one slightly above LeRobot's (else vlatune's) last error."""
    if given is not None:
        return given
    reference = courses.get("lerobot") or next(iter(courses.values()))
    return ERROR_FACTOR * reference.curve[-1].error


def over_lerobot(courses: dict[str, Course], error: float, names: Sequence[str]) -> dict[str, float | None]:
    """Return how many times sooner than LeRobot each run reaches the error, from the first step.
    None if one of them never reached it or started below it."""
    theirs = courses["lerobot"].seconds_to(error) if "lerobot" in courses else None
    ours = {name: courses[name].seconds_to(error) for name in names}
    return {name: theirs[0] / own[0] if theirs and own and own[0] > 0 else None for name, own in ours.items()}
