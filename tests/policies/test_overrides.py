"""Fields of LeRobot's config that a run changes: known by the policy's card, kept with the run, held against the base."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from vlatune import cli
from vlatune.config import DatasetConfig, PolicyConfig, RunConfig, to_json
from vlatune.config_checks import validate
from vlatune.flags import config_from_dict, parse_flags
from vlatune.policies import registry
from vlatune.policies.base import ModuleOptions
from vlatune.policies.base_folder import read_config
from vlatune.policies.processors import Schema, is_count, is_numbers
from vlatune.policies.registry import Override, Policy, at_least
from vlatune.run_setup import make_setup
from vlatune.train.driver.resume_rules import config_changes

GIVEN = ["--dataset.root=data", "--policy.path=base"]
CARD = Policy(
    type="walker",
    title="Walker",
    adapter=lambda: None,
    train_ways={"expert": "every weight"},
    recipes={"walker-small": registry.Recipe("small", {"policy": {"type": "walker", "legs": 6}}, small=True)},
    overrides={
        "legs": Override(int, "How many.", 4, at_least(2)),
        "widths": Override(tuple[int, ...], "Of its layers.", (8, 8), at_least(1), with_base="any"),
        "gait": Override(Literal["trot", "pace"] | None, "How it goes.", "trot", with_base="any"),
        "blind": Override(bool, "Without pictures.", False, with_base="unused"),
    },
)


@pytest.fixture(autouse=True)
def _walker(monkeypatch):
    found = registry.get_policy
    monkeypatch.setitem(registry.PACKAGES, "walker", "walker")
    monkeypatch.setattr(registry, "get_policy", lambda name: CARD if name == "walker" else found(name))
    monkeypatch.setattr("vlatune.config.get_policy", registry.get_policy)
    monkeypatch.setattr("vlatune.config_checks.get_policy", registry.get_policy)
    monkeypatch.setattr("vlatune.recipes.get_policy", registry.get_policy)


def parsed(*words: str) -> RunConfig:
    return parse_flags(["--policy.type=walker", *GIVEN, *words], RunConfig)


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        (["--policy.legs=6"], {"legs": 6}),
        (["--policy.widths=[3,5]"], {"widths": (3, 5)}),
        (["--policy.gait=pace", "--policy.legs", "8"], {"gait": "pace", "legs": 8}),
        (["--policy.gait=null"], {"gait": None}),
        (["--policy.blind"], {"blind": True}),
        ([], {}),
        (["--recipe=walker-small"], {"legs": 6}),
        (["--recipe=walker-small", "--policy.legs=8"], {"legs": 8}),
    ],
)
def test_flags_become_values_of_the_cards_kinds_and_come_back_from_json(words, overrides):
    config = parsed(*words)
    assert config.policy.overrides == overrides
    validate(config)
    stored = to_json(config)
    assert stored["policy"].items() >= json.loads(json.dumps(overrides)).items()
    assert config_from_dict(RunConfig, stored, "config.json") == config


def test_a_file_has_them_under_the_same_names(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("policy: {type: walker, legs: 6, widths: [1, 2]}\n")
    config = parse_flags([f"--config_path={file}", "--policy.widths=[3]"], RunConfig)
    assert config.policy.overrides == {"legs": 6, "widths": (3,)}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--policy.leg=6"], "unknown flag --policy.leg; did you mean --policy.legs?"),
        (["--policy.legs=some"], "--policy.legs=some: expected a whole number"),
        (["--policy.legs=1"], "--policy.legs=1: must be 2 or more"),
        (["--policy.widths=[0,3]"], "--policy.widths=(0, 3): must be 1 or more"),
        (["--policy.gait=run"], "--policy.gait=run: expected one of trot, pace"),
        (["--policy.overrides={}"], "unknown flag --policy.overrides"),
        (
            ["--policy.num_inference_steps=5"],
            "--policy.num_inference_steps=5: Walker (--policy.type=walker) has no setting num_inference_steps; it has legs, ",
        ),
    ],
)
def test_what_the_policy_does_not_have_or_take_is_refused(words, says):
    with pytest.raises(ValueError, match=r".") as caught:
        validate(parsed(*words))
    assert str(caught.value).startswith(says)


def test_a_run_that_goes_on_must_have_the_same():
    then, now = parsed("--policy.legs=6", "--policy.gait=pace"), parsed("--policy.legs=8", "--policy.blind=true")
    changes = list(config_changes(now, to_json(then), "there"))
    assert [change.text for change in changes] == [
        "--policy.blind was left out, now True",
        "--policy.gait was 'pace', now left out",
        "--policy.legs was 6, now 8",
    ]
    assert {change.group for change in changes} == {"config"}
    assert list(config_changes(then, to_json(then), "there")) == []


SCHEMA = Schema("walker", config={"legs": is_count, "widths": is_numbers})


@pytest.mark.parametrize(
    ("stored", "given", "found"),
    [
        ({"legs": 6}, {"legs": 6}, {"legs": 6}),
        ({}, {"legs": 4}, {"legs": 4}),  # LeRobot's default, which the base has by leaving it out
        ({"widths": [1, 2]}, {"widths": (3, 5)}, {"widths": [3, 5]}),
        ({"legs": 6}, {"legs": 4}, "--policy.legs=4: the weights of the base model '.*' are made for 6"),
        ({}, {"legs": 6}, "--policy.legs=6: the weights of the base model '.*' are made for 4"),
    ],
)
def test_a_base_takes_what_its_weights_allow(tmp_path, stored, given, found):
    (tmp_path / "config.json").write_text(json.dumps({"type": "walker", **stored}))
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            read_config(tmp_path, SCHEMA, given)
    else:
        assert read_config(tmp_path, SCHEMA, given).items() >= found.items()


def test_help_lists_them_by_policy(capsys):
    assert cli.main(["train", "--help"]) == cli.OK
    out = " ".join(capsys.readouterr().out.split())
    assert "settings of PI0.5 (--policy.type=pi05), as LeRobot's: --policy.chunk_size=INT Actions in a chunk." in out


def test_a_flow_policy_takes_another_chunk_on_the_same_weights(dataset_v3: Path, small_base: Path, tmp_path: Path):
    """From the data to the module and what is exported."""
    base = tmp_path / "base"
    shutil.copytree(small_base, base)
    policy = PolicyConfig(path=str(base), overrides={"chunk_size": 3, "n_action_steps": 2})
    config = RunConfig(dataset=DatasetConfig(root=(str(dataset_v3),)), policy=policy)
    setup = make_setup(config)
    assert setup.policy.horizon == 3
    module = setup.adapter.load_module(setup.policy, setup.binding, ModuleOptions.of(policy))
    assert (module.policy.config.chunk_size, module.policy.model.config.n_action_steps) == (3, 2)
    from vlatune.checkpoint.policy_files import make_policy_files

    stored = json.loads(make_policy_files(setup.policy, setup.binding, setup.stats, dtype=None)["config.json"])
    assert (stored["chunk_size"], stored["n_action_steps"]) == (3, 2)
    with pytest.raises(ValueError, match=r"n_action_steps is 5, and a chunk has 3 actions.*--policy.n_action_steps=3"):
        make_setup(replace(config, policy=replace(policy, overrides={"chunk_size": 3})))
