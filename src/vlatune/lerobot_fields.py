"""The table of `--from_lerobot`: every field of LeRobot's training config, and what means the same here.

Each has the flag of ours, the reason why it may be left out, or the reason why there is nothing like it. `docs/from_lerobot.md`
shows the table, and tests hold both to LeRobot's own classes. A policy's further fields are on its card (`Policy.overrides`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

REQUIRED: Any = object()
"""LeRobot's fields that have no default."""


@dataclass(frozen=True)
class Row:
    """What becomes of one field of LeRobot's, or of all below a name that ends with a dot."""

    default: Any = REQUIRED
    """LeRobot's own."""
    ours: str | None = None
    """Our flag of the same meaning."""
    why: str = ""
    """Why there is none."""
    harmless: bool = False
    """Whether it may be left out, as it changes nothing that is learnt."""
    values: Mapping[str, str] | None = None
    """Of a name: their values -> ours; any other has no equivalent."""


def same(ours: str, default: Any = REQUIRED) -> Row:
    return Row(default, ours)


def named(ours: str, values: Mapping[str, str], why: str) -> Row:
    return Row(ours=ours, values=values, why=why)


def left_out(why: str) -> Row:
    return Row(why=why, harmless=True)


def unlike(default: Any, why: str) -> Row:
    return Row(default, why=why)


