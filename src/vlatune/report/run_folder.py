"""A run's folder: what its files are called, and what they hold, read back as one typed `Run`.

Reading never changes the folder, and works on a run that is going on or has died: what is not there is empty. All names
stand here (those of summary.json and the checkpoints with their types), and every file has one reader and one writer:
settings and evaluation here, the others in sinks.py, summary.py, kept_samples.py, html.py and run_setup.py.
"""

import re
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from vlatune.checkpoint.local_store import LocalStore
from vlatune.checkpoint.store import CHECKPOINTS, absolute_storage, open_store, place_of
from vlatune.config import RunConfig, to_json
from vlatune.files import read_json, write_json
from vlatune.flags import config_from_dict
from vlatune.report.kept_samples import (
    EVAL_SAMPLES_FILE,
    FIRST_BATCH_FILE,
    ROLLOUTS_FILE,
    EvalSample,
    TrainedSample,
    load_eval_samples,
    load_first_batch,
    load_rollouts,
)
from vlatune.report.run_places import PLACES_FILE, is_trusted
from vlatune.report.sinks import read_jsonl
from vlatune.report.summary import SUMMARY_FILE, Summary, checked_value, read_summary

CONFIG_FILE, SKIPPED_FILE = "config.json", "skipped_episodes.json"
METRICS_FILE, SAMPLES_FILE, VALIDATIONS_FILE = "metrics.jsonl", "samples.jsonl", "validation.jsonl"
EVENTS_FILE, DATA_FILE = "events.jsonl", "data.json"
EVALUATION_FILE, REPORT_FILE = "eval.json", "report.html"
SIMULATION_FILE, EVAL_PAGE_FILE = "simulation.json", "eval.html"
"""The newest simulation of the run; and the page of an evaluation that is not its own: on another dataset, of a LeRobot folder."""
LOGS = "logs"
DRIVER_LOCK, WRITER_LOCK = ".lock", ".writer.lock"
"""Files that are locked, by the driver and by rank 0."""
OLD_WRITER_LOCK = ".pen"
"""The name that rank 0's had before; a folder that still holds it goes on as any other."""
Number = int | float | None
SETTINGS = {
    "job_name": str | None,
    "steps": int | None,
    "num_workers": int,
    "storage_path": str | None,
    "policy": dict | None,
    "dataset": dict | None,
    "ray": dict | None,
}
RECORD = {
    "optimizer_step": int,
    **dict.fromkeys(("loss", "lr", "grad_norm", "samples_per_s", "step_s", "wait_share"), Number),
    **dict.fromkeys(("kept_share", "other_threads_share", "spilled_bytes", "fallback_bytes"), Number),
    **dict.fromkeys(("object_store_bytes", "time_to_first_batch_s", "peak_object_store_bytes"), Number),
    **dict.fromkeys(("restarts", "reader_restarts"), int | None),
    "samples_seen": int | None,
    "loss_by_dataset": tuple[Number, ...] | None,
    "loss_by_task": dict[str, Number] | None,
    "loss_by_dim": tuple[Number, ...] | None,
}
EVENT = {"event": str, "optimizer_step": int, "time_s": int | float}
DATA = {"datasets": tuple[dict, ...], "tasks": tuple[str, ...], "num_tasks": int, "task_episodes": tuple[int, ...]}
DATASET = {"root": str, "episodes": int, "held_out": int, "frames": int, "share": int | float}
SIMULATION = {
    "env": str,
    "task": str | None,
    **dict.fromkeys(("episodes", "successes"), int),
    "success_rate": int | float,
    "success_interval_95": tuple[int | float, ...],
    **dict.fromkeys(("mean_reward", "mean_max_reward"), Number),
}
ROLLOUTS = {
    "error": int | float,
    **dict.fromkeys(("num_chunks", "replan_every"), int),
    "per_dim_error": dict[str, Number],
    "per_horizon_error": tuple[Number, ...],
    "per_dim_horizon_error": dict[str, tuple[Number, ...]],
    "episodes": tuple[dict, ...],
}
VALIDATION = {"optimizer_step": int, "val_loss": int | float, "val_action_error": int | float}
EVALUATION = {
    **dict.fromkeys(("val_loss", "action_error", "mean_action_error"), Number),
    **dict.fromkeys(("blank_images_error", "blank_sentence_error"), Number),
    **dict.fromkeys(("blank_camera_errors", "per_dim_error"), dict[str, Number] | None),
    "num_samples": int | None,
    "root": str | None,
    "rollouts": dict | None,
    "per_horizon_error": tuple[Number, ...] | None,
    "action_names": tuple[str, ...] | None,
    "episodes": list | None,
    "datasets": tuple[dict, ...] | None,
}
"""Kinds of what the report uses of config.json, of a line of metrics.jsonl, events.jsonl and validation.jsonl, of data.json and
of eval.json; each may be missing."""
RUN_ENTRIES = (
    CONFIG_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    VALIDATIONS_FILE,
    EVENTS_FILE,
    DATA_FILE,
    SUMMARY_FILE,
    SKIPPED_FILE,
    PLACES_FILE,
    EVALUATION_FILE,
    SIMULATION_FILE,
    EVAL_SAMPLES_FILE,
    ROLLOUTS_FILE,
    FIRST_BATCH_FILE,
    REPORT_FILE,
    LOGS,
    CHECKPOINTS,
    DRIVER_LOCK,
    WRITER_LOCK,
    OLD_WRITER_LOCK,
)
"""All that a run puts into its folder."""
BESIDE = ("base", "dataset")
"""What the demo puts beside a run; runs only read it."""
LEFT_OVER = re.compile(r"\.(.+)\.\d+\.(?:aside|partial)")


