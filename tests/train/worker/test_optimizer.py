"""The learning rate is LeRobot's, never 0 at the start, and flat after the decay."""

from dataclasses import replace

import pytest
import torch
from lerobot.optim import CosineDecayWithWarmupSchedulerConfig
from lerobot.policies.pi05 import PI05Config

from vlatune.config import DatasetConfig, OptimizerConfig, PolicyConfig, RunConfig, SchedulerConfig, validate
from vlatune.train.worker.optimizer import learning_rate, make_optimizer

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


def test_first_rate_is_above_zero_and_the_end_is_flat():
    assert learning_rate(0, 1000, 1e-4, CONFIG) > 0
    assert learning_rate(100, 1000, 1e-4, CONFIG) == pytest.approx(CONFIG.decay_lr)
    assert learning_rate(999, 1000, 1e-4, CONFIG) == pytest.approx(CONFIG.decay_lr)


def test_no_warmup_starts_at_the_peak():
    config = SchedulerConfig(num_warmup_steps=0, num_decay_steps=100, decay_lr=0.0)
    assert learning_rate(0, 100, 1e-4, config) == pytest.approx(1e-4)


def test_defaults_are_lerobots_presets_of_pi05():
    optimizer, scheduler = PI05Config().get_optimizer_preset(), PI05Config().get_scheduler_preset()
    ours = OptimizerConfig()
    assert (ours.lr, ours.betas, ours.eps) == (optimizer.lr, optimizer.betas, optimizer.eps)
    assert (ours.weight_decay, ours.grad_clip_norm) == (optimizer.weight_decay, optimizer.grad_clip_norm)
    assert SchedulerConfig() == SchedulerConfig(
        scheduler.num_warmup_steps, scheduler.num_decay_steps, scheduler.decay_lr
    )


def test_the_optimizer_is_fused_and_has_the_configs_numbers():
    config = OptimizerConfig(lr=0.5, betas=(0.8, 0.7), eps=1e-6, weight_decay=0.25)
    (group,) = make_optimizer([torch.nn.Parameter(torch.zeros(1))], config).param_groups
    assert group["fused"] is True
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.5, (0.8, 0.7), 1e-6, 0.25)


@pytest.mark.parametrize(
    ("part", "changed", "says"),
    [
        ("optimizer", {"lr": 0.0}, r"--optimizer\.lr=0\.0: must be above 0"),
        ("optimizer", {"lr": float("nan")}, r"--optimizer\.lr=nan"),
        ("optimizer", {"betas": (0.9, 1.0)}, r"--optimizer\.betas"),
        ("optimizer", {"grad_clip_norm": -1.0}, r"--optimizer\.grad_clip_norm=-1\.0: must be 0 or more"),
        ("optimizer", {"ema_decay": 1.0}, r"--optimizer\.ema_decay=1\.0: must be at least 0 and below 1"),
        ("scheduler", {"num_decay_steps": 0}, r"--scheduler\.num_decay_steps=0: must be 1 or more"),
        ("scheduler", {"num_warmup_steps": 40_000}, r"--scheduler\.num_warmup_steps=40000: must be 0 to"),
        ("scheduler", {"decay_lr": -1e-6}, r"--scheduler\.decay_lr"),
    ],
)
def test_settings_that_cannot_work_are_refused(part, changed, says):
    config = RunConfig(dataset=DatasetConfig(root=("somewhere",)), policy=PolicyConfig(path="somewhere"))
    validate(config)
    with pytest.raises(ValueError, match=says):
        validate(replace(config, **{part: replace(getattr(config, part), **changed)}))
