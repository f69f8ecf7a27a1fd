"""The demo of every policy: its small twin learns the world's task on a CPU, through the command line."""

import json
import re

import pytest

from vlatune import cli, demo
from vlatune.config import DemoConfig
from vlatune.dataset.meta.dataset_meta import load_meta
from vlatune.policies.registry import PACKAGES, get_policy
from vlatune.report.run_folder import read_config

OTHERS = [name for name in PACKAGES if name != next(iter(PACKAGES))]
"""The first one is the demo of `make demo`, which other tests run."""


@pytest.mark.parametrize("name", PACKAGES)
def test_every_policy_has_a_demo_in_a_folder_of_its_own(name):
    assert get_policy(name).small_recipe in get_policy(name).recipes
    assert DemoConfig(policy=name).run_dir.name == ("demo" if name not in OTHERS else f"demo-{name}")


def test_a_world_of_the_other_kind_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "EPISODES", 4)
    folder = demo.ensure_dataset(tmp_path / "dataset", seed=0, sentences=False)
    assert load_meta(str(folder)).tasks == ("move to the red pad",)
    assert demo.ensure_dataset(folder, seed=0, sentences=False) == folder
    with pytest.raises(ValueError, match="made for the demo of another kind of policy: it has one task"):
        demo.ensure_dataset(folder, seed=0)


def test_an_unknown_policy_is_refused(capsys):
    assert cli.main(["demo", "--policy=akt"]) == cli.MISUSED
    assert re.search(r"--policy\.type=akt: must be one of pi05, .*did you mean act", capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("name", OTHERS)
def test_its_small_twin_learns(name, tmp_path):
    """Held-out error at most half of the mean action's, and worse without pictures and without the sentence."""
    assert cli.main(["demo", f"--policy={name}", f"--output_dir={tmp_path / 'demo'}"]) == cli.OK
    figures = json.loads((tmp_path / "demo/eval.json").read_text())
    assert figures["action_error"] <= 0.5 * figures["mean_action_error"], figures
    assert figures["blank_images_error"] > 1.5 * figures["action_error"], figures
    if get_policy(name).has_prompt:
        assert figures["blank_sentence_error"] > 1.5 * figures["action_error"], figures
    assert read_config(tmp_path / "demo").policy.type == name
