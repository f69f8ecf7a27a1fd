"""Statistics that would spoil normalisation: refused where no number comes out of it, warned of where no sense does.

Normalising itself stays LeRobot's to the last bit: a range of exactly zero is replaced by 1e-8, so that the constant
value becomes -1 and any other value about 1e8. A policy trained on that learns nothing of the dimension at best.

`look_at_rows` holds a dataset's statistics against its rows: what share of them lies outside, and which values never change.
LeRobot averages the quantiles of episodes, which pulls q01 and q99 inwards, by a little or by half of the frames. Reads
columns of parquet files alone, at most MAX_FILES files and about MAX_ROWS rows spread over the dataset: a second or so.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vlatune.dataset.meta.dataset_meta import DatasetMeta
from vlatune.dataset.meta.listing import one_per_file
from vlatune.dataset.meta.stats import Moments, read_file

NEARLY_ZERO = 1e-6
"""A range this small against its ends holds no more than float32's rounding."""
EPS = 1e-8
"""What LeRobot divides by instead of zero."""


def check_stats(
    where: str, key: str, stats: Mapping[str, np.ndarray], dims: Sequence[str] | None, *, width: int | None = None
) -> list[str]:
    """Warnings on the two statistics (in the order low, high) that normalise a feature; ValueError where they cannot.

    `dims` are the names of its dimensions, where the dataset has them, and `width` their number.
    """
    (low_name, low), (high_name, high) = ((name, np.ravel(values)) for name, values in stats.items())
    for name, values in ((low_name, low), (high_name, high)):
        if width is not None and len(values) != width:  # one value would be spread over all dims in silence
            raise ValueError(
                f"{where}: {key} has {len(values)} values of {name}, expected {width}, one for each dim of meta/info.json; take "
                f"'{key}' out of the statistics to have them computed from the rows, as --dataset.stats=computed does"
            )
    for name, values in ((low_name, low), (high_name, high)):
        for dim in np.flatnonzero(~np.isfinite(values)):
            raise ValueError(
                f"{where}: {key} {dim_text(dim, dims, len(low))} has {name} = {values[dim]}, a finite number was expected; mend "
                f"the rows that are not finite (`vlatune inspect` names them), or take '{key}' out of meta/stats.json to "
                f"have its statistics computed from the rows, as --dataset.stats=computed does"
            )
    found = _flat_std(low, high) if high_name == "std" else _flat_range(low_name, low, high_name, high)
    return [f"{where}: {key} {dim_text(dim, dims, len(low))} has {text}" for dim, text in found]


