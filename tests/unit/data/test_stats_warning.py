"""Statistics that spoil normalisation are reported before a run starts."""

import json
import shutil
from pathlib import Path

import pytest

from vlatune.config.settings import DatasetConfig, PolicyConfig, RunConfig
from vlatune.run_setup import make_setup


@pytest.fixture
def config_with(dataset_v3, small_base, tmp_path):
    """Make the config of a run with these statistics of the last action dim."""

    def make(low: float, high: float) -> RunConfig:
        root = Path(shutil.copytree(dataset_v3, tmp_path / "dataset"))
        stats = json.loads((root / "meta/stats.json").read_text())
        stats["action"]["q01"][-1], stats["action"]["q99"][-1] = low, high
        (root / "meta/stats.json").write_text(json.dumps(stats))
        return RunConfig(dataset=DatasetConfig(root=(str(root),)), policy=PolicyConfig(path=str(small_base)))

    return make


def test_a_constant_dim_gives_one_warning(config_with, capsys):
    config = config_with(0.5, 0.5)
    make_setup(config)
    assert capsys.readouterr().err == ""
    names = make_setup(config, preflight=True).binding.action_names
    errors = capsys.readouterr().err
    assert f"action dim {len(names) - 1} '{names[-1]}' has q01 = 0.5 and q99 = 0.5" in errors
    assert errors.count("warning:") == 1


def test_statistics_that_are_not_finite_are_an_error(config_with):
    with pytest.raises(ValueError, match=r"action dim \d+ '.*' has q99 = nan, expected a finite number"):
        make_setup(config_with(0.0, float("nan")))