BY_THE_BASE = "the base's config.json says it; change it there"
READING = "reading is sized by the machine (docs/sizing.md)"
ROBOT = "it decides how the robot or the hub is served, not what is learnt"
DIFFUSERS = named(
    "scheduler.type",
    {"cosine": "diffuser", "constant_with_warmup": "constant_with_warmup", "constant": "none"},
    "of diffusers' schedules there are cosine, constant_with_warmup and constant",
)
ROWS: Mapping[str, Row] = {
    "dataset.repo_id": same("dataset.repo_id"),
    "dataset.root": same("dataset.root", None),
    "dataset.episodes": same("dataset.episodes", None),
    "dataset.revision": same("dataset.revision", None),
    "dataset.eval_split": same("dataset.eval_split", 0.0),
    "dataset.repo_type": unlike(
        "dataset", "storage buckets of the hub are not read; fetch the dataset, and give its folder"
    ),
    "dataset.streaming": left_out("datasets are always read as they are needed"),
    "dataset.video_backend": left_out("PyAV decodes, to the same frames"),
    "dataset.return_uint8": left_out("pixels are uint8 up to the device anyway"),
    "dataset.depth_output_unit": left_out("depth is not read"),
    "dataset.use_imagenet_stats": same("dataset.use_imagenet_stats", True),
    "dataset.image_transforms.enable": same("dataset.image_transforms.enable", False),
    "dataset.image_transforms.max_num_transforms": same("dataset.image_transforms.max_num_transforms", 3),
    "dataset.image_transforms.random_order": same("dataset.image_transforms.random_order", False),
    "dataset.image_transforms.tfs": same("dataset.image_transforms.tfs"),
    "env": unlike(None, "nothing is simulated while training; `vlatune eval RUN --env.type=...` does it afterwards"),
    "env.": left_out("see env"),
    "reward_model": unlike(None, "reward models are not trained here"),
    "reward_model.": left_out("see reward_model"),
    "sample_weighting": unlike(None, "samples are weighted by dataset alone (--dataset.weight)"),
    "sample_weighting.": left_out("see sample_weighting"),
    "output_dir": same("output_dir", None),
    "job_name": same("job_name", None),
    "resume": unlike(False, "a run of LeRobot's cannot be continued; start from its weights with --policy.path"),
    "checkpoint_path": left_out("a run of LeRobot's cannot be continued"),
    "seed": same("seed", 1000),
    "cudnn_deterministic": same("deterministic", False),
    "num_workers": left_out(f"{READING}; our --num_workers counts training workers"),
    "batch_size": same("batch_size", 8),
    "prefetch_factor": left_out(READING),
    "persistent_workers": left_out(READING),
    "dataloader_multiprocessing_context": left_out(READING),
    "steps": same("steps", 100_000),
    "env_eval_freq": left_out("nothing is simulated while training"),
    "log_freq": same("log_freq", 200),
    "eval_steps": same("eval_freq", 0),
    "max_eval_samples": same("eval_samples", 0),
    "tolerance_s": same("dataset.tolerance_s", 1e-4),
    "save_checkpoint": unlike(True, "checkpoints are always saved; see --save_freq and --keep_checkpoints"),
    "save_freq": same("save_freq", 20_000),
    "save_checkpoint_to_hub": unlike(False, "push the export of a run: vlatune export RUN DIR --push_to_hub=NAME"),
    "use_policy_training_preset": left_out("optimizer and schedule are taken from where it says"),
    "rename_map": same("rename_map", {}),
    "eval.": left_out("nothing is simulated while training"),
    "job.": left_out("see job.target"),
    "job.target": unlike(None, "runs are not sent to HF Jobs; start it there, or with RAY_ADDRESS on a cluster"),
    "wandb.": left_out("see wandb.enable"),
    "wandb.enable": same("wandb.enable", False),
    "wandb.project": same("wandb.project", "lerobot"),
    **{f"wandb.{name}": same(f"wandb.{name}", None) for name in ("entity", "notes", "run_id", "mode")},
    "optimizer": left_out("none beside the policy's preset"),
    "optimizer.type": named("optimizer.type", {"adamw": "adamw", "adam": "adam"}, "the optimizers are AdamW and Adam"),
    "optimizer.lr": same("optimizer.lr"),
    "optimizer.betas": same("optimizer.betas"),
    "optimizer.eps": same("optimizer.eps"),
    "optimizer.weight_decay": same("optimizer.weight_decay"),
    "optimizer.grad_clip_norm": same("optimizer.grad_clip_norm"),
    "scheduler": left_out("none: the rate stays what it is"),
    "scheduler.type": named(
        "scheduler.type",
        {
            "cosine_decay_with_warmup": "cosine_decay_with_warmup",
            "cosine_annealing_with_warmup": "diffuser",
            "constant_with_warmup": "constant_with_warmup",
            "diffuser": "diffuser",
        },
        "the schedules are a cosine to a floor or to 0, and a constant rate, each after a warm-up",
    ),
    "scheduler.name": DIFFUSERS,
    "scheduler.num_warmup_steps": same("scheduler.num_warmup_steps"),
    "scheduler.num_decay_steps": same("scheduler.num_decay_steps"),
    "scheduler.peak_lr": left_out("it is the optimizer's rate"),
    "scheduler.decay_lr": same("scheduler.decay_lr"),
    "peft": left_out("none"),
    "peft.method_type": unlike("LORA", "adapters are LoRA's"),
    "peft.r": same("policy.lora_rank", 16),
    "peft.lora_alpha": same("policy.lora_alpha", None),
    "peft.target_modules": unlike(None, "--policy.train=lora adapts the language model and the expert"),
    "peft.full_training_modules": unlike(None, "--policy.train=lora trains the projections, too"),
    "peft.init_type": unlike(None, "adapters begin as PEFT has it"),
    "policy.type": same("policy.type"),
    "policy.path": same("policy.path"),
    "policy.pretrained_path": same("policy.path"),
    "policy.pretrained_revision": same("policy.revision"),
    "policy.dtype": same("policy.dtype"),
    "policy.gradient_checkpointing": same("policy.gradient_checkpointing"),
    "policy.compile_model": same("policy.compile"),
    "policy.compile_mode": left_out("layers are compiled one by one"),
    "policy.device": left_out("a worker takes the GPU that is there"),
    "policy.use_amp": unlike(
        False, "give --policy.dtype=bfloat16: frozen weights and computing in bfloat16, what trains in float32"
    ),
    "policy.use_peft": left_out("see peft"),
    "policy.train_expert_only": left_out("--policy.train says what trains"),
    "policy.freeze_vision_encoder": left_out("--policy.train says what trains"),
    **dict.fromkeys(
        ("policy.push_to_hub", "policy.repo_id", "policy.private", "policy.tags", "policy.license"), left_out(ROBOT)
    ),
    "policy.optimizer_lr": same("optimizer.lr"),
    "policy.optimizer_betas": same("optimizer.betas"),
    "policy.optimizer_eps": same("optimizer.eps"),
    "policy.optimizer_weight_decay": same("optimizer.weight_decay"),
    "policy.optimizer_grad_clip_norm": same("optimizer.grad_clip_norm"),
    "policy.scheduler_name": DIFFUSERS,
    "policy.scheduler_warmup_steps": same("scheduler.num_warmup_steps"),
    "policy.scheduler_decay_steps": same("scheduler.num_decay_steps"),
    "policy.scheduler_decay_lr": same("scheduler.decay_lr"),
    "policy.": Row(why=BY_THE_BASE),
}
"""The longest name counts: `policy.` is for what neither another row nor the policy's card has."""

PRESETS = tuple(name for name in ROWS if name.startswith(("policy.optimizer_", "policy.scheduler_")))
WHO_TRAINS = ("policy.train_expert_only", "policy.freeze_vision_encoder")
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "grad_clip_norm": 10.0},
    "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 10.0},
}
"""LeRobot's defaults of `--optimizer.type`, which count without a policy's preset."""
