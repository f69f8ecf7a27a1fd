"""One training step our way: the worker's own parts, with a stopwatch on them.

Columns that read tasks have prepared, `device_batches`, the schedule, `Updater`, and the watch for what is not finite.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from vlatune.batch import Columns
from vlatune.bench.step_meter import Stopwatch
from vlatune.config import OptimizerConfig, SchedulerConfig
from vlatune.policies.pi05.module import Pi05Module
from vlatune.train.device import DeviceBatch, device_batches
from vlatune.train.finite import FiniteWatch
from vlatune.train.optim import learning_rate, make_optimizer, set_learning_rate
from vlatune.train.step import Batch, Updater

STEPS = 30_000
"""Length of the imagined run; it decides the learning rates alone."""


class TimedUpdater(Updater):
    """The updater of training; its parts tell the stopwatch when they run."""

    def __init__(self, stopwatch: Stopwatch, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stopwatch = stopwatch

    def _forward(self, batch: Batch) -> Tensor:
        with self._stopwatch.phase("forward"):
            return super()._forward(batch)

    def _backward(self, loss: Tensor, share: float) -> None:
        with self._stopwatch.phase("backward"):
            super()._backward(loss, share)

    def _apply(self) -> Tensor:
        with self._stopwatch.phase("optimizer"):
            return super()._apply()


class OurWay:
    def __init__(self, module: Pi05Module, columns: Columns, device: torch.device) -> None:
        self.stopwatch = Stopwatch(device)
        self.policy = module.policy
        config = OptimizerConfig()
        parameters = [p for p in module.parameters() if p.requires_grad]
        self._module, self._peak_lr = module, config.lr
        self._optimizer = make_optimizer(parameters, config)
        self._updater = TimedUpdater(
            self.stopwatch, module, parameters, self._optimizer, clip_norm=config.grad_clip_norm
        )
        self._watch = FiniteWatch()
        self._batches = device_batches(itertools.repeat(columns), device)
        self._taken: list[DeviceBatch] = []
        self._done = 0

    def step(self) -> None:
        """One optimizer step of one micro-step, as the worker's loop makes it."""
        batch = self._next_batch()
        set_learning_rate(self._optimizer, learning_rate(self._done, STEPS, self._peak_lr, SchedulerConfig()))
        result = self._updater.update([batch.tensors], 1)
        self._watch.remember(result.losses, result.grad_norm, [batch.samples])
        self._done += 1

    def forward_backward(self) -> None:
        """A micro-step in the middle of an accumulation: gradients stay."""
        self._updater._backward(self._updater._forward(self._next_batch().tensors), 1.0)

    def loss(self) -> Tensor:
        with torch.no_grad():
            return self._module(self._next_batch().tensors)

    def resident(self) -> list[Tensor]:
        """What lives on an accelerator before a step: weights, buffers, the optimizer's, and the batch that comes next."""
        self._taken.append(self._next_batch())
        state = [value for values in self._optimizer.state.values() for value in values.values()]
        return [*self._module.parameters(), *self._module.buffers(), *state, *self._taken[0].tensors.values()]

    def close(self) -> None:
        self._batches.close()

    def _next_batch(self) -> DeviceBatch:
        return self._taken.pop() if self._taken else next(self._batches)
