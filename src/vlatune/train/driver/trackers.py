"""Weights & Biases and MLflow, fed from the driver: they follow what rank 0 writes, so that no tracker runs in the process
that trains, and none can hold it up or end it.

Points go out once. A tracker remembers up to which optimizer step it has sent each file, in `logs/trackers.json` beside the
id of its run; steps that are made again after a restart have the same numbers, and are not sent again. The same command,
given again, goes on with the same charts. A tracker that fails says so once and is left alone.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from vlatune.config import MlflowConfig, RunConfig, WandbConfig, to_json
from vlatune.files import make_folder, parse_json, read_file, write_json
from vlatune.outgoing import redacted, warn
from vlatune.report.run_folder import LOGS, REPORT_FILE, RunFolder
from vlatune.report.sinks import JsonlTail
from vlatune.report.summary import SUMMARY_FILE

STATE_FILE = "trackers.json"
POLL_S = 2.0


class Tracker(Protocol):
    def send(self, optimizer_step: int, numbers: Mapping[str, float]) -> None: ...
    def finish(self, files: list[Path]) -> None:
        """The run is done, or stops for now; `files` are worth keeping beside the charts."""
        ...


@contextmanager
def tracked(config: RunConfig) -> Iterator[None]:
    """Trackers that the config switches on follow the run folder meanwhile; at the end they get the report."""
    begin = make_trackers(config)
    feed = TrackerFeed(config.run_dir, begin) if begin else None
    try:
        yield
    finally:
        if feed:
            feed.close()


def make_trackers(config: RunConfig) -> dict[str, Callable[[str | None], tuple[Tracker, str]]]:
    """Name -> what begins it: run id of before, or None -> tracker and run id. Only those that the config switches on."""
    settings = flat_settings(to_json(config))
    found: dict[str, Callable[[str | None], tuple[Tracker, str]]] = {}
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
    """Follows a run's files on a thread of the driver until closed."""

    def __init__(self, run_dir: Path, begin: Mapping[str, Callable[[str | None], tuple[Tracker, str]]]) -> None:
        folder = RunFolder(run_dir)
        self._run_dir = run_dir
        self._tails = {"metrics": JsonlTail(folder.metrics), "validation": JsonlTail(folder.validations)}
        self._state: dict[str, Any] = _read_state(run_dir)
        self._trackers: dict[str, Tracker] = {}
        self._begin = dict(begin)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="trackers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Everything that is written is sent; waits for the trackers, which may have a network to wait for."""
        self._stop.set()
        self._thread.join()

    def _follow(self) -> None:
        for name, begin in self._begin.items():
            self._guarded(name, lambda name=name, begin=begin: self._start(name, begin))
        while not self._stop.wait(POLL_S):
            self._send_new()
        self._send_new()
        files = [file for name in (REPORT_FILE, SUMMARY_FILE) if (file := self._run_dir / name).is_file()]
        for name, tracker in list(self._trackers.items()):
            self._guarded(name, lambda tracker=tracker: tracker.finish(files))

    def _start(self, name: str, begin: Callable[[str | None], tuple[Tracker, str]]) -> None:
        known = self._state.setdefault(name, {})
        tracker, run_id = begin(known.get("run_id"))
        known["run_id"] = run_id
        self._trackers[name] = tracker
        self._write_state()

    def _send_new(self) -> None:
        for source, tail in self._tails.items():
            lines = tail.read_new()
            for name, tracker in list(self._trackers.items()):
                self._guarded(name, lambda s=source, ls=lines, n=name, t=tracker: self._send(s, ls, n, t))
            if lines:
                self._write_state()

    def _send(self, source: str, lines: list[dict[str, Any]], name: str, tracker: Tracker) -> None:
        sent = self._state[name].setdefault("sent", {})
        for line in lines:
            step = line["optimizer_step"]
            if step > sent.get(source, -1):
                numbers = {k: v for k, v in line.items() if isinstance(v, int | float) and k != "optimizer_step"}
                tracker.send(step, numbers)
                sent[source] = step

    def _guarded(self, name: str, act: Callable[[], object]) -> None:
        """A tracker must not end a run: whatever goes wrong in it is said once, and it is left alone."""
        try:
            act()
        except Exception as error:
            self._trackers.pop(name, None)
            warn(f"vlatune: warning: {name}: {error}; the run goes on without it, its figures are in metrics.jsonl")

    def _write_state(self) -> None:
        write_json(make_folder(self._run_dir, LOGS) / STATE_FILE, self._state)


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


class MlflowTracker:
    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id = client, run_id

    def send(self, optimizer_step: int, numbers: Mapping[str, float]) -> None:
        for key, value in numbers.items():
            self._client.log_metric(self._run_id, key, float(value), step=optimizer_step)

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
