"""Define, read and write RUN/summary.json."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from vlatune.storage.files import read_json, write_json
from vlatune.storage.json_types import checked
from vlatune.storage.paths import SUMMARY_FILE

Scalar = bool | int | float | str | None


@dataclass(frozen=True)
class Summary:
    """Results of a run; rates, waits and seconds cover its last start only. Fields with a default
    may be missing in the file."""

    optimizer_steps: int
    final_loss: float
    samples_per_s: float
    wait_share: float
    time_to_first_batch_s: float | None
    spilled_bytes: int
    fallback_bytes: int
    peak_object_store_bytes: int
    restarts: int
    """Number of lost worker groups."""
    object_store_capacity_bytes: int | None = None
    num_readers: int | None = None
    """Number of readers over all workers."""
    time_s: dict[str, float] = field(default_factory=dict)
    """Seconds by activity and by data stage; see meters.py."""
    other_process_share: float | None = None
    """Share of the usable CPUs' time that other processes used; None if unknown."""
    kept_prefix_samples: int | None = None
    """Samples of the last start whose prefix was read, not computed; None without --policy.keep_prefix."""
    kept_prefix_share: float | None = None
    performance_flags: dict[str, Scalar] = field(default_factory=dict)
    best_validation: dict[str, int | float] | None = None
    """Optimizer step and action error of the best validation during training."""
    loss_by_episode: tuple[dict[str, int | float], ...] = ()
    """`dataset`, `episode`, mean `loss` and number of `samples` of the worst episodes."""
    versions: dict[str, str] = field(default_factory=dict)
    """Package -> version, as in the run's checkpoints."""
    checkpoints: tuple[int, ...] | None = None
    """Optimizer steps of the checkpoints that were kept."""
    best_checkpoint: int | None = None
    """Optimizer step of the checkpoint that `--checkpoint=best` selects."""
    checkpoint_place: str | None = None
    """Folder or URL of the checkpoints."""
    num_skipped_episodes: int = 0
    skipped_episodes: tuple[dict[str, int | str], ...] = ()
    verdict: str = ""


def write_summary(run_dir: Path, summary: Summary) -> None:
    write_json(run_dir / SUMMARY_FILE, dataclasses.asdict(summary))


def read_summary(run_dir: Path) -> Summary | None:
    """Read and validate RUN/summary.json; None if the run has not finished."""
    file = run_dir / SUMMARY_FILE
    return checked(read_json(run_dir, SUMMARY_FILE), Summary, str(file)) if file.exists() else None
