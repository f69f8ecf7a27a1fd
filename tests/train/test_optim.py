"""The learning rate is LeRobot's, never 0 at the start, and flat after the decay."""

import pytest
import torch
from lerobot.optim import CosineDecayWithWarmupSchedulerConfig

from vlatune.config import SchedulerConfig
from vlatune.train.optim import learning_rate

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
