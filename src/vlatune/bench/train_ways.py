"""The three programs of `vlatune bench train`, each called as its users call it, with the same data, base and samples."""

import json
import os
import re
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vlatune.bench.resume_watch import WORKER
from vlatune.bench.train_case import TrainJob
from vlatune.bench.train_watch import Program
from vlatune.config import RunConfig, to_json

LEROBOT_LINE = re.compile(rb"\bstep:\S+ smpl:\S+ ")
"""In a line of LeRobot's log that comes every `--log_freq` steps; its progress bar may stand before it."""
TEMPLATE_MARK = "optimizer_step"
"""The first key of every line that the template's way prints."""
METRICS, CONFIG_FILE = "metrics.jsonl", "bench.json"


@dataclass(frozen=True)
class TemplateJob:
    """What `train_template.py` is told."""

    root: str
    base: str
    train: str
    episodes: list[int]
    steps: int
    batch_size: int
    log_freq: int
    lr: float


def ours(job: TrainJob, folder: Path, *, save_freq: int = 0, flow_samples: int = 1) -> Program:
    """`vlatune train`, its config in a file."""
    config = replace(
        job.config,
        policy=replace(job.config.policy, flow_samples=flow_samples),
        output_dir=str(folder / "run"),
        save_freq=save_freq,
        keep_checkpoints=1_000_000,  # all of them are evaluated
    )
    return Program(
        command=_python("vlatune.cli", "train", f"--config_path={write_config(folder, config)}"),
        env=_env(folder),
        output=folder / "output.txt",
        progress=folder / "run" / METRICS,
        is_mark=lambda line: line.startswith(b"{"),
        log_freq=config.log_freq,
        trainer=WORKER,
    )


def lerobot(job: TrainJob, folder: Path, *, save_freq: int = 0) -> Program:
    """`lerobot-train`, with a DataLoader's workers."""
    return Program(
        command=_python(
            "vlatune.bench.train_lerobot_main", str(job.config.policy.path), *_flags(job, folder, save_freq)
        ),
        env=_env(folder),
        output=folder / "output.txt",
        progress=folder / "output.txt",
        is_mark=is_lerobot_line,
        log_freq=job.config.log_freq,
    )


def template(job: TrainJob, folder: Path) -> Program:
    """The template's pipeline and step, in one process beside Ray's."""
    config = job.config
    what = TemplateJob(
        root=config.dataset.root[0],
        base=str(config.policy.path),
        train=config.policy.train,
        episodes=list(job.episodes),
        steps=config.steps,
        batch_size=config.batch_size,
        log_freq=config.log_freq,
        lr=config.optimizer.lr,
    )
    return Program(
        command=_python("vlatune.bench.train_template", json.dumps(asdict(what))),
        env=_env(folder),
        output=folder / "output.txt",
        progress=folder / "output.txt",
        is_mark=lambda line: line.startswith(f'{{"{TEMPLATE_MARK}"'.encode()),
        log_freq=config.log_freq,
    )


def alone(job: TrainJob, folder: Path, what: str) -> tuple[list[str], dict[str, str]]:
    """Command and environment of `train_alone`; threads wait as a training worker's do."""
    config = write_config(folder, job.config)
    env = _env(folder) | {"OMP_WAIT_POLICY": "PASSIVE"}
    return _python("vlatune.bench.train_alone", what, str(config)), env


def is_lerobot_line(line: bytes) -> bool:
    return LEROBOT_LINE.search(line) is not None


def write_config(folder: Path, config: RunConfig) -> Path:
    file = folder / CONFIG_FILE
    file.write_text(json.dumps(to_json(config)))
    return file


def _flags(job: TrainJob, folder: Path, save_freq: int) -> list[str]:
    """LeRobot's own flags for the run that our config describes."""
    config = job.config
    flags = {
        "dataset.repo_id": "bench/train",
        "dataset.root": config.dataset.root[0],
        "dataset.episodes": json.dumps(job.episodes),
        "policy.device": "cpu",
        "policy.dtype": "float32",
        "policy.push_to_hub": "false",
        "policy.train_expert_only": json.dumps(config.policy.train == "expert"),
        "policy.optimizer_lr": config.optimizer.lr,
        "policy.scheduler_warmup_steps": config.scheduler.num_warmup_steps,
        "policy.scheduler_decay_steps": config.scheduler.num_decay_steps,
        "policy.scheduler_decay_lr": config.scheduler.decay_lr,
        "output_dir": folder / "run",
        "steps": config.steps,
        "batch_size": config.batch_size,
        "num_workers": job.num_workers,
        "seed": config.seed,
        "log_freq": config.log_freq,
        "save_freq": save_freq,
        "env_eval_freq": 0,
        "wandb.enable": "false",
    }
    return [f"--{name}={value}" for name, value in flags.items()]


def _python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def _env(folder: Path) -> dict[str, str]:
    """A user's: no cluster of others, no setting of this process' threads, nothing fetched, caches below the folder."""
    ours_alone = ("RAY_ADDRESS", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if name not in ours_alone}
    return kept | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
