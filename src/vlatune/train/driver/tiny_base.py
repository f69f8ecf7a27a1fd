"""A run without a base model: the policy with random weights, small with --recipe=tiny, made for its datasets in RUN/base.

It has their cameras (those that all of them have, under the names of --rename_map), dims and sentences. Written aside and
renamed, once: a run that goes on takes the one that is there. The same datasets and seed give the same weights. No torch
at import.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from vlatune.batch import ACTION, STATE
from vlatune.config import RunConfig, makes_base, makes_small
from vlatune.dataset.features import as_flag, likely_name
from vlatune.dataset.meta.dataset_meta import DatasetMeta
from vlatune.files import put_folder, read_json, remove_leftovers, write_json
from vlatune.policies.base import Fit
from vlatune.policies.binding import why_one_robot
from vlatune.policies.registry import get_policy
from vlatune.report.run_folder import CONFIG_FILE, RunFolder
from vlatune.train.driver.resume_rules import check_run, only_one

BASE, ASIDE = "base", ".base.making"
MADE_FOR = "made_for.json"
"""In the folder: what the model was made for, so that one of a start with other flags is not taken for this one's."""
IMAGE_SIZE = 48
HORIZON_S = 0.8
"""Seconds of actions in a chunk."""


def with_base(config: RunConfig, metas: tuple[DatasetMeta, ...], *, say: Callable[[str], None]) -> RunConfig:
    """The config with its base model, which is made for the datasets first if the run makes its own and has not yet."""
    if not makes_base(config):
        return config
    folder = RunFolder(config.run_dir)
    config = replace(config, policy=replace(config.policy, path=str((folder.path / BASE).resolve())))
    if (folder.path / CONFIG_FILE).exists() and (folder.path / BASE).is_dir():
        return config  # the run has begun with it
    policy = get_policy(config.policy.type)
    mixed = config.dataset.robots != "one" and _differ(config, metas)
    if mixed and not policy.adapter().mixes_robots:
        raise ValueError(f"the datasets are of several robots; {why_one_robot(policy.type)}; train on those of one")
    fit = fit_datasets(metas, seed=config.seed, max_dims=policy.max_dims, mixed=mixed)
    fit = replace(fit, overrides=config.policy.overrides)
    with only_one(folder):
        shutil.rmtree(folder.path / ASIDE, ignore_errors=True)  # of a start that was killed
        remove_leftovers(folder.path / ASIDE)
        check_run(config)
        _ensure(folder.path, config, fit, say)
    return config


def fit_datasets(metas: tuple[DatasetMeta, ...], *, seed: int, max_dims: int, mixed: bool = False) -> Fit:
    """`mixed`: datasets of several robots; every camera that one of them has, and the most dims."""
    first = metas[0]
    cameras = _all_cameras(metas) if mixed else _common_cameras(metas)
    groups = [(meta,) for meta in metas] if mixed else [metas]
    owner = {camera: next(meta for meta in metas if meta.own(camera) in meta.cameras) for camera in cameras}
    return Fit(
        cameras=cameras,
        state_dim=max(_width(group, STATE, max_dims) for group in groups),
        action_dim=max(_width(group, ACTION, max_dims) for group in groups),
        horizon=max(1, round(HORIZON_S * first.fps)),
        image_size=IMAGE_SIZE,
        tasks=tuple(sorted({task for meta in metas for task in meta.tasks})),
        seed=seed,
        recorded_hw=tuple(owner[name].features[owner[name].own(name)].height_width for name in cameras),
        fps=first.fps,
    )


def _differ(config: RunConfig, metas: tuple[DatasetMeta, ...]) -> bool:
    """Whether the datasets are of several robots. Cameras alone do not tell: what all have is enough for one."""
    shapes = {
        tuple(meta.features[meta.own(key)].shape for key in (STATE, ACTION) if meta.own(key) in meta.features)
        for meta in metas
    }
    return config.dataset.robots == "several" or len(shapes) > 1


def _all_cameras(metas: tuple[DatasetMeta, ...]) -> tuple[str, ...]:
    colour = [meta.names.get(own, own) for meta in metas for own in meta.cameras if not meta.features[own].is_depth]
    return tuple(dict.fromkeys(colour)) or _common_cameras(metas)


def _common_cameras(metas: tuple[DatasetMeta, ...]) -> tuple[str, ...]:
    """Colour cameras that go by one name in all datasets, in the order of the first."""
    names = [[meta.names.get(own, own) for own in meta.cameras if not meta.features[own].is_depth] for meta in metas]
    common = tuple(name for name in names[0] if all(name in others for others in names))
    if common:
        return common
    said = "; ".join(
        f"'{meta.root.url}' has {', '.join(each) or 'none'}" for meta, each in zip(metas, names, strict=True)
    )
    other = next((each for each in names[1:] if each and names[0]), None)
    remedy = f"give them one name with {as_flag({other[0]: names[0][0]})}" if other else "record one"
    raise ValueError(f"--recipe=tiny: there is no colour camera that all datasets have ({said}); {remedy}")


def _width(metas: tuple[DatasetMeta, ...], key: str, most: int) -> int:
    for meta in metas:
        own = meta.own(key)
        if own not in meta.features:
            likely = likely_name(key, [name for name in meta.features if name not in meta.cameras])
            hint = f"; '{likely}' may be it" if likely else f"; it has {', '.join(meta.features)}"
            raise ValueError(
                f"dataset '{meta.root.url}': there is no feature '{key}'{hint}; name it with {as_flag({likely or 'NAME': key})}"
            )
        shape, first = meta.features[own].shape, metas[0].features[metas[0].own(key)].shape
        if len(shape) != 1 or shape != first or shape[0] > most:
            raise ValueError(
                f"dataset '{meta.root.url}': '{own}' has the shape {shape}, expected a vector of at most {most} values, "
                f"as long as that of '{metas[0].root.url}' ({first}); leave the dataset out, or dims of it"
            )
    return metas[0].features[metas[0].own(key)].shape[0]


def _ensure(run_dir: Path, config: RunConfig, fit: Fit, say: Callable[[str], None]) -> None:
    base, aside = run_dir / BASE, run_dir / ASIDE
    policy, small = get_policy(config.policy.type), makes_small(config)
    made_for = json.loads(json.dumps(asdict(fit) | {"type": policy.type, "small": small}))
    if base.is_dir():
        if not (base / MADE_FOR).is_file():
            raise ValueError(f"'{base}' is in the way of the run's own base model; take it with --policy.path={base}")
        if read_json(base, MADE_FOR) == made_for:
            return
    say(
        f"no --policy.path: making a {'small ' if small else ''}{policy.title} with random weights for {', '.join(fit.cameras)}, "
        f"{fit.state_dim} state and {fit.action_dim} action dims, {len(fit.tasks)} sentences in {base}"
    )
    policy.adapter().make_base(aside, fit, small=small, place=base)
    write_json(aside / MADE_FOR, made_for)
    shutil.rmtree(base, ignore_errors=True)  # of a start with other flags, which never became a run
    put_folder(aside, base)