def is_flat(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """By dim: whether nothing but rounding lies between the two, or they are upside down."""
    return high - low <= np.maximum(EPS, NEARLY_ZERO * np.maximum(np.abs(low), np.abs(high)))


def _flat_range(low_name: str, low: np.ndarray, high_name: str, high: np.ndarray) -> Iterator[tuple[int, str]]:
    for dim in np.flatnonzero(is_flat(low, high)):
        if low[dim] > high[dim]:
            both = (
                f"{low_name} = {low[dim]:g} above {high_name} = {high[dim]:g}: its values would be turned upside down"
            )
        elif low[dim] == high[dim]:
            both = (
                f"{low_name} = {high_name} = {low[dim]:g}: it carries no information, and any other value becomes huge"
            )
        else:
            both = f"{low_name} and {high_name} = {low[dim]:g}, {high[dim] - low[dim]:.1g} apart: it carries no information, and noise is magnified"
        yield int(dim), f"{both}; leave the dimension out of the dataset if the robot does not use it"


def _flat_std(mean: np.ndarray, std: np.ndarray) -> Iterator[tuple[int, str]]:
    for dim in np.flatnonzero(std <= np.maximum(EPS, NEARLY_ZERO * np.abs(mean))):
        yield (
            int(dim),
            f"mean = {mean[dim]:g} and std = {std[dim]:g}: it carries no information, and any other value becomes huge; "
            f"leave the dimension out of the dataset if the robot does not use it",
        )


def dim_text(dim: int, dims: Sequence[str] | None, width: int) -> str:
    """`dim 3 'gripper'`, where the dataset has names."""
    return f"dim {dim} '{dims[dim]}'" if dims is not None and len(dims) == width else f"dim {dim}"


MAX_FILES = 100
MAX_ROWS = 1_000_000
MAX_BAD = 10
FAR = 10.0
"""Ranges by which a value lies outside of its statistics when it is hardly of the same kind."""
OUTSIDE = {("q01", "q99"): 0.02, ("q10", "q90"): 0.2, ("min", "max"): 0.0}
"""Pairs of statistics -> the share of the rows that lies outside them when they are right."""
TOO_MANY = 0.03
"""How much larger a share outside quantiles may be: estimates are never exact."""
ROUNDING = 1e-6
"""Of a range: differences this small come from how the statistics were written."""
TOO_FAR = 0.1
"""How far the mean may be from that of the rows, in standard deviations, and how much the standard deviation may differ."""


@dataclass(frozen=True)
class RowsSeen:
    """What some or all rows of a feature say."""

    num_rows: int
    is_all: bool
    stats: Mapping[str, np.ndarray]
    """min, max, mean, std of the rows."""
    is_finite_D: np.ndarray
    outside: Mapping[tuple[str, str], np.ndarray]
    """Pair of statistics -> share of the rows outside them, by dim."""
    not_finite: tuple[str, ...] = ()
    """Episode and frame of the first rows with a value that is no finite number."""


def look_at_rows(
    meta: DatasetMeta,
    own: str,
    stats: Mapping[str, np.ndarray],
    *,
    max_files: int = MAX_FILES,
    max_rows: int = MAX_ROWS,
) -> RowsSeen | None:
    """Hold the rows of a feature (by its own name) against those pairs of `stats` that are whole; None without rows."""
    files, is_all = _spread_files(meta, max_files, max_rows)
    width = int(np.prod(meta.features[own].shape))
    pairs = [pair for pair in OUTSIDE if all(name in stats and stats[name].size == width for name in pair)]
    moments, counts = Moments(), {pair: np.zeros(width, np.int64) for pair in pairs}
    bad: list[str] = []
    for file in files:
        row = 0
        for part_ND in read_file(meta, own, file):
            bad += _not_finite(meta, file, part_ND, row)[: MAX_BAD - len(bad)]
            row += len(part_ND)
            moments.add(part_ND)
            for low, high in pairs:
                counts[low, high] += _count_outside(part_ND, stats[low], stats[high])
    if moments.num_rows == 0:
        return None
    shares = {pair: count / moments.num_rows for pair, count in counts.items()}
    return RowsSeen(moments.num_rows, is_all, moments.stats(), np.asarray(moments.is_finite_D), shares, tuple(bad))


def _not_finite(meta: DatasetMeta, file: str, part_ND: np.ndarray, first_row: int) -> list[str]:
    """Rows of a part of a file, as people name them."""
    if part_ND.dtype.kind != "f" or np.isfinite(part_ND).all():
        return []
    rows = np.flatnonzero(~np.isfinite(part_ND).all(axis=1))[:MAX_BAD] + first_row
    return [_place(meta, file, int(row)) for row in rows]


def _place(meta: DatasetMeta, file: str, row: int) -> str:
    episodes = meta.episodes
    begins = np.flatnonzero((episodes.data_offset <= row) & (row < episodes.data_offset + episodes.length))
    here = [position for position in begins.tolist() if meta.data_path(position) == file]
    if not here:
        return f"row {row} of {file}"
    return f"episode {episodes.index[here[0]]}, frame {row - episodes.data_offset[here[0]]}"


def _count_outside(part_ND: np.ndarray, low_D: np.ndarray, high_D: np.ndarray) -> np.ndarray:
    slack = ROUNDING * np.abs(high_D - low_D)
    return ((part_ND < low_D - slack) | (part_ND > high_D + slack)).sum(axis=0)


def _spread_files(meta: DatasetMeta, max_files: int, max_rows: int) -> tuple[list[str], bool]:
    """Data files, spread evenly, and whether they are all; those of episodes that are left out are not opened."""
    positions, group = one_per_file(meta)
    bad = {int(group[position]) for position in meta.left_out}
    usable = [file for file in range(len(positions)) if file not in bad]
    num_files = max(1, min(max_files, len(usable), max_rows * len(positions) // max(meta.num_frames, 1)))
    chosen = np.unique(np.linspace(0, len(usable) - 1, num_files).round().astype(int)) if usable else []
    return [meta.data_path(positions[usable[one]]) for one in chosen], len(chosen) == len(positions)


def doubts(
    stats: Mapping[str, np.ndarray], seen: RowsSeen, names: Sequence[str] | None
) -> Iterator[tuple[str, list[str]]]:
    """(what is wrong, the dims it is wrong of), for each pair of statistics that the rows do not bear out."""
    for (low, high), share_D in seen.outside.items():
        expected = OUTSIDE[low, high]
        limit = expected + TOO_MANY + 2 / seen.num_rows if expected else 0.0
        flat_D = is_flat(stats[low], stats[high])  # told of elsewhere
        dims = [
            f"{dim_text(dim, names, len(share_D))}: {100 * share_D[dim]:.3g} %"
            for dim in np.flatnonzero((share_D > limit) & ~flat_D)
        ]
        if dims:
            yield f"frames outside {low} and {high}, of which {100 * expected:g} % were expected", dims
    yield from _far(stats, seen, names)
    yield from _moved(stats, seen, names)


def _far(
    stats: Mapping[str, np.ndarray], seen: RowsSeen, names: Sequence[str] | None
) -> Iterator[tuple[str, list[str]]]:
    """Single values that no share tells of: a sensor's fault, or another unit."""
    for low, high in list(seen.outside)[:1]:
        range_D = stats[high] - stats[low]
        away_D = np.maximum(seen.stats["max"] - stats[high], stats[low] - seen.stats["min"])
        is_far = (away_D > FAR * range_D) & ~is_flat(stats[low], stats[high])
        dims = [
            f"{dim_text(dim, names, len(range_D))}: {seen.stats['min'][dim]:.4g} to {seen.stats['max'][dim]:.4g}"
            for dim in np.flatnonzero(is_far)
        ]
        if dims:
            yield f"values more than {FAR:g} times the range outside {low} and {high}", dims


def _moved(
    stats: Mapping[str, np.ndarray], seen: RowsSeen, names: Sequence[str] | None
) -> Iterator[tuple[str, list[str]]]:
    """Mean and standard deviation, where all rows were looked at."""
    if not seen.is_all or any(
        name not in stats or stats[name].shape != seen.stats["std"].shape for name in ("mean", "std")
    ):
        return
    std = np.maximum(seen.stats["std"], 1e-12)
    is_far = (np.abs(stats["mean"] - seen.stats["mean"]) > TOO_FAR * std) | (np.abs(stats["std"] / std - 1) > TOO_FAR)
    is_far &= seen.is_finite_D & (seen.stats["std"] > ROUNDING * np.abs(seen.stats["mean"]))
    dims = [
        f"{dim_text(dim, names, len(std))}: mean {stats['mean'][dim]:.4g}, std {stats['std'][dim]:.4g}; the rows have "
        f"{seen.stats['mean'][dim]:.4g}, {seen.stats['std'][dim]:.4g}"
        for dim in np.flatnonzero(is_far)
    ]
    if dims:
        yield "mean and std are not those of the rows", dims
