"""Define the programs of the train benchmark, each called as its users call it."""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.processes import Program
from benchmarks.train.train_cases import TrainJob, choose_log_freq
from vlatune.config.settings import RunConfig, to_json
from vlatune.ray_internals import TRAIN_WORKER_TITLE

LEROBOT_LINE = re.compile(rb"\bstep:\S+ smpl:\S+ ")
"""Matches LeRobot's log line of every `--log_freq` steps; a progress bar may precede it."""
LEROBOT_BEGIN = b"Start offline training"
"""Part of LeRobot's last log line before the first batch."""
METRICS, CONFIG_FILE = "metrics.jsonl", "bench.json"
TEMPLATE_PROGRESS = "progress.jsonl"
COSINE = ("scheduler_warmup_steps", "scheduler_decay_steps", "scheduler_decay_lr")
POLICY_FLAGS = {
    "pi05": ("dtype", "train_expert_only", *COSINE),
    "pi0": ("dtype", "train_expert_only", *COSINE),
    "smolvla": ("train_expert_only", "freeze_vision_encoder", *COSINE),
    "act": ("optimizer_lr_backbone",),
    "diffusion": ("scheduler_warmup_steps",),
}
"""Policy-specific fields of LeRobot's config that correspond to our config."""


def ours(job: TrainJob, folder: Path, *, save_freq: int = 0, flow_samples: int = 1) -> Program:
    """Return `vlatune train` with its config in a file."""
    config = replace(
        job.config,
        policy=replace(job.config.policy, flow_samples=flow_samples),
        output_dir=str(folder / "run"),
        save_freq=save_freq,
        keep_checkpoints=1_000_000,  # keep all checkpoints for evaluation
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


def ours_cached(job: TrainJob, folder: Path, *, steps: int = 0, save_freq: int = 0) -> Program:
    """Return `vlatune train` with an empty frame cache, or with a kept prefix if the policy has a frozen one.

    It trains `cache_epochs`, or the given number of steps.
    """
    steps = steps or job.cache_epochs * job.steps_per_epoch
    dataset = replace(job.config.dataset, cache=str(folder / "frames"))
    policy = replace(job.config.policy, keep_prefix="true" if job.config.policy.train == "expert" else "false")
    config = replace(job.config, dataset=dataset, policy=policy, steps=steps, log_freq=choose_log_freq(steps))
    return ours(replace(job, config=config), folder, save_freq=save_freq)


def lerobot(job: TrainJob, folder: Path, *, save_freq: int = 0) -> Program:
    """Return `lerobot-train` with DataLoader workers."""
    return Program(
        command=_launched(
            job, "benchmarks.train.lerobot_main", str(job.config.policy.path), *_flags(job, folder, save_freq)
        ),
        env=_env(folder, job.config.torch_threads),
        output=folder / "output.txt",
        progress=folder / "output.txt",
        is_mark=is_lerobot_line,
        log_freq=job.config.log_freq,
        begins_reading=lambda line: LEROBOT_BEGIN in line,
    )


def template(job: TrainJob, folder: Path, version: str = "template") -> Program:
    """Return the template's training program, before or after pull request #705."""
    config = job.config
    what = {
        "version": version,
        "folder": str(folder),
        "root": config.dataset.root[0],
        "base": str(config.policy.path),
        "train": config.policy.train,
        "episodes": list(job.episodes),
        "steps": config.steps,
        "batch_size": config.batch_size,
        "log_freq": config.log_freq,
        "lr": config.optimizer.lr,
        "store_bytes": config.ray.object_store_bytes,
        "num_workers": config.num_workers,
        "device": job.device,
    }
    return Program(
        command=_python("benchmarks.table.template_program", json.dumps(what)),
        env=_env(folder, config.torch_threads),
        output=folder / "output.txt",
        progress=folder / TEMPLATE_PROGRESS,
        is_mark=lambda line: line.startswith(b'{"optimizer_step"'),
        log_freq=config.log_freq,
        trainer=TRAIN_WORKER_TITLE,
    )


def alone(job: TrainJob, folder: Path, what: str, measure_s: float) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of `parts_alone`, with the OpenMP wait policy of a worker."""
    config = write_config(folder, job.config)
    env = _env(folder) | {"OMP_WAIT_POLICY": "PASSIVE"}
    return _python("benchmarks.train.parts_alone", what, str(config), str(measure_s)), env


def is_lerobot_line(line: bytes) -> bool:
    return LEROBOT_LINE.search(line) is not None


def write_config(folder: Path, config: RunConfig) -> Path:
    file = folder / CONFIG_FILE
    file.write_text(json.dumps(to_json(config)))
    return file


def _flags(job: TrainJob, folder: Path, save_freq: int) -> list[str]:
    """Return LeRobot's flags that are equivalent to our config."""
    config = job.config
    flags = {
        "dataset.repo_id": "bench/train",
        "dataset.root": config.dataset.root[0],
        "dataset.episodes": json.dumps(job.episodes),
        "policy.device": job.device,
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
    return [sys.executable, "-P", "-m", module, *arguments]


def _launched(job: TrainJob, module: str, *arguments: str) -> list[str]:
    """Return a command that starts one process per training worker, as LeRobot documents it."""
    if job.config.num_workers == 1:
        return _python(module, *arguments)
    return _python("accelerate.commands.launch", f"--num_processes={job.config.num_workers}", "-m", module, *arguments)


def _env(folder: Path, threads: int | None = None) -> dict[str, str]:
    """Return a user's environment: no cluster, no thread settings, offline, caches below `folder`.
    `threads` sets the number of compute threads of programs that do not choose it."""
    ours_alone = ("RAY_ADDRESS", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if name not in ours_alone}
    given = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return kept | given | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
