"""What is optimised, how, at which rate, and its moving average. The rate is a pure function of the optimizer step.

`Updater` makes one optimizer update over micro-batches. No Ray, no host sync: loss, gradient norm and the table of losses by group
stay on the device.

An update whose loss or gradient is not finite is not made, on no worker, and neither is any after it; `non_finite_guard.py` says
how, and how the host learns of it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vlatune.batch import LOSS_GROUPS
from vlatune.config import OptimizerConfig, SchedulerConfig
from vlatune.pipeline.loss_groups import LossGroups
from vlatune.policies.base import LossParts
from vlatune.train.worker.non_finite_guard import NonFiniteGuard

RATE_FACTOR = "rate_factor"
"""Of a group of parameters: its share of the run's learning rate."""


def make_optimizer(
    parameters: Iterable[Tensor] | Iterable[dict[str, Any]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Fused AdamW or Adam over the trainable parameters, or groups of them: one kernel for all of a rate."""
    kind = torch.optim.AdamW if config.type == "adamw" else torch.optim.Adam
    return kind(
        parameters, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
    )


def make_groups(parameters: Mapping[str, Tensor], lr: float, rate_factors: Mapping[str, float]) -> list[dict[str, Any]]:
    """A group for what has the run's own rate and one for each beginning of a name in `rate_factors`; none is empty.

    The factors are those of `PolicyAdapter.rate_factors`.
    """
    by_start: dict[str, list[Tensor]] = {start: [] for start in ("", *rate_factors)}
    for name, parameter in parameters.items():
        by_start[next((start for start in rate_factors if name.startswith(start)), "")].append(parameter)
    return [
        {"params": members, "lr": lr * rate_factors.get(start, 1.0), RATE_FACTOR: rate_factors.get(start, 1.0)}
        for start, members in by_start.items()
        if members
    ]


def learning_rate(optimizer_step: int, total_steps: int, peak_lr: float, config: SchedulerConfig) -> float:
    """Rate of optimizer step 0, 1, ..., as LeRobot's schedulers of the same names give it.

    The usual one warms up linearly from above 0, falls to `decay_lr` by a cosine and stays there; a run shorter than the
    decay shrinks both phases. `diffuser` begins at 0 and ends at 0 with the run. Its first update therefore changes nothing.
    """
    if config.type == "cosine_decay_with_warmup":
        return _cosine_decay(optimizer_step, total_steps, peak_lr, config)
    if config.type == "none":
        return peak_lr
    warmup = config.num_warmup_steps
    if optimizer_step < warmup:
        return peak_lr * optimizer_step / warmup
    if config.type == "constant_with_warmup":
        return peak_lr
    progress = (optimizer_step - warmup) / max(1, total_steps - warmup)
    return peak_lr * max(0.0, 0.5 * (1 + math.cos(math.pi * progress)))


def _cosine_decay(optimizer_step: int, total_steps: int, peak_lr: float, config: SchedulerConfig) -> float:
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
    """Of the run; groups with a factor of their own have that part of it."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(RATE_FACTOR, 1.0)


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

    @contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """The averages as the weights, for a look at them; afterwards all is as it was, to the bit: both are float32."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, weight in self._weights.items():  # one by one: the device holds a copy of one of them more
            kept = weight.detach().clone()
            weight.copy_(self._averages[name])
            self._averages[name].copy_(kept)

    def tensors(self) -> dict[str, Tensor]:
        """The averages under the weights' names: the tensors themselves, so that what is copied into them counts."""
        return dict(self._averages)


Batch = Mapping[str, Tensor]


class LossTable:
    """Losses by robot, task, action dim and episode, added up on the device; `pipeline/loss_groups.py` says where each is."""

    def __init__(self, groups: LossGroups, device: torch.device) -> None:
        self.sums_2G = torch.zeros(2, groups.columns, device=device)
        """Sums of losses, and how many they are: a part of the run's state."""
        self.interval_2I, self.episodes_2E = self.sums_2G.tensor_split([groups.interval], dim=1)
        """What a log line reads and sets to zero, and the rest: views."""
        self._dims_2A = self.sums_2G[:, groups.dim_columns]

    @torch.no_grad()
    def add(self, loss: Tensor, parts: LossParts | None, groups_BR: Tensor) -> None:
        """A micro-batch: its loss, what it is the mean of where the policy tells, and its rows' columns. No host sync."""
        if parts is not None:
            sums_2BA = self._by_sample_and_dim(parts, len(groups_BR))
            self._dims_2A += sums_2BA.sum(dim=1)
            sums_B, counts_B = sums_2BA.sum(dim=2)
            loss = (
                loss if loss.ndim else sums_B / counts_B.clamp_min(1)
            )  # of several robots it is each sample's already
        if loss.ndim:
            each_2B = torch.stack([loss.float(), torch.ones_like(loss, dtype=torch.float32)])
            each_2BR = each_2B[:, :, None].expand(-1, -1, groups_BR.shape[1])
            self.sums_2G.index_add_(1, groups_BR.flatten(), each_2BR.flatten(1))

    def _by_sample_and_dim(self, parts: LossParts, samples: int) -> Tensor:
        errors_MTA = parts.errors_MTA.float()
        counted = torch.ones_like(errors_MTA) if parts.counted is None else parts.counted.expand_as(errors_MTA).float()
        both = torch.stack([errors_MTA * counted, counted])
        return both.unflatten(1, (samples, -1)).sum(dim=(2, 3))


@dataclass(frozen=True)
class StepResult:
    losses: Tensor
    """Of every micro-step of this worker, in order, on the device."""
    loss: Tensor
    """Their mean, 0-d."""
    grad_norm: Tensor
    """Before clipping, of all workers' mean gradient: the same on every worker."""


def make_parallel(module: nn.Module) -> DistributedDataParallel:
    """The module as one of several workers': gradients are averaged over all of them, in the memory they are kept in.

    Buffers that a step changes are no worker's business but its own, and rank 0's are saved: none are sent round.
    """
    return DistributedDataParallel(module, broadcast_buffers=False, gradient_as_bucket_view=True)


class Updater:
    """Owns what an update touches: the module, its trainable parameters (listed once) and the optimizer."""

    def __init__(
        self,
        module: nn.Module,
        parameters: list[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float,
        losses: LossTable | None = None,
    ) -> None:
        """`clip_norm` 0 leaves gradients as they are. `losses` gets those of every group, where batches have LOSS_GROUPS."""
        self.losses = losses
        self.guard = NonFiniteGuard(optimizer, parameters[0].device)
        self._module = module
        self._parameters = parameters
        self._optimizer = optimizer
        self._clip_norm = clip_norm or math.inf

    def update(self, batches: Iterable[Batch], micro_steps: int) -> StepResult:
        """Accumulate over the next `micro_steps` of `batches`, all of one size, then clip and step.

        The gradient is the mean over what there is: where the data end inside an accumulation, the caller gives the
        smaller number, which it knows by arithmetic, the same on all workers. Gradients are exchanged with the last.
        """
        losses = []
        for batch in islice(batches, micro_steps):
            with self._exchange(last=len(losses) == micro_steps - 1):
                loss = self.forward(batch)
                self.backward(loss, 1 / micro_steps)
            losses.append(loss.detach())
        if len(losses) != micro_steps:
            raise RuntimeError(
                f"an update over {micro_steps} micro-batches got only {len(losses)}; the weights are as they were"
            )
        stacked = torch.stack(losses)
        return StepResult(stacked, stacked.mean(), self.apply())

    def forward(self, batch: Batch) -> Tensor:
        """The first of an update's three parts; all are public, so that each can be timed."""
        loss = self._module(batch)
        if self.losses is not None:
            policy = self._module.module if isinstance(self._module, DistributedDataParallel) else self._module
            self.losses.add(loss, getattr(policy, "loss_parts", None), batch[LOSS_GROUPS])
        return loss.mean() if loss.ndim else loss

    def backward(self, loss: Tensor, share: float) -> None:
        """A loss that is not finite becomes NaN in every gradient, so that the exchange tells all workers."""
        loss.backward(loss.detach() * 0.0 + share)

    def apply(self) -> Tensor:
        """Clip, step, and let the gradients go; their norm before clipping."""
        grad_norm = nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        self.guard.watch(grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return grad_norm

    def _exchange(self, *, last: bool) -> AbstractContextManager[None]:
        if last or not isinstance(self._module, DistributedDataParallel):
            return nullcontext()
        return self._module.no_sync()
