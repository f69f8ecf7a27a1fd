"""May this run start in its folder, and from where: nothing, or its newest whole checkpoint.

A folder that holds a finished run is refused, one that holds the same run unfinished is continued, and one that holds
another run is refused with what differs. One process at a time: a lock file says so. What may change between two attempts
at one run, what may not, and what to say of it: settings in FREE change nothing that was learnt or will be. Everything else
that differs from the checkpoint is refused with its name, unless `--allow_changed` names its group: base, dataset, config
or versions.
"""

import fcntl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlatune.checkpoint.policy_files import make_mixture_files, make_policy_files
from vlatune.checkpoint.state_file import STATE, TrainState, parse_state
from vlatune.checkpoint.store import Store, absolute_storage, find_newest, open_store
from vlatune.config import RunConfig, to_json
from vlatune.files import make_folder, open_to_append, refuse_links_out
from vlatune.flags import config_from_dict
from vlatune.report.run_folder import (
    BESIDE,
    CONFIG_FILE,
    DRIVER_LOCK,
    LOGS,
    OLD_WRITER_LOCK,
    WRITER_LOCK,
    RunFolder,
    is_left_over,
    read_settings,
    write_settings,
)
from vlatune.report.run_places import seal_places
from vlatune.report.summary import SUMMARY_FILE
from vlatune.run_setup import Setup, make_setup
from vlatune.train.fingerprint import fingerprints
from vlatune.train.worker_job import CheckpointPlan

FREE = {
    "recipe": "its settings are compared one by one",
    "output_dir": "a place",
    "job_name": "a name",
    "storage_path": "a place",
    "dataset.root": "a place; the dataset itself is compared",
    "dataset.repo_id": "a place; the dataset itself is compared",
    "dataset.revision": "the dataset itself is compared",
    "dataset.storage_options": "how a place is reached",
    "policy.path": "a place; the base model itself is compared",
    "policy.revision": "the base model itself is compared",
    "policy.gradient_checkpointing": "the same numbers, computed when they are needed",
    "steps": "how far the run goes; the learning rate's decay follows it",
    "batch_size": "how the global batch is shared out; its size may not change",
    "grad_accum": "how the global batch is shared out; its size may not change",
    "num_workers": "how the global batch is shared out; must divide the lanes",
    "hang_timeout_s": "when a worker counts as hanging",
    "grace_s": "how long the end may take",
    "prefetch_batches": "how early a batch is on the device",
    "log_freq": "what is written down",
    "log_samples": "what is written down",
    "eval_freq": "what is looked at; training does not feel it",
    "eval_samples": "what is looked at; training does not feel it",
    "early_stop": "how far the run goes",
    "wandb": "where figures go",
    "mlflow": "where figures go",
    "save_freq": "when it is saved",
    "save_every_s": "when it is saved",
    "save_buffer_bytes": "how much of a checkpoint is in memory at once",
    "keep_checkpoints": "what is kept",
    "keep_best": "what is kept",
    "max_restarts": "when it is stopped",
    "max_spilled_bytes": "when it is stopped",
    "ray": "the cluster",
}
"""Setting, or the beginning of several -> why it may change."""
NOT_THE_RUNS = ("resume", "strict_resume", "allow_changed")
"""Words to this start of the run, not settings of it."""
STATISTICS = "dataset.statistics"
"""Older checkpoints do not have it."""
ORDER_CHANGED = "this vlatune takes the samples in another order, or draws other noise, from here on"
FREE_VERSIONS = ("ray",)
"""Packages whose version changes no number: the order of samples is ours."""


@dataclass(frozen=True)
class Change:
    group: str
    """base, dataset, config or versions; empty for what is free."""
    text: str


def check_changes(config: RunConfig, stored: TrainState, fingerprints: Mapping[str, str], where: str) -> list[str]:
    """Refuse what may not change; returns what did, in words for the log."""
    found = [
        *config_changes(config, stored.config, f"checkpoint {where}"),
        *_made_of(fingerprints, stored.fingerprints),
    ]
    if stored.lanes % config.num_workers:
        raise ValueError(
            f"--num_workers={config.num_workers}: the run has {stored.lanes} lanes, which so many workers cannot share; "
            f"use a number that divides {stored.lanes}"
        )
    if config.num_workers != stored.num_workers:
        found.append(Change("", "the order of samples stays; gradients are summed in another order"))
    return accepted(found, config.allow_changed, f"checkpoint {where} was made with other things")


