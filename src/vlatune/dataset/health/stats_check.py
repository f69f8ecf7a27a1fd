"""Statistics that would spoil normalisation: refused where no number comes out of it, warned of where no sense does.

Normalising itself stays LeRobot's to the last bit: a range of exactly zero is replaced by 1e-8, so that the constant
value becomes -1 and any other value about 1e8. A policy trained on that learns nothing of the dimension at best. Pure.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

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
