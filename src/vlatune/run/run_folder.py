"""Define the files of a run folder, and read them as one validated `Run`.

Reading never changes the folder and works for running and failed runs: missing files are empty.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NotRequired, Required, TypedDict

from vlatune.checkpoint.local_store import LocalStore
from vlatune.checkpoint.store import CHECKPOINTS
from vlatune.config.flags import config_from_dict
from vlatune.config.settings import RunConfig
from vlatune.run.kept_samples import (
    EVAL_SAMPLES_FILE,
    FIRST_BATCH_FILE,
    ROLLOUTS_FILE,
    EvalSample,
    TrainedSample,
    load_samples,
)
from vlatune.run.sinks import read_jsonl
from vlatune.run.summary import Summary, read_summary
from vlatune.storage.files import read_json
from vlatune.storage.json_types import checked
from vlatune.storage.paths import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, require_run

SKIPPED_FILE, EVENTS_FILE, DATA_FILE = "skipped_episodes.json", "events.jsonl", "data.json"
SAMPLES_FILE, VALIDATIONS_FILE = "samples.jsonl", "validation.jsonl"
EVALUATION_FILE, REPORT_FILE = "eval.json", "report.html"
EVAL_PAGE_FILE = "eval.html"
"""Page of an evaluation outside of the run folder."""
LOGS = "logs"
DRIVER_LOCK = ".lock"
"""Lock file of the driver."""
Number = int | float | None


class MetricsRecord(TypedDict, total=False):
    """Line of metrics.jsonl."""

    optimizer_step: Required[int]
    loss: Number
    lr: Number
    grad_norm: Number
    samples_per_s: Number
    step_s: Number
    wait_share: Number
    other_process_share: Number
    cached_share: Number
    spilled_bytes: Number
    object_store_bytes: Number
    samples_seen: int | None
    loss_by_dataset: tuple[Number, ...] | None
    loss_by_task: dict[str, Number] | None
    loss_by_dim: tuple[Number, ...] | None


class ValidationRecord(TypedDict):
    """Line of validation.jsonl."""

    optimizer_step: int
    val_loss: float
    val_action_error: float
    val_loss_int8: NotRequired[float]
    """Loss with prefixes rounded as they are kept (--policy.keep_prefix_dtype=int8)."""


class Event(TypedDict):
    """Line of events.jsonl."""

    event: str
    optimizer_step: int
    time_s: float


class DatasetRecord(TypedDict):
    root: str
    episodes: int
    held_out: int
    frames: int
    share: float


class StoreRecord(TypedDict):
    """A result that is stored instead of computed again; see train/cache_choice.py."""

    name: str
    is_used: bool
    decision: str
    sample_bytes: int
    stored_bytes: int
    share: float
    make_s: Number
    read_s: Number
    epoch_s_without: Number
    epoch_s_with: Number


class StoresRecord(TypedDict):
    epochs: float
    levels: tuple[StoreRecord, ...]


class DataRecord(TypedDict):
    """Training data of a run (data.json), as written by run_setup.py."""

    datasets: tuple[DatasetRecord, ...]
    tasks: tuple[str, ...]
    num_tasks: int
    task_episodes: NotRequired[tuple[int, ...]]
    stores: NotRequired[StoresRecord]
    base: NotRequired[str]
    """Name of the base model in --storage_path, if it was a folder of the driver."""


class EpisodeError(TypedDict):
    episode: int
    error: float


class RolloutErrors(TypedDict, total=False):
    error: Required[float]
    num_chunks: Required[int]
    replan_every: Required[int]
    per_dim_error: dict[str, Number]
    per_horizon_error: tuple[Number, ...]
    per_dim_horizon_error: dict[str, tuple[Number, ...]]
    episodes: Required[tuple[EpisodeError, ...]]


class DatasetErrors(TypedDict):
    dataset: int
    root: str
    action_error: float
    mean_action_error: float
    val_loss: float


class Evaluation(TypedDict, total=False):
    """Result of `vlatune eval` (eval.json)."""

    checkpoint: str
    weights: str
    root: str | None
    val_loss: Number
    action_error: Number
    mean_action_error: Number
    blank_images_error: Number
    blank_instruction_error: Number
    blank_camera_errors: dict[str, Number] | None
    per_dim_error: dict[str, float] | None
    per_horizon_error: tuple[Number, ...] | None
    action_names: tuple[str, ...] | None
    num_samples: int | None
    episodes: tuple[int, ...] | None
    datasets: tuple[DatasetErrors, ...] | None
    rollouts: RolloutErrors | None


class Settings(TypedDict, total=False):
    """Part of config.json that a report reads, from any version of vlatune."""

    job_name: str | None
    steps: int | None
    num_workers: int
    storage_path: str | None
    policy: dict | None
    dataset: dict | None
    ray: dict | None


RUN_ENTRIES = (
    CONFIG_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    VALIDATIONS_FILE,
    EVENTS_FILE,
    DATA_FILE,
    SUMMARY_FILE,
    SKIPPED_FILE,
    EVALUATION_FILE,
    EVAL_SAMPLES_FILE,
    ROLLOUTS_FILE,
    FIRST_BATCH_FILE,
    REPORT_FILE,
    LOGS,
    CHECKPOINTS,
    DRIVER_LOCK,
)
"""Everything a run writes into its folder."""
OWN_FOLDERS = ("base", "dataset")
"""Folders that the demo creates next to a run's files; runs only read them."""
LEFT_OVER = re.compile(r"\.(.+)\.\d+\.(?:tmp|partial)")


