"""What is optimised, how, and at which rate. The rate is a pure function of the optimizer step."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from vlatune.config import OptimizerConfig, SchedulerConfig


def make_optimizer(parameters: Iterable[Tensor], config: OptimizerConfig) -> torch.optim.AdamW:
    """Fused AdamW over the trainable parameters: one kernel for all of them."""
    return torch.optim.AdamW(
        parameters, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
    )


def learning_rate(optimizer_step: int, total_steps: int, peak_lr: float, config: SchedulerConfig) -> float:
    """Rate of optimizer step 0, 1, ...: linear warm-up from above 0, cosine to `decay_lr`, flat afterwards.

    As LeRobot's `CosineDecayWithWarmupSchedulerConfig`: a run shorter than the decay shrinks both phases.
    """
    warmup, decay = config.num_warmup_steps, config.num_decay_steps
    if total_steps < decay:
        warmup, decay = int(warmup * total_steps / decay), total_steps
    if optimizer_step < warmup:
        first = 1 / (warmup + 1)
        return peak_lr * (first + (1 - first) * optimizer_step / warmup)
    floor = config.decay_lr / peak_lr
    cosine = 0.5 * (1 + math.cos(math.pi * min(optimizer_step, decay) / decay))
    return peak_lr * ((1 - floor) * cosine + floor)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