def is_left_over(name: str) -> bool:
    """What a killed process left beside an entry that it wrote aside: `.report.html.123.aside`, `.dataset.123.partial`."""
    left = LEFT_OVER.fullmatch(name)
    return left is not None and left[1] in (*RUN_ENTRIES, *BESIDE)


@dataclass(frozen=True)
class RunFolder:
    """Where a run's files are, while it runs."""

    path: Path

    @property
    def logs(self) -> Path:
        return self.path / LOGS

    @property
    def metrics(self) -> Path:
        return self.path / METRICS_FILE

    @property
    def samples(self) -> Path:
        return self.path / SAMPLES_FILE

    @property
    def validations(self) -> Path:
        return self.path / VALIDATIONS_FILE

    @property
    def events(self) -> Path:
        """Starts, checkpoints and the end, each with the time of the day: what happened, also what a restart undid."""
        return self.path / EVENTS_FILE

    def new_log(self, name: str) -> Path:
        """A file of `logs/` that is not there yet: what earlier attempts left stays, also those of a killed process."""
        return next(file for number in count() if not (file := self.logs / f"{name}-{number}.txt").exists())

    def summary(self) -> Summary | None:
        return read_summary(self.path)


@dataclass(frozen=True)
class Checkpoints:
    """Those that a run has kept."""

    steps: tuple[int, ...] | None = ()
    """None where their place did not tell."""
    elsewhere: str | None = None
    """Their place, where it is not the run folder (--storage_path)."""


