"""Seconds to a held-out action error, LeRobot's program and ours side by side.

Each run saves checkpoints on its way, evenly spaced, as LeRobot's program saves them; of these the first few and then fewer and
fewer are evaluated afterwards, by the same function on the same samples. Saving counts in a run's seconds, evaluating does
not. From one checkpoint to the next an error rises as often as not, so it counts as reached where the nearest curve that never
rises reaches it. One that was reached before the first checkpoint lies on a straight line from the start: its seconds are rough,
and are named so.

Where a part of the model is frozen, a random one would show the rest nothing that could be learnt. So it has learnt to see
before: on another recording of the same world.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from vlatune.batch import Columns
from vlatune.bench.harness import say
from vlatune.bench.options import TrainBench
from vlatune.bench.processes import Program, Seen, watch
from vlatune.bench.train import train_programs as ways
from vlatune.bench.train.train_cases import VIDEOS, TrainJob, ensure_videos
from vlatune.bench.train.train_figures import (
    ErrorPoint,
    falling,
    first_at,
    first_step_at,
    measured_checkpoints,
    seconds_to_error,
)
from vlatune.checkpoint.export import export_run
from vlatune.checkpoint.policy_files import TOKENIZER_FOLDER
from vlatune.checkpoint.store import list_checkpoints
from vlatune.config import EvalConfig, ExportConfig, RunConfig
from vlatune.evaluate.held_out import read_held_out
from vlatune.evaluate.predictions import predict
from vlatune.files import whole_folder
from vlatune.policies.base import ModuleOptions, PolicySpec, trained_tensors
from vlatune.policies.model_size import SIZE_FILE
from vlatune.policies.registry import get_policy
from vlatune.run_setup import make_setup

ERROR_FACTOR = 1.1
"""Of LeRobot's last error: reached before the very end, where a curve is flat and seconds are chance, and not at once."""


@dataclass(frozen=True)
class Course:
    """A run's error on its way."""

    points: tuple[ErrorPoint, ...]
    """As measured; the first is that of the base."""
    seen: Seen

    @cached_property
    def curve(self) -> tuple[ErrorPoint, ...]:
        """Without the rises."""
        return falling(self.points)

    def seconds_to(self, error: float) -> tuple[float, float] | None:
        """From the first step, and from the command; None where the error was never reached."""
        at_s = seconds_to_error(self.curve, self.seen.marks, error)
        return None if at_s is None else (at_s - first_step_at(self.seen.marks), at_s - self.seen.begin_s)

    def is_rough(self, error: float) -> bool:
        """Whether it was reached before the first checkpoint, where nothing is known but the base's error."""
        place = first_at(self.curve, error)
        return place is not None and place <= 1

    def to_json(self) -> dict[str, Any]:
        return {"errors": [[point.optimizer_step, point.error] for point in self.points]}


OTHER_VIDEOS = replace(VIDEOS, episodes=2 * VIDEOS.episodes, height=120, width=160, seed=1)
"""What the frozen part has learnt from: other episodes, in pictures that are cheap to decode."""
SEEING_STEPS = 400


def with_seeing_base(job: TrainJob, options: TrainBench, folder: Path) -> TrainJob:
    """The job on a base whose frozen part has learnt to see: trained as a whole on another recording, or on the user's own, then what
    the job trains put back to what it was. Made once, as the base is.
    """
    base = Path(str(job.config.policy.path))
    seeing = folder / f"{base.name}-seeing"
    if not seeing.exists():
        root = options.root or str(ensure_videos(folder / "other-videos", OTHER_VIDEOS))
        config = replace(
            job.config,
            dataset=replace(job.config.dataset, root=(root,)),
            policy=replace(job.config.policy, train="full"),
            steps=SEEING_STEPS,
            torch_threads=None,
        )
        say(f"training the whole model for {SEEING_STEPS} steps, so that its frozen part learns to see")
        place = folder / ".seeing"
        shutil.rmtree(place, ignore_errors=True)  # of a start that was killed
        place.mkdir()
        program = ways.ours(replace(job, config=config), place)
        watch(program, timeout_s=options.timeout_s)
        with whole_folder(seeing) as aside:
            shutil.copytree(base, aside, dirs_exist_ok=True)
            _put_back(job.config, our_folder(place, SEEING_STEPS), aside)
        shutil.rmtree(place)
    return replace(job, config=replace(job.config, policy=replace(job.config.policy, path=str(seeing))))


