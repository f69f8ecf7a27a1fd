"""TensorBoard, Weights & Biases and MLflow, fed from the driver: they follow what rank 0 writes, so that no tracker runs in
the process that trains, and none can hold it up or end it.

Points go out once. A tracker remembers up to which optimizer step it has sent each file, in `logs/trackers.json` beside the
id of its run; steps that are made again after a restart have the same numbers, and are not sent again. The same command,
given again, goes on with the same charts. A tracker that fails says so once and is left alone.
"""

import copy
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from vlatune.config import MlflowConfig, RunConfig, WandbConfig, to_json
from vlatune.console import redacted, warn
from vlatune.files import make_folder, parse_json, read_file, write_json
from vlatune.report.run_folder import LOGS, REPORT_FILE, RunFolder
from vlatune.report.sinks import JsonlTail
from vlatune.report.summary import SUMMARY_FILE

STATE_FILE = "trackers.json"
POLL_S = 2.0
FINISH_S = 60.0
"""How long all trackers together may take for the rest, when the run is done."""


class Tracker(Protocol):
    def send(self, optimizer_step: int, numbers: Mapping[str, float]) -> None: ...
    def finish(self, files: list[Path]) -> None:
        """The run is done, or stops for now; `files` are worth keeping beside the charts."""
        ...


Begin = Callable[[str | None], tuple[Tracker, str]]
"""Run id of before, or None -> tracker and run id; may take its time."""


@contextmanager
def tracked(config: RunConfig) -> Iterator[None]:
    """Trackers follow the run folder meanwhile; at the end they get the report."""
    feed = TrackerFeed(config.run_dir, make_trackers(config))
    try:
        yield
    finally:
        feed.close()


def make_trackers(config: RunConfig) -> dict[str, Begin]:
    """Name -> what begins it: TensorBoard, and those that the config switches on."""
    settings = flat_settings(to_json(config))
    found: dict[str, Begin] = {"tensorboard": lambda _: begin_tensorboard(config.run_dir)}
    if config.wandb.enable:
        found["wandb"] = lambda run_id: begin_wandb(config.wandb, config.job_name, config.run_dir, settings, run_id)
    if config.mlflow.enable:
        found["mlflow"] = lambda run_id: begin_mlflow(config.mlflow, config.job_name, settings, run_id)
    return found


