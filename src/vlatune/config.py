"""The commands' settings as frozen dataclasses: every setting and its default.

`RunConfig` is what `vlatune train` needs to know and nothing else. The sentence under a field is its `--help` text.
What is refused is in `config_checks.py`; how flags, files and recipes become a `RunConfig` is the business of `flags.py`.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vlatune.flag_values import OpenNames
from vlatune.policies.registry import (
    DEFAULT_TYPE,
    all_overrides,
    find_override,
    get_policy,
)
from vlatune.recipes import find_recipe


@dataclass(frozen=True)
class ImageTransformConfig:
    """One kind of augmentation; names and meanings are LeRobot's."""

    weight: float = 1.0
    """How likely it is among those that are drawn, relative to the others; 0 leaves it out."""
    type: str = "Identity"
    """ColorJitter, SharpnessJitter, RandomAffine, ...; `pipeline/picture_kinds.py` has the list."""
    kwargs: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Its settings: a number, or the lowest and the highest one."""


def _lerobot_transforms() -> dict[str, ImageTransformConfig]:
    """LeRobot's own defaults."""
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
    """Augment pictures in training, each camera and sample by its own draw; evaluation sees them as they are."""
    preset: Literal["lerobot", "openpi"] = "lerobot"
    """lerobot draws some of tfs; openpi crops to 95 %, rotates by up to 5 degrees and jitters colours, wrist cameras' colours only."""
    max_num_transforms: int = 3
    """How many of tfs a picture gets."""
    random_order: bool = False
    """Apply those that were drawn in any order instead of the one of tfs."""
    tfs: dict[str, ImageTransformConfig] = field(default_factory=_lerobot_transforms)
    """What is drawn from, in place of all of the defaults: {"hue": {"weight": 1, "type": "ColorJitter", "kwargs": {"hue": [-0.05, 0.05]}}}."""


@dataclass(frozen=True)
class DatasetConfig:
    root: tuple[str, ...] = ()
    """Folder or URL of a LeRobot dataset; give the flag again for several."""
    weight: tuple[float, ...] = ()
    """Share of the samples that each root gives, in the order of the roots; by its number of frames when left out."""
    weight_temperature: float | None = None
    """In place of weights: shares by the number of frames to the power 1/T. 1 is by size; the higher, the more alike."""
    robots: Literal["auto", "one", "several"] = "auto"
    """Whether the roots are of one robot, with statistics over all of them, or of several, padded, masked and each with its own; auto: several where dims or cameras differ."""
    action_fps: float | None = None
    """Actions of a chunk are so many to the second in every root, each the nearest recorded one; every root's own frames when left out."""
    rename_map: tuple[dict[str, str], ...] = ()
    """A map as --rename_map for each root, in the order of the roots, where one for all does not do."""
    stats: Literal["dataset", "computed"] = "dataset"
    """Statistics that normalise: the dataset's own (computed where it lacks them and for several roots), or always computed from all rows."""
    use_imagenet_stats: bool = True
    """Pictures that a policy normalises by mean and deviation take ImageNet's; false takes the dataset's own."""
    repo_id: str | None = None
    """Hub repository of the dataset, used when no root is given."""
    revision: str | None = None
    """Revision of the hub repository."""
    episodes: tuple[int, ...] | None = None
    """Episodes to use, as [0,1,2]; all when left out."""
    eval_split: float = 0.1
    """Share of the episodes held out of training, for `vlatune eval`; 0 trains on all."""
    tolerance_s: float = 1e-4
    """How far a frame's time may lie from its row's timestamp."""
    image_transforms: ImageTransformsConfig = field(default_factory=ImageTransformsConfig)
    on_bad_episode: Literal["fail", "skip"] = "fail"
    """fail stops at the first bad episode; skip checks all rows and mp4 files first and leaves the bad episodes out."""
    storage_options: str | None = None
    """JSON object for fsspec when root is a URL, as {"endpoint_url": "https://..."}; secrets belong in the environment."""
    run_length: int = 32
    """Neighbouring frames that are decoded together; longer runs decode faster, shorter ones mix better."""
    window_rows: int = 32
    """Samples of a lane that are mixed with each other before they are used."""
    drop_last: bool = True
    """true leaves frames that fill no whole global batch out of the epoch; false fills the last batch up with others."""


OVERRIDES = OpenNames(
    names=lambda: {name: one.kind for name, one in all_overrides().items()},
    kind_of=lambda policy, name: find_override(policy["type"], name).kind,
)
"""`--policy.chunk_size` and the like: each policy's card says which it has."""