def _put_back(config: RunConfig, trained: Path, folder: Path) -> None:
    """`folder` is the base's: it gets what was trained, but for what the config trains."""
    setup = make_setup(config)
    options = ModuleOptions(config.policy.train, "float32")

    def load(spec: PolicySpec) -> Any:
        return setup.adapter.load_module(spec, setup.binding, options, stats=setup.stats)

    random, seeing = load(setup.policy), load(setup.adapter.read_spec(trained))
    with torch.no_grad():
        for name, tensor in trained_tensors(seeing).items():
            tensor.copy_(trained_tensors(random)[name])
    seeing.as_lerobot().save_pretrained(folder)


class ErrorMeter:
    """Mean absolute open-loop error of LeRobot folders on the episodes that nobody trained on, whose rows are read once."""

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
    job: TrainJob, options: TrainBench, meter: ErrorMeter, folder: Callable[[str], Path], *, say: Callable[[str], None]
) -> dict[str, Course]:
    """Way -> its course: LeRobot's, where it is among the peers, and ours with each number of draws."""
    save_freq = max(1, job.config.steps // options.checkpoints)
    start = ErrorPoint(0, meter.error_of(Path(str(job.config.policy.path))))
    before = measured_checkpoints(job.config.steps // save_freq)[:-1]
    wanted = [*(save_freq * number for number in before), job.config.steps]  # both save after the last step, too

    def run(name: str, program: Program, find: Callable[[Path, int], Path]) -> Course:
        say(f"{name}: a run with checkpoints")
        seen = watch(program, timeout_s=options.timeout_s)
        points = [ErrorPoint(step, meter.error_of(find(program.output.parent, step))) for step in wanted]
        say(f"{name}: held-out error {points[-1].error:.4f} after {points[-1].optimizer_step} steps")
        return Course((start, *points), seen)

    courses = {}
    if "lerobot" in options.peers:
        program = ways.lerobot(job, folder("lerobot"), save_freq=save_freq)
        courses["lerobot"] = run("lerobot-train", program, lambda at, step: lerobot_folder(job, at, step))
    for draws in draws_tried(job, options):
        program = ways.ours(job, folder(f"ours-{draws}"), save_freq=save_freq, flow_samples=draws)
        courses[f"ours, {draws} draws"] = run(f"vlatune train, flow_samples={draws}", program, our_folder)
    return courses


def draws_tried(job: TrainJob, options: TrainBench) -> tuple[int, ...]:
    return options.flow_samples if "flow_samples" in get_policy(job.config.policy.type).settings else (1,)


def our_folder(at: Path, step: int) -> Path:
    """LeRobot folder of the checkpoint after so many optimizer steps."""
    found = next(one for one in list_checkpoints(at / "run") if int(one.name) == step)
    folder = at / "exports" / found.name
    folder.parent.mkdir(exist_ok=True)
    if not folder.exists():
        export_run(at / "run", folder, ExportConfig(checkpoint=found.name), warn=say)
    return folder


def lerobot_folder(job: TrainJob, at: Path, step: int) -> Path:
    """The same of LeRobot's; they do not know their size, and name the base's tokenizer by its path."""
    saved = (at / "run" / "checkpoints").iterdir()
    folder = next(one for one in saved if one.name.isdecimal() and int(one.name) == step) / "pretrained_model"
    base = Path(str(job.config.policy.path))
    if (base / SIZE_FILE).exists():
        shutil.copy(base / SIZE_FILE, folder / SIZE_FILE)
    if (base / TOKENIZER_FOLDER).is_dir():
        shutil.copytree(base / TOKENIZER_FOLDER, folder / TOKENIZER_FOLDER, dirs_exist_ok=True)
    return folder


def wanted_error(courses: dict[str, Course], given: float | None) -> float:
    """The given one, else a little above LeRobot's last, or ours where LeRobot did not run."""
    if given is not None:
        return given
    reference = courses.get("lerobot") or next(iter(courses.values()))
    return ERROR_FACTOR * reference.curve[-1].error


def over_lerobot(courses: dict[str, Course], error: float, names: Sequence[str]) -> dict[str, float | None]:
    """Way -> LeRobot's seconds by its own, from the first step on: how many times sooner it is there.

    None where one of them never came so far, or began there.
    """
    theirs = courses["lerobot"].seconds_to(error) if "lerobot" in courses else None
    ours = {name: courses[name].seconds_to(error) for name in names}
    return {name: theirs[0] / own[0] if theirs and own and own[0] > 0 else None for name, own in ours.items()}
