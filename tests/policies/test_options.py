"""Settings of a policy: refused where they cannot work, and handed to the module as they are."""

from dataclasses import fields, replace

import pytest

from vlatune.config import DatasetConfig, PolicyConfig, RunConfig
from vlatune.config_checks import validate
from vlatune.policies.base import ModuleOptions

POLICY = PolicyConfig(path="base")
CONFIG = RunConfig(dataset=DatasetConfig(root=("data",)), policy=POLICY)


def test_the_module_gets_what_the_config_says():
    config = PolicyConfig(
        path="base",
        train="lora",
        dtype="bfloat16",
        flow_samples=8,
        gradient_checkpointing=True,
        compile=True,
        lora_rank=4,
        lora_alpha=2.0,
        keep_features=True,
    )
    options = ModuleOptions.of(config)
    for field in fields(ModuleOptions):
        assert getattr(options, field.name) == getattr(config, field.name) != getattr(POLICY, field.name), field.name


@pytest.mark.parametrize("train", ["heads", "expert", "lora", "full"])
def test_every_way_to_train_is_accepted(train):
    validate(replace(CONFIG, policy=replace(POLICY, train=train)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"train": "some"}, "--policy.train=some: must be one of heads, expert, lora, full"),
        ({"flow_samples": 0}, "--policy.flow_samples=0: must be 1 or more"),
        ({"lora_rank": 0}, "--policy.lora_rank=0: must be 1 or more"),
        ({"lora_alpha": 0.0}, "--policy.lora_alpha=0.0: must be above 0"),
        ({"dtype": "float16"}, "--policy.dtype=float16: must be one of float32, bfloat16"),
    ],
)
def test_what_cannot_work_is_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        validate(replace(CONFIG, policy=replace(POLICY, **changes)))
