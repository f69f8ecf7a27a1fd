"""What is refused of a run's settings before anything is started or loaded: value, place, expectation and remedy.

Nothing here looks at a file: what datasets and bases must be is the business of `run_setup.py`.
"""

import dataclasses
import math
from pathlib import Path

from vlatune.config import (
    DatasetConfig,
    EvalConfig,
    ImageTransformsConfig,
    OptimizerConfig,
    PolicyConfig,
    RayConfig,
    RunConfig,
    SchedulerConfig,
    makes_base,
    validates,
)
from vlatune.console import has_secret
from vlatune.policies.registry import (
    Policy,
    check_overrides,
    get_policy,
)

MAX_COUNT = 10**15
"""Of steps, bytes and seconds: more could not be read back from config.json."""


CHANGEABLE = ("base", "dataset", "config", "versions")


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
    _require(
        not (config.policy.keep_features and config.dataset.image_transforms.enable),
        "--policy.keep_features=true: with --dataset.image_transforms.enable=true a picture is another one each time it is looked at; "
        "leave one of them out",
    )
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
    for name, least in {"max_samples": 1, "batch_size": 1, "seed": 0, "rollouts": 0, "episodes": 1}.items():
        value = getattr(options, name)
        _require(value >= least, f"--{name}={value}: must be {least} or more")
    data, env = options.dataset, options.env
    _require(
        data.root is not None or (data.episodes is None and data.storage_options is None),
        "--dataset.episodes and --dataset.storage_options are of another dataset; name it with --dataset.root",
    )
    _require(
        data.root is not None or env.type is not None or not options.rename_map,
        "--rename_map: a run's held-out episodes have its own map; give --dataset.root, or leave it out",
    )
    _require(
        env.type is not None or (env.task is None and not env.options),
        "--env.task and --env.options are of a simulated environment; name it with --env.type, as --env.type=pusht",
    )
    _require(
        env.type is None or data.root is None,
        f"--env.type={env.type}: an environment is simulated, and --dataset.root={data.root} would be given in vain; leave one out",
    )


def _check_ray(ray: RayConfig) -> None:
    least_store = 80 * 1024 * 1024  # Ray refuses to start a store below 75 MiB
    for name, least in {"num_cpus": 1, "object_store_bytes": least_store}.items():
        value = getattr(ray, name)
        _require(value is None or value >= least, f"--ray.{name}={value}: must be {least} or more")


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


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _one_of(flag: str, value: str, choices: tuple[str, ...]) -> None:
    _require(value in choices, f"{flag}={value}: must be one of {', '.join(choices)}")
