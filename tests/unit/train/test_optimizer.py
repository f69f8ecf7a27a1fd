"""Schedules, parameter groups and optimizers equal LeRobot's."""

import pytest
import torch
from lerobot.optim import CosineDecayWithWarmupSchedulerConfig
from lerobot.optim.schedulers import ConstantWithWarmupSchedulerConfig, DiffuserSchedulerConfig

from vlatune.config.settings import OptimizerConfig, SchedulerConfig
from vlatune.train.worker.optimizer import learning_rate, make_groups, make_optimizer, set_learning_rate

CONFIG = SchedulerConfig(num_warmup_steps=10, num_decay_steps=100, decay_lr=2.5e-6)


@pytest.mark.parametrize("total_steps", [20, 57, 100, 250])
def test_rates_equal_lerobots(total_steps):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter], lr=2.5e-5)
    theirs = CosineDecayWithWarmupSchedulerConfig(
        peak_lr=2.5e-5, decay_lr=2.5e-6, num_warmup_steps=10, num_decay_steps=100
    ).build(optimizer, total_steps)
    for optimizer_step in range(total_steps):
        ours = learning_rate(optimizer_step, total_steps, 2.5e-5, CONFIG)
        assert ours == pytest.approx(theirs.get_last_lr()[0], rel=1e-12), optimizer_step
        optimizer.step()
        theirs.step()


def rates_of(theirs, optimizer: torch.optim.Optimizer, steps: int) -> list[list[float]]:
    """Return the learning rates of the groups at each step of LeRobot's scheduler."""
    found = []
    for _ in range(steps):
        found.append(list(theirs.get_last_lr()))
        optimizer.step()
        theirs.step()
    return found


@pytest.mark.parametrize("total_steps", [20, 57])
@pytest.mark.parametrize(
    "theirs",
    [DiffuserSchedulerConfig(num_warmup_steps=10), ConstantWithWarmupSchedulerConfig(num_warmup_steps=10)],
    ids=lambda one: one.type,
)
def test_other_schedules_are_lerobots_for_every_group(theirs, total_steps):
    config = SchedulerConfig(num_warmup_steps=10, type=theirs.type)
    weights = {"head.w": torch.nn.Parameter(torch.zeros(1)), "backbone.w": torch.nn.Parameter(torch.zeros(1))}
    ours = make_optimizer(make_groups(weights, 1e-4, {"backbone": 0.1}), OptimizerConfig(lr=1e-4))
    peer = torch.optim.AdamW(
        [{"params": [weights["head.w"]]}, {"params": [weights["backbone.w"]], "lr": 1e-5}], lr=1e-4
    )
    for step, expected in enumerate(rates_of(theirs.build(peer, total_steps), peer, total_steps)):
        set_learning_rate(ours, learning_rate(step, total_steps, 1e-4, config))
        assert [group["lr"] for group in ours.param_groups] == pytest.approx(expected, rel=1e-12), step


def test_without_a_scheduler_the_rate_is_constant():
    config = SchedulerConfig(type="none")
    assert {learning_rate(step, 100, 3e-4, config) for step in (0, 50, 99)} == {3e-4}


def test_each_group_has_its_learning_rate_and_no_parameter_is_lost():
    weights = {name: torch.nn.Parameter(torch.zeros(1)) for name in ("a.x", "back.x", "b.x", "back.y", "neck.x")}
    groups = make_groups(weights, 0.5, {"back.y": 2.0, "back": 0.1, "absent": 3.0})
    optimizer = make_optimizer(groups, OptimizerConfig(lr=0.5))
    by_rate = {
        group["lr"]: [name for name in weights if any(weights[name] is p for p in group["params"])]
        for group in optimizer.param_groups
    }
    assert by_rate == {0.5: ["a.x", "b.x", "neck.x"], 1.0: ["back.y"], 0.05: ["back.x"]}
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5, 0.025]
    assert all(group["fused"] for group in optimizer.param_groups)
