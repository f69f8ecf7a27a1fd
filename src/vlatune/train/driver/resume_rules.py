"""Decide whether a run may start in its folder, and from which checkpoint.

A folder with the same unfinished run is resumed; a finished or different run is rejected with the
differences. A lock file ensures one process at a time. Settings in MAY_CHANGE do not affect training
results, so they may change. All other differences from the checkpoint are rejected by name, unless
`--allow_changed` names their group: base, dataset, config or versions.
"""

import fcntl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlatune.checkpoint.state_file import TrainState, read_state
from vlatune.checkpoint.store import Store, absolute_storage, find_newest, open_store, storage_root
from vlatune.config.flags import config_from_dict
from vlatune.config.settings import RunConfig, to_json
from vlatune.export.policy_files import make_mixture_files, make_policy_files
from vlatune.run.external_paths import record_paths
from vlatune.run.mirror import restore
from vlatune.run.run_folder import (
    CONFIG_FILE,
    DRIVER_LOCK,
    LOGS,
    OWN_FOLDERS,
    flat_settings,
    is_left_over,
    read_settings,
)
from vlatune.run.summary import SUMMARY_FILE, read_summary
from vlatune.run_setup import Setup, check_workers, make_setup
from vlatune.storage.files import (
    make_folder,
    make_output_folder,
    open_to_append,
    read_json,
    reject_link,
    reject_links_out,
    write_json,
)
from vlatune.storage.lease import LEASE_FILE, LOCK_FILE, Lease, held, lease_file
from vlatune.storage.paths import is_local, require_output, run_url
from vlatune.train.fingerprint import fingerprints
from vlatune.train.worker_job import CheckpointPlan

# Locations and names; the dataset and the base model are compared by content.
MAY_CHANGE = ("recipe", "output_dir", "job_name", "storage_path", "dataset.root", "dataset.repo_id")
MAY_CHANGE += ("dataset.revision", "dataset.storage_options", "policy.path", "policy.revision")
# Where and when the same numbers are computed.
MAY_CHANGE += ("dataset.cache", "dataset.cache_bytes", "policy.gradient_checkpointing", "ray")
# The split of the global batch, whose size is compared.
MAY_CHANGE += ("batch_size", "grad_accum", "num_workers", "min_workers", "fsdp")
# The end of the run, and when it is stopped.
MAY_CHANGE += ("steps", "early_stop", "hang_timeout_s", "grace_s", "max_restarts", "max_spilled_bytes")
# What is logged, evaluated and saved.
MAY_CHANGE += ("log_freq", "log_samples", "eval_freq", "eval_samples", "wandb")
MAY_CHANGE += ("save_freq", "save_every_s", "save_buffer_bytes", "keep_checkpoints", "keep_best")
START_ONLY = ("resume", "allow_changed")
"""Options of one start, not settings of the run."""
FREE_VERSIONS = ("versions.ray",)
"""Versions that do not affect results."""
CONTENTS = {
    "meta": "features, episodes, tasks or statistics in meta/",
    "files": "sizes of data and video files",
    "selection": "number, lengths or held-out split of the episodes",
    "order": "order of samples or noise samples of this version of vlatune",
}


@dataclass(frozen=True)
class Change:
    group: str
    """base, dataset, config or versions; empty if the change is allowed."""
    text: str


def check_changes(config: RunConfig, stored: TrainState, found: Mapping[str, str], where: str) -> list[str]:
    """Reject invalid changes since a checkpoint; return the allowed changes for the log."""
    changes = [
        *config_changes(config, stored.config, f"checkpoint {where}"),
        *fingerprint_changes(found, stored.fingerprints),
    ]
    if stored.lanes % config.num_workers:
        raise ValueError(
            f"--num_workers={config.num_workers} does not divide the {stored.lanes} lanes of the run; "
            f"use a number that divides {stored.lanes}"
        )
    check_workers(config, stored.lanes)
    if not config.fewest_workers <= stored.num_workers <= config.num_workers:
        changes.append(Change("", "the order of samples stays; gradients are summed in another order"))
    return accepted(changes, config.allow_changed, f"checkpoint {where} differs from this command")


