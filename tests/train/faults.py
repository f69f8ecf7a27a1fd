"""Named points of a worker's life at which a test ends it, for real: SIGKILL, from inside.

    data wait           before a micro-batch is taken
    forward, backward   before that pass
    all-reduce          a gradient is complete; its exchange with the other workers is under way
    optimizer           the weights are new, the step is not counted yet
    after step          between a step and its log line or save
    report              the log line is written, nothing else is
    validation          of its held-out batches one is computed, the others are not
    validated           all workers have the figures, nobody has written them down
    save: PHASE         a moment of a save (checkpoint/phases.py), e.g. `save: synced`, `save: uploading`

`worker_with(faults, ...)` is what Ray Train calls on every rank instead of `run_worker`: it arms the points, then runs
the real worker. A fault fires once, also over restarts: it leaves a file.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POINTS = ("data wait", "forward", "backward", "all-reduce", "optimizer", "after step", "report")
VALIDATION_POINTS = ("validation", "validated")
SAVE_POINTS = tuple(
    f"save: {phase}" for phase in ("begun", "file", "written", "synced", "committed", "removing", "pruned")
)
UPLOAD_POINTS = ("save: uploading", "save: uploaded")


@dataclass(frozen=True)
class Fault:
    point: str
    optimizer_step: int
    """The step that is being made, counted from 1; of a save, the step that it saves."""
    rank: int = 0
    signal: int = signal.SIGKILL
    pid: int | None = None
    """Who gets it; the worker itself when left out."""

    def file(self, folder: Path) -> Path:
        return folder / f"{self.point.replace(' ', '_')}-{self.optimizer_step}-{self.rank}"


class Faults:
    """Armed in a worker's process."""

    def __init__(self, faults: tuple[Fault, ...], folder: Path, rank: int) -> None:
        self._mine = [fault for fault in faults if fault.rank == rank]
        self._folder = folder
        self.making = 0
        """The optimizer step that is being made."""
        self.saving = 0

    def reach(self, point: str) -> None:
        step = self.saving if point.startswith("save") else self.making
        for fault in self._mine:
            if fault.point == point and fault.optimizer_step == step and not fault.file(self._folder).exists():
                fault.file(self._folder).touch()
                os.kill(fault.pid or os.getpid(), fault.signal)


def worker_with(
    faults: tuple[Fault, ...], folder: Path, environment: dict[str, str]
) -> Callable[[dict[str, Any]], None]:
    """A worker that will meet its faults; `environment` is laid over its own."""

    def run_faulty_worker(settings: dict[str, Any]) -> None:
        import ray.train

        from vlatune.train.worker.loop import run_worker

        os.environ.update(environment)
        arm(Faults(faults, folder, ray.train.get_context().get_world_rank()))
        run_worker(settings)

    return run_faulty_worker


def arm(faults: Faults) -> None:
    from vlatune.checkpoint.snapshot import BackgroundWriter
    from vlatune.train.worker.loop import Worker
    from vlatune.train.worker.metrics_logger import MetricsLogger
    from vlatune.train.worker.optimizer import Updater
    from vlatune.train.worker.validation import Validator

    def before(owner: Any, name: str, act: Callable[[Any], None]) -> None:
        real = getattr(owner, name)

        def armed(self, *args: Any, **kwargs: Any) -> Any:
            act(self)
            return real(self, *args, **kwargs)

        setattr(owner, name, armed)

    def after(owner: Any, name: str, point: str) -> None:
        real = getattr(owner, name)

        def armed(self, *args: Any, **kwargs: Any) -> Any:
            result = real(self, *args, **kwargs)
            faults.reach(point)
            return result

        setattr(owner, name, armed)

    def next_step(worker: Any) -> None:
        faults.making = (faults.making or worker.first_step) + 1
        faults.reach("data wait")

    def watch_gradients(updater: Any) -> None:
        if not hasattr(updater, "armed"):
            updater.armed = True
            for parameter in updater._parameters:
                parameter.register_post_accumulate_grad_hook(lambda _: faults.reach("all-reduce"))
            updater._optimizer.register_step_post_hook(lambda *_: faults.reach("optimizer"))

    before(Worker, "_take", next_step)
    before(Updater, "update", watch_gradients)
    before(Updater, "forward", lambda _: faults.reach("forward"))
    before(Updater, "backward", lambda _: faults.reach("backward"))
    after(Worker, "_note", "after step")
    after(MetricsLogger, "log", "report")

    real_validate = Validator.validate

    def validate(self, *args: Any, on_batch: Callable[[int], None], **kwargs: Any) -> Any:
        def watched(done: int) -> None:
            on_batch(done)
            faults.reach("validation")

        found = real_validate(self, *args, on_batch=watched, **kwargs)
        faults.reach("validated")
        return found

    Validator.validate = validate

    real_save, real_init = BackgroundWriter.save, BackgroundWriter.__init__

    def save(self, optimizer_step: int, *args: Any, **kwargs: Any) -> None:
        self.wait()
        faults.saving = optimizer_step
        real_save(self, optimizer_step, *args, **kwargs)

    def init(self, *args: Any, on_phase: Callable[[str], None], **kwargs: Any) -> None:
        def watched(phase: str) -> None:
            on_phase(phase)
            faults.reach(f"save: {phase}")

        real_init(self, *args, on_phase=watched, **kwargs)

    BackgroundWriter.save, BackgroundWriter.__init__ = save, init
