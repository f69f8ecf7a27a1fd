"""TensorBoard and Weights & Biases logging from the driver.

Trackers follow the files that rank 0 writes, so they cannot block or fail the training process.
Each point is sent once: `logs/trackers.json` stores each tracker's run id and the last step sent
per file. Steps repeated after a restart are not sent again, and resumed runs continue the same
charts. A tracker that fails is reported once and disabled.
"""

import copy
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vlatune.config.settings import RunConfig, WandbConfig, to_json
from vlatune.console import printable, redacted, warn
from vlatune.run.run_folder import LOGS, METRICS_FILE, REPORT_FILE, VALIDATIONS_FILE, flat_settings
from vlatune.run.sinks import JsonlTail
from vlatune.run.summary import SUMMARY_FILE
from vlatune.storage.files import make_folder, read_json, write_json
from vlatune.storage.json_types import checked

STATE_FILE = "trackers.json"
POLL_S = 2.0
FINISH_S = 60.0
"""Maximum seconds for all trackers to finish at the end of a run."""


class Tracker(Protocol):
    def send(self, optimizer_step: int, numbers: Mapping[str, float]) -> None: ...
    def finish(self, files: list[Path]) -> None:
        """Finish or pause the run; `files` are uploaded with it."""
        ...


Begin = Callable[[str | None], tuple[Tracker, str]]
"""Previous run id or None -> tracker and run id; may block."""


@contextmanager
def tracked(config: RunConfig) -> Iterator[None]:
    """Run trackers during the context; at the end they get the report."""
    feed = TrackerFeed(config.run_dir, make_trackers(config))
    try:
        yield
    finally:
        feed.close()


def make_trackers(config: RunConfig) -> dict[str, Begin]:
    """Return name -> start function of TensorBoard and the enabled trackers."""
    settings = tracked_settings(config)
    found: dict[str, Begin] = {"tensorboard": lambda _: begin_tensorboard(config.run_dir)}
    if config.wandb.enable:
        found["wandb"] = lambda run_id: begin_wandb(config.wandb, config.job_name, config.run_dir, settings, run_id)
    return found


def tracked_settings(config: RunConfig) -> dict[str, str]:
    """Return the settings by flag name, with secrets redacted."""
    return {name: redacted(str(value))[:500] for name, value in flat_settings(to_json(config)).items()}


class TrackerFeed:
    """Feed a run's files to trackers until closed, with one driver thread per tracker."""

    def __init__(self, run_dir: Path, begin: Mapping[str, Begin]) -> None:
        self._run_dir = run_dir
        name = f"{LOGS}/{STATE_FILE}"
        found = read_json(run_dir, name) if (run_dir / name).exists() else {}
        self._state = checked(found, dict[str, dict], f"{run_dir / name} (remove it; charts then start again)")
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._threads = {
            name: threading.Thread(target=self._follow, args=(name, one), name=f"tracker {name}", daemon=True)
            for name, one in begin.items()
        }
        for thread in self._threads.values():
            thread.start()

    def close(self) -> None:
        """Send everything written so far; a tracker that hangs is abandoned."""
        self._stop.set()
        until_s = time.monotonic() + FINISH_S
        for name, thread in self._threads.items():
            thread.join(max(0.0, until_s - time.monotonic()))
            if thread.is_alive():
                self._give_up(name, f"no answer for {FINISH_S:g} s")

    def _follow(self, name: str, begin: Begin) -> None:
        """Feed one tracker; errors are reported once and disable it."""
        known: dict[str, Any] = {"sent": {}, **copy.deepcopy(self._state.get(name, {}))}
        files = {"metrics": METRICS_FILE, "validation": VALIDATIONS_FILE}
        tails = {source: JsonlTail(self._run_dir / file) for source, file in files.items()}
        try:
            tracker, known["run_id"] = begin(known.get("run_id"))
            self._remember(name, known)
            is_last = False
            while not is_last:
                is_last = self._stop.wait(POLL_S)
                for source, tail in tails.items():
                    for line in tail.read_new():
                        if (step := line["optimizer_step"]) > known["sent"].get(source, -1):
                            tracker.send(step, flat_numbers(line))
                            known["sent"][source] = step
                self._remember(name, known)
            tracker.finish([file for one in (REPORT_FILE, SUMMARY_FILE) if (file := self._run_dir / one).is_file()])
        except Exception as error:
            self._give_up(name, str(error))
            self._remember(name, known)

    def _give_up(self, name: str, reason: str) -> None:
        warn(f"vlatune: warning: {name}: {reason}; the run continues without it, its values are in metrics.jsonl")

    def _remember(self, name: str, known: Mapping[str, Any]) -> None:
        with self._writing:
            if self._state.get(name) != known:
                self._state[name] = copy.deepcopy(dict(known))
                write_json(make_folder(self._run_dir, LOGS) / STATE_FILE, self._state)