@dataclass(frozen=True)
class PolicyConfig:
    path: str | None = None
    """Folder or hub repository of the base model, in LeRobot's pretrained_model layout; --recipe=tiny makes one when left out."""
    type: str = DEFAULT_TYPE
    """Kind of policy; the list is below."""
    revision: str | None = None
    """Revision of the hub repository."""
    train: str = "expert"
    """What is trained; each policy has its own ways, listed below."""
    dtype: str | None = None
    """float32 or bfloat16 for computing and for frozen weights; what the base model says when left out."""
    flow_samples: int = 1
    """Noise and time draws per observation; the pictures and the sentence are looked at once for all of them."""
    gradient_checkpointing: bool = False
    """Compute layers again in the backward pass instead of keeping their activations: less memory, slower."""
    compile: bool = False
    """Run the layers through torch.compile: minutes at the start, faster steps."""
    lora_rank: int = 16
    """Rank of the adapters of --policy.train=lora."""
    lora_alpha: float = 16.0
    """The adapters' output is scaled by lora_alpha / lora_rank."""
    keep_features: bool = False
    """Compute what the frozen vision tower makes of each picture once, before training, keep it in files, and train from these."""
    overrides: dict[str, Any] = field(default_factory=dict, metadata={"open": OVERRIDES})
    """Fields of LeRobot's config with values of this run's own; flags of the same names, --policy.chunk_size."""


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = 2.5e-5
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.01
    """AdamW's weight decay."""
    grad_clip_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them as they are."""
    ema_decay: float = 0.0
    """Keep a moving average of the trained weights with this decay, e.g. 0.999, and evaluate it; 0 keeps none."""
    type: Literal["adamw", "adam"] = "adamw"
    """adam adds weight_decay to the gradient, adamw takes it from the weights."""


@dataclass(frozen=True)
class SchedulerConfig:
    num_warmup_steps: int = 1000
    """Optimizer steps of linear warm-up; shortened in proportion when the run is shorter than the decay."""
    num_decay_steps: int = 30_000
    """Optimizer steps after which the cosine has reached its floor."""
    decay_lr: float = 2.5e-6
    """The floor."""
    type: Literal["cosine_decay_with_warmup", "diffuser", "constant_with_warmup", "none"] = "cosine_decay_with_warmup"
    """diffuser: warm-up from 0, then a cosine to 0 at the last step; constant_with_warmup: no decay; none: lr throughout."""


@dataclass(frozen=True)
class WandbConfig:
    enable: bool = False
    """Send figures to Weights & Biases, from the driver; `pip install wandb`."""
    project: str = "vlatune"
    """Its project."""
    entity: str | None = None
    """Its user or team."""
    mode: str | None = None
    """online, offline (kept in logs/wandb, sent later with `wandb sync`) or disabled; what WANDB_MODE says when left out."""
    run_id: str | None = None
    """Run to go on with; a run of vlatune that goes on finds its own."""
    notes: str | None = None
    """Text beside the run."""


@dataclass(frozen=True)
class MlflowConfig:
    enable: bool = False
    """Send figures to MLflow, from the driver; `pip install mlflow-skinny`."""
    tracking_uri: str | None = None
    """Server or folder; what MLFLOW_TRACKING_URI says when left out."""
    experiment: str = "vlatune"
    """Its experiment."""


@dataclass(frozen=True)
class RayConfig:
    num_cpus: int | None = None
    """CPUs that the local cluster and its workers use; all that this process may use when left out. RAY_ADDRESS joins a running one instead."""
    object_store_bytes: int | None = None
    """Shared memory of the local cluster's object store; by the size of samples and the number of readers when left out."""


