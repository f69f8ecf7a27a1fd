"""Tables for `--from_lerobot`: all fields of LeRobot's training config.

A name that ends with a dot stands for all fields below it that have no row. Options of policies are
flags of the same name and not listed. `docs/from_lerobot.md` shows the table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

REQUIRED: Any = object()
"""Marks fields without a default."""


@dataclass(frozen=True)
class Row:
    """Translation of a LeRobot field: to a flag, ignored, or rejected unless it has its default."""

    default: Any = REQUIRED
    """LeRobot's default."""
    flag: str | None = None
    """Our equivalent flag."""
    reason: str = ""
    """Why the field, or its value, is rejected; a field without flag and reason is ignored."""
    values: Mapping[str, str] | None = None
    """LeRobot's values -> ours, if they differ; other values are rejected."""


FROZEN = ("train_expert_only", "freeze_vision_encoder")
"""Fields of a policy that select the fine-tuning mode."""

SAME_NAME = {
    **dict.fromkeys(("dataset.repo_id", "dataset.image_transforms.tfs", "policy.type", "policy.path"), REQUIRED),
    **dict.fromkeys(("dataset.root", "dataset.episodes", "dataset.revision", "dataset.exclude_episodes"), None),
    "dataset.eval_split": 0.0,
    "dataset.use_imagenet_stats": True,
    "dataset.image_transforms.enable": False,
    "dataset.image_transforms.max_num_transforms": 3,
    "dataset.image_transforms.random_order": False,
    "output_dir": None,
    "job_name": None,
    "seed": 1000,
    "batch_size": 8,
    "steps": 100_000,
    "log_freq": 200,
    "save_freq": 20_000,
    "rename_map": {},
    "wandb.enable": False,
    "wandb.project": "lerobot",
    **dict.fromkeys(("wandb.entity", "wandb.notes", "wandb.run_id", "wandb.mode"), None),
    **dict.fromkeys(("policy.dtype", "policy.gradient_checkpointing", "optimizer.lr", "optimizer.betas"), REQUIRED),
    **dict.fromkeys(("optimizer.eps", "optimizer.weight_decay", "optimizer.grad_clip_norm"), REQUIRED),
    **dict.fromkeys(("scheduler.num_warmup_steps", "scheduler.num_decay_steps", "scheduler.decay_lr"), REQUIRED),
}
"""Fields with a flag of the same name -> default."""

OTHER_NAME = {
    "cudnn_deterministic": ("deterministic", False),
    "eval_steps": ("eval_freq", 0),
    "max_eval_samples": ("eval_samples", 0),
    "tolerance_s": ("dataset.tolerance_s", 1e-4),
    "ema.decay": ("optimizer.ema_decay", None),
    "parallelism.dp_replicate": ("num_workers", 1),
    "peft.r": ("policy.lora_rank", 16),
    "peft.lora_alpha": ("policy.lora_alpha", None),
    "policy.pretrained_path": ("policy.path", REQUIRED),
    "policy.pretrained_revision": ("policy.revision", REQUIRED),
    **{f"policy.optimizer_{name}": (f"optimizer.{name}", REQUIRED) for name in ("lr", "betas", "eps")},
    **{f"policy.optimizer_{name}": (f"optimizer.{name}", REQUIRED) for name in ("weight_decay", "grad_clip_norm")},
    "policy.scheduler_warmup_steps": ("scheduler.num_warmup_steps", REQUIRED),
    "policy.scheduler_decay_steps": ("scheduler.num_decay_steps", REQUIRED),
    "policy.scheduler_decay_lr": ("scheduler.decay_lr", REQUIRED),
}
"""Fields with a flag of another name -> (flag, default)."""

DIFFUSERS = Row(
    flag="scheduler.type",
    values={"cosine": "diffuser", "constant_with_warmup": "constant_with_warmup", "constant": "none"},
    reason="supported diffusers schedules are cosine, constant_with_warmup and constant",
)
OTHER_VALUES = {
    "policy.compile_model": Row(
        flag="policy.compile",
        values={"True": "true", "true": "true", "False": "auto", "false": "auto"},
        reason="must be true or false",
    ),
    "optimizer.type": Row(
        flag="optimizer.type",
        values={"adamw": "adamw", "adam": "adam"},
        reason="supported optimizers are adamw and adam",
    ),
    "scheduler.type": Row(
        flag="scheduler.type",
        values={
            "cosine_decay_with_warmup": "cosine_decay_with_warmup",
            "cosine_annealing_with_warmup": "diffuser",
            "constant_with_warmup": "constant_with_warmup",
            "diffuser": "diffuser",
        },
        reason="supported schedules are cosine and constant, each after a warm-up",
    ),
    "scheduler.name": DIFFUSERS,
    "policy.scheduler_name": DIFFUSERS,
}

