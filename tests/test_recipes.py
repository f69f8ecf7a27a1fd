"""Every recipe is a config that parses and passes the checks of a run."""

from dataclasses import replace

import pytest
from repository_files import ROOT

from vlatune.config import PolicyConfig, RunConfig
from vlatune.config_checks import validate
from vlatune.flags import parse_flags
from vlatune.policies.registry import all_recipes
from vlatune.recipes import get_recipe

GIVEN = ["--dataset.root=data", "--policy.path=base"]
"""What a recipe leaves to the user: at least the dataset."""


@pytest.mark.parametrize("name", all_recipes())
def test_recipe_is_a_valid_config(name: str) -> None:
    config = parse_flags([f"--recipe={name}", *GIVEN], RunConfig)
    validate(config)
    assert config.recipe == name
    assert config.scheduler.num_warmup_steps < config.scheduler.num_decay_steps
    assert config.scheduler.decay_lr < config.optimizer.lr


@pytest.mark.parametrize("train", ["heads", "expert", "full"])
def test_pi05_recipes_train_what_they_say(train: str) -> None:
    config = parse_flags([f"--recipe=pi05-{train}"], RunConfig)
    expected = PolicyConfig(path="lerobot/pi05_base", type="pi05", train=train, dtype="bfloat16")
    assert config.policy == replace(expected, gradient_checkpointing=train == "full")


def test_pi05_numbers_are_lerobots_presets() -> None:
    from lerobot.policies.pi05 import PI05Config

    preset = PI05Config()
    config = parse_flags(["--recipe=pi05-full"], RunConfig)
    assert config.optimizer.lr == preset.optimizer_lr
    assert config.optimizer.betas == tuple(preset.optimizer_betas)
    assert config.optimizer.eps == preset.optimizer_eps
    assert config.optimizer.weight_decay == preset.optimizer_weight_decay
    assert config.optimizer.grad_clip_norm == preset.optimizer_grad_clip_norm
    assert config.scheduler.num_warmup_steps == preset.scheduler_warmup_steps
    assert config.scheduler.num_decay_steps == preset.scheduler_decay_steps
    assert config.scheduler.decay_lr == preset.scheduler_decay_lr


def test_the_readme_names_every_recipe() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in all_recipes() if f"`{name}`" not in text] == []


def test_a_recipe_is_handed_out_as_a_copy() -> None:
    get_recipe("tiny")["policy"]["train"] = "heads"
    assert get_recipe("tiny")["policy"]["train"] == "full"


def test_a_misspelt_recipe_names_the_close_one() -> None:
    with pytest.raises(ValueError, match="unknown recipe 'pi05_full'; did you mean pi05-full"):
        get_recipe("pi05_full")
