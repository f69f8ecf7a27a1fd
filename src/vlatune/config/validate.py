"""Check settings before anything is started or loaded: limits of fields, and rules across them.

No file is read here: `run_setup.py` checks datasets and base models.
"""

import dataclasses
from pathlib import Path

from vlatune.config.fields import check_limits, violation
from vlatune.config.settings import (
    DatasetConfig,
    EvalConfig,
    ImageTransformsConfig,
    PolicyConfig,
    RunConfig,
    makes_base,
    validates,
)
from vlatune.console import has_secret
from vlatune.registry import PolicyInfo, get_policy_info, policy_types

MAX_TRANSFORMS = 100
"""Maximum number of image transforms in --dataset.image_transforms.tfs."""
COMMON = ("path", "type", "revision", "train", "overrides")
"""Fields of `PolicyConfig` that every policy has."""


def validate(config: RunConfig) -> None:
    """Raise a ValueError for settings that cannot work."""
    check_limits(config)
    dataset, policy, scheduler = config.dataset, config.policy, config.scheduler
    if Path(config.job_name).name != config.job_name or config.job_name in ("", ".", ".."):
        name = f"--job_name={config.job_name}"
        raise ValueError(f"{name}: must be the name of a folder below runs/; give a path with --output_dir")
    if not (dataset.root or dataset.repo_id):
        either = "--dataset.root=FOLDER (or --dataset.repo_id=NAME)"
        raise ValueError(f"no dataset: name one with {either}, or make one with `vlatune make-dataset DIR`")
    _check_roots(dataset)
    _check_image_transforms(dataset.image_transforms)
    _check_policy(policy, get_policy_info(policy.type), has_base=policy.path is not None or makes_base(config))
    if config.fsdp:
        _check_sharding(config, get_policy_info(policy.type))
    if policy.keep_prefix == "true" and dataset.image_transforms.enable:
        text = "--policy.keep_prefix=true: the prefix of an augmented image cannot be kept"
        raise ValueError(f"{text}; remove it or --dataset.image_transforms.enable=true")
    for flag, text in {"storage_path": config.storage_path, "policy.path": policy.path}.items():
        if text is not None and has_secret(text):
            raise ValueError(
                f"--{flag}: the address contains a password, a token or a signature, and settings are written to the "
                f"run folder; pass it in the environment (AWS_ACCESS_KEY_ID, HF_TOKEN, ...)"
            )
    if config.early_stop and not validates(config):
        remedy = "set --eval_freq to at most --steps, and hold out episodes with --dataset.eval_split"
        raise ValueError(f"--early_stop={config.early_stop}: the run has no validation; {remedy}")
    if scheduler.type == "cosine_decay_with_warmup" and scheduler.num_warmup_steps > scheduler.num_decay_steps:
        most = f"must be at most --scheduler.num_decay_steps={scheduler.num_decay_steps}"
        raise ValueError(f"--scheduler.num_warmup_steps={scheduler.num_warmup_steps}: {most}")


def validate_eval(options: EvalConfig) -> None:
    """Raise a ValueError for evaluation settings that cannot work."""
    check_limits(options)
    data = options.dataset
    if data.root is None and (data.episodes is not None or data.storage_options is not None or data.select_dims):
        raise ValueError("--dataset.episodes, --dataset.select_dims and --dataset.storage_options need --dataset.root")
    if data.root is None and options.rename_map:
        text = "--rename_map: held-out episodes use the run's own map"
        raise ValueError(f"{text}; add --dataset.root, or remove the flag")


def _check_policy(policy: PolicyConfig, info: PolicyInfo, *, has_base: bool) -> None:
    """Reject a missing base model, and settings that the policy does not have."""
    if not has_base:
        example = f", e.g. --policy.path={info.hub_base}" if info.hub_base else ""
        text = f"no base model: name one with --policy.path=FOLDER_OR_REPO{example}"
        raise ValueError(f"{text}, or create a tiny one for the dataset with --recipe=tiny")
    if policy.train not in info.train_modes:
        raise ValueError(f"--policy.train={policy.train}: must be one of {', '.join(info.train_modes)}")
    for name, value in policy.overrides.items():
        if problem := violation(info.option(name), value):
            raise ValueError(f"--policy.{name}={value}: {problem}")
    for field in dataclasses.fields(policy):
        value = getattr(policy, field.name)
        if field.name not in (*COMMON, *info.settings) and value != field.default:
            name = f"{info.title} (--policy.type={info.type})"
            raise ValueError(f"--policy.{field.name}={value}: {name} has no such setting; remove it")


def _check_sharding(config: RunConfig, info: PolicyInfo) -> None:
    if not info.shards:
        able = [one.title for one in map(get_policy_info, policy_types()) if one.shards]
        name = f"{info.title} (--policy.type={info.type})"
        raise ValueError(f"--fsdp=true: {name} cannot be sharded, only {', '.join(able)}; remove the flag")
    if config.fewest_workers == 1:
        raise ValueError("--fsdp=true: one worker holds all weights; add --num_workers=2, or remove the flag")
    for flag in ("compile", "keep_prefix"):
        if getattr(config.policy, flag) == "true":
            raise ValueError(f"--fsdp=true: does not work together with --policy.{flag}=true; remove one of them")


def _check_image_transforms(given: ImageTransformsConfig) -> None:
    flag = "--dataset.image_transforms"
    if len(given.tfs) > MAX_TRANSFORMS:
        raise ValueError(f"{flag}.tfs: {len(given.tfs):,} transforms, the maximum is {MAX_TRANSFORMS}; remove some")
    for name, one in given.tfs.items():
        if one.weight < 0:
            raise ValueError(f"{flag}.tfs: the weight of '{name}' is {one.weight}; must be 0 or more")
    if given.preset == "openpi":
        usual = ImageTransformsConfig(enable=given.enable, preset="openpi")
        if given != usual:
            text = f"{flag}.preset=openpi: has its own transforms, so max_num_transforms, random_order and tfs"
            raise ValueError(f"{text} would have no effect; remove them or the preset")
    elif given.enable and not any(one.weight for one in given.tfs.values()):
        raise ValueError(f"{flag}.tfs: no transform has a weight above 0; add one, or remove {flag}.enable")


def _check_roots(dataset: DatasetConfig) -> None:
    """Check the settings that are given for each root."""
    roots = max(1, len(dataset.root))
    for flag, given, what in (("rename_map", dataset.rename_map, "maps"), ("weight", dataset.weight, "weights")):
        if len(given) not in (0, roots):
            text = f"--dataset.{flag}: {len(given)} {what} for {roots} datasets"
            raise ValueError(f"{text}; give one for each --dataset.root, or none")
    if dataset.weight_temperature is not None and (roots == 1 or dataset.weight):
        text = f"--dataset.weight_temperature={dataset.weight_temperature}"
        raise ValueError(f"{text}: must be used for several roots, and without --dataset.weight")
    if dataset.robots == "several" and roots == 1:
        text = "--dataset.robots=several: there is one --dataset.root"
        raise ValueError(f"{text}; add the others, or remove the flag")
