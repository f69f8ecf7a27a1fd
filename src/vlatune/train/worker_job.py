"""What the driver sends to every worker: plain values and frozen dataclasses. No Ray."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlatune.config import RunConfig
from vlatune.pipeline.memory import Budget
from vlatune.run_setup import Setup

DETERMINISTIC_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Of a worker with --deterministic=true. cuBLAS reads it when it starts: with memory set aside, its sums have one order."""


@dataclass(frozen=True)
class CheckpointPlan:
    """What the driver knows about a run's checkpoints; plain values, sent to every worker."""

    run_dir: str
    storage_path: str | None
    resume_step: int | None
    """The checkpoint to go on from."""
    fingerprints: Mapping[str, str]
    policy_files: Mapping[str, bytes]
    """The policy's config and processors with the dataset's statistics, by name: what an export needs."""


@dataclass(frozen=True)
class WorkerJob:
    config: RunConfig
    setup: Setup
    budget: Budget
    run_dir: str
    checkpoints: CheckpointPlan
    restarts: int
    """How many worker groups this run has lost before this one."""
    torch_threads: int = 1
    store_bytes: int | None = None
    """Of the object store that the budget is a share of."""
    coordinators: tuple[Any, ...] = ()
    """Handles of the processes that read for each rank, where they were started ahead."""
    monitor: Any = None
    """Handle of the actor that hears how far the workers are."""
