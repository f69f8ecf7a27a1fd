"""A whole run as frozen dataclasses: every setting, its default, and its check.

`RunConfig` is what `vlatune train` needs to know and nothing else. The sentence under a field is its
`--help` text. `validate()` runs on the driver before Ray starts, and says value, place, expectation and
remedy. How flags, files and recipes become a `RunConfig` is the business of `flags.py`.
"""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vlatune.flag_values import OpenNames
from vlatune.outgoing import has_secret
from vlatune.policies.registry import (
    DEFAULT_TYPE,
    Policy,
    all_overrides,
    check_overrides,
    find_override,
    get_policy,
)
from vlatune.recipes import find_recipe

MAX_COUNT = 10**15
"""Of steps, bytes and seconds: more could not be read back from config.json."""
CHANGEABLE = ("base", "dataset", "config", "versions")


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
class EvalConfig:
    checkpoint: tuple[str, ...] = ()
    """Name of a checkpoint of the run, or all; give the flag again for several; the newest when left out."""
    weights: Literal["auto", "ema", "trained", "both"] = "auto"
    """ema (the averaged ones), trained, both, or auto: averaged ones where there are some."""
    device: str | None = None
    """cpu, cuda or cuda:1; a CUDA device where there is one when left out."""
    json: bool = False
    """Print the figures as one JSON object."""
    max_samples: int = 256
    """Samples of the held-out episodes that are looked at, spread evenly."""
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
    """Write the page again while the run goes on, until it is finished or Ctrl-C."""
    every_s: float = 10.0
    """Seconds between two pages of --watch."""
    output: str | None = None
    """File for a comparison of several runs; comparison.html in this folder when left out."""


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


def validate(config: RunConfig) -> None:
    """Refuse what cannot work, before anything is started or loaded."""
    at_least = {"steps": 1, "batch_size": 1, "grad_accum": 1, "num_workers": 1, "log_freq": 1, "save_freq": 0}
    at_least |= {"keep_checkpoints": 1, "max_restarts": 0, "max_spilled_bytes": 0, "seed": 0}
    at_least |= {"save_buffer_bytes": 1024**2, "eval_freq": 0, "eval_samples": 1, "early_stop": 0}
    at_least |= {"keep_best": 0, "save_every_s": 0, "prefetch_batches": 1, "hang_timeout_s": 0, "grace_s": 0}
    for name, least in at_least.items():
        _require(getattr(config, name) >= least, f"--{name}={getattr(config, name)}: must be {least} or more")
        _require(getattr(config, name) <= MAX_COUNT, f"--{name}={getattr(config, name)}: must be {MAX_COUNT} or less")
    _require(
        Path(config.job_name).name == config.job_name and config.job_name not in ("", ".", ".."),
        f"--job_name={config.job_name}: must be the name of a folder below runs/; give a path with --output_dir",
    )
    threads = config.torch_threads
    _require(threads is None or threads >= 1, f"--torch_threads={threads}: must be 1 or more")
    for name, least in {"run_length": 1, "window_rows": 1}.items():
        value = getattr(config.dataset, name)
        _require(value >= least, f"--dataset.{name}={value}: must be {least} or more")
    split = config.dataset.eval_split
    _require(0.0 <= split < 1.0, f"--dataset.eval_split={split}: must be at least 0 and below 1")
    _require(
        bool(config.dataset.root or config.dataset.repo_id),
        "no dataset: name one with --dataset.root=FOLDER (or --dataset.repo_id=NAME), or make one with `vlatune make-dataset DIR`",
    )
    _check_weights(config.dataset)
    _check_image_transforms(config.dataset.image_transforms)
    policy = get_policy(config.policy.type)
    example = f", e.g. --policy.path={policy.hub_base}" if policy.hub_base else ""
    _require(
        config.policy.path is not None or makes_base(config),
        f"no base model: name one with --policy.path=FOLDER_OR_REPO{example}, or let --recipe=tiny make a small one for the "
        f"dataset",
    )
    for flag, text in {
        "--storage_path": config.storage_path,
        "--policy.path": config.policy.path,
        "--mlflow.tracking_uri": config.mlflow.tracking_uri,
    }.items():
        _require(
            text is None or not has_secret(text),
            f"{flag}: its address holds a password, a token or a signature, and a run's settings are written to its folder; give "
            f"it in the environment (AWS_ACCESS_KEY_ID, HF_TOKEN, ...)",
        )
    _require(
        not config.early_stop or validates(config),
        f"--early_stop={config.early_stop}: there is no validation that it could go by; give --eval_freq at most --steps, and hold "
        f"episodes out with --dataset.eval_split",
    )
    if config.wandb.mode is not None:
        _one_of("--wandb.mode", config.wandb.mode, ("online", "offline", "disabled"))
    for group in config.allow_changed:
        _one_of("--allow_changed", group, CHANGEABLE)
    _one_of("--policy.train", config.policy.train, tuple(policy.train_ways))
    _check_settings(config.policy, policy)
    if config.policy.dtype is not None:
        _one_of("--policy.dtype", config.policy.dtype, ("float32", "bfloat16"))
    for name in ("flow_samples", "lora_rank"):
        value = getattr(config.policy, name)
        _require(value >= 1, f"--policy.{name}={value}: must be 1 or more")
    _require(config.policy.lora_alpha > 0, f"--policy.lora_alpha={config.policy.lora_alpha}: must be above 0")
    _check_optimizer(config.optimizer, config.scheduler)
    _check_ray(config.ray)


def validate_eval(options: EvalConfig) -> None:
    """The same for an evaluation."""
    for name, least in {"max_samples": 1, "batch_size": 1, "seed": 0}.items():
        value = getattr(options, name)
        _require(value >= least, f"--{name}={value}: must be {least} or more")


