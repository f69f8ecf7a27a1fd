"""Settings of all commands as frozen dataclasses, with their defaults and limits.

The string under each field is its `--help` text. `validate.py` checks rules across fields;
`flags.py` builds a config from flags, files and recipes.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vlatune.config.fields import POLICY_OPTIONS, setting
from vlatune.registry import DEFAULT_TYPE, find_recipe, get_policy_info

MIN_STORE_BYTES = 80 * 1024 * 1024
"""Ray rejects object stores below 75 MiB."""


@dataclass(frozen=True)
class ImageTransformConfig:
    """One image augmentation, with LeRobot's names and semantics."""

    weight: float = 1.0
    """Relative probability of choosing this transform; 0 disables it."""
    type: str = "Identity"
    """Name of the transform: ColorJitter, SharpnessJitter, RandomAffine, ..."""
    kwargs: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Parameters of the transform: a number, or a [min, max] range."""


def _lerobot_transforms() -> dict[str, ImageTransformConfig]:
    """Return LeRobot's default transforms."""
    jitter = {"brightness": (0.8, 1.2), "contrast": (0.8, 1.2), "saturation": (0.5, 1.5), "hue": (-0.05, 0.05)}
    affine = {"degrees": (-5.0, 5.0), "translate": (0.05, 0.05)}
    return {
        **{name: ImageTransformConfig(type="ColorJitter", kwargs={name: span}) for name, span in jitter.items()},
        "sharpness": ImageTransformConfig(type="SharpnessJitter", kwargs={"sharpness": (0.5, 1.5)}),
        "affine": ImageTransformConfig(type="RandomAffine", kwargs=affine),
    }


@dataclass(frozen=True)
class ImageTransformsConfig:
    enable: bool = False
    """Augment training images, independently for each camera and sample."""
    preset: Literal["lerobot", "openpi"] = "lerobot"
    """Apply random transforms from tfs (lerobot), or crop, rotate and jitter colours (openpi)."""
    max_num_transforms: int = setting(3, minimum=1)
    """Maximum number of transforms from tfs applied to an image."""
    random_order: bool = False
    """Apply the chosen transforms in random order instead of the order of tfs."""
    tfs: dict[str, ImageTransformConfig] = field(default_factory=_lerobot_transforms)
    """Transforms to choose from, e.g. {"hue": {"type": "ColorJitter", "kwargs": {"hue": [-0.05,
    0.05]}}}."""