@dataclass(frozen=True)
class RunConfig:
    recipe: str | None = None
    """Name of a complete config to start from; `vlatune train --help` lists them."""
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)
    rename_map: dict[str, str] = field(default_factory=dict)
    """Dataset's name of any feature -> policy's, as {"state": "observation.state"}; for every root that has the name."""
    output_dir: str | None = None
    """Run folder; runs/<job_name> when left out."""
    job_name: str = "train"
    """Name of the run."""
    steps: int = 3000
    """Optimizer steps."""
    batch_size: int = 8
    """Samples per worker and micro-step."""
    grad_accum: int = 1
    """Micro-steps per optimizer step."""
    num_workers: int = 1
    """Training workers, one per GPU where there are GPUs."""
    torch_threads: int | None = None
    """Threads that a worker computes with; when left out, by the cores there are and what a step costs beside reading."""
    prefetch_batches: int = 1
    """Micro-batches that lie ready on the device while one computes, beside as many as 64 MiB hold (2 to 8)."""
    seed: int = 1000
    """Decides the order of samples, the noise and the initial weights of what is new."""
    deterministic: bool = False
    """Only kernels that give the same numbers each time, which is slower on a GPU; on a CPU all of them do."""
    log_freq: int = 10
    """Optimizer steps between two lines of metrics.jsonl."""
    eval_freq: int = 500
    """Optimizer steps between two validations: loss and action error on the held-out episodes; 0 for none."""
    eval_samples: int = 128
    """Held-out samples that a validation looks at, spread evenly."""
    early_stop: int = 0
    """Validations in a row without a lower action error after which the run ends; 0 never ends it."""
    save_freq: int = 500
    """Optimizer steps between two checkpoints; 0 leaves it to save_every_s."""
    save_every_s: float = 600.0
    """Seconds after which the next step saves a checkpoint, if none was saved meanwhile; 0 leaves it to save_freq."""
    save_buffer_bytes: int = 4 * 1024**3
    """Memory of rank 0's machine that a save may take; of a larger checkpoint the loop waits until the rest is written."""
    keep_checkpoints: int = 3
    """How many of the newest checkpoints stay."""
    keep_best: int = 0
    """How many stay beside them: those of lowest validation error; without validation, of lowest training loss since the one before."""
    storage_path: str | None = None
    """Folder or URL for checkpoints, as s3://bucket/runs: they go below it, under the run folder's name."""
    resume: bool = False
    """Continue the run in output_dir from its newest checkpoint."""
    strict_resume: bool = False
    """Refuse a damaged newest checkpoint instead of taking the one before it."""
    allow_changed: tuple[str, ...] = ()
    """Continue though these are not what the checkpoint was made with: base, dataset, config, versions."""
    log_samples: bool = False
    """Write the sample ids of every optimizer step to samples.jsonl."""
    max_restarts: int = 3
    """How often in a row a run restarts by itself, after a worker died or hung, without a new checkpoint in between."""
    hang_timeout_s: float = 600.0
    """A worker that has done nothing for so long hangs: stacks are written, the workers restart; three times as long while it starts; 0 never."""
    grace_s: float = 25.0
    """Seconds that a run takes at most to save a checkpoint after it was asked to end with SIGTERM or Ctrl-C."""
    max_spilled_bytes: int = 0
    """A run whose object store has spilled more than this ends with an error."""

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step, over all workers and micro-steps."""
        return self.batch_size * self.grad_accum * self.num_workers

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) if self.output_dir else Path("runs") / self.job_name


@dataclass(frozen=True)
class DoctorConfig(RunConfig):
    json: bool = False
    """Print one JSON object instead of lines."""
    html: str | None = None
    """File for the page with the first batch; runs/<job_name>-doctor/doctor.html, beside the run's folder, when left out."""

    @property
    def page(self) -> Path:
        """Never in the run's own folder: what is there decides whether `train` may start."""
        return Path(self.html) if self.html else self.run_dir.with_name(f"{self.run_dir.name}-doctor") / "doctor.html"

    def run(self) -> RunConfig:
        """What `train` would be given."""
        return RunConfig(**{one.name: getattr(self, one.name) for one in dataclasses.fields(RunConfig)})


@dataclass(frozen=True)
class EvalDatasetConfig:
    root: str | None = None
    """Folder or URL of another LeRobot dataset, looked at whole in place of the run's held-out episodes."""
    episodes: tuple[int, ...] | None = None
    """Episodes of it to look at, as [0,1,2]; all when left out."""
    storage_options: str | None = None
    """JSON object for fsspec when root is a URL; secrets belong in the environment."""


@dataclass(frozen=True)
class EvalEnvConfig:
    type: str | None = None
    """Simulated environment of LeRobot's, as pusht: the policy is handed to `lerobot-eval`, and success is counted."""
    task: str | None = None
    """Task of the environment; its usual one when left out."""
    options: dict[str, str] = field(default_factory=dict)
    """Further settings of it by LeRobot's names, as {"episode_length": "100"} for its --env.episode_length=100."""