def accepted(changes: list[Change], allow: tuple[str, ...], what: str) -> list[str]:
    """The changes in words; those of groups that are not in `allow` are refused."""
    refused = [change for change in changes if change.group and change.group not in allow]
    if refused:
        flags = " ".join(f"--allow_changed={group}" for group in dict.fromkeys(change.group for change in refused))
        raise ValueError(
            f"{what}: {'; '.join(change.text for change in refused)}. Use what it was made with, choose another "
            f"--output_dir or --job_name, or accept the change with {flags}"
        )
    return [change.text for change in changes]


def config_changes(config: RunConfig, stored: Mapping[str, Any], where: str) -> Iterator[Change]:
    """Settings that differ, those that a newer version added at their defaults."""
    now, then = to_json(config), to_json(config_from_dict(RunConfig, stored, where))
    if _global_batch(now) != _global_batch(then):
        text = f"the global batch, batch_size * grad_accum * num_workers, was {_global_batch(then)}, now {_global_batch(now)}"
        yield Change("config", text)
    flat_now, flat_then = dict(_flatten(now)), dict(_flatten(then))
    for key in sorted(flat_now.keys() | flat_then.keys()):
        was, is_now = (repr(flat[key]) if key in flat else "left out" for flat in (flat_then, flat_now))
        if was != is_now and key not in NOT_THE_RUNS:
            yield Change("" if _is_free(key) else "config", f"--{key} was {was}, now {is_now}")


def _made_of(now: Mapping[str, str], then: Mapping[str, str]) -> Iterator[Change]:
    for key in sorted(now.keys() | then.keys()):
        if now.get(key) == then.get(key) or (key == STATISTICS and key not in then):
            continue
        group, _, what = key.partition(".")
        if key == "versions.order":
            yield Change(group, f"{ORDER_CHANGED} (version {then.get(key, '1')}, now {now.get(key)})")
        elif group == "versions":
            text = f"{what} was {then.get(key)}, now {now.get(key)}"
            yield Change("" if what in FREE_VERSIONS else group, text)
        else:
            yield Change(group, _differs(group, what))


def _differs(group: str, what: str) -> str:
    if group == "base":
        return f"the base model has other {what}" if what == "weights" else f"the base model has another {what}"
    if what == "statistics":
        return "the statistics that normalise are others"
    if what == "selection":
        return "other episodes are trained on: their number, their lengths, or which of them are held out"
    number, _, part = what.partition(".")
    part = {"meta": "meta/ (features, episodes, tasks, statistics)", "files": "list of file sizes"}.get(part, part)
    return f"dataset {number}: its {part} is another"


def _is_free(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in FREE)


def _global_batch(config: Mapping[str, Any]) -> int:
    return config["batch_size"] * config["grad_accum"] * config["num_workers"]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and key != "rename_map":
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@dataclass(frozen=True)
class ResumePoint:
    store: Store
    step: int | None
    """Optimizer step of the checkpoint to go on from; None for a new run."""
    setup: Setup
    fingerprints: Mapping[str, str]
    policy_files: Mapping[str, bytes]

    def plan(self, config: RunConfig) -> CheckpointPlan:
        """What the workers need to know about checkpoints; they run in another folder than the driver."""
        run_dir, storage_path = str(config.run_dir.resolve()), absolute_storage(config.storage_path)
        return CheckpointPlan(run_dir, storage_path, self.step, self.fingerprints, self.policy_files)