@dataclass(frozen=True)
class DatasetConfig:
    root: tuple[str, ...] = ()
    """Folder or URL of a LeRobot dataset; repeat the flag for several datasets."""
    weight: tuple[float, ...] = setting((), above=0)
    """Sampling weight of each root, in order of the roots (default: number of frames)."""
    weight_temperature: float | None = setting(None, minimum=0.01)
    """Weight each root by (number of frames)^(1/T); larger T is more uniform."""
    robots: Literal["auto", "one", "several"] = "auto"
    """Treat the roots as one robot, or as several with padded dims and separate statistics."""
    action_fps: float | None = setting(None, above=0)
    """Resample action chunks to this many actions per second (default: the dataset's fps)."""
    rename_map: tuple[dict[str, str], ...] = ()
    """One --rename_map for each root, in order of the roots."""
    select_dims: tuple[dict[str, tuple[int | str, ...]], ...] = ()
    """Dims of a vector to use, by name, index or range, e.g. {"action": ["gripper", 0, "3:6"]}."""
    stats: Literal["dataset", "computed"] = "dataset"
    """Normalise with the statistics of the dataset, or compute them from all rows."""
    use_imagenet_stats: bool = True
    """Use ImageNet statistics for images normalised by mean and std; false uses the dataset's."""
    repo_id: str | None = None
    """Hub repository of the dataset; used if no root is given."""
    revision: str | None = None
    """Revision of the hub repository of the dataset."""
    episodes: tuple[int, ...] | None = None
    """Episodes to use, e.g. [0,1,2] (default: all)."""
    exclude_episodes: tuple[int, ...] | None = None
    """Episodes to exclude, e.g. [3,17]."""
    eval_split: float = setting(0.1, minimum=0, below=1)
    """Fraction of the episodes held out for validation and `vlatune eval`; 0 trains on all."""
    hold_out: Literal["random", "last_of_task"] = "random"
    """Episodes to hold out: random ones, or the last of each task as in LeRobot."""
    tolerance_s: float = setting(1e-4, minimum=0)
    """Maximum difference in seconds between a frame's time and its row's timestamp."""
    timestamps: Literal["auto", "recorded", "frame_index"] = "auto"
    """Find video frames by recorded timestamp or by frame_index / fps (auto: recorded if
    plausible)."""
    image_transforms: ImageTransformsConfig = field(default_factory=ImageTransformsConfig)
    on_bad_episode: Literal["fail", "skip"] = "fail"
    """Stop at the first damaged episode, or check all files first and skip damaged episodes."""
    cache: str = "auto"
    """Keep decoded frames on local disk for later epochs and runs: off, auto (where it saves time),
    or a folder."""
    cache_bytes: int = setting(0, minimum=0)
    """Maximum size of the frame cache in bytes (0: free disk minus a reserve)."""
    storage_options: str | None = None
    """Options of fsspec as JSON for URLs; pass secrets in the environment."""
    run_length: int = setting(32, minimum=1)
    """Number of consecutive frames that are decoded together; smaller values shuffle better."""
    window_rows: int = setting(32, minimum=1)
    """Size of each lane's shuffle window, in samples."""
    drop_last: bool = True
    """Drop the frames that do not fill a global batch at the end of an epoch."""


@dataclass(frozen=True)
class PolicyConfig:
    path: str | None = None
    """Folder, URL or hub repository of the base model (LeRobot pretrained_model layout)."""
    type: str = DEFAULT_TYPE
    """Policy type; listed below."""
    revision: str | None = None
    """Revision of the hub repository of the base model."""
    train: str = "expert"
    """Fine-tuning mode; listed below."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of computation and frozen weights (default: as in the base model)."""
    flow_samples: int = setting(1, minimum=1)
    """Noise samples per observation; images and instruction are encoded only once."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, slower steps."""
    compile: Literal["auto", "true", "false"] = "auto"
    """Compile the layers with torch.compile: slower start, faster steps (auto: on CUDA with a compiler)."""
    lora_rank: int = setting(16, minimum=1)
    """Rank of the adapters with --policy.train=lora."""
    lora_alpha: float = setting(16.0, above=0)
    """LoRA scaling: the adapter output is multiplied by lora_alpha / lora_rank."""
    keep_prefix: Literal["auto", "true", "false"] = "false"
    """Keep what the frozen part computes for a sample on local disk (auto: where it saves time)."""
    keep_prefix_dtype: Literal["same", "int8"] = "same"
    """Number format of what is kept; int8 is smaller and rounds what the policy trains on."""
    overrides: dict[str, Any] = field(default_factory=dict, metadata={POLICY_OPTIONS: True})
    """Overridden fields of LeRobot's policy config; each is a flag, e.g. --policy.chunk_size."""


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = setting(2.5e-5, above=0)
    """Peak learning rate."""
    betas: tuple[float, float] = setting((0.9, 0.95), minimum=0, below=1)
    """Adam's betas."""
    eps: float = setting(1e-8, above=0)
    """Adam's epsilon."""
    weight_decay: float = setting(0.01, minimum=0)
    """Weight decay."""
    grad_clip_norm: float = setting(1.0, minimum=0)
    """Maximum gradient norm (0 disables clipping)."""
    ema_decay: float = setting(0.0, minimum=0, below=1)
    """Decay of a moving average of the trained weights, which is evaluated (0 disables)."""
    type: Literal["adamw", "adam"] = "adamw"
    """Optimizer; adamw decouples weight decay from the gradient."""