def _check_ray(ray: RayConfig) -> None:
    least_store = 80 * 1024 * 1024  # Ray refuses to start a store below 75 MiB
    for name, least in {"num_cpus": 1, "object_store_bytes": least_store}.items():
        value = getattr(ray, name)
        _require(value is None or value >= least, f"--ray.{name}={value}: must be {least} or more")


def validates(config: RunConfig) -> bool:
    """Whether the run comes to a validation at all."""
    return 0 < config.eval_freq <= config.steps and config.dataset.eval_split > 0


def makes_base(config: RunConfig) -> bool:
    """Whether the run begins with random weights of its own, made for the dataset."""
    return config.policy.path is None and (makes_small(config) or get_policy(config.policy.type).from_scratch)


def makes_small(config: RunConfig) -> bool:
    """Whether those are the policy's small twin."""
    return config.recipe is not None and find_recipe(config.recipe).small


def _check_settings(given: PolicyConfig, policy: Policy) -> None:
    """A setting that the policy does not have would be given in vain."""
    check_overrides(policy.type, given.overrides)
    known = {"path", "type", "revision", "train", "overrides", *policy.settings}
    for one in dataclasses.fields(given):
        value = getattr(given, one.name)
        _require(
            one.name in known or value == one.default,
            f"--policy.{one.name}={value}: {policy.title} (--policy.type={policy.type}) has no such setting; leave it out",
        )


def _check_image_transforms(given: ImageTransformsConfig) -> None:
    flag, least = "--dataset.image_transforms", given.max_num_transforms
    _require(least >= 1, f"{flag}.max_num_transforms={least}: must be 1 or more")
    for name, one in given.tfs.items():
        _require(0 <= one.weight < math.inf, f"{flag}.tfs: the weight of '{name}' is {one.weight}; must be 0 or more")
    _require(
        not given.enable or given.preset == "openpi" or any(one.weight for one in given.tfs.values()),
        f"{flag}.tfs: there is none with a weight above 0 to draw; leave {flag}.enable out",
    )
    own = [name for name in ("max_num_transforms", "random_order", "tfs") if _is_changed(given, name)]
    _require(
        given.preset == "lerobot" or not own,
        f"{flag}.preset={given.preset}: has its own transforms in its own order, so {flag}.{'/'.join(own)} would be given in vain; "
        f"leave one of them out",
    )


def _is_changed(given: ImageTransformsConfig, name: str) -> bool:
    return getattr(given, name) != getattr(ImageTransformsConfig(), name)


def _check_weights(dataset: DatasetConfig) -> None:
    roots, weights = max(1, len(dataset.root)), dataset.weight
    maps = len(dataset.rename_map)
    _require(
        maps in (0, roots),
        f"--dataset.rename_map: {maps} maps for {roots} datasets; give one for each --dataset.root, {{}} for a root that "
        f"needs none, or one for all with --rename_map",
    )
    _require(
        len(weights) in (0, roots),
        f"--dataset.weight: {len(weights)} weights for {roots} datasets; give one for each --dataset.root, or none",
    )
    temperature = dataset.weight_temperature
    _require(
        temperature is None or (0.01 <= temperature < math.inf and roots > 1 and not weights),
        f"--dataset.weight_temperature={temperature}: must be 0.01 or more, for several roots, and without --dataset.weight",
    )
    rate = dataset.action_fps
    _require(rate is None or 0 < rate < math.inf, f"--dataset.action_fps={rate}: must be above 0")
    _require(
        dataset.robots != "several" or roots > 1,
        "--dataset.robots=several: there is one --dataset.root; give the others, or leave the flag out",
    )
    for weight in weights:
        _require(0 < weight < math.inf, f"--dataset.weight={weight}: must be above 0; leave out a dataset of no weight")


def _check_optimizer(optimizer: OptimizerConfig, scheduler: SchedulerConfig) -> None:
    for name in ("lr", "eps"):
        value = getattr(optimizer, name)
        _require(0 < value < math.inf, f"--optimizer.{name}={value}: must be above 0")
    for name in ("weight_decay", "grad_clip_norm"):
        value = getattr(optimizer, name)
        _require(0 <= value < math.inf, f"--optimizer.{name}={value}: must be 0 or more")
    _require(
        all(0 <= beta < 1 for beta in optimizer.betas), f"--optimizer.betas={optimizer.betas}: each at least 0, below 1"
    )
    _require(
        0 <= optimizer.ema_decay < 1, f"--optimizer.ema_decay={optimizer.ema_decay}: must be at least 0 and below 1"
    )
    warmup, decay = scheduler.num_warmup_steps, scheduler.num_decay_steps
    _require(decay >= 1, f"--scheduler.num_decay_steps={decay}: must be 1 or more")
    if scheduler.type == "cosine_decay_with_warmup":
        _require(0 <= warmup <= decay, f"--scheduler.num_warmup_steps={warmup}: must be 0 to num_decay_steps={decay}")
    _require(warmup >= 0, f"--scheduler.num_warmup_steps={warmup}: must be 0 or more")
    floor = scheduler.decay_lr
    _require(0 <= floor < math.inf, f"--scheduler.decay_lr={floor}: must be 0 or more")


def to_json(config: RunConfig) -> dict[str, Any]:
    """Plain JSON values, under the flags' names; `flags.config_from_dict` reads them back."""
    made = json.loads(json.dumps(dataclasses.asdict(config)))
    made["policy"] |= made["policy"].pop("overrides")
    return made


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _one_of(flag: str, value: str, choices: tuple[str, ...]) -> None:
    _require(value in choices, f"{flag}={value}: must be one of {', '.join(choices)}")