def find_resume_point(config: RunConfig, setup: Setup | None = None, *, say: Callable[[str], None]) -> ResumePoint:
    """Read the newest checkpoint's page and hold it against the config; what differs is refused, or said.

    `setup` is the config's; it is made here for a caller that has none yet.
    """
    setup = setup or make_setup(config)
    store = open_store(config.run_dir, config.storage_path)
    step = find_newest(store, warn=say, strict=config.strict_resume)
    if step is None:
        return ResumePoint(store, None, setup, fingerprints(setup), _policy_files(config, setup))
    stored = parse_state(store.read_bytes(step, STATE), store.where(step))
    _check_steps(config, stored, store.where(step))
    setup = setup.with_lanes(stored.lanes)
    made_of = fingerprints(setup)
    for change in check_changes(config, stored, made_of, store.where(step)):
        say(f"changed since the checkpoint: {change}")
    return ResumePoint(store, step, setup, made_of, _policy_files(config, setup))


def _policy_files(config: RunConfig, setup: Setup) -> dict[str, bytes]:
    make = make_mixture_files if setup.binding.parts else make_policy_files
    return make(setup.policy, setup.binding, setup.stats, dtype=config.policy.dtype)


def _check_steps(config: RunConfig, stored: TrainState, where: str) -> None:
    if stored.optimizer_step > config.steps:
        raise ValueError(
            f"--steps={config.steps}: checkpoint {where} is already at step {stored.optimizer_step}; "
            f"give more --steps, or another --output_dir or --job_name"
        )


def check_run(config: RunConfig) -> None:
    """Refuse a folder in which the run may neither start nor go on; nothing is written."""
    folder = RunFolder(config.run_dir)
    stored = read_settings(folder.path)
    if stored is not None:
        _check_same_run(config, folder, stored)
    elif folder.path.exists() and any(folder.path.iterdir()) and not _only_ours(folder.path):
        raise ValueError(
            f"run folder '{folder.path}' is not empty and holds no run; choose another --output_dir or --job_name"
        )
    elif config.resume and not _has_checkpoints_elsewhere(config):
        raise ValueError(f"--resume=true: there is no run in '{folder.path}'; check --output_dir and --job_name")


def open_run(config: RunConfig) -> RunFolder:
    """Check the folder and record the run's config there."""
    check_run(config)
    folder = RunFolder(config.run_dir)
    make_folder(folder.path, LOGS)
    write_settings(folder.path, replace(config, resume=False, allow_changed=()))
    seal_places(folder.path, config)
    (folder.path / SUMMARY_FILE).unlink(missing_ok=True)  # a run that goes on is not finished
    return folder


@contextmanager
def only_one(folder: RunFolder) -> Iterator[None]:
    """Hold the folder's lock; it falls with the process, however that ends."""
    folder.path.mkdir(parents=True, exist_ok=True)
    refuse_links_out(folder.path, skip=BESIDE)
    with open_to_append(folder.path / DRIVER_LOCK) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"run folder '{folder.path}' is in use by another process; wait for it or choose another --output_dir"
            ) from error
        yield


def _check_same_run(config: RunConfig, folder: RunFolder, stored: dict[str, Any]) -> None:
    summary = folder.summary()
    if summary and summary.finished:
        longer = config.resume and config.steps > summary.optimizer_steps
        if not longer:
            raise ValueError(
                f"run folder '{folder.path}' already holds a finished run of {summary.optimizer_steps} steps; choose another --job_name or "
                f"--output_dir, delete the folder, or go on with --resume=true and more --steps"
            )
    what = f"run folder '{folder.path}' holds a run with other settings"
    accepted(list(config_changes(config, stored, f"'{folder.path}/{CONFIG_FILE}'")), config.allow_changed, what)


def _has_checkpoints_elsewhere(config: RunConfig) -> bool:
    """A run whose folder was lost with its machine goes on from --storage_path."""
    return config.storage_path is not None and bool(open_store(config.run_dir, config.storage_path).steps())


def _only_ours(folder: Path) -> bool:
    """Nothing in it but what a start that was broken off leaves, or what the demo puts beside a run."""
    begun = (DRIVER_LOCK, WRITER_LOCK, OLD_WRITER_LOCK, LOGS, *BESIDE)
    return all(entry.name in begun or is_left_over(entry.name) for entry in folder.iterdir())
