"""A run folder read back: config, metrics, summary, evaluation, whatever of it is there.

Reading never changes the folder, and works on a run that is going on or has died: what is not there is empty. Writing
these files is the trainer's and the evaluation's business, through sinks.py and eval_samples.py.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlatune.files import read_json
from vlatune.report.eval_samples import FILE_NAME, EvalSample, load_eval_samples
from vlatune.report.sinks import read_jsonl

RUN_ENTRIES = (
    "config.json",
    "metrics.jsonl",
    "samples.jsonl",
    "summary.json",
    "skipped_episodes.json",
    "eval.json",
    FILE_NAME,
    "report.html",
    "logs",
    "checkpoints",
    ".lock",
    ".pen",
)
"""All that a run puts into its folder."""
BESIDE = ("base", "dataset")
"""What the demo puts beside a run; runs only read it."""


@dataclass(frozen=True)
class Run:
    """What a run folder holds; empty where it holds nothing."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    samples: list[EvalSample] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)

    def figure(self, key: str) -> Any:
        """From the summary; while there is none, from the last line of metrics."""
        live = {"optimizer_steps": "optimizer_step", "final_loss": "loss"}.get(key, key)
        last = self.metrics[-1] if self.metrics else {}
        return self.summary[key] if self.summary.get(key) is not None else last.get(live)

    @property
    def capacity_bytes(self) -> float | None:
        measured = self.summary.get("object_store_capacity_bytes")
        return measured or (self.config.get("ray") or {}).get("object_store_bytes")


def read_run(run_dir: Path, eval_samples: list[EvalSample] | None) -> Run:
    """Gather what the folder has."""
    known = ("config.json", "metrics.jsonl", "summary.json")
    if not any((run_dir / name).exists() for name in known):
        raise ValueError(f"{run_dir}: not a run folder (none of {', '.join(known)}); give the --output_dir of a run")
    config = _read_json(run_dir, "config.json")
    if eval_samples is None:
        eval_samples = load_eval_samples(run_dir) if (run_dir / FILE_NAME).exists() else []
    metrics_path = run_dir / "metrics.jsonl"
    return Run(
        name=str(config.get("job_name") or run_dir.resolve().name),
        config=config,
        metrics=read_jsonl(metrics_path) if metrics_path.exists() else [],
        summary=_read_json(run_dir, "summary.json"),
        evaluation=_read_json(run_dir, "eval.json"),
        samples=eval_samples,
        checkpoints=sorted(int(path.name) for path in run_dir.glob("checkpoints/*") if path.name.isdigit()),
    )


def _read_json(run_dir: Path, name: str) -> dict[str, Any]:
    return read_json(run_dir, name) if (run_dir / name).exists() else {}
