"""Recipes are valid configs, and settings that cannot work are rejected before a run starts."""

from typing import Any

import pytest
from lerobot.configs import PreTrainedConfig
from lerobot.policies import factory  # noqa: F401  (registers the policies)
from repository_files import ROOT

from vlatune.config.flags import parse_flags
from vlatune.config.settings import RunConfig
from vlatune.config.validate import validate
from vlatune.registry import all_recipes

GIVEN = ["--dataset.root=data", "--policy.path=base"]


@pytest.mark.parametrize("name", all_recipes())
def test_every_recipe_is_a_valid_config(name: str) -> None:
    config = parse_flags([f"--recipe={name}", *GIVEN], RunConfig)
    validate(config)
    assert config.recipe == name
    assert config.scheduler.num_warmup_steps < config.scheduler.num_decay_steps
    assert config.scheduler.decay_lr < config.optimizer.lr
    assert f"`{name}`" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in all_recipes() if "tiny" not in name])
def test_optimizer_and_schedule_are_lerobots_presets(name: str) -> None:
    config = parse_flags([f"--recipe={name}"], RunConfig)
    preset: Any = PreTrainedConfig.get_choice_class(config.policy.type)(device="cpu")
    optimizer, schedule = preset.get_optimizer_preset(), preset.get_scheduler_preset()
    assert config.optimizer.type == optimizer.type
    assert config.optimizer.betas == tuple(optimizer.betas)
    for field in ("lr", "eps", "weight_decay", "grad_clip_norm"):
        assert getattr(config.optimizer, field) == getattr(optimizer, field), field
    assert config.scheduler.type == (schedule.type if schedule else "none")
    for field in ("num_warmup_steps", "num_decay_steps", "decay_lr"):
        assert not hasattr(schedule, field) or getattr(config.scheduler, field) == getattr(schedule, field), field


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps=0"], "--steps=0: must be 1 or more"),
        (["--seed=1000000000000001"], "--seed=1000000000000001: must be 1000000000000000 or less"),
        (["--optimizer.lr=0"], "--optimizer.lr=0.0: must be above 0"),
        (["--optimizer.grad_clip_norm=-1"], "--optimizer.grad_clip_norm=-1.0: must be 0 or more"),
        (["--optimizer.ema_decay=1"], "--optimizer.ema_decay=1.0: must be at least 0 and below 1"),
        (["--scheduler.num_decay_steps=0"], "--scheduler.num_decay_steps=0: must be 1 or more"),
        (["--scheduler.decay_lr=-1"], "--scheduler.decay_lr"),
        (["--optimizer.betas=[0.9,1]"], "--optimizer.betas=(0.9, 1.0): must be at least 0 and below 1"),
        (["--policy.train=some"], "--policy.train=some: must be one of heads, expert, lora, full"),
        (["--policy.lora_alpha=0"], "--policy.lora_alpha=0.0: must be above 0"),
        (
            ["--policy.type=act", "--policy.keep_prefix=true"],
            "--policy.keep_prefix=true: ACT (--policy.type=act) has no such setting",
        ),
        (
            ["--scheduler.num_warmup_steps=9", "--scheduler.num_decay_steps=8"],
            "--scheduler.num_warmup_steps=9: must be",
        ),
        (["--early_stop=2", "--eval_freq=0"], "--early_stop=2: the run has no validation"),
        (["--storage_path=s3://user:secret@bucket"], "--storage_path: the address contains a password"),
        (["--job_name=a/b"], "--job_name=a/b: must be the name of a folder"),
        (["--dataset.weight=[1,2]"], "--dataset.weight: 2 weights for 1 datasets"),
        (["--dataset.root=[]"], "no dataset: name one with --dataset.root"),
        (["--policy.path=null"], "no base model: name one with --policy.path"),
    ],
)
def test_settings_that_cannot_work_are_rejected(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        validate(parse_flags([*(one for one in GIVEN if one.split("=")[0] not in flags[0]), *flags], RunConfig))
    assert str(caught.value).startswith(message)
