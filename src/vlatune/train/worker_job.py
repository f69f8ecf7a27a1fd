"""Values that the driver sends to every worker. No Ray."""

from collections.abc import Mapping
from dataclasses import dataclass

from vlatune.config.settings import RunConfig
from vlatune.feed.memory import Budget
from vlatune.run_setup import Setup
from vlatune.train.base_source import BaseSource
from vlatune.train.records import Recorded

DETERMINISTIC_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Environment of workers with --deterministic=true; cuBLAS reads it at initialisation."""

ALLOCATOR = "PYTORCH_ALLOC_CONF"
ALLOCATOR_NAMES = (ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables of torch's device allocator; it prefers the first."""


def missing_environment(given: Mapping[str, str], *, deterministic: bool, uses_gpu: bool) -> dict[str, str]:
    """Return the variables that a worker adds to its environment before torch reads it."""
    wanted = dict(DETERMINISTIC_ENVIRONMENT) if deterministic else {}
    if uses_gpu and not any(name in given for name in ALLOCATOR_NAMES):
        wanted[ALLOCATOR] = "expandable_segments:True"  # prompts of several lengths fragment fixed segments
    return {name: value for name, value in wanted.items() if name not in given}


@dataclass(frozen=True)
class CheckpointPlan:
    """Checkpoint settings of a run; plain values, sent to every worker."""

    run_dir: str
    storage_path: str | None
    resume_step: int | None
    """Step of the checkpoint to resume from."""
    fingerprints: Mapping[str, str]
    policy_files: Mapping[str, bytes]
    """Policy config and processors with dataset statistics, by file name, as needed for export."""
    lease_id: str | None = None
    """The driver's lease of `storage_path`, checked before checkpoints are published or removed."""


@dataclass(frozen=True)
class WorkerJob:
    config: RunConfig
    setup: Setup
    budget: Budget
    num_workers: int
    """Size of this worker group; an elastic run has groups of several sizes."""
    run_dir: str
    checkpoints: CheckpointPlan
    restarts: int
    """Number of worker groups that have failed before this one."""
    torch_threads: int
    store_bytes: int
    """Size of the object store that the budget is part of."""
    recorded: Recorded
    base: BaseSource
