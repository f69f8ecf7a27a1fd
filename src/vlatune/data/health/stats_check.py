"""Check statistics for normalisation: reject invalid ones, warn of implausible ones.

Normalisation itself equals LeRobot's: a range of zero is replaced by 1e-8, so a constant becomes -1
and any other value about 1e8, which makes the dim useless for training.

`compare_with_rows` compares statistics with the rows: the share of values outside, and constant dims.
LeRobot averages the quantiles of episodes, which moves q01 and q99 inwards. At most MAX_FILES
parquet files and about MAX_ROWS rows, spread over the dataset, are read.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vlatune.data.meta.dataset_meta import DatasetMeta
from vlatune.data.meta.listing import one_per_file
from vlatune.data.meta.stats import read_file
from vlatune.findings import Finding

NEARLY_ZERO = 1e-6
"""Relative size of a range below which it only holds float32 rounding errors."""
EPS = 1e-8
"""Divisor that LeRobot uses instead of zero."""


def check_stats(
    where: str, key: str, stats: Mapping[str, np.ndarray], dims: Sequence[str] | None, *, width: int | None = None
) -> list[Finding]:
    """Return warnings on the two statistics (low, high) that normalise a feature.

    Raises ValueError if they are invalid. `dims` are the names of the feature's dims, if any, and
    `width` is their number.
    """
    (low_name, low), (high_name, high) = ((name, np.ravel(values)) for name, values in stats.items())
    remedy = f"remove '{key}' from the statistics or use --dataset.stats=computed: they are then computed from the rows"
    for name, values in ((low_name, low), (high_name, high)):
        if width is not None and len(values) != width:  # a single value would be broadcast silently
            raise ValueError(
                f"{where}: {key} has {len(values)} values of {name}, expected {width}, one for each dim of meta/info.json; {remedy}"
            )
        for dim in np.flatnonzero(~np.isfinite(values)):
            raise ValueError(
                f"{where}: {key} {dim_text(dim, dims, len(values))} has {name} = {values[dim]}, expected a finite number; fix "
                f"rows that are not finite (`vlatune inspect` lists them), or {remedy}"
            )
    has_range = high_name != "std"
    is_flat_D = is_flat(low, high) if has_range else high <= np.maximum(EPS, NEARLY_ZERO * np.abs(low))
    remedy, found = "leave the dimension out of the dataset if the robot does not use it", []
    for dim in np.flatnonzero(is_flat_D).tolist():
        effect = "it carries no information, and any other value becomes huge"
        if has_range and low[dim] > high[dim]:
            effect = "its values would be inverted"
        text = f"{key} {dim_text(dim, dims, len(low))} has {low_name} = {low[dim]:g} and {high_name} = {high[dim]:g}"
        found.append(Finding("warn", "statistics", f"{text}: {effect}", place=where, remedy=remedy))
    return found


def is_flat(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """True for dims whose range is only rounding error, or negative."""
    return high - low <= np.maximum(EPS, NEARLY_ZERO * np.maximum(np.abs(low), np.abs(high)))


def dim_text(dim: int, dims: Sequence[str] | None, width: int) -> str:
    """Return `dim 3 'gripper'`, or `dim 3` without names."""
    return f"dim {dim} '{dims[dim]}'" if dims is not None and len(dims) == width else f"dim {dim}"


MAX_FILES = 100
MAX_ROWS = 1_000_000
MAX_BAD = 10
OUTSIDE = {("q01", "q99"): 0.02, ("q10", "q90"): 0.2, ("min", "max"): 0.0}
"""Maps pairs of statistics to the expected share of rows outside them."""
TOO_MANY = 0.03
"""Tolerance of the share outside quantiles, because they are estimates."""
ROUNDING = 1e-6
"""Relative tolerance of a range for rounding in written statistics."""


@dataclass(frozen=True)
class RowsSeen:
    """Statistics of some or all rows of a feature."""

    num_rows: int
    is_all: bool
    stats: Mapping[str, np.ndarray]
    """min and max of the rows."""
    is_finite_D: np.ndarray
    outside: Mapping[tuple[str, str], np.ndarray]
    """Maps pairs of statistics to the share of rows outside them, per dim."""
    not_finite: tuple[str, ...] = ()
    """Episode and frame of the first rows with values that are not finite."""


def compare_with_rows(
    meta: DatasetMeta,
    own: str,
    stats: Mapping[str, np.ndarray],
    *,
    max_files: int = MAX_FILES,
    max_rows: int = MAX_ROWS,
) -> RowsSeen | None:
    """Compare the rows of a feature (own name) with its complete `stats`; None without rows."""
    files, is_all = _spread_files(meta, max_files, max_rows)
    width = int(np.prod(meta.features[own].shape))
    pairs = [pair for pair in OUTSIDE if all(name in stats and stats[name].size == width for name in pair)]
    counts = {pair: np.zeros(width, np.int64) for pair in pairs}
    num_rows, min_D, max_D, is_finite_D = 0, np.full(width, np.inf), np.full(width, -np.inf), np.ones(width, bool)
    bad: list[str] = []
    for file in files:
        row = 0
        for part_ND in read_file(meta, own, file):
            bad += itertools.islice(_not_finite(meta, file, part_ND, row), MAX_BAD - len(bad))
            row, num_rows, part_ND = row + len(part_ND), num_rows + len(part_ND), part_ND.astype(np.float64)
            min_D = np.minimum(min_D, part_ND.min(axis=0, initial=np.inf))
            max_D = np.maximum(max_D, part_ND.max(axis=0, initial=-np.inf))
            is_finite_D &= np.isfinite(part_ND).all(axis=0)
            for low, high in pairs:
                slack_D = ROUNDING * np.abs(stats[high] - stats[low])
                is_outside_ND = (part_ND < stats[low] - slack_D) | (part_ND > stats[high] + slack_D)
                counts[low, high] += is_outside_ND.sum(axis=0)
    if num_rows == 0:
        return None
    shares = {pair: count / num_rows for pair, count in counts.items()}
    return RowsSeen(num_rows, is_all, {"min": min_D, "max": max_D}, is_finite_D, shares, tuple(bad))


def _not_finite(meta: DatasetMeta, file: str, part_ND: np.ndarray, first_row: int) -> Iterator[str]:
    """Yield the locations of rows that are not finite in a part of a file."""
    if part_ND.dtype.kind != "f":
        return
    episodes = meta.episodes
    for row in (np.flatnonzero(~np.isfinite(part_ND).all(axis=1))[:MAX_BAD] + first_row).tolist():
        begins = np.flatnonzero((episodes.data_offset <= row) & (row < episodes.data_offset + episodes.length))
        here = next((position for position in begins.tolist() if meta.data_path(position) == file), None)
        is_known = here is not None
        yield f"episode {here}, frame {row - episodes.data_offset[here]}" if is_known else f"row {row} of {file}"


def _spread_files(meta: DatasetMeta, max_files: int, max_rows: int) -> tuple[list[str], bool]:
    """Return evenly spread data files without left-out episodes, and whether these are all."""
    positions, group = one_per_file(meta)
    bad = {int(group[position]) for position in meta.left_out}
    usable = [file for file in range(len(positions)) if file not in bad]
    num_files = max(1, min(max_files, len(usable), max_rows * len(positions) // max(meta.num_frames, 1)))
    chosen = np.unique(np.linspace(0, len(usable) - 1, num_files).round().astype(int)) if usable else []
    return [meta.data_path(positions[usable[one]]) for one in chosen], len(chosen) == len(positions)


def doubts(stats: Mapping[str, np.ndarray], seen: RowsSeen, names: Sequence[str] | None) -> Iterator[Finding]:
    """Yield a warning, with the affected dims, for each pair of statistics that contradicts the rows."""
    for (low, high), share_D in seen.outside.items():
        expected = OUTSIDE[low, high]
        limit = expected + TOO_MANY + 2 / seen.num_rows if expected else 0.0
        is_outside = (share_D > limit) & ~is_flat(stats[low], stats[high])  # flat dims are reported elsewhere
        dims = [
            f"{dim_text(int(dim), names, len(share_D))}: {100 * share_D[dim]:.3g} %"
            for dim in np.flatnonzero(is_outside)
        ]
        if dims:
            text = f"frames outside {low} and {high}, expected {100 * expected:g} %"
            yield Finding("warn", "values", text, examples=tuple(dims), count=len(dims))