def flat_settings(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """{"a": {"b": 1}} -> {"a.b": "1"}: the names of the flags, without secrets."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        inner = isinstance(value, dict) and value
        flat |= flat_settings(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": redacted(str(value))[:500]}
    return flat


class TrackerFeed:
    """Follows a run's files until closed, on a thread of the driver for each tracker: none waits for another."""

    def __init__(self, run_dir: Path, begin: Mapping[str, Begin]) -> None:
        self._run_dir = run_dir
        self._state: dict[str, Any] = _read_state(run_dir)
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._threads = {
            name: threading.Thread(target=self._follow, args=(name, one), name=f"tracker {name}", daemon=True)
            for name, one in begin.items()
        }
        for thread in self._threads.values():
            thread.start()

    def close(self) -> None:
        """Everything that is written is sent. A tracker may have a network to wait for; one that hangs is left behind."""
        self._stop.set()
        until_s = time.monotonic() + FINISH_S
        for name, thread in self._threads.items():
            thread.join(max(0.0, until_s - time.monotonic()))
            if thread.is_alive():
                self._give_up(name, f"it does not answer for {FINISH_S:g} s")

    def _follow(self, name: str, begin: Begin) -> None:
        """A tracker must not end a run: whatever goes wrong in it is said once, and it is left alone."""
        try:
            self._feed(name, begin)
        except Exception as error:
            self._give_up(name, str(error))

    def _feed(self, name: str, begin: Begin) -> None:
        known: dict[str, Any] = {"sent": {}, **copy.deepcopy(self._state.get(name, {}))}
        tracker, known["run_id"] = begin(known.get("run_id"))
        self._remember(name, known)
        folder, is_last = RunFolder(self._run_dir), False
        tails = {"metrics": JsonlTail(folder.metrics), "validation": JsonlTail(folder.validations)}
        while not is_last:
            is_last = self._stop.wait(POLL_S)
            try:
                for source, tail in tails.items():
                    _send(tracker, tail.read_new(), known["sent"], source)
            finally:
                self._remember(name, known)
        tracker.finish([file for one in (REPORT_FILE, SUMMARY_FILE) if (file := self._run_dir / one).is_file()])

    def _give_up(self, name: str, reason: str) -> None:
        warn(f"vlatune: warning: {name}: {reason}; the run goes on without it, its figures are in metrics.jsonl")

    def _remember(self, name: str, known: Mapping[str, Any]) -> None:
        with self._writing:
            if self._state.get(name) != known:
                self._state[name] = copy.deepcopy(dict(known))
                write_json(make_folder(self._run_dir, LOGS) / STATE_FILE, self._state)


def _send(tracker: Tracker, lines: list[dict[str, Any]], sent: dict[str, int], source: str) -> None:
    for line in lines:
        if line["optimizer_step"] > sent.get(source, -1):
            tracker.send(line["optimizer_step"], flat_numbers(line))
            sent[source] = line["optimizer_step"]


def flat_numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """{"loss": 1.0, "loss_by_task": {"fold": 2.0}, "loss_by_dim": [3.0]} -> loss, loss_by_task/fold, loss_by_dim/0."""
    parts = {key: dict(enumerate(one)) if isinstance(one, list) else one for key, one in line.items()}
    inner = {f"{key}/{name}": one for key, of in parts.items() if isinstance(of, dict) for name, one in of.items()}
    numbers = {key: one for key, one in (parts | inner).items() if isinstance(one, int | float)}
    return {key: float(one) for key, one in numbers.items() if key != "optimizer_step"}


def _read_state(run_dir: Path) -> dict[str, Any]:
    file = run_dir / LOGS / STATE_FILE
    if not file.exists():
        return {}
    state = parse_json(
        read_file(run_dir, f"{LOGS}/{STATE_FILE}"), f"{file}:", remedy="remove it; charts then begin anew"
    )
    fits = isinstance(state, dict) and all(isinstance(one, dict) for one in state.values())
    if not fits:
        raise ValueError(f"{file}: expected an object of objects; remove it; charts then begin anew")
    return state


class TensorBoardTracker:
    """TensorBoard's scalars, written without importing torch or TensorFlow.

    Protobuf makes its classes when imported, where a type checker cannot see them.
    """

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


class WandbTracker:
    def __init__(self, run: Any) -> None:
        self._run = run

    def send(self, optimizer_step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({**numbers, "optimizer_step": optimizer_step})

    def finish(self, files: list[Path]) -> None:
        for file in files:
            self._run.save(str(file), base_path=str(file.parent), policy="now")
        self._run.finish(quiet=True)


def begin_wandb(
    config: WandbConfig, job_name: str, run_dir: Path, settings: Mapping[str, str], run_id: str | None
) -> tuple[Tracker, str]:
    wandb = _imported("wandb", "wandb")
    run_id = str(config.run_id or run_id or wandb.util.generate_id())
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


NOT_IN_MLFLOW = re.compile(r"[^\w./ -]")
"""Characters that MLflow refuses in the name of a figure: a sentence's comma, say."""


class MlflowTracker:
    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id = client, run_id

    def send(self, optimizer_step: int, numbers: Mapping[str, float]) -> None:
        for key, value in numbers.items():
            self._client.log_metric(self._run_id, NOT_IN_MLFLOW.sub("_", key), value, step=optimizer_step)

    def finish(self, files: list[Path]) -> None:
        for file in files:
            self._client.log_artifact(self._run_id, str(file))
        self._client.set_terminated(self._run_id)


def begin_mlflow(
    config: MlflowConfig, job_name: str, settings: Mapping[str, str], run_id: str | None
) -> tuple[Tracker, str]:
    mlflow = _imported("mlflow", "mlflow-skinny")
    client = mlflow.MlflowClient(tracking_uri=config.tracking_uri)
    if run_id is not None:
        client.update_run(run_id, status="RUNNING")
        return MlflowTracker(client, run_id), run_id
    found = client.get_experiment_by_name(config.experiment)
    experiment_id = found.experiment_id if found else client.create_experiment(config.experiment)
    run = client.create_run(experiment_id, run_name=job_name)
    for key, value in settings.items():
        client.log_param(run.info.run_id, key, value)
    return MlflowTracker(client, run.info.run_id), run.info.run_id


def _imported(name: str, package: str) -> Any:
    """One of the two libraries above, never a name from outside."""
    assert name in ("wandb", "mlflow")
    try:
        if name == "wandb":
            import wandb as library
        else:
            import mlflow as library
    except ImportError:
        raise RuntimeError(f"it is not installed; `pip install '{package}'`, or leave --{name}.enable out") from None
    return library
