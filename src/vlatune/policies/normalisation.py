"""Which statistics a policy normalises with, where a run takes them from, and the steps that use them. No torch.

A dataset's own statistics are held to their shape and to its rows before anything trains on them: what is wrong is refused,
what is doubtful is told with the flag that mends it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vlatune.batch import ACTION, STATE
from vlatune.dataset.health.stats_check import check_stats, doubts, look_at_rows
from vlatune.dataset.meta.stats import feature_stats, has_stats, picture_stats, relative_action_stats
from vlatune.pipeline.transforms import Normalise, RelativeActions

if TYPE_CHECKING:
    from vlatune.config import DatasetConfig
    from vlatune.dataset.meta.dataset_meta import DatasetMeta
    from vlatune.policies.base import Binding, PolicySpec, Stats

STATS_OF_MODE = {
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
    "MIN_MAX": ("min", "max"),
    "MEAN_STD": ("mean", "std"),
}


def make_relative(spec: PolicySpec, binding: Binding) -> list[RelativeActions]:
    """What comes before the normalisers: a step where the policy learns relative actions, else none."""
    if spec.relative_exclude is None:
        return []
    return [RelativeActions(relative_dims(binding.action_names, spec.relative_exclude))]


def relative_dims(action_names: Sequence[str], exclude: Sequence[str]) -> tuple[bool, ...]:
    """Of each action dim, whether it becomes relative: as LeRobot, a name that holds an excluded word stays absolute.

    >>> relative_dims(("shoulder.pos", "Gripper.pos"), ("gripper",))
    (True, False)
    """
    words = [word.lower() for word in exclude if word]
    return tuple(not any(word in name.lower() for word in words) for name in action_names)


def make_normalisers(spec: PolicySpec, stats: Stats) -> list[Normalise]:
    """State and action normalisers, in this order, as the policy's config asks; pictures are normalised on the device."""
    made = []
    for key, kind in ((STATE, "STATE"), (ACTION, "ACTION")):
        mode = spec.normalisation.get(kind, "IDENTITY")
        if mode != "IDENTITY":
            low, high = (stats[key][name] for name in STATS_OF_MODE[mode])
            made.append(Normalise(key, mode, low, high))
    return made


NEUTRAL = {name: value for low, high in STATS_OF_MODE.values() for name, value in ((low, -1.0), (high, 1.0))}
NEUTRAL["mean"] = 0.0
"""Statistics of dims that a robot lacks: they normalise 0 to 0."""


def stack_stats(each: Sequence[Stats], binding: Binding) -> Stats:
    """Each dataset's statistics as one table, (datasets, dims), padded."""
    dims = {STATE: binding.state_dim, ACTION: binding.action_dim}
    stacked: dict[str, dict[str, np.ndarray]] = {}
    for key, of in each[0].items():
        stacked[key] = {}
        for name in of:
            table = np.full((len(each), dims[key]), NEUTRAL[name])
            for number, one in enumerate(each):
                table[number, : one[key][name].size] = one[key][name]
            stacked[key][name] = table
    return stacked


def stats_of(stats: Stats, binding: Binding, number: int) -> Stats:
    """One dataset's out of the tables."""
    part = binding.parts[number]
    dims = {STATE: part.state_dim, ACTION: part.action_dim}
    return {
        key: {name: table[number, : dims[key]] if key in dims else table for name, table in of.items()}
        for key, of in stats.items()
    }


def stats_needed(spec: PolicySpec, cameras: Sequence[str] = ()) -> dict[str, Sequence[str]]:
    """Feature, by the policy's name -> names of the statistics that the policy's normalisation uses."""
    kinds = {STATE: "STATE", ACTION: "ACTION"} | dict.fromkeys(cameras, "VISUAL")
    modes = {key: spec.normalisation.get(kind, "IDENTITY") for key, kind in kinds.items()}
    unknown = [mode for mode in modes.values() if mode != "IDENTITY" and mode not in STATS_OF_MODE]
    if unknown:
        raise ValueError(
            f"policy '{spec.folder}': its normalisation mode '{unknown[0]}' is not known; known: {', '.join(STATS_OF_MODE)}"
        )
    return {key: STATS_OF_MODE[mode] for key, mode in modes.items() if mode != "IDENTITY"}


