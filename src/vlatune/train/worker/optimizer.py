"""What is optimised, how, at which rate, and its moving average. The rate is a pure function of the optimizer step."""

import math
from collections.abc import Iterable, Mapping

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


class Ema:
    """An exponential moving average of the trained weights, kept on the device beside them.

    `average <- decay * average + (1 - decay) * weight` after every optimizer step, beginning with the base's weights.
    Evaluation and export take the average where there is one; training goes on with the weights themselves.
    """

    def __init__(self, trainable: Mapping[str, Tensor], decay: float) -> None:
        self._weights = dict(trainable)
        # float32 whatever the weights are: with a decay of 0.999 a bfloat16 average would never move.
        self._averages = {name: weight.detach().to(torch.float32, copy=True) for name, weight in trainable.items()}
        self._new_share = 1.0 - decay

    @torch.no_grad()
    def update(self) -> None:
        """One kernel for all weights; no host sync."""
        weights = [weight.float() for weight in self._weights.values()]
        averages = list(self._averages.values())
        torch._foreach_lerp_(averages, weights, self._new_share)  # pyright: ignore[reportPrivateImportUsage]

    def tensors(self) -> dict[str, Tensor]:
        """The averages under the weights' names: the tensors themselves, so that what is copied into them counts."""
        return dict(self._averages)