def is_left_over(name: str) -> bool:
    """True for a temporary file of a killed process: `.report.html.123.tmp`,
    `.dataset.123.partial`."""
    left = LEFT_OVER.fullmatch(name)
    return left is not None and left[1] in (*RUN_ENTRIES, *OWN_FOLDERS)


def new_log(run_dir: Path, name: str) -> Path:
    """Return a new file in `logs/`, without overwriting files of earlier attempts."""
    return next(file for number in count() if not (file := run_dir / LOGS / f"{name}-{number}.txt").exists())


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints that a run has kept."""

    steps: tuple[int, ...] | None = ()
    """Optimizer steps; None if the run has not listed them."""
    elsewhere: str | None = None
    """Storage location if outside of the run folder (--storage_path)."""


@dataclass(frozen=True)
class Run:
    """Validated contents of a run folder; missing files are empty."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[Mapping[str, Any]] = ()
    validations: Sequence[ValidationRecord] = ()
    summary: Summary | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    samples: Sequence[EvalSample] = ()
    rollouts: Sequence[EvalSample] = ()
    """Complete episodes; image keys are `CAMERA, frame N`."""
    first_batch: Sequence[TrainedSample] = ()
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    events: Sequence[Event] = ()
    data: DataRecord | None = None

    @property
    def restart_steps(self) -> list[int]:
        """Return the optimizer steps from which the run was restarted."""
        return [event["optimizer_step"] for event in self.events if event["event"] == "start"][1:]

    @property
    def roots(self) -> tuple[str, ...]:
        """Return the datasets that the settings name."""
        dataset = self.config.get("dataset") or {}
        given = dataset.get("root") or dataset.get("repo_id") or ()
        return (given,) if isinstance(given, str) else tuple(map(str, given))

    @property
    def best_validation(self) -> ValidationRecord | None:
        return min(self.validations, key=lambda one: one["val_action_error"], default=None)

    def figure(self, key: str) -> Any:
        """Return a value of the summary, or of the last metrics line if there is no summary."""
        live = {"optimizer_steps": "optimizer_step", "final_loss": "loss"}.get(key, key)
        final = getattr(self.summary, key, None)
        return final if final is not None or not self.metrics else self.metrics[-1].get(live)

    @property
    def capacity_bytes(self) -> float | None:
        measured = self.summary.object_store_capacity_bytes if self.summary else None
        return measured or (self.config.get("ray") or {}).get("object_store_bytes")


def read_run(run_dir: Path, *, with_samples: bool = True) -> Run:
    """Read and validate everything in a run folder; `with_samples=False` skips images."""
    require_run(run_dir)
    config, summary = _read_checked(run_dir, CONFIG_FILE, Settings) or {}, read_summary(run_dir)
    return Run(
        name=str(config.get("job_name") or run_dir.resolve().name),
        config=config,
        metrics=read_records(run_dir / METRICS_FILE, MetricsRecord),
        validations=read_records(run_dir / VALIDATIONS_FILE, ValidationRecord),
        summary=summary,
        evaluation=read_evaluation(run_dir),
        samples=load_samples(run_dir, EVAL_SAMPLES_FILE, EvalSample) if with_samples else (),
        rollouts=load_samples(run_dir, ROLLOUTS_FILE, EvalSample) if with_samples else (),
        first_batch=load_samples(run_dir, FIRST_BATCH_FILE, TrainedSample) if with_samples else (),
        checkpoints=_checkpoints(run_dir, config.get("storage_path"), summary),
        events=read_records(run_dir / EVENTS_FILE, Event),
        data=_read_checked(run_dir, DATA_FILE, DataRecord),
    )


def read_records(path: Path, kind: Any) -> list[Any]:
    """Read and validate the lines of a file; empty if it does not exist."""
    records = read_jsonl(path) if path.exists() else []
    return [checked(record, kind, f"{path}, line {number}") for number, record in enumerate(records, start=1)]


def read_validation_errors(run_dir: Path) -> dict[int, float]:
    """Return optimizer step -> action error of all validations of a run."""
    lines: list[ValidationRecord] = read_records(run_dir / VALIDATIONS_FILE, ValidationRecord)
    return {line["optimizer_step"]: line["val_action_error"] for line in lines}


def read_settings(run_dir: Path) -> dict[str, Any] | None:
    """Read config.json without validation; None if it does not exist."""
    return read_json(run_dir, CONFIG_FILE) if (run_dir / CONFIG_FILE).exists() else None


def read_config(run_dir: Path) -> RunConfig:
    """Read and validate the run's settings."""
    require_run(run_dir, files=(CONFIG_FILE,))
    return config_from_dict(RunConfig, read_json(run_dir, CONFIG_FILE), str(run_dir / CONFIG_FILE))


def read_evaluation(run_dir: Path) -> Evaluation:
    """Read and validate eval.json; empty if it does not exist."""
    return _read_checked(run_dir, EVALUATION_FILE, Evaluation) or Evaluation()


def flat_settings(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to flag names: {"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        is_group = isinstance(value, dict) and value
        flat |= flat_settings(value, f"{prefix}{key}.") if is_group else {f"{prefix}{key}": value}
    return flat


def _checkpoints(run_dir: Path, storage_path: str | None, summary: Summary | None) -> Checkpoints:
    """Return the run's checkpoints; a location outside of the run folder is never accessed."""
    if storage_path is None:
        return Checkpoints(tuple(LocalStore(run_dir / CHECKPOINTS).steps()))
    if summary is None or summary.checkpoint_place is None:
        return Checkpoints(None, storage_path)
    return Checkpoints(summary.checkpoints, summary.checkpoint_place)


def _read_checked(run_dir: Path, name: str, kind: Any) -> Any:
    return checked(read_json(run_dir, name), kind, str(run_dir / name)) if (run_dir / name).exists() else None