@dataclass(frozen=True)
class EvalConfig:
    dataset: EvalDatasetConfig = field(default_factory=EvalDatasetConfig)
    env: EvalEnvConfig = field(default_factory=EvalEnvConfig)
    rename_map: dict[str, str] = field(default_factory=dict)
    """Name of any feature of --dataset.root, or of an environment's observation -> policy's; goes before the policy's own map."""
    checkpoint: tuple[str, ...] = ()
    """Name of a checkpoint of the run, or all; give the flag again for several; the newest when left out."""
    weights: Literal["auto", "ema", "trained", "both"] = "auto"
    """ema (the averaged ones), trained, both, or auto: averaged ones where there are some."""
    device: str | None = None
    """cpu, cuda or cuda:1; a CUDA device where there is one when left out."""
    json: bool = False
    """Print the figures as one JSON object."""
    output_dir: str | None = None
    """Folder for eval.json and the page; when left out, the run's own, and RUN-eval beside it for --dataset.root, --env.type and FOLDER."""
    max_samples: int = 256
    """Samples of the held-out episodes that are looked at, spread evenly."""
    rollouts: int = 4
    """Episodes, spread evenly, that are gone through whole, asking the policy anew as often as a robot would; 0 for none."""
    episodes: int = 50
    """Episodes of --env.type."""
    batch_size: int = 32
    """Samples per forward pass; it changes the speed, not the result."""
    seed: int = 0
    """Decides the noise of the validation loss."""
    trust_run: bool = False
    """Open the datasets, base model and checkpoints that the run names outside of its folder, though no command of yours did."""


@dataclass(frozen=True)
class ExportConfig:
    checkpoint: str | None = None
    """Name of the checkpoint in RUN/checkpoints; the newest when left out."""
    base: str | None = None
    """Where the base model is now, if not where the run had it."""
    dataset: int | None = None
    """Of a run on several robots: whose dims, cameras and statistics the folder has, by the place of its --dataset.root, from 0."""
    adapter: bool = False
    """Only the adapters of --policy.train=lora, as LeRobot and PEFT load them beside the base."""
    weights: Literal["auto", "ema", "trained"] = "auto"
    """ema (the averaged ones), trained, or auto: averaged ones where there are some."""
    trust_run: bool = False
    """Open the base model and checkpoints that the run names outside of its folder, though no command of yours did."""
    push_to_hub: str | None = None
    """Hub repository (owner/name) that gets the folder, with a model card; the token comes from the environment (HF_TOKEN)."""
    hub_private: bool = True
    """Of --push_to_hub: a repository that is made is private, and one that everybody can read is refused; false makes a public one."""


@dataclass(frozen=True)
class ReportConfig:
    watch: bool = False
    """Write the page again while the runs go on, until they are finished or Ctrl-C; the page loads itself again."""
    every_s: float = 10.0
    """Seconds between two pages of --watch."""
    output: str | None = None
    """File for the page; RUN/report.html when left out, and of several runs comparison.html in this folder."""


@dataclass(frozen=True)
class DemoConfig:
    policy: str = DEFAULT_TYPE
    """Type of the policy whose small twin is trained; `vlatune train --help` lists them."""
    output_dir: str | None = None
    """Folder for the dataset, the base model and the run; runs/demo when left out, and runs/demo-TYPE for another policy."""
    steps: int | None = None
    """Optimizer steps; what the policy's small recipe says when left out."""
    seed: int = 0
    """Decides the dataset, the initial weights and the order of samples."""

    @property
    def run_dir(self) -> Path:
        usual = "runs/demo" if self.policy == DEFAULT_TYPE else f"runs/demo-{self.policy}"
        return Path(self.output_dir or usual)


def validates(config: RunConfig) -> bool:
    """Whether the run comes to a validation at all."""
    return 0 < config.eval_freq <= config.steps and config.dataset.eval_split > 0


def makes_base(config: RunConfig) -> bool:
    """Whether the run begins with random weights of its own, made for the dataset."""
    return config.policy.path is None and (makes_small(config) or get_policy(config.policy.type).from_scratch)


def makes_small(config: RunConfig) -> bool:
    """Whether those are the policy's small twin."""
    return config.recipe is not None and find_recipe(config.recipe).small


def to_json(config: RunConfig) -> dict[str, Any]:
    """Plain JSON values, under the flags' names; `flags.config_from_dict` reads them back."""
    made = json.loads(json.dumps(dataclasses.asdict(config)))
    made["policy"] |= made["policy"].pop("overrides")
    return made
