"""Select and validate a run's normalisation statistics, and build the transforms that use them.

A dataset's statistics are checked against its shapes and rows before training: errors raise,
suspicious values are reported with the flag that fixes them. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vlatune.batch import ACTION, STATE
from vlatune.data.features import offsets_at_rate
from vlatune.data.health.stats_check import check_stats, compare_with_rows, doubts
from vlatune.data.meta.stats import feature_stats, has_stats, image_stats, relative_action_stats
from vlatune.data.transforms import Normalise, RelativeActions

if TYPE_CHECKING:
    from vlatune.config.settings import DatasetConfig
    from vlatune.data.meta.dataset_meta import DatasetMeta
    from vlatune.policies.base import Binding, PolicySpec, Stats

STATS_OF_MODE = {
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
    "MIN_MAX": ("min", "max"),
    "MEAN_STD": ("mean", "std"),
}


def make_relative(spec: PolicySpec, binding: Binding) -> list[RelativeActions]:
    """Return the transform to relative actions, if the policy uses them."""
    if spec.relative_exclude is None:
        return []
    if not binding.parts:
        return [RelativeActions(np.array(binding.is_relative))]
    table = np.zeros((len(binding.parts), binding.action_dim), dtype=bool)
    for line, part in zip(table, binding.parts, strict=True):
        line[: part.action_dim] = part.is_relative
    return [RelativeActions(table)]


def relative_dims(action_names: Sequence[str], exclude: Sequence[str]) -> tuple[bool, ...]:
    """Return for each action dim whether it becomes relative.

    As in LeRobot, dims whose name contains an excluded word stay absolute.

    >>> relative_dims(("shoulder.pos", "Gripper.pos"), ("gripper",))
    (True, False)
    """
    words = [word.lower() for word in exclude if word]
    return tuple(not any(word in name.lower() for word in words) for name in action_names)


def make_normalisers(spec: PolicySpec, stats: Stats) -> list[Normalise]:
    """Return the state and action normalisers; images are normalised on the device."""
    made = []
    for key, kind in ((STATE, "STATE"), (ACTION, "ACTION")):
        mode = spec.normalisation.get(kind, "IDENTITY")
        if mode != "IDENTITY":
            low, high = (stats[key][name] for name in STATS_OF_MODE[mode])
            made.append(Normalise(key, mode, low, high))
    return made


NEUTRAL = {name: value for low, high in STATS_OF_MODE.values() for name, value in ((low, -1.0), (high, 1.0))}
NEUTRAL["mean"] = 0.0
"""Statistics of dims that a robot lacks: they map 0 to 0."""


def stack_stats(each: Sequence[Stats], binding: Binding) -> Stats:
    """Stack the statistics of all datasets into padded tables, (datasets, dims)."""
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
    """Return the statistics of one dataset from the stacked tables."""
    part = binding.parts[number]
    dims = {STATE: part.state_dim, ACTION: part.action_dim}
    return {
        key: {name: table[number, : dims[key]] if key in dims else table for name, table in of.items()}
        for key, of in stats.items()
    }


def stats_needed(spec: PolicySpec, cameras: Sequence[str] = ()) -> dict[str, Sequence[str]]:
    """Map features (by the policy's names) to the statistics that their normalisation needs."""
    kinds = {STATE: "STATE", ACTION: "ACTION"} | dict.fromkeys(cameras, "VISUAL")
    modes = {key: spec.normalisation.get(kind, "IDENTITY") for key, kind in kinds.items()}
    unknown = [mode for mode in modes.values() if mode != "IDENTITY" and mode not in STATS_OF_MODE]
    if unknown:
        raise ValueError(
            f"policy '{spec.folder}': unknown normalisation mode '{unknown[0]}', expected one of {', '.join(STATS_OF_MODE)}"
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
    """Return the run's statistics and warnings; `against_rows` also compares them with rows."""
    groups = list(zip(([meta] for meta in metas), binding.parts, strict=True)) if binding.parts else [(metas, binding)]
    by_group = [_vector_stats(dataset, tuple(group), policy, own) for group, own in groups]
    warnings: list[str] = []
    for (group, _), stats in zip(groups, by_group, strict=True):
        warnings += _check_stats(group, stats)
    for (group, _), stats in zip(groups, by_group, strict=True) if against_rows else ():
        plain = {key: values for key, values in stats.items() if key == STATE or policy.relative_exclude is None}
        warnings += _compare_with_rows(dataset, group, plain)
    vectors = stack_stats(by_group, binding) if binding.parts else by_group[0]
    needed = stats_needed(policy, [camera for _, camera in binding.cameras])
    return {**vectors, **image_stats(metas, needed, imagenet=dataset.use_imagenet_stats)}, tuple(warnings)


def _vector_stats(
    dataset: DatasetConfig, metas: tuple[DatasetMeta, ...], policy: PolicySpec, binding: Binding
) -> dict[str, dict[str, np.ndarray]]:
    needed, computed = stats_needed(policy), dataset.stats == "computed"
    made = {key: feature_stats(metas, key, needed[key], computed=computed) for key in needed if key != ACTION}
    if ACTION not in needed:
        return made
    if policy.relative_exclude is None:
        return made | {ACTION: feature_stats(metas, ACTION, needed[ACTION], computed=computed)}
    return made | {
        ACTION: relative_action_stats(
            metas,
            needed[ACTION],
            offsets=[offsets_at_rate(policy.action_offsets, meta.fps, dataset.action_fps) for meta in metas],
            is_relative=binding.is_relative,
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
    return tuple(str(warning) for warnings in checked for warning in warnings)


def _compare_with_rows(
    dataset: DatasetConfig, metas: Sequence[DatasetMeta], stats: Mapping[str, Mapping[str, np.ndarray]]
) -> tuple[str, ...]:
    """Compare the dataset's own statistics with its rows; return warnings."""
    if dataset.stats == "computed":
        return ()
    texts = []
    for key in (key for key, values in stats.items() if has_stats(metas, key, tuple(values))):
        own = metas[0].own(key)
        seen, names = compare_with_rows(metas[0], own, stats[key]), metas[0].features[own].names
        if seen and seen.not_finite:
            raise ValueError(
                f"dataset '{metas[0].root.url}': {key}: values are not finite: {', '.join(seen.not_finite)}; fix these episodes, "
                f"or skip them with --dataset.on_bad_episode=skip"
            )
        where, remedy = (
            f"dataset '{metas[0].root.url}': {key}",
            "compute statistics of all rows with --dataset.stats=computed",
        )
        found = doubts(stats[key], seen, names) if seen else ()
        texts += [f"{where}: {one.text}: {', '.join(one.examples)}; {remedy}" for one in found]
    return tuple(texts)
