"""From where a run starts: nothing, or its newest whole checkpoint, after a look at what changed since."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vlatune.checkpoint.policy_files import make_policy_files
from vlatune.checkpoint.state_file import STATE, TrainState, parse_state
from vlatune.checkpoint.store import Store, absolute_storage, find_newest, open_store
from vlatune.config import RunConfig
from vlatune.run_setup import Setup, make_setup
from vlatune.train.driver.resume_rules import check_changes
from vlatune.train.fingerprint import fingerprints
from vlatune.train.worker_job import CheckpointPlan


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
    return make_policy_files(setup.policy, setup.binding, setup.stats, dtype=config.policy.dtype)


def _check_steps(config: RunConfig, stored: TrainState, where: str) -> None:
    if stored.optimizer_step > config.steps:
        raise ValueError(
            f"--steps={config.steps}: checkpoint {where} is already at step {stored.optimizer_step}; "
            f"give more --steps, or another --output_dir or --job_name"
        )
