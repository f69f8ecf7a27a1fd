"""What is wrong with a dataset, as far as `meta/` tells: totals, names and widths of features, statistics, tasks.

A `Problem` says where, what was found, what was expected, and what would fix it. An error keeps a training run from
starting or from learning what was recorded; a warning is what a person should know before. Nothing is read here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from vlatune.batch import ACTION, STATE
from vlatune.dataset.features import ALIASES, as_flag, camera_name, likely_name
from vlatune.dataset.health.stats_check import is_flat
from vlatune.dataset.meta.dataset_meta import DatasetMeta, Feature
from vlatune.policies.registry import DEFAULT_TYPE, get_policy

MAX_EXAMPLES = 10
INDEX_FEATURES = ("timestamp", "frame_index", "episode_index", "index", "task_index")
"""Features that every dataset has and no policy normalises."""
RENAME, COMPUTE = "--rename_map", "--dataset.stats=computed"
POLICY = get_policy(DEFAULT_TYPE)
"""The one whose base models a dataset is held against."""


type Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Problem:
    severity: Severity
    place: str
    found: str
    expected: str
    fix: str
    examples: tuple[str, ...] = ()
    """The first MAX_EXAMPLES of what is meant."""
    count: int = 1
    """How many are meant."""
    flag: str = ""
    """The flag of `vlatune train` that mends it, where one does."""


def with_examples(
    severity: Severity, things: Sequence[str], *, count: int | None = None, **texts: str
) -> list[Problem]:
    """One problem for all `things`, none when there are none; `count` where only the first of them are at hand."""
    if not things:
        return []
    return [Problem(severity, examples=tuple(things[:MAX_EXAMPLES]), count=count or len(things), **texts)]


def refusal(error: ValueError, url: str, *, place: str, expected: str) -> Problem:
    """An error of the reading code as a problem: our messages say what was found, then what to do."""
    text = " ".join(str(error).split()).removeprefix(f"dataset '{url}': ").removeprefix(f"{place} ")
    found, _, fix = text.partition("; ")
    return Problem("error", place=place, found=found, expected=expected, fix=fix or "fetch or convert the dataset anew")


def meta_problems(meta: DatasetMeta, info: Mapping[str, Any]) -> list[Problem]:
    """All that can be told from the metadata but the times of videos (videos.py)."""
    named = {meta.names.get(name, name): feature for name, feature in meta.features.items()}
    return [
        *total_problems(meta, info),
        *name_problems(named),
        *width_problems(named),
        *depth_problems(meta.features),
        *stats_problems(meta),
    ]


def total_problems(meta: DatasetMeta, info: Mapping[str, Any]) -> list[Problem]:
    counted = {"total_episodes": len(meta.episodes), "total_frames": meta.num_frames, "total_tasks": len(meta.tasks)}
    return [
        Problem(
            "warning" if name == "total_tasks" else "error",
            place="meta/info.json",
            found=f"{name} is {info[name]}",
            expected=f"{number}, as meta/{'tasks' if name == 'total_tasks' else 'episodes'} lists",
            fix=f"set {name} to {number} if nothing is missing; else fetch the dataset anew",
        )
        for name, number in counted.items()
        if name in info and info[name] != number
    ]


def name_problems(features: Mapping[str, Feature]) -> list[Problem]:
    """`actions`, `state` and `image` are not what policies ask for."""
    problems = [one for key in ALIASES if key not in features for one in _absent(key, features)]
    for name, feature in features.items():
        if feature.is_camera and not name.startswith("observation.image"):
            problems.append(_misnamed("warning", name, camera_name(name)))
    if not any(feature.is_camera for feature in features.values()):
        problems.append(_no_feature("warning", "camera", "a feature of dtype video or image", features))
    return problems


def _absent(key: str, features: Mapping[str, Feature]) -> list[Problem]:
    alias = likely_name(key, [name for name, feature in features.items() if not feature.is_camera])
    if alias is not None:
        return [_misnamed("error", alias, key)]
    severity = "error" if key == ACTION else "warning"  # some policies do without a state, none without an action
    return [_no_feature(severity, f"feature '{key}'", f"a feature named {key}", features)]


def _misnamed(severity: Severity, name: str, wanted: str) -> Problem:
    return Problem(
        severity,
        place=f"meta/info.json, feature '{name}'",
        found=f"it is named '{name}'",
        expected=f"'{wanted}', the kind of name that policies ask for",
        fix=f"map it with {as_flag({name: wanted})} (feature_map in Python), or rename it in info.json, data and stats",
        flag=RENAME,
    )


def _no_feature(severity: Severity, what: str, expected: str, features: Mapping[str, Feature]) -> Problem:
    return Problem(
        severity,
        place="meta/info.json",
        found=f"no {what}; it has {', '.join(name for name in features if name not in INDEX_FEATURES) or 'no features'}",
        expected=expected,
        fix="name the feature that holds it with --rename_map (feature_map in Python), or record it",
    )


def width_problems(features: Mapping[str, Feature]) -> list[Problem]:
    return [
        Problem(
            "warning",
            place=f"meta/info.json, feature '{key}'",
            found=f"it has {features[key].shape[0]} dims",
            expected=f"{POLICY.max_dims} at most for {POLICY.title}'s base models",
            fix="leave dims out of the dataset, or take a policy that is as wide",
        )
        for key in (ACTION, STATE)
        if key in features and features[key].shape and features[key].shape[0] > POLICY.max_dims
    ]


def depth_problems(features: Mapping[str, Feature]) -> list[Problem]:
    return with_examples(
        "warning",
        [name for name, feature in features.items() if feature.is_camera and feature.is_depth],
        place="meta/info.json",
        found="depth cameras",
        expected="colour cameras: depth would be decoded as if it were colour",
        fix="do not give them to the policy: leave them out of --rename_map and of `cameras`",
    )


def stats_problems(meta: DatasetMeta) -> list[Problem]:
    """For the features that a policy normalises; pictures have their own ways."""
    names = [name for name, feature in meta.features.items() if is_normalised(name, feature)]
    return [*_missing_stats(meta, names), *_wrong_stats(meta, names)]


def is_normalised(name: str, feature: Feature) -> bool:
    return name not in INDEX_FEATURES and feature.dtype.startswith(("float", "int", "uint"))


def _missing_stats(meta: DatasetMeta, names: Sequence[str]) -> list[Problem]:
    place = "meta/stats.json" if meta.version == "v3.0" else "meta/episodes_stats.jsonl"
    without = [name for name in names if not meta.stats.get(name)]
    half = [name for name in names if name not in without and not {"q01", "q99"} <= meta.stats[name].keys()]
    computed = "vlatune computes them from the data files when a run starts; for LeRobot itself "
    return [
        *with_examples(
            "warning",
            without,
            place=place,
            found="features without statistics",
            expected="min, max, mean, std, q01, q10, q50, q90, q99 of each",
            fix=f"{computed}run lerobot.scripts.augment_dataset_quantile_stats",
        ),
        *with_examples(
            "warning",
            half,
            place=place,
            found="features without quantiles" + (", which v2.1 does not have" if meta.version == "v2.1" else ""),
            expected=f"q01 and q99, which {POLICY.title} normalises with",
            fix=f"{computed}{'convert to v3.0 and ' if meta.version == 'v2.1' else ''}run lerobot.scripts.augment_dataset_quantile_stats",
        ),
    ]


def _wrong_stats(meta: DatasetMeta, names: Sequence[str]) -> list[Problem]:
    stats = {name: meta.stats.get(name, {}) for name in names}
    nan = [f"{name}: {dim}" for name in names for dim in nan_dims(stats[name], meta.features[name])]
    flat = [f"{name}: {dim}" for name in names for dim in degenerate_dims(stats[name], meta.features[name])]
    turned = [f"{name}: {dim}" for name in names for dim in upside_down_dims(stats[name], meta.features[name])]
    wide = [f"{name}: {text}" for name in names for text in wrong_widths(stats[name], meta.features[name])]
    recompute = "compute the statistics anew (delete them: vlatune then computes its own)"
    return [
        *with_examples(
            "error",
            wide,
            place="statistics",
            found="statistics of another width than the feature",
            expected="a number for each dim of meta/info.json",
            fix=recompute,
        ),
        *with_examples(
            "error",
            nan,
            place="statistics",
            found="dims whose statistics are not finite numbers",
            expected="finite numbers",
            fix=f"look for NaN in the data files, then {recompute}",
        ),
        *with_examples(
            "warning",
            turned,
            place="statistics",
            found="dims whose q01 lies above q99",
            expected="q01 below q99: normalising would turn the values upside down",
            fix=recompute,
        ),
        *with_examples(
            "warning",
            flat,
            place="statistics",
            found="dims that never change (q01 equals q99, but for rounding)",
            expected="dims that vary: normalising divides by q99 - q01",
            fix=f"nothing if the joint was not used in the recordings; else {recompute}",
        ),
    ]


def wrong_widths(stats: Mapping[str, np.ndarray], feature: Feature) -> list[str]:
    width = int(np.prod(feature.shape))
    return [
        f"{name} has {values.size} values, not {width}"
        for name, values in stats.items()
        if name != "count" and values.size != width
    ]


def nan_dims(stats: Mapping[str, np.ndarray], feature: Feature) -> list[str]:
    bad = {int(dim) for values in stats.values() for dim in np.flatnonzero(~np.isfinite(values))}
    return [dim_name(dim, feature) for dim in sorted(bad)]


def degenerate_dims(stats: Mapping[str, np.ndarray], feature: Feature) -> list[str]:
    low, high = ("q01", "q99") if {"q01", "q99"} <= stats.keys() else ("min", "max")
    if low not in stats or high not in stats or stats[low].shape != stats[high].shape:
        return []
    flat = is_flat(stats[low], stats[high]) & (stats[low] <= stats[high])
    return [dim_name(int(dim), feature) for dim in np.flatnonzero(flat)]


def upside_down_dims(stats: Mapping[str, np.ndarray], feature: Feature) -> list[str]:
    low, high = stats.get("q01"), stats.get("q99")
    if low is None or high is None or low.shape != high.shape:
        return []
    return [dim_name(int(dim), feature) for dim in np.flatnonzero(low > high)]


def dim_name(dim: int, feature: Feature) -> str:
    return f"{dim} ({feature.names[dim]})" if feature.names and dim < len(feature.names) else str(dim)
