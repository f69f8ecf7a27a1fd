"""Optimizer, learning rate schedule, EMA, and the update over micro-batches. No Ray, no host sync.

Loss, gradient norm and losses by group stay on the device. Updates with a non-finite loss or
gradient are skipped on all workers, and so are all later ones; see `non_finite_guard.py`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from vlatune.batch import LOSS_GROUPS
from vlatune.checkpoint.state import complete
from vlatune.config.settings import OptimizerConfig, SchedulerConfig
from vlatune.data.loss_groups import LossGroups
from vlatune.policies.base import PolicyOutput
from vlatune.train.worker.non_finite_guard import NonFiniteGuard

CLIP_EPS = 1e-6
"""Added to the gradient norm, as in torch's clipping."""
RATE_FACTOR = "rate_factor"
"""Key of a parameter group: its factor on the learning rate."""


def make_optimizer(
    parameters: Iterable[Tensor] | Iterable[dict[str, Any]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Return fused AdamW or Adam over the trainable parameters or parameter groups."""
    kind = torch.optim.AdamW if config.type == "adamw" else torch.optim.Adam
    return kind(
        parameters, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
    )


def make_groups(parameters: Mapping[str, Tensor], lr: float, rate_factors: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return parameter groups: one per name prefix in `rate_factors`, and one for all others.

    The factors come from `PolicyAdapter.rate_factors`. Empty groups are omitted.
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
    """Return the learning rate of an optimizer step (from 0), as in LeRobot's schedulers.

    The default warms up linearly from above 0 and decays to `decay_lr` by a cosine; runs shorter
    than the decay scale both phases. `diffuser` starts and ends at 0, so its first update has no
    effect.
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
    """Set the learning rate, times the factor of each parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(RATE_FACTOR, 1.0)


class Ema:
    """Exponential moving average (EMA) of the trained weights, on the device.

    `average <- decay * average + (1 - decay) * weight` after every optimizer step, starting with
    the base model's weights. Evaluation and export use the average; training continues with the
    weights.
    """

    def __init__(self, trainable: Mapping[str, Tensor], decay: float) -> None:
        self._weights = dict(trainable)
        # Always float32: with a decay of 0.999, a bfloat16 average would never change.
        self._averages = {name: weight.detach().to(torch.float32, copy=True) for name, weight in trainable.items()}
        self._new_share = 1.0 - decay

    @torch.no_grad()
    def update(self) -> None:
        """Update all averages with one kernel, without host sync."""
        weights = [weight.float() for weight in self._weights.values()]
        averages = list(self._averages.values())
        torch._foreach_lerp_(averages, weights, self._new_share)  # pyright: ignore[reportPrivateImportUsage]

    @contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """Temporarily swap the averages into the model; float32 makes this exact."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, weight in self._weights.items():  # one by one, to limit extra device memory
            kept = weight.detach().clone()
            weight.copy_(self._averages[name])
            self._averages[name].copy_(kept)

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages by weight name; the tensors are not copied."""
        return dict(self._averages)


Batch = Mapping[str, Tensor]


class LossTable:
    """Losses by robot, task, action dim and episode, summed on the device.

    `data/loss_groups.py` defines the columns.
    """

    def __init__(self, groups: LossGroups, device: torch.device) -> None:
        self.sums_2G = torch.zeros(2, groups.columns, device=device)
        """Sums and counts of losses; part of the checkpoint."""
        self.interval_2I, self.episodes_2E = self.sums_2G.tensor_split([groups.interval], dim=1)
        """Views: columns that are reset at each log line, and columns of episodes."""
        self._dims_2A = self.sums_2G[:, groups.dim_columns]

    @torch.no_grad()
    def add(self, output: PolicyOutput, groups_BR: Tensor) -> None:
        """Add a micro-batch without host sync, as far as `output` has losses per sample and dim."""
        loss_B = output.loss_B
        if output.errors_MTA is not None:
            errors_MTA = output.errors_MTA.float()
            counted = torch.ones_like(errors_MTA)
            if output.counted is not None:
                counted = output.counted.expand_as(errors_MTA).float()
            both = torch.stack([errors_MTA * counted, counted])
            sums_2BA = both.unflatten(1, (len(groups_BR), -1)).sum(dim=(2, 3))
            self._dims_2A += sums_2BA.sum(dim=1)
            sums_B, counts_B = sums_2BA.sum(dim=2)
            loss_B = sums_B / counts_B.clamp_min(1) if loss_B is None else loss_B
        if loss_B is not None:
            each_2B = torch.stack([loss_B.float(), torch.ones_like(loss_B, dtype=torch.float32)])
            each_2BR = each_2B[:, :, None].expand(-1, -1, groups_BR.shape[1])
            self.sums_2G.index_add_(1, groups_BR.flatten(), each_2BR.flatten(1))


@dataclass(frozen=True)
class StepResult:
    losses: Tensor
    """Losses of this worker's micro-steps, on the device."""
    loss: Tensor
    """Mean of `losses`, 0-d."""
    grad_norm: Tensor
    """Norm of the gradient averaged over all workers, before clipping."""


def make_parallel(module: nn.Module, *, accumulates: bool) -> DistributedDataParallel:
    """Wrap the module in DDP; an `Updater` exchanges the gradients.

    Frozen weights are not sent: every worker has loaded them. Buffers are not either: they are local
    to each worker, and rank 0's are saved.
    """
    trained = [one for one in module.parameters() if one.requires_grad]
    for one in trained:
        dist.broadcast(one.detach(), src=0)
    if accumulates:
        hold_places(trained)
    return DistributedDataParallel(module, broadcast_buffers=False, gradient_as_bucket_view=True, init_sync=False)


def hold_places(parameters: Iterable[nn.Parameter]) -> None:
    """Set gradients to zeros that take no memory.

    DDP replaces gradients that exist by views of its buckets when it makes these: once when it is
    created, and once before the second update. Without views, micro-steps before the last one would
    accumulate beside the buckets.
    """
    for one in parameters:
        one.grad = one.new_zeros(()).expand_as(one)


def start_exchange(pending: list[dist.Work], bucket: dist.GradBucket) -> Future[Tensor]:  # pyright: ignore[reportPrivateImportUsage]
    """Sum a bucket of gradients over the workers; the update waits for it, not the backward pass."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work
    pending.append(work)
    begun: Future[Tensor] = Future()
    begun.set_result(bucket.buffer())
    return begun


class Updater:
    """Updates the trainable parameters of a module."""

    def __init__(
        self,
        module: nn.Module,
        parameters: list[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float,
        losses: LossTable | None = None,
    ) -> None:
        """Create an updater; a `clip_norm` of 0 disables clipping, and `losses` needs LOSS_GROUPS
        in batches."""
        self.losses = losses
        self.guard = NonFiniteGuard(optimizer, parameters[0].device)
        self._module = module
        self._parameters = parameters
        self._optimizer = optimizer
        self._clip_norm = clip_norm or math.inf
        self._has_views, self._is_first = parameters[0].grad is not None, True
        self._num_workers, self._pending = 1, []
        if isinstance(module, DistributedDataParallel):
            self._num_workers = dist.get_world_size()
            module.register_comm_hook(self._pending, start_exchange)

    def update(
        self, batches: Iterable[Batch], micro_steps: int, meanwhile: Callable[[], object] | None = None
    ) -> StepResult:
        """Accumulate over `micro_steps` batches of equal size, then clip and step.

        The gradient is the mean over the micro-batches. Gradients are exchanged with the last one,
        during its backward pass and `meanwhile`.
        """
        losses = []
        for batch in islice(batches, micro_steps):
            with self._exchange(last=len(losses) == micro_steps - 1):
                loss = self.forward(batch)
                del batch  # may have the prefix, which is large
                self.backward(loss, 1 / (micro_steps * self._num_workers))
            losses.append(loss.detach())
        if len(losses) != micro_steps:
            raise RuntimeError(
                f"an update over {micro_steps} micro-batches got only {len(losses)}; the weights are as they were"
            )
        if meanwhile:
            meanwhile()
        stacked = torch.stack(losses)
        return StepResult(stacked, stacked.mean(), self.apply())

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss of a micro-batch; public, like `backward` and `apply`, for timing."""
        output: PolicyOutput = self._module(batch)
        if self.losses is not None:
            self.losses.add(output, batch[LOSS_GROUPS])
        return output.loss

    def backward(self, loss: Tensor, share: float) -> None:
        """Backpropagate; a non-finite loss makes all gradients NaN, so that all workers notice."""
        loss.backward(loss.detach() * 0.0 + share)

    def apply(self) -> Tensor:
        """Wait for the exchange, clip, step and free the gradients; return their norm before clipping."""
        while self._pending:
            self._pending.pop().wait()  # on an accelerator, only its stream waits
        grad_norm = complete(nn.utils.get_total_norm([one.grad for one in self._parameters if one.grad is not None]))
        self.guard.watch(grad_norm)
        # As with GradScaler, a fused step divides by this tensor, which saves a pass over the gradients.
        scale = ((grad_norm + CLIP_EPS) / self._clip_norm).clamp_min(1.0)
        self._optimizer.grad_scale = scale  # pyright: ignore[reportAttributeAccessIssue]
        self._optimizer.step()
        if self._has_views and self._is_first:
            hold_places(self._parameters)
        else:
            self._optimizer.zero_grad(set_to_none=not self._has_views)
        self._is_first = False
        return grad_norm

    def _exchange(self, *, last: bool) -> AbstractContextManager[None]:
        if last or not isinstance(self._module, DistributedDataParallel):
            return nullcontext()
        return self._module.no_sync()
