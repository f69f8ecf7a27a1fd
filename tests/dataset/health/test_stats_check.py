"""Degenerate statistics: named by feature and dimension; what is no number is refused."""

import numpy as np
import pytest

from vlatune.dataset.health.stats_check import check_stats

DIMS = ("x", "y", "z", "gripper")


def quantiles(low: list[float], high: list[float]) -> dict[str, np.ndarray]:
    return {"q01": np.array(low), "q99": np.array(high)}


def test_healthy_statistics_are_passed_in_silence():
    assert check_stats("d", "action", quantiles([-1, 0, 1e-3, -5], [1, 1e-2, 2e-3, 5]), DIMS) == []
    assert check_stats("d", "action", {"mean": np.zeros(2), "std": np.full(2, 1e-3)}, None) == []


def test_a_dimension_that_never_moves_is_named():
    (warning,) = check_stats("d", "action", quantiles([-1, -1, -1, 0.5], [1, 1, 1, 0.5]), DIMS)
    assert warning.startswith("d: action dim 3 'gripper' has q01 = q99 = 0.5: it carries no information")


@pytest.mark.parametrize(
    ("stats", "words"),
    [
        (
            quantiles([0, 1000.0], [1, 1000.0001]),
            "dim 1 has q01 and q99 = 1000, 0.0001 apart: it carries no information",
        ),
        (quantiles([0, 0], [1, 1e-9]), "dim 1 has q01 and q99 = 0, 1e-09 apart"),
        (quantiles([3, 0], [1, 1]), "dim 0 has q01 = 3 above q99 = 1: its values would be turned upside down"),
        ({"min": np.array([2.0]), "max": np.array([2.0])}, "dim 0 has min = max = 2"),
        (
            {"mean": np.array([2.0]), "std": np.array([0.0])},
            "dim 0 has mean = 2 and std = 0: it carries no information",
        ),
    ],
)
def test_what_is_nearly_flat_or_upside_down(stats, words):
    (warning,) = check_stats("d", "observation.state", stats, None)
    assert words in warning


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["q01", "q99"])
def test_what_is_not_finite_is_refused_with_the_remedy(bad, side):
    stats = quantiles([0, 0, 0, 0], [1, 1, 1, 1])
    stats[side] = stats[side].astype(float)
    stats[side][2] = bad
    with pytest.raises(
        ValueError, match=rf"d: action dim 2 'z' has {side} = {bad}, .* take 'action' out of meta/stats"
    ):
        check_stats("d", "action", stats, DIMS)


def test_names_that_do_not_fit_the_width_are_not_used():
    (warning,) = check_stats("d", "action", quantiles([1.0], [1.0]), DIMS)
    assert "action dim 0 has" in warning
