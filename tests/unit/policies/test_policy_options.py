"""Options of a policy: flags from its dataclass, saved with the run, checked against the base model."""

import json
import sys

import pytest

from vlatune import cli
from vlatune.config.flags import config_from_dict, flags_of, parse_flags
from vlatune.config.settings import RunConfig, to_json
from vlatune.config.validate import validate
from vlatune.policies.base_folder import read_config
from vlatune.policies.processors import Schema, is_count, is_numbers
from vlatune.train.driver.resume_rules import config_changes

PACKAGE = '''
from dataclasses import dataclass
from typing import Literal
from vlatune.config.fields import setting
from vlatune.config.settings import PolicyConfig, RunConfig
from vlatune.registry import PolicyInfo, Recipe

@dataclass(frozen=True)
class Options:
    legs: int = setting(4, minimum=2)
    """Number of legs."""
    widths: tuple[int, ...] = setting((8, 8), minimum=1, with_base="any")
    gait: Literal["trot", "pace"] | None = setting("trot", with_base="any")
    blind: bool = setting(False, with_base="unused")

POLICY = PolicyInfo(
    type="walker",
    title="Walker",
    adapter="walker_policy:WalkerAdapter",
    train_modes={"expert": "every weight"},
    recipes={"walker-tiny": Recipe("tiny", RunConfig(policy=PolicyConfig(type="walker", overrides={"legs": 6})), small=True)},
    options=Options,
)
'''


@pytest.fixture(scope="module", autouse=True)
def _walker(tmp_path_factory):
    """An installed package with a policy."""
    site = tmp_path_factory.mktemp("site")
    (site / "walker_policy.py").write_text(PACKAGE)
    info = site / "walker_policy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: walker-policy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vlatune.policies]\nwalker = walker_policy:POLICY\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield
    sys.modules.pop("walker_policy", None)


def parsed(*words: str) -> RunConfig:
    return parse_flags(["--policy.type=walker", "--dataset.root=data", "--policy.path=base", *words], RunConfig)


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        (["--policy.widths=[3,5]"], {"widths": (3, 5)}),
        (["--policy.gait=pace", "--policy.legs", "8"], {"gait": "pace", "legs": 8}),
        (["--policy.gait=null"], {"gait": None}),
        (["--policy.blind"], {"blind": True}),
        ([], {}),
        (["--recipe=walker-tiny"], {"legs": 6}),
        (["--recipe=walker-tiny", "--policy.legs=8"], {"legs": 8}),
    ],
)
def test_flags_are_parsed_and_saved_with_the_run(words, overrides):
    config = parsed(*words)
    assert config.policy.overrides == overrides
    validate(config)
    assert config_from_dict(RunConfig, json.loads(json.dumps(to_json(config))), "config.json") == config
    assert parse_flags(flags_of(config), RunConfig) == config


def test_a_config_file_has_the_same_names(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("policy: {type: walker, legs: 6, widths: [1, 2]}\n")
    config = parse_flags([f"--config_path={file}", "--policy.widths=[3]"], RunConfig)
    assert config.policy.overrides == {"legs": 6, "widths": (3,)}


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--policy.leg=6", "unknown flag --policy.leg; did you mean --policy.legs?"),
        ("--policy.legs=some", "--policy.legs=some: expected a whole number"),
        ("--policy.legs=1", "--policy.legs=1: must be 2 or more"),
        ("--policy.widths=[0,3]", "--policy.widths=(0, 3): must be 1 or more"),
        ("--policy.gait=run", "--policy.gait=run: expected one of trot, pace"),
        ("--policy.overrides={}", "unknown flag --policy.overrides"),
        (
            "--policy.num_inference_steps=5",
            "--policy.num_inference_steps=5: Walker (--policy.type=walker) has no setting",
        ),
    ],
)
def test_unknown_options_and_invalid_values_are_rejected(flag, message):
    with pytest.raises(ValueError, match=r".") as caught:
        validate(parsed(flag))
    assert str(caught.value).startswith(message)


def test_a_resumed_run_must_have_the_same_options():
    old, new = parsed("--policy.legs=6", "--policy.gait=pace"), parsed("--policy.legs=8", "--policy.blind=true")
    changes = list(config_changes(new, to_json(old), "there"))
    assert [change.text.split()[0] for change in changes] == ["--policy.blind", "--policy.gait", "--policy.legs"]
    assert list(config_changes(old, to_json(old), "there")) == []


@pytest.mark.parametrize(
    ("stored", "given", "found"),
    [
        ({"legs": 6}, {"legs": 6}, {"legs": 6}),
        ({}, {"legs": 4}, {"legs": 4}),  # LeRobot's default
        ({"widths": [1, 2]}, {"widths": (3, 5)}, {"widths": [3, 5]}),
        ({"legs": 6}, {"legs": 4}, "--policy.legs=4: the weights of the base model '.*' require 6"),
        ({}, {"legs": 6}, "--policy.legs=6: the weights of the base model '.*' require 4"),
    ],
)
def test_a_base_model_accepts_what_its_weights_allow(tmp_path, stored, given, found):
    (tmp_path / "config.json").write_text(json.dumps({"type": "walker", **stored}))
    schema = Schema("walker", config={"legs": is_count, "widths": is_numbers})
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            read_config(tmp_path, schema, given)
    else:
        assert read_config(tmp_path, schema, given).items() >= found.items()


def test_help_lists_options_and_recipes_of_every_policy(capsys):
    assert cli.main(["train", "--help"]) == cli.OK
    out = " ".join(capsys.readouterr().out.split())
    assert "--policy.legs=INT Number of legs. (default 4)" in out
    assert "walker Walker: expert (every weight)" in out
    assert "walker-tiny tiny" in out
