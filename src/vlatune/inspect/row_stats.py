"""State and action in the rows, held against the statistics: shares outside, values that never change or are no numbers."""

from collections.abc import Iterator

import numpy as np

from vlatune.batch import ACTION, STATE
from vlatune.dataset.features import likely_name
from vlatune.dataset.health.stats_check import MAX_FILES, MAX_ROWS, RowsSeen, doubts, is_flat, look_at_rows
from vlatune.dataset.meta.dataset_meta import DatasetMeta
from vlatune.inspect.problems import COMPUTE, Problem, dim_name, is_normalised, refusal, with_examples

FIX = f"train with {COMPUTE}, which takes the statistics of all rows"


def row_stats_problems(meta: DatasetMeta, *, every: bool, is_told: bool) -> list[Problem]:
    """Of data files whose footers and first rows are as they should be; `is_told`: why some cannot be read is known."""
    limits = {} if not every else {"max_files": len(meta.episodes), "max_rows": meta.num_frames}
    problems: list[Problem] = []
    for own in _normalised(meta):
        stats = meta.stats.get(own, {})
        try:
            seen = look_at_rows(meta, own, stats, **({"max_files": MAX_FILES, "max_rows": MAX_ROWS} | limits))
        except ValueError as error:  # null values, lists of several lengths: no footer tells of them
            if is_told:
                continue
            place, expected = f"data files, feature '{own}'", "a value of the feature's shape in every row"
            problems.append(refusal(error, meta.root.url, place=place, expected=expected))
            continue
        problems += _of_feature(meta, own, seen) if seen else []
    return problems


def _normalised(meta: DatasetMeta) -> Iterator[str]:
    """Own names of the state and the action, or of what may be them."""
    vectors = [name for name, feature in meta.features.items() if is_normalised(name, feature)]
    for key in (STATE, ACTION):
        own = meta.own(key) if meta.own(key) in vectors else likely_name(key, vectors)
        if own is not None:
            yield own


def _of_feature(meta: DatasetMeta, own: str, seen: RowsSeen) -> list[Problem]:
    feature, stats = meta.features[own], meta.stats.get(own, {})
    looked_at = f"in {'all' if seen.is_all else 'the'} {seen.num_rows:,} rows{'' if seen.is_all else ' looked at'}"
    bad = [f"dim {dim_name(int(dim), feature)}" for dim in np.flatnonzero(~seen.is_finite_D)]
    still_D = (seen.stats["min"] == seen.stats["max"]) & seen.is_finite_D
    if {"q01", "q99"} <= stats.keys() and stats["q01"].shape == still_D.shape:
        still_D &= ~is_flat(stats["q01"], stats["q99"])  # else the statistics have told
    still = [dim_name(int(dim), feature) for dim in np.flatnonzero(still_D)]
    return [
        *with_examples(
            "error",
            [*seen.not_finite[:5], *bad],
            count=len(bad),
            place=f"data files, feature '{own}'",
            found=f"dims with values that are not finite numbers, {looked_at}",
            expected="finite numbers: one that is not ends a run",
            fix="record or convert these episodes anew, or leave them out with --dataset.on_bad_episode=skip",
        ),
        *with_examples(
            "warning",
            still,
            place=f"data files, feature '{own}'",
            found=f"dims that never change, {looked_at}",
            expected="dims that vary",
            fix=f"nothing if the joint was not used; its statistics say that it varies, so {FIX}"
            if stats
            else "nothing if the joint was not used in the recordings",
        ),
        *(
            problem
            for what, dims in doubts(stats, seen, feature.names)
            for problem in with_examples(
                "warning",
                dims,
                place=f"statistics of '{own}'",
                found=f"{what}, {looked_at}",
                expected="statistics of the rows; a policy sees values outside as beyond its scale, a state as cut off at its end",
                fix=f"{FIX}; LeRobot's own are averages of the episodes'",
                flag=COMPUTE,
            )
        ),
    ]
