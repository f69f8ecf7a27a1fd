"""What a dataset's statistics would spoil is said, or refused, on the driver before anything starts."""

import json
import shutil
from pathlib import Path

import pytest

from vlatune.config import DatasetConfig, PolicyConfig, RunConfig
from vlatune.run_setup import make_setup


@pytest.fixture
def config_with(dataset_v3, small_base, tmp_path):
    """(q01, q99) of the last action dimension -> the config of a run on such a dataset."""

    def make(low: float, high: float) -> RunConfig:
        root = Path(shutil.copytree(dataset_v3, tmp_path / "dataset"))
        stats = json.loads((root / "meta/stats.json").read_text())
        stats["action"]["q01"][-1], stats["action"]["q99"][-1] = low, high
        (root / "meta/stats.json").write_text(json.dumps(stats))
        return RunConfig(dataset=DatasetConfig(root=(str(root),)), policy=PolicyConfig(path=str(small_base)))

    return make


def test_a_dimension_without_information_is_warned_of_once(config_with, capsys):
    config = config_with(0.5, 0.5)
    make_setup(config)
    assert capsys.readouterr().err == ""
    names = make_setup(config, preflight=True).binding.action_names
    said = capsys.readouterr().err
    assert f"action dim {len(names) - 1} '{names[-1]}' has q01 = q99 = 0.5: it carries no information" in said
    assert said.count("warning:") == 1


def test_statistics_that_are_no_numbers_are_refused(config_with):
    with pytest.raises(ValueError, match=r"action dim \d+ '.*' has q99 = nan, a finite number was expected"):
        make_setup(config_with(0.0, float("nan")))
