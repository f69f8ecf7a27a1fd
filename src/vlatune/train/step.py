"""One optimizer update over micro-batches. No Ray, no host sync: loss and gradient norm stay on the device."""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class StepResult:
    loss: Tensor
    """Mean over the micro-steps of this worker, 0-d, on the device."""
    grad_norm: Tensor
    """Before clipping, over all workers' mean gradient."""


class Updater:
    """Owns what an update touches: the module, its trainable parameters (listed once) and the optimizer."""

    def __init__(
        self, module: nn.Module, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, *, clip_norm: float
    ) -> None:
        self._module = module
        self._parameters = parameters
        self._optimizer = optimizer
        self._clip_norm = clip_norm

    def update(self, batches: Iterable[Batch], grad_accum: int) -> StepResult:
        """Accumulate over `grad_accum` micro-batches, clip, step. Gradients are exchanged once, with the last."""
        losses = []
        for micro_step, batch in enumerate(batches):
            last = micro_step == grad_accum - 1
            with nullcontext() if last else self._no_sync():
                loss = self._module(batch) / grad_accum
                loss.backward()
            losses.append(loss.detach())
        grad_norm = nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(torch.stack(losses).sum(), grad_norm)

    def _no_sync(self):
        return self._module.no_sync() if isinstance(self._module, DistributedDataParallel) else nullcontext()
