"""Create a base model with random weights in RUN/base for runs without one.

It fits the datasets: common cameras (after --rename_map), dims and tasks. It is written atomically
and once, so resumed runs reuse it. The same datasets and seed give the same weights. torch is not
imported at module level.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from vlatune.batch import ACTION, STATE
from vlatune.config.flags import quote_flags
from vlatune.config.settings import RunConfig, makes_base, makes_small
from vlatune.data.features import SELECT_DIMS, as_flag, narrow_flags, no_vector
from vlatune.data.meta.dataset_meta import DatasetMeta
from vlatune.formatting import plural
from vlatune.policies.base import Fit
from vlatune.policies.binding import why_one_robot
from vlatune.registry import get_adapter, get_policy_info, recipes_for
from vlatune.run.run_folder import CONFIG_FILE
from vlatune.storage.files import read_json, remove_leftovers, replace_folder, write_json
from vlatune.train.driver.resume_rules import check_run, run_lock

BASE, PARTIAL = "base", ".base.making"
MADE_FOR = "made_for.json"
"""File that records what the model was made for, to detect a base of a start with other flags."""
IMAGE_SIZE = 48
HORIZON_S = 0.8
"""Duration of an action chunk in seconds."""


def with_base(config: RunConfig, metas: tuple[DatasetMeta, ...], *, say: Callable[[str], None]) -> RunConfig:
    """Return the config with its base model, created first if needed."""
    if not makes_base(config):
        return config
    config = replace(config, policy=replace(config.policy, path=str((config.run_dir / BASE).resolve())))
    if (config.run_dir / CONFIG_FILE).exists() and (config.run_dir / BASE).is_dir():
        check_run(config)  # before the base is read, which may be another policy's
        return config  # already used by the run
    policy = get_policy_info(config.policy.type)
    mixed = config.dataset.robots != "one" and _are_several_robots(config, metas)
    if mixed and not get_adapter(policy.type).mixes_robots:
        reason = why_one_robot(policy.type)
        raise ValueError(f"the datasets are of several robots; {reason}; train on the datasets of one robot")
    fit = fit_datasets(metas, seed=config.seed, max_dims=policy.max_dims, mixed=mixed)
    fit = replace(fit, overrides=config.policy.overrides)
    with run_lock(config.run_dir):
        shutil.rmtree(config.run_dir / PARTIAL, ignore_errors=True)  # left by a killed process
        remove_leftovers(config.run_dir / PARTIAL)
        check_run(config)
        _ensure(config.run_dir, config, fit, say)
    return config


def fit_datasets(metas: tuple[DatasetMeta, ...], *, seed: int, max_dims: int, mixed: bool = False) -> Fit:
    """Return the model dimensions; `mixed` (several robots) uses all cameras and the most dims."""
    first = metas[0]
    cameras = _cameras(metas, mixed=mixed)
    groups = [(meta,) for meta in metas] if mixed else [metas]
    owner = {camera: next(meta for meta in metas if meta.own(camera) in meta.cameras) for camera in cameras}
    return Fit(
        cameras=cameras,
        state_dim=max(_width(group, STATE, max_dims, metas) for group in groups),
        action_dim=max(_width(group, ACTION, max_dims, metas) for group in groups),
        horizon=max(1, round(HORIZON_S * first.fps)),
        image_size=IMAGE_SIZE,
        tasks=tuple(sorted({task for meta in metas for task in meta.tasks})),
        seed=seed,
        recorded_hw=tuple(owner[name].features[owner[name].own(name)].height_width for name in cameras),
        fps=first.fps,
    )


def _are_several_robots(config: RunConfig, metas: tuple[DatasetMeta, ...]) -> bool:
    """True if the datasets are of several robots; cameras may differ for one robot."""
    shapes = {
        tuple(meta.features[meta.own(key)].shape for key in (STATE, ACTION) if meta.own(key) in meta.features)
        for meta in metas
    }
    return config.dataset.robots == "several" or len(shapes) > 1


def _cameras(metas: tuple[DatasetMeta, ...], *, mixed: bool) -> tuple[str, ...]:
    """Return the colour cameras of all datasets, or those with the same name in each (not `mixed`)."""
    names = [[meta.names.get(own, own) for own in meta.cameras if not meta.features[own].is_depth] for meta in metas]
    found = dict.fromkeys(name for each in names for name in each if mixed or all(name in one for one in names))
    if found:
        return tuple(found)
    listed = "; ".join(
        f"'{meta.root.url}' has {', '.join(each) or 'none'}" for meta, each in zip(metas, names, strict=True)
    )
    other = next((each for each in names[1:] if each and names[0]), None)
    remedy = f"give them one name with {as_flag({other[0]: names[0][0]})}" if other else "record one"
    raise ValueError(f"--recipe=tiny: there is no colour camera that all datasets have ({listed}); {remedy}")


def _width(metas: tuple[DatasetMeta, ...], key: str, most: int, of_run: tuple[DatasetMeta, ...]) -> int:
    """Return the number of dims of one robot's feature; raise if its datasets differ or it is too wide."""
    for meta in metas:
        own = meta.own(key)
        if own not in meta.features:
            raise no_vector(meta, key, meta.names)
        shape, first = meta.features[own].shape, metas[0].features[metas[0].own(key)].shape
        if len(shape) != 1 or shape != first:
            raise ValueError(
                f"dataset '{meta.root.url}': '{own}' has the shape {shape}, expected a vector as long as in "
                f"'{metas[0].root.url}' ({first}); leave the dataset out, or use some of the dims with {SELECT_DIMS}"
            )
        if shape[0] > most:
            mixed = len(metas) < len(of_run)
            names = [name for small in (True, False) for name in recipes_for(shape[0], small=small, mixed=mixed)]
            other = f"train a policy that takes as many ({' or '.join(f'--recipe={name}' for name in names)}), or "
            select = quote_flags(narrow_flags(of_run, {STATE: most, ACTION: most}))
            raise ValueError(
                f"dataset '{meta.root.url}': '{own}' has {shape[0]} dims, the policy takes {most} at most; "
                f"{other if names else ''}use some of the dims, such as the first: {select}"
            )
    return metas[0].features[metas[0].own(key)].shape[0]


def _ensure(run_dir: Path, config: RunConfig, fit: Fit, say: Callable[[str], None]) -> None:
    base, partial = run_dir / BASE, run_dir / PARTIAL
    policy, small = get_policy_info(config.policy.type), makes_small(config)
    made_for = json.loads(json.dumps(asdict(fit) | {"type": policy.type, "small": small}))
    if base.is_dir():
        if not (base / MADE_FOR).is_file():
            raise ValueError(
                f"'{base}' exists and was not made by this run; remove it, or use it with --policy.path={base}"
            )
        if read_json(base, MADE_FOR) == made_for:
            return
    say(
        f"no --policy.path: making a {'small ' if small else ''}{policy.title} with random weights for {', '.join(fit.cameras)}, "
        f"{fit.state_dim} state and {fit.action_dim} action dims, {plural(len(fit.tasks), 'task')} in {base}"
    )
    get_adapter(policy.type).make_base(partial, fit, small=small, place=base)
    write_json(partial / MADE_FOR, made_for)
    shutil.rmtree(base, ignore_errors=True)  # of a start with other flags that never became a run
    replace_folder(partial, base)