@dataclass(frozen=True)
class Run:
    """What a run folder holds; empty where it holds nothing."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    summary: Summary | None = None
    evaluation: dict[str, Any] = field(default_factory=dict)
    samples: list[EvalSample] = field(default_factory=list)
    rollouts: list[EvalSample] = field(default_factory=list)
    """Whole episodes; their frames' pictures go by `CAMERA, frame N`."""
    simulation: dict[str, Any] = field(default_factory=dict)
    first_batch: list[TrainedSample] = field(default_factory=list)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    events: list[dict[str, Any]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    """What it is trained on, as run_setup.py tells it."""

    @property
    def restart_steps(self) -> list[int]:
        """Optimizer steps from which it was started again."""
        return [event["optimizer_step"] for event in self.events if event["event"] == "start"][1:]

    def figure(self, key: str) -> Any:
        """From the summary; while there is none, from the last line of metrics."""
        live = {"optimizer_steps": "optimizer_step", "final_loss": "loss"}.get(key, key)
        last = self.metrics[-1] if self.metrics else {}
        told = getattr(self.summary, key, None)
        return told if told is not None else last.get(live)

    @property
    def capacity_bytes(self) -> float | None:
        measured = self.summary.object_store_capacity_bytes if self.summary else None
        return measured or (self.config.get("ray") or {}).get("object_store_bytes")


def read_run(run_dir: Path, eval_samples: list[EvalSample] | None) -> Run:
    """Gather what the folder has."""
    known = (CONFIG_FILE, METRICS_FILE, SUMMARY_FILE)
    if not any((run_dir / name).exists() for name in known):
        raise ValueError(f"{run_dir}: not a run folder (none of {', '.join(known)}); give the --output_dir of a run")
    config, summary = read_settings(run_dir) or {}, read_summary(run_dir)
    evaluation = read_evaluation(run_dir)
    _check_kinds(config, SETTINGS, run_dir / CONFIG_FILE)
    data = _read_object(run_dir, DATA_FILE) or {}
    _check_kinds(data, DATA, run_dir / DATA_FILE)
    for one in data.get("datasets", ()):
        _check_kinds(one, DATASET, run_dir / DATA_FILE)
    if eval_samples is None:
        eval_samples = load_eval_samples(run_dir) if (run_dir / EVAL_SAMPLES_FILE).exists() else []
    folder = RunFolder(run_dir)
    return Run(
        name=str(config.get("job_name") or run_dir.resolve().name),
        config=config,
        metrics=read_records(folder.metrics, RECORD),
        validations=read_records(folder.validations, VALIDATION),
        summary=summary,
        evaluation=evaluation,
        samples=eval_samples,
        rollouts=load_rollouts(run_dir),
        simulation=read_simulation(run_dir),
        first_batch=load_first_batch(run_dir) if (run_dir / FIRST_BATCH_FILE).exists() else [],
        checkpoints=_checkpoints(run_dir, config.get("storage_path"), summary),
        events=read_records(folder.events, EVENT),
        data=data,
    )


def read_records(path: Path, kinds: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of a file, each checked; none where it is not there."""
    records = read_jsonl(path) if path.exists() else []
    for number, record in enumerate(records, start=1):
        _check_kinds(record, kinds, f"{path}, line {number}")
    return records


def read_validation_errors(run_dir: Path) -> dict[int, float]:
    """Optimizer step -> action error, of every validation of a run."""
    lines = read_records(RunFolder(run_dir).validations, VALIDATION)
    return {line["optimizer_step"]: float(line["val_action_error"]) for line in lines if "val_action_error" in line}


def read_settings(run_dir: Path) -> dict[str, Any] | None:
    """What config.json says, unchecked: it may be another version's. None where there is none."""
    return _read_object(run_dir, CONFIG_FILE)


def read_config(run_dir: Path) -> RunConfig:
    """The run's settings as this version knows them."""
    stored = read_settings(run_dir)
    if stored is None:
        raise ValueError(
            f"'{run_dir}' is not a run folder: there is no {CONFIG_FILE} in it; RUN is the --output_dir of a run"
        )
    return config_from_dict(RunConfig, stored, str(run_dir / CONFIG_FILE))


def write_settings(run_dir: Path, config: RunConfig) -> None:
    write_json(run_dir / CONFIG_FILE, to_json(config))


def write_data(run_dir: Path, data: dict[str, Any]) -> None:
    write_json(run_dir / DATA_FILE, data)


def read_evaluation(run_dir: Path) -> dict[str, Any]:
    """What eval.json says, checked; empty where there is none."""
    evaluation = _read_object(run_dir, EVALUATION_FILE) or {}
    _check_kinds(evaluation, EVALUATION, run_dir / EVALUATION_FILE)
    _check_kinds(evaluation.get("rollouts") or {}, ROLLOUTS, f"{run_dir / EVALUATION_FILE}: rollouts")
    return evaluation


def read_simulation(run_dir: Path) -> dict[str, Any]:
    """The same for the newest simulation."""
    simulation = _read_object(run_dir, SIMULATION_FILE) or {}
    _check_kinds(simulation, SIMULATION, run_dir / SIMULATION_FILE)
    return simulation


def write_evaluation(run_dir: Path, figures: dict[str, Any]) -> None:
    write_json(run_dir / EVALUATION_FILE, figures)


def _check_kinds(values: dict[str, Any], kinds: dict[str, Any], where: object) -> None:
    """Refuse a value of another kind than vlatune writes; names that are not listed are another version's."""
    for name, kind in kinds.items():
        if name in values:
            checked_value(values[name], kind, f"{where}: '{name}'")


def _checkpoints(run_dir: Path, storage_path: Any, summary: Summary | None) -> Checkpoints:
    """A folder that is there is looked into; an object store is asked only where the summary does not tell. Neither is
    touched where only the run's own files name it (run_places.py).
    """
    if not isinstance(storage_path, str):
        return Checkpoints(tuple(LocalStore(run_dir / CHECKPOINTS).steps()))
    trusted = is_trusted(run_dir, storage_path)
    if summary and summary.checkpoint_place:
        place, below = Path(summary.checkpoint_place), absolute_storage(storage_path)
        can_look = trusted and below is not None and place.resolve().is_relative_to(below) and place.is_dir()
        return Checkpoints(tuple(LocalStore(place).steps()) if can_look else summary.checkpoints, str(place))
    if not trusted:
        return Checkpoints(None, storage_path)
    try:
        store = open_store(run_dir, storage_path)
        return Checkpoints(tuple(store.steps()), place_of(store))
    except (OSError, RuntimeError, ValueError):  # not reachable now, or its driver is not installed here
        return Checkpoints(None, storage_path)


def _read_object(run_dir: Path, name: str) -> dict[str, Any] | None:
    return read_json(run_dir, name) if (run_dir / name).exists() else None