def accepted(changes: list[Change], allow: tuple[str, ...], what: str) -> list[str]:
    """Return the descriptions of changes; reject changes of groups that are not in `allow`."""
    rejected = [change for change in changes if change.group and change.group not in allow]
    if rejected:
        flags = " ".join(f"--allow_changed={group}" for group in dict.fromkeys(change.group for change in rejected))
        raise ValueError(
            f"{what}: {'; '.join(change.text for change in rejected)}. Restore the previous values, choose another "
            f"--output_dir or --job_name, or accept the change with {flags}"
        )
    return [change.text for change in changes]


def config_changes(config: RunConfig, stored: Mapping[str, Any], where: str) -> Iterator[Change]:
    """Yield the settings that differ; missing settings have their defaults."""
    before = config_from_dict(RunConfig, stored, where)
    config = _with_decision_of(before, config)
    if config.global_batch != before.global_batch:
        yield Change(
            "config",
            f"the global batch, batch_size * grad_accum * num_workers, was {before.global_batch}, now {config.global_batch}",
        )
    then, now = flat_settings(to_json(before)), flat_settings(to_json(config))
    for key in sorted(now.keys() | then.keys()):
        was, is_now = (repr(flat[key]) if key in flat else "not set" for flat in (then, now))
        if was != is_now and key not in START_ONLY:
            is_free = any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE)
            yield Change("" if is_free else "config", f"--{key} was {was}, now {is_now}")


def fingerprint_changes(now: Mapping[str, str], then: Mapping[str, str]) -> Iterator[Change]:
    """Yield the differences of dataset, base model and versions, e.g. `base.weights`."""
    for key in sorted(now.keys() | then.keys()):
        if now.get(key) != then.get(key):
            group, content = key.partition(".")[0], CONTENTS.get(key.rpartition(".")[2])
            text = f"{key} was {then.get(key)}, now {now.get(key)}"
            yield Change("" if key in FREE_VERSIONS else group, f"{text} ({content})" if content else text)


@dataclass(frozen=True)
class ResumePoint:
    store: Store
    step: int | None
    """Optimizer step of the checkpoint to resume from; None for a new run."""
    setup: Setup
    fingerprints: Mapping[str, str]
    policy_files: Mapping[str, bytes]

    def plan(self, config: RunConfig, lease_id: str | None = None) -> CheckpointPlan:
        """Return the checkpoint settings with absolute paths; workers run in another folder."""
        run_dir, storage_path = str(config.run_dir.resolve()), absolute_storage(config.storage_path)
        return CheckpointPlan(run_dir, storage_path, self.step, self.fingerprints, self.policy_files, lease_id)


def find_resume_point(config: RunConfig, setup: Setup | None = None, *, say: Callable[[str], None]) -> ResumePoint:
    """Compare the latest checkpoint with the config; reject or report the differences.

    `setup` is built from the config if not given.
    """
    setup = setup or make_setup(config)
    store = open_store(config.run_dir, config.storage_path)
    step = find_newest(store, warn=say)
    stored = None if step is None else read_state(store, step, setup.policy)
    if stored is not None:
        setup = setup.with_lanes(stored.lanes)
    found = fingerprints(setup)
    if stored is not None and step is not None:
        where = store.where(step)
        if stored.optimizer_step > config.steps:
            raise ValueError(
                f"--steps={config.steps}: checkpoint {where} is already at step {stored.optimizer_step}; "
                f"use more --steps, or another --output_dir or --job_name"
            )
        for change in check_changes(config, stored, found, where):
            say(f"changed since the checkpoint: {change}")
    make_files = make_mixture_files if setup.binding.parts else make_policy_files
    files = make_files(setup.policy, setup.binding, setup.stats, dtype=config.policy.dtype)
    return ResumePoint(store, step, setup, found, files)


def with_recorded_prefix(config: RunConfig) -> RunConfig:
    """Return the settings with --policy.keep_prefix=auto replaced by what the run decided before."""
    store = open_store(config.run_dir, config.storage_path)  # also rejects an invalid storage_path early
    if config.policy.keep_prefix != "auto":
        return config
    stored, where = read_settings(config.run_dir), f"run '{config.run_dir}'"
    if stored is None and (step := find_newest(store, warn=lambda _: None)) is not None:
        stored = read_state(store, step).config
    return config if stored is None else _with_decision_of(config_from_dict(RunConfig, stored, where), config)