def flat_numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Flatten {"loss_by_task": {"fold": 2.0}, "loss_by_dim": [3.0]} to loss_by_task/fold etc."""
    parts = {key: dict(enumerate(one)) if isinstance(one, list) else one for key, one in line.items()}
    nested = {
        f"{key}/{name}": one for key, part in parts.items() if isinstance(part, dict) for name, one in part.items()
    }
    numbers = {key: one for key, one in (parts | nested).items() if isinstance(one, int | float)}
    # Task and camera names come from datasets; a tracker gets no control characters.
    return {printable(key): float(one) for key, one in numbers.items() if key != "optimizer_step"}


class TensorBoardTracker:
    """Write TensorBoard scalars without importing torch or TensorFlow."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder))

    def send(self, optimizer_step: int, numbers: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        values = [Summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=optimizer_step, summary=Summary(value=values)))
        self._writer.flush()

    def finish(self, files: list[Path]) -> None:
        self._writer.close()


def begin_tensorboard(run_dir: Path) -> tuple[Tracker, str]:
    return TensorBoardTracker(make_folder(run_dir, f"{LOGS}/tensorboard")), "local"


@dataclass(frozen=True)
class WandbTracker:
    run: Any

    def send(self, optimizer_step: int, numbers: Mapping[str, float]) -> None:
        self.run.log({**numbers, "optimizer_step": optimizer_step})

    def finish(self, files: list[Path]) -> None:
        for file in files:
            self.run.save(str(file), base_path=str(file.parent), policy="now")
        self.run.finish(quiet=True)


def begin_wandb(
    config: WandbConfig, job_name: str, run_dir: Path, settings: Mapping[str, str], run_id: str | None
) -> tuple[Tracker, str]:
    _check_wandb_settings()
    try:
        import wandb
    except ImportError:
        raise RuntimeError("it is not installed; `pip install wandb`, or leave --wandb.enable out") from None
    run_id = str(config.run_id or run_id or secrets.token_hex(4))
    run = wandb.init(
        project=config.project,
        entity=config.entity,
        name=job_name,
        notes=config.notes,
        mode=config.mode,
        id=run_id,
        resume="allow",
        dir=str(make_folder(run_dir, LOGS)),
        config=dict(settings),
        settings=wandb.Settings(console="off", disable_git=True, x_disable_stats=True, silent=True),
    )
    run.define_metric("optimizer_step")
    run.define_metric("*", step_metric="optimizer_step")
    return WandbTracker(run), run_id


def _check_wandb_settings() -> None:
    """Raise if W&B would read its server, which gets the API key, from the working directory."""
    for name in ("wandb/settings", ".wandb/settings"):
        if Path(name).exists():
            raise RuntimeError(
                f"'{Path(name).absolute()}' would choose the server that gets your API key; start the command in another folder, or "
                f"remove the file and set WANDB_BASE_URL"
            )