@dataclass(frozen=True)
class SchedulerConfig:
    num_warmup_steps: int = setting(1000, minimum=0)
    """Optimizer steps of linear warm-up, scaled down in runs shorter than num_decay_steps."""
    num_decay_steps: int = setting(30_000, minimum=1)
    """Optimizer steps until the cosine schedule reaches decay_lr."""
    decay_lr: float = setting(2.5e-6, minimum=0)
    """Final learning rate of the cosine schedule."""
    type: Literal["cosine_decay_with_warmup", "diffuser", "constant_with_warmup", "none"] = "cosine_decay_with_warmup"
    """Learning rate schedule; diffuser is a cosine to 0 at the last step."""


@dataclass(frozen=True)
class WandbConfig:
    enable: bool = False
    """Log metrics to Weights & Biases from the driver (requires `pip install wandb`)."""
    project: str = "vlatune"
    """Weights & Biases project."""
    entity: str | None = None
    """Weights & Biases user or team."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """Weights & Biases mode (default: WANDB_MODE)."""
    run_id: str | None = None
    """Weights & Biases run to continue; resumed runs find theirs."""
    notes: str | None = None
    """Notes of the Weights & Biases run."""


@dataclass(frozen=True)
class RayConfig:
    num_cpus: int | None = setting(None, minimum=1)
    """CPUs of the local Ray cluster (default: all); set RAY_ADDRESS to join a running cluster."""
    object_store_bytes: int | None = setting(None, minimum=MIN_STORE_BYTES)
    """Object store size of the local Ray cluster (default: by sample size and readers)."""


@dataclass(frozen=True)
class RunConfig:
    recipe: str | None = None
    """Named config to start from; listed below."""
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    rename_map: dict[str, str] = field(default_factory=dict)
    """Map of dataset feature names to policy feature names, e.g. {"state": "observation.state"}."""
    output_dir: str | None = None
    """Run folder (default: runs/<job_name>)."""
    job_name: str = "train"
    """Name of the run."""
    steps: int = setting(3000, minimum=1)
    """Number of optimizer steps."""
    batch_size: int = setting(8, minimum=1)
    """Samples per worker and micro-step."""
    grad_accum: int = setting(1, minimum=1)
    """Micro-steps (gradient accumulation) per optimizer step."""
    num_workers: int = setting(1, minimum=1)
    """Number of training workers, one per GPU if there are GPUs; MIN:MAX for as many as the cluster has room for."""
    min_workers: int | None = setting(None, minimum=1)
    """Smallest number of workers of an elastic run; --num_workers=MIN:MAX sets it."""
    fsdp: bool = False
    """Shard weights, gradients and optimizer states over the workers (FSDP2): less memory each."""
    torch_threads: int | None = setting(None, minimum=1)
    """Number of torch threads per worker (default: by cores and cost of reading)."""
    seed: int = setting(1000, minimum=0)
    """Seed of the sample order, the noise and newly initialised weights."""
    deterministic: bool = False
    """Use only deterministic kernels; slower on GPUs, no effect on CPUs."""
    log_freq: int = setting(10, minimum=1)
    """Optimizer steps between log lines in metrics.jsonl."""
    eval_freq: int = setting(500, minimum=0)
    """Optimizer steps between validations (0 disables)."""
    eval_samples: int = setting(128, minimum=1)
    """Number of held-out samples per validation."""
    early_stop: int = setting(0, minimum=0)
    """Stop after this many validations without a lower action error (0 disables)."""
    save_freq: int = setting(500, minimum=0)
    """Optimizer steps between checkpoints (0 disables)."""
    save_every_s: float = setting(600.0, minimum=0)
    """Maximum seconds between checkpoints (0 disables)."""
    save_buffer_bytes: int = setting(4 * 1024**3, minimum=1024**2)
    """Maximum host memory for saving in the background (at most an eighth of the RAM); training waits
    for the rest."""
    keep_checkpoints: int = setting(3, minimum=1)
    """Number of latest checkpoints to keep."""
    keep_best: int = setting(0, minimum=0)
    """Number of checkpoints to keep in addition, by validation error or else training loss."""
    storage_path: str | None = None
    """Folder or URL for checkpoints, e.g. s3://bucket/runs; a URL also gets a copy of the run folder."""
    resume: bool = False
    """Resume the run in output_dir from its latest checkpoint."""
    allow_changed: tuple[Literal["base", "dataset", "config", "versions"], ...] = ()
    """Resume although these differ from the checkpoint."""
    log_samples: bool = False
    """Write the sample ids of every optimizer step to samples.jsonl."""
    max_restarts: int = setting(3, minimum=0)
    """Maximum restarts without a new checkpoint."""
    hang_timeout_s: float = setting(600.0, minimum=0)
    """Restart workers that make no progress for this many seconds (0 disables)."""
    grace_s: float = setting(25.0, minimum=0)
    """Maximum seconds to save a checkpoint after SIGTERM or Ctrl-C."""
    max_spilled_bytes: int = setting(0, minimum=0)
    """Fail if the object store has spilled more than this many bytes."""

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step, over all workers and micro-steps; smaller groups use more micro-steps."""
        return self.batch_size * self.grad_accum * self.num_workers

    @property
    def fewest_workers(self) -> int:
        return self.min_workers or self.num_workers

    @property
    def kept_best(self) -> int:
        """Number of best checkpoints to keep; at least one with early stopping."""
        return max(self.keep_best, 1 if self.early_stop else 0)

    @property
    def usual_checkpoint(self) -> str | None:
        """Default checkpoint of `eval` and `export`; None is the latest."""
        return "best" if self.early_stop else None

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) if self.output_dir else Path("runs") / self.job_name


@dataclass(frozen=True)
class DoctorConfig(RunConfig):
    json: bool = False
    """Print one JSON object instead of text."""
    html: str | None = None
    """File for the HTML page with the first batch (default: runs/<job_name>-doctor/doctor.html)."""
    usd_per_hour: float | None = setting(None, minimum=0)
    """Price of one GPU for the estimated cost of the run (default: a typical price of each GPU)."""

    @property
    def page(self) -> Path:
        """Path of the HTML page; not in the run folder, where it could keep `train` from starting."""
        return Path(self.html) if self.html else self.run_dir.with_name(f"{self.run_dir.name}-doctor") / "doctor.html"

    def run(self) -> RunConfig:
        """Return the config that `train` would get."""
        return RunConfig(**{one.name: getattr(self, one.name) for one in dataclasses.fields(RunConfig)})


@dataclass(frozen=True)
class EvalDatasetConfig:
    root: str | None = None
    """Folder or URL of another LeRobot dataset to evaluate instead of the held-out episodes."""
    episodes: tuple[int, ...] | None = None
    """Episodes of --dataset.root to evaluate, e.g. [0,1,2] (default: all)."""
    select_dims: dict[str, tuple[int | str, ...]] = field(default_factory=dict)
    """Dims of a vector to use, as in `train --dataset.select_dims` (default: as in training)."""
    storage_options: str | None = None
    """Options of fsspec as JSON for URLs; pass secrets in the environment."""


@dataclass(frozen=True)
class EvalConfig:
    dataset: EvalDatasetConfig = field(default_factory=EvalDatasetConfig)
    rename_map: dict[str, str] = field(default_factory=dict)
    """Map of feature names of --dataset.root to policy feature names."""
    checkpoint: str | None = None
    """Name of a checkpoint, or best (default: latest; best with --early_stop)."""
    weights: Literal["auto", "ema", "trained"] = "auto"
    """Weights to evaluate: moving average or trained (auto: the average if available)."""
    device: str | None = None
    """Device: cpu, cuda or cuda:1 (default: CUDA if available)."""
    json: bool = False
    """Print the metrics as one JSON object."""
    output_dir: str | None = None
    """Folder for eval.json and the HTML page (default: RUN, or RUN-eval for other data)."""
    max_samples: int = setting(256, minimum=1)
    """Maximum number of held-out samples."""
    rollouts: int = setting(4, minimum=0)
    """Number of held-out episodes to replay (0 disables)."""
    batch_size: int = setting(32, minimum=1)
    """Samples per forward pass."""
    seed: int = setting(0, minimum=0)
    """Seed of the noise of the validation loss."""
    trust_run: bool = False
    """Open files outside the run folder although another user started the run."""


@dataclass(frozen=True)
class ExportConfig:
    checkpoint: str | None = None
    """Name of a checkpoint, or best (default: latest; best with --early_stop)."""
    base: str | None = None
    """Location of the base model, if it was moved."""
    dataset: int | None = setting(None, minimum=0)
    """Index of the --dataset.root to export for, in runs on several robots."""
    adapter: bool = False
    """Export only the LoRA adapters, for loading with PEFT on top of the base model."""
    weights: Literal["auto", "ema", "trained"] = "auto"
    """Weights to export: moving average or trained (auto: the average if available)."""
    trust_run: bool = False
    """Open files outside the run folder although another user started the run."""
    push_to_hub: str | None = None
    """Hub repository (owner/name) to upload to; the token is read from HF_TOKEN."""
    hub_private: bool = True
    """Create a private repository, and reject an existing public one."""


@dataclass(frozen=True)
class InspectConfig:
    json: bool = False
    """Print one JSON object instead of tables."""
    videos: bool = False
    """Read all mp4 and data files instead of one mp4 file per camera and a sample of the episodes."""
    write_checksums: bool = False
    """Write SHA-256 checksums to meta/checksums.json if no error is found; readers verify them."""
    rename_map: dict[str, str] = field(default_factory=dict)
    """Rename features, such as {"state": "observation.state"}; same as for `vlatune train`."""


@dataclass(frozen=True)
class ReportConfig:
    output: str | None = None
    """File for the page (default: RUN/report.html; comparison.html for several runs)."""


@dataclass(frozen=True)
class DemoConfig:
    policy: str = DEFAULT_TYPE
    """Policy type whose tiny model is trained."""
    output_dir: str | None = None
    """Folder for the dataset, the base model and the run (default: runs/demo)."""
    steps: int | None = setting(None, minimum=1)
    """Number of optimizer steps (default: as in the recipe)."""
    seed: int = setting(0, minimum=0)
    """Seed of the dataset, the initial weights and the sample order."""

    @property
    def run_dir(self) -> Path:
        usual = "runs/demo" if self.policy == DEFAULT_TYPE else f"runs/demo-{self.policy}"
        return Path(self.output_dir or usual)


def validates(config: RunConfig) -> bool:
    """True if the run validates at least once."""
    return 0 < config.eval_freq <= config.steps and config.dataset.eval_split > 0


def makes_base(config: RunConfig) -> bool:
    """True if the run starts from newly initialised weights, created for the dataset."""
    return config.policy.path is None and (makes_small(config) or get_policy_info(config.policy.type).from_scratch)


def makes_small(config: RunConfig) -> bool:
    """True if the run creates the policy's tiny model."""
    return config.recipe is not None and find_recipe(config.recipe).small


def to_json(config: RunConfig) -> dict[str, Any]:
    """Return plain JSON values under the flag names; `flags.config_from_dict` reads them back."""
    made = json.loads(json.dumps(dataclasses.asdict(config)))
    made["policy"] |= made["policy"].pop("overrides")
    return made