IGNORED = (
    *(f"dataset.{name}" for name in ("streaming", "video_backend", "return_uint8", "depth_output_unit")),
    *("num_workers", "prefetch_factor", "persistent_workers", "dataloader_multiprocessing_context"),
    *("env.", "env_eval_freq", "eval.", "reward_model.", "sample_weighting.", "job.", "checkpoint_path"),
    *("wandb.", "trackio.", "ema.", "ema.enable", "accelerator.", "accelerator.mixed_precision", "checkpoint_format"),
    *("use_policy_training_preset", "optimizer", "scheduler", "scheduler.peak_lr", "peft"),
    *(f"policy.{name}" for name in ("push_to_hub", "repo_id", "private", "tags", "license")),
    *(f"policy.{name}" for name in ("compile_mode", "device", "use_peft", *FROZEN)),
    *(f"policy.memory_{name}" for name in ("frames", "stride", "temporal_attention_every")),
)
"""Fields that do not affect the trained model, or that the translation of other fields reads."""

MEMORY = "observation memory is not supported"
REJECTED = {
    "dataset.repo_type": ("dataset", "storage buckets are not supported; download the dataset and give its folder"),
    "env": (None, "training runs no simulation; export the run and use `lerobot-eval`"),
    "reward_model": (None, "reward models are not supported"),
    "sample_weighting": (None, "samples are weighted by dataset only (--dataset.weight)"),
    "resume": (False, "LeRobot runs cannot be resumed; start from the weights with --policy.path"),
    "save_checkpoint": (True, "checkpoints are always saved; see --save_freq and --keep_checkpoints"),
    "save_checkpoint_to_hub": (False, "use `vlatune export RUN DIR --push_to_hub=NAME` afterwards"),
    "job.target": (None, "HF Jobs are not supported; set RAY_ADDRESS to run on a cluster"),
    "trackio.enable": (False, "Trackio is not supported; use --wandb.enable=true"),
    "ema.update_after_step": (0, "the moving average starts with the first step"),
    "parallelism.": (1, "use --num_workers with --fsdp=true, which shards over all workers"),
    "accelerator.gradient_accumulation.steps": (
        1,
        "LeRobot counts micro-batches as steps; remove it, use --grad_accum, and divide the steps by it",
    ),
    "accelerator.compile.enabled": (False, "use --policy.compile=true"),
    "accelerator.activation_checkpointing.mode": ("none", "use --policy.gradient_checkpointing=true"),
    "peft.method_type": ("LORA", "only LoRA adapters are supported"),
    "peft.target_modules": (None, "--policy.train=lora adapts the language model and the expert"),
    "peft.full_training_modules": (None, "--policy.train=lora also trains the projections"),
    "peft.init_type": (None, "adapters have PEFT's default initialisation"),
    "policy.use_amp": (False, "use --policy.dtype=bfloat16; trained weights stay float32"),
    "policy.rtc_training_max_delay": (0, "training for real-time chunking is not supported"),
    **dict.fromkeys(("policy.use_visual_memory", "policy.use_proprioceptive_memory"), (False, MEMORY)),
    "policy.": (REQUIRED, "set by the config.json of the base model"),
}
"""Fields without an equivalent -> (default, reason). `policy.` applies to all other policy fields."""

ROWS: Mapping[str, Row] = {
    **{name: Row(default, name) for name, default in SAME_NAME.items()},
    **{name: Row(default, flag) for name, (flag, default) in OTHER_NAME.items()},
    **OTHER_VALUES,
    **dict.fromkeys(IGNORED, Row()),
    **{name: Row(default, reason=reason) for name, (default, reason) in REJECTED.items()},
}

PRESETS = tuple(name for name in ROWS if name.startswith(("policy.optimizer_", "policy.scheduler_")))
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "grad_clip_norm": 10.0},
    "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 10.0},
}
"""LeRobot's defaults by `--optimizer.type`, used without the policy's preset."""
