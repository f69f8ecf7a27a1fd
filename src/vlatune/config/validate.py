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
from vlatune.registry import PolicyInfo, get_policy_info

MAX_TRANSFORMS = 100
"""Maximum number of image transforms in --dataset.image_transforms.tfs."""
COMMON = ("path", "type", "revision", "train", "overrides")
"""Fields of `PolicyConfig` that every policy has."""


def validate(config: RunConfig) -> None:
    """Raise a ValueError for settings that cannot work."""
    check_limits(config)
    dataset, policy, scheduler = config.dataset, config.policy, config.scheduler
    _require(
        Path(config.job_name).name == config.job_name and config.job_name not in ("", ".", ".."),
        f"--job_name={config.job_name}: must be the name of a folder below runs/; give a path with --output_dir",
    )
    _require(
        bool(dataset.root or dataset.repo_id),
        "no dataset: name one with --dataset.root=FOLDER (or --dataset.repo_id=NAME), or make one with `vlatune make-dataset DIR`",
    )
    _check_roots(dataset)
    _check_image_transforms(dataset.image_transforms)
    _check_policy(policy, get_policy_info(policy.type), has_base=policy.path is not None or makes_base(config))
    _require(
        not (policy.keep_prefix == "true" and dataset.image_transforms.enable),
        "--policy.keep_prefix=true: the prefix of an augmented image cannot be kept; remove it or "
        "--dataset.image_transforms.enable=true",
    )
    for flag, text in {
        "--storage_path": config.storage_path,
        "--policy.path": policy.path,
        "--mlflow.tracking_uri": config.mlflow.tracking_uri,
    }.items():
        _require(
            text is None or not has_secret(text),
            f"{flag}: the address contains a password, a token or a signature, and settings are written to the run folder; pass "
            f"it in the environment (AWS_ACCESS_KEY_ID, HF_TOKEN, ...)",
        )
    _require(
        not config.early_stop or validates(config),
        f"--early_stop={config.early_stop}: the run has no validation; set --eval_freq to at most --steps, and hold out "
        f"episodes with --dataset.eval_split",
    )
    _require(
        scheduler.type != "cosine_decay_with_warmup" or scheduler.num_warmup_steps <= scheduler.num_decay_steps,
        f"--scheduler.num_warmup_steps={scheduler.num_warmup_steps}: must be at most "
        f"--scheduler.num_decay_steps={scheduler.num_decay_steps}",
    )


def validate_eval(options: EvalConfig) -> None:
    """Raise a ValueError for evaluation settings that cannot work."""
    check_limits(options)
    data = options.dataset
    _require(
        data.root is not None or (data.episodes is None and data.storage_options is None and not data.select_dims),
        "--dataset.episodes, --dataset.select_dims and --dataset.storage_options need --dataset.root",
    )
    _require(
        data.root is not None or not options.rename_map,
        "--rename_map: held-out episodes use the run's own map; add --dataset.root, or remove the flag",
    )


def _check_policy(policy: PolicyConfig, info: PolicyInfo, *, has_base: bool) -> None:
    """Reject a missing base model, and settings that the policy does not have."""
    example = f", e.g. --policy.path={info.hub_base}" if info.hub_base else ""
    _require(
        has_base,
        f"no base model: name one with --policy.path=FOLDER_OR_REPO{example}, or create a tiny one for the dataset with "
        f"--recipe=tiny",
    )
    _require(
        policy.train in info.train_modes,
        f"--policy.train={policy.train}: must be one of {', '.join(info.train_modes)}",
    )
    for name, value in policy.overrides.items():
        if problem := violation(info.option(name), value):
            raise ValueError(f"--policy.{name}={value}: {problem}")
    for field in dataclasses.fields(policy):
        value = getattr(policy, field.name)
        _require(
            field.name in (*COMMON, *info.settings) or value == field.default,
            f"--policy.{field.name}={value}: {info.title} (--policy.type={info.type}) has no such setting; remove it",
        )


def _check_image_transforms(given: ImageTransformsConfig) -> None:
    flag = "--dataset.image_transforms"
    _require(
        len(given.tfs) <= MAX_TRANSFORMS,
        f"{flag}.tfs: {len(given.tfs):,} transforms, the maximum is {MAX_TRANSFORMS}; remove some",
    )
    for name, one in given.tfs.items():
        _require(one.weight >= 0, f"{flag}.tfs: the weight of '{name}' is {one.weight}; must be 0 or more")
    _require(
        not given.enable or given.preset == "openpi" or any(one.weight for one in given.tfs.values()),
        f"{flag}.tfs: no transform has a weight above 0; add one, or remove {flag}.enable",
    )
    usual = ImageTransformsConfig()
    changed = [
        name for name in ("max_num_transforms", "random_order", "tfs") if getattr(given, name) != getattr(usual, name)
    ]
    _require(
        given.preset == "lerobot" or not changed,
        f"{flag}.preset={given.preset}: has its own transforms, so {flag}.{'/'.join(changed)} would have no effect; "
        f"remove one of them",
    )


def _check_roots(dataset: DatasetConfig) -> None:
    """Check the settings that are given for each root."""
    roots = max(1, len(dataset.root))
    _require(
        len(dataset.rename_map) in (0, roots),
        f"--dataset.rename_map: {len(dataset.rename_map)} maps for {roots} datasets; give one for each --dataset.root, {{}} "
        f"for a root that needs none, or one for all with --rename_map",
    )
    _require(
        len(dataset.weight) in (0, roots),
        f"--dataset.weight: {len(dataset.weight)} weights for {roots} datasets; give one for each --dataset.root, or none",
    )
    _require(
        dataset.weight_temperature is None or (roots > 1 and not dataset.weight),
        f"--dataset.weight_temperature={dataset.weight_temperature}: must be used for several roots, and without --dataset.weight",
    )
    _require(
        dataset.robots != "several" or roots > 1,
        "--dataset.robots=several: there is one --dataset.root; add the others, or remove the flag",
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