def _with_decision_of(before: RunConfig, config: RunConfig) -> RunConfig:
    """Return the settings with `auto` replaced by what the run recorded when it decided."""
    if config.policy.keep_prefix != "auto":
        return config
    return replace(config, policy=replace(config.policy, keep_prefix=before.policy.keep_prefix))


def check_run(config: RunConfig) -> None:
    """Raise if the run may neither start nor resume in its folder; writes nothing."""
    folder = config.run_dir
    require_output(folder, resumes=False)
    reject_link(folder)
    stored = read_settings(folder)
    if stored is not None:
        _check_same_run(config, folder, stored)
    elif folder.exists() and not all(_is_ours(entry.name) for entry in folder.iterdir()):
        raise ValueError(
            f"run folder '{folder}' is not empty and holds no run; choose another --output_dir or --job_name"
        )
    elif config.resume and not _has_checkpoints_elsewhere(config):
        require_output(folder, resumes=True)


def restore_run(config: RunConfig, *, say: Callable[[str], None]) -> None:
    """Restore the run folder from --storage_path if it is missing, or was continued on another machine."""
    if config.storage_path is None or is_local(config.storage_path):
        return
    root = storage_root(run_url(config.run_dir, config.storage_path))
    if restore(config.run_dir, root, lambda copy: _check_same_run(config, copy, read_json(copy, CONFIG_FILE))):
        say(f"run folder restored from {root.url}")


def open_run(config: RunConfig) -> None:
    """Check the folder and record the run's config there."""
    check_run(config)
    folder = config.run_dir
    make_folder(folder, LOGS)
    write_json(folder / CONFIG_FILE, to_json(replace(config, resume=False, allow_changed=())))
    record_paths(folder, config)
    if config.storage_path:
        record_paths(run_url(folder, config.storage_path), config)
    (folder / SUMMARY_FILE).unlink(missing_ok=True)  # a resumed run is not finished


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which is released when the process ends."""
    make_output_folder(folder)
    reject_links_out(folder, skip=OWN_FOLDERS)
    with open_to_append(folder / DRIVER_LOCK) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"run folder '{folder}' is in use by another process; wait for it or choose another --output_dir"
            ) from error
        except OSError as error:
            raise ValueError(
                f"run folder '{folder}' cannot be locked ({error.strerror}); choose an --output_dir on a file system "
                f"with locks (flock); --storage_path needs none"
            ) from error
        yield


def check_lease_is_free(config: RunConfig) -> None:
    """Raise if another driver holds the lease, without waiting for the run's setup."""
    if config.storage_path is not None:
        Lease(lease_file(config.run_dir, config.storage_path)).check_free()


@contextmanager
def run_lease(config: RunConfig) -> Iterator[Lease | None]:
    """Hold the lease of the checkpoints in --storage_path; the lock covers those in the run folder."""
    if config.storage_path is None:
        yield None
        return
    with held(Lease(lease_file(config.run_dir, config.storage_path))) as lease:
        yield lease


def _check_same_run(config: RunConfig, folder: Path, stored: dict[str, Any]) -> None:
    """Raise if the run in a folder, which may be a copy, is finished or has other settings."""
    summary, folder = read_summary(folder), config.run_dir
    if summary and not (config.resume and config.steps > summary.optimizer_steps):
        raise ValueError(
            f"run folder '{folder}' already holds a finished run of {summary.optimizer_steps} steps; choose another --job_name or "
            f"--output_dir, delete the folder, or continue with --resume=true and more --steps"
        )
    changes = list(config_changes(config, stored, f"'{folder}/{CONFIG_FILE}'"))
    accepted(changes, config.allow_changed, f"run folder '{folder}' holds a run with other settings")


def _has_checkpoints_elsewhere(config: RunConfig) -> bool:
    """True if a run whose folder was lost can resume from --storage_path."""
    return config.storage_path is not None and bool(open_store(config.run_dir, config.storage_path).steps())


def _is_ours(name: str) -> bool:
    """True for leftovers of an aborted start, and for files of the demo."""
    return name in (DRIVER_LOCK, LEASE_FILE, LOCK_FILE, LOGS, *OWN_FOLDERS) or is_left_over(name)
