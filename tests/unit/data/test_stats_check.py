"""Statistics that make normalisation useless are reported per dim; invalid ones are errors."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from vlatune.config.settings import DatasetConfig, PolicyConfig, RunConfig
from vlatune.data.health.stats_check import check_stats
from vlatune.run_setup import make_setup

DIMS = ("x", "y", "z", "gripper")


def quantiles(low: list[float], high: list[float]) -> dict[str, np.ndarray]:
    return {"q01": np.array(low), "q99": np.array(high)}


def test_valid_statistics_give_no_warning():
    assert check_stats("d", "action", quantiles([-1, 0, 1e-3, -5], [1, 1e-2, 2e-3, 5]), DIMS) == []
    assert check_stats("d", "action", {"mean": np.zeros(2), "std": np.full(2, 1e-3)}, None) == []


@pytest.mark.parametrize(
    ("stats", "dim"),
    [
        (quantiles([-1, -1, -1, 0.5], [1, 1, 1, 0.5]), 3),
        (quantiles([0, 1000.0], [1, 1000.0001]), 1),
        (quantiles([0, 0], [1, 1e-9]), 1),
        (quantiles([3, 0], [1, 1]), 0),
        ({"min": np.array([2.0]), "max": np.array([2.0])}, 0),
        ({"mean": np.array([2.0]), "std": np.array([0.0])}, 0),
    ],
)
def test_a_dim_without_range_is_named(stats, dim):
    (warning,) = check_stats("d", "action", stats, DIMS)
    name = " 'gripper'" if dim == 3 else ""  # names are used only if their number fits
    assert (warning.level, warning.place) == ("warn", "d")
    assert warning.text.startswith(f"action dim {dim}{name} has ")
    assert warning.remedy


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["q01", "q99"])
def test_a_statistic_that_is_not_finite_is_an_error(bad, side):
    stats = quantiles([0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0])
    stats[side][2] = bad
    with pytest.raises(ValueError, match=rf"d: action dim 2 'z' has {side} = {bad}, .*--dataset.stats=computed"):
        check_stats("d", "action", stats, DIMS)


def test_statistics_of_another_width_are_an_error():
    with pytest.raises(ValueError, match="expected 3"):
        check_stats("d", "action", quantiles([0.0], [1.0]), None, width=3)


def test_a_constant_dim_gives_one_warning_before_a_run_starts(dataset_v3, small_base, tmp_path, capsys):
    root = Path(shutil.copytree(dataset_v3, tmp_path / "dataset"))
    stats = json.loads((root / "meta/stats.json").read_text())
    stats["action"]["q01"][-1] = stats["action"]["q99"][-1] = 0.5
    (root / "meta/stats.json").write_text(json.dumps(stats))
    config = RunConfig(dataset=DatasetConfig(root=(str(root),)), policy=PolicyConfig(path=str(small_base)))
    make_setup(config)
    assert capsys.readouterr().err == ""
    names = make_setup(config, preflight=True).binding.action_names
    errors = capsys.readouterr().err
    assert f"action dim {len(names) - 1} '{names[-1]}' has q01 = 0.5 and q99 = 0.5" in errors
    assert errors.count("warning:") == 1
