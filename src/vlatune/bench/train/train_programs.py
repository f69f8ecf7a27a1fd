"""The three programs that `vlatune bench train` runs, each called as its users call it, with what a configuration says."""

import json
import os
import re
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vlatune.bench.processes import Program
from vlatune.bench.train.train_cases import TrainJob
from vlatune.config import RunConfig, to_json
from vlatune.ray_internals import TRAIN_WORKER_TITLE

LEROBOT_LINE = re.compile(rb"\bstep:\S+ smpl:\S+ ")
"""In a line of LeRobot's log that comes every `--log_freq` steps; its progress bar may stand before it."""
TEMPLATE_MARK = "optimizer_step"
"""The first key of every line that the template's way prints."""
METRICS, CONFIG_FILE = "metrics.jsonl", "bench.json"


@dataclass(frozen=True)
class TemplateJob:
    """What `template_train.py` is told."""

    root: str
    base: str
    train: str
    episodes: list[int]
    steps: int
    batch_size: int
    log_freq: int
    lr: float


COSINE = ("scheduler_warmup_steps", "scheduler_decay_steps", "scheduler_decay_lr")
POLICY_FLAGS = {
    "pi05": ("dtype", "train_expert_only", *COSINE),
    "pi0": ("dtype", "train_expert_only", *COSINE),
    "smolvla": ("train_expert_only", "freeze_vision_encoder", *COSINE),
    "act": ("optimizer_lr_backbone",),
    "diffusion": ("scheduler_warmup_steps",),
}
"""Fields of LeRobot's config by which a policy is told what our config says, beside those that all have."""


def ours(
    job: TrainJob,
    folder: Path,
    *,
    save_freq: int = 0,
    flow_samples: int = 1,
    augmented: bool = False,
    keep_features: bool = False,
) -> Program:
    """`vlatune train`, its config in a file."""
    transforms = replace(job.config.dataset.image_transforms, enable=augmented)
    config = replace(
        job.config,
        dataset=replace(job.config.dataset, image_transforms=transforms),
        policy=replace(job.config.policy, flow_samples=flow_samples, keep_features=keep_features),
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
        trainer=TRAIN_WORKER_TITLE,
    )


def lerobot(job: TrainJob, folder: Path, *, save_freq: int = 0) -> Program:
    """`lerobot-train`, with a DataLoader's workers."""
    return Program(
        command=_python(
            "vlatune.bench.train.lerobot_main", str(job.config.policy.path), *_flags(job, folder, save_freq)
        ),
        env=_env(folder, job.config.torch_threads),
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
        command=_python("vlatune.bench.train.template_train", json.dumps(asdict(what))),
        env=_env(folder, config.torch_threads),
        output=folder / "output.txt",
        progress=folder / "output.txt",
        is_mark=lambda line: line.startswith(f'{{"{TEMPLATE_MARK}"'.encode()),
        log_freq=config.log_freq,
    )


def alone(job: TrainJob, folder: Path, what: str, measure_s: float) -> tuple[list[str], dict[str, str]]:
    """Command and environment of `parts_alone`; threads wait as a training worker's do."""
    config = write_config(folder, job.config)
    env = _env(folder) | {"OMP_WAIT_POLICY": "PASSIVE"}
    return _python("vlatune.bench.train.parts_alone", what, str(config), str(measure_s)), env


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
        "policy.push_to_hub": "false",
        "policy.optimizer_lr": config.optimizer.lr,
        **_policy_flags(config),
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


def _policy_flags(config: RunConfig) -> dict[str, Any]:
    values = {
        "dtype": "float32",
        "train_expert_only": json.dumps(config.policy.train == "expert"),
        "freeze_vision_encoder": json.dumps(config.policy.train != "full"),
        "optimizer_lr_backbone": config.policy.overrides.get("optimizer_lr_backbone"),
        "scheduler_warmup_steps": config.scheduler.num_warmup_steps,
        "scheduler_decay_steps": config.scheduler.num_decay_steps,
        "scheduler_decay_lr": config.scheduler.decay_lr,
    }
    return {f"policy.{name}": values[name] for name in POLICY_FLAGS.get(config.policy.type, ())}


def _python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def _env(folder: Path, threads: int | None = None) -> dict[str, str]:
    """A user's: no cluster of others, no setting of this process' threads, nothing fetched, caches below the folder.
    `threads` is how many a peer computes with, where it is not its own choice.
    """
    ours_alone = ("RAY_ADDRESS", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if name not in ours_alone}
    given = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return kept | given | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
