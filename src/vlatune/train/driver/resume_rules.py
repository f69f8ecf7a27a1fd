"""From where a run starts: nothing, or its newest whole checkpoint, after a look at what changed since.

What may change between two attempts at one run, what may not, and what to say of it: settings in FREE change nothing that was learnt or will be. Everything else that differs from the checkpoint is refused
with its name, unless `--allow_changed` names its group: base, dataset, config or versions.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vlatune.checkpoint.policy_files import make_mixture_files, make_policy_files
from vlatune.checkpoint.state_file import STATE, TrainState, parse_state
from vlatune.checkpoint.store import Store, absolute_storage, find_newest, open_store
from vlatune.config import RunConfig, to_json
from vlatune.flags import config_from_dict
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
    for key in sorted(flat_now.keys() | flat_then.keys()):  # a mapping's own names need not be in both
        if flat_now.get(key) != flat_then.get(key) and key not in NOT_THE_RUNS:
            text = f"--{key} was {flat_then.get(key)!r}, now {flat_now.get(key)!r}"
            yield Change("" if _is_free(key) else "config", text)


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