def run_stats(
    dataset: DatasetConfig,
    metas: Sequence[DatasetMeta],
    policy: PolicySpec,
    binding: Binding,
    *,
    against_rows: bool = False,
) -> tuple[Stats, tuple[str, ...]]:
    """The statistics that a run normalises with, and what is doubtful about them; `against_rows` looks at rows for that, too."""
    groups = list(zip(([meta] for meta in metas), binding.parts, strict=True)) if binding.parts else [(metas, binding)]
    by_group = [_vector_stats(dataset, tuple(group), policy, own) for group, own in groups]
    told: list[str] = []
    for (group, _), stats in zip(groups, by_group, strict=True):
        told += _check_stats(group, stats)
    for (group, _), stats in zip(groups, by_group, strict=True) if against_rows else ():
        plain = {key: values for key, values in stats.items() if key == STATE or policy.relative_exclude is None}
        told += _hold_against_rows(dataset, group, plain)
    vectors = stack_stats(by_group, binding) if binding.parts else by_group[0]
    needed = stats_needed(policy, [camera for _, camera in binding.cameras])
    return {**vectors, **picture_stats(metas, needed, imagenet=dataset.use_imagenet_stats)}, tuple(told)


def _vector_stats(
    dataset: DatasetConfig, metas: tuple[DatasetMeta, ...], policy: PolicySpec, binding: Binding
) -> dict[str, dict[str, np.ndarray]]:
    """Of state and action, as the policy's normalisation asks for them."""
    needed, computed = stats_needed(policy), dataset.stats == "computed"
    made = {key: feature_stats(metas, key, needed[key], computed=computed) for key in needed if key != ACTION}
    if ACTION not in needed:
        return made
    relative = next(iter(make_relative(policy, binding)), None)
    if relative is None:
        return made | {ACTION: feature_stats(metas, ACTION, needed[ACTION], computed=computed)}
    return made | {
        ACTION: relative_action_stats(
            metas,
            needed[ACTION],
            chunk_size=policy.horizon,
            is_relative=relative.is_relative,
            computed=computed,
        )
    }


def _check_stats(metas: Sequence[DatasetMeta], stats: Mapping[str, Mapping[str, np.ndarray]]) -> tuple[str, ...]:
    where = " and ".join(f"dataset '{meta.root.url}'" for meta in metas)
    features = {key: metas[0].features[metas[0].own(key)] for key in stats}
    checked = (
        check_stats(where, key, values, features[key].names, width=int(np.prod(features[key].shape)))
        for key, values in stats.items()
    )
    return tuple(text for warnings in checked for text in warnings)


def _hold_against_rows(
    dataset: DatasetConfig, metas: Sequence[DatasetMeta], stats: Mapping[str, Mapping[str, np.ndarray]]
) -> tuple[str, ...]:
    """What the rows say of the dataset's own statistics; computed ones come from the rows."""
    if dataset.stats == "computed":
        return ()
    texts = []
    for key in (key for key, values in stats.items() if has_stats(metas, key, tuple(values))):
        own = metas[0].own(key)
        seen, names = look_at_rows(metas[0], own, stats[key]), metas[0].features[own].names
        if seen and seen.not_finite:
            raise ValueError(
                f"dataset '{metas[0].root.url}': {key}: values that are not finite numbers: {', '.join(seen.not_finite)}; record or "
                f"convert these episodes anew, or leave them out with --dataset.on_bad_episode=skip"
            )
        for what, dims in doubts(stats[key], seen, names) if seen else ():
            texts.append(
                f"dataset '{metas[0].root.url}': {key}: {what}: {', '.join(dims)}; take statistics of all rows with "
                f"--dataset.stats=computed"
            )
    return tuple(texts)
