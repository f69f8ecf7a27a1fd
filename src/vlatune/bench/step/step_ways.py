"""One training step, our way and LeRobot's, with a stopwatch on the parts.

Ours is made of the worker's own: columns that read tasks have prepared, `device_batches`, the schedule, `Updater`, and the
watch for what is not finite. LeRobot's is what `lerobot-train` does between two batches of its loader: its processor
pipeline, then its own `update_policy` with Accelerate, its optimizer and its schedule.
"""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from lerobot.policies.factory import make_pre_post_processors
from lerobot.scripts.lerobot_train import update_policy
from lerobot.utils.logging_utils import AverageMeter, MetricsTracker
from torch import Tensor

from vlatune.batch import ACTION, IMAGE_PREFIX, Columns, num_rows
from vlatune.bench.base_models import Base, lerobot_batch
from vlatune.bench.step.step_meter import Stopwatch
from vlatune.config import OptimizerConfig, SchedulerConfig
from vlatune.train.worker.device import DeviceBatch, device_batches
from vlatune.train.worker.non_finite_guard import NonFiniteWatch
from vlatune.train.worker.optimizer import Batch, Updater, learning_rate, make_optimizer, set_learning_rate

STEPS = 30_000
"""Length of the imagined run; it decides the learning rates alone."""


class TimedUpdater(Updater):
    """The updater of training; its parts tell the stopwatch when they run."""

    def __init__(self, stopwatch: Stopwatch, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stopwatch = stopwatch

    def forward(self, batch: Batch) -> Tensor:
        with self._stopwatch.phase("forward"):
            return super().forward(batch)

    def backward(self, loss: Tensor, share: float) -> None:
        with self._stopwatch.phase("backward"):
            super().backward(loss, share)

    def apply(self) -> Tensor:
        with self._stopwatch.phase("optimizer"):
            return super().apply()


class OurWay:
    def __init__(self, module: Any, columns: Columns, device: torch.device) -> None:
        self.stopwatch = Stopwatch(device)
        self.policy = module.policy
        config = OptimizerConfig()
        parameters = [p for p in module.parameters() if p.requires_grad]
        self._module, self._peak_lr = module, config.lr
        self._optimizer = make_optimizer(parameters, config)
        self._updater = TimedUpdater(
            self.stopwatch, module, parameters, self._optimizer, clip_norm=config.grad_clip_norm
        )
        self._watch = NonFiniteWatch()
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
        self._updater.backward(self._updater.forward(self._next_batch().tensors), 1.0)

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


METERS = ("loss", "grad_norm", "lr", "update_s", "gpu_mem_gb")


def make_accelerator(device: torch.device) -> Accelerator:
    return Accelerator(step_scheduler_with_optimizer=False, mixed_precision="no", cpu=device.type == "cpu")


class LeRobotWay:
    """Trains what is trainable of LeRobot's `policy` on `rows`."""

    def __init__(self, policy: Any, base: Base, rows: Columns, accelerator: Accelerator) -> None:
        self._device = accelerator.device
        self.stopwatch = Stopwatch(self._device)
        self._preprocess = _make_preprocessor(policy.config, base, self._device)
        self._batch = lerobot_batch(rows, self._device)
        preset = policy.config.get_optimizer_preset()
        optimizer = preset.build([p for p in policy.parameters() if p.requires_grad])
        scheduler = policy.config.get_scheduler_preset().build(optimizer, STEPS)
        self._clip_norm = preset.grad_clip_norm
        self._policy, self._optimizer, self._scheduler = accelerator.prepare(policy, optimizer, scheduler)
        self._accelerator = accelerator
        meters = {name: AverageMeter(name, ":.3f") for name in METERS}
        self._tracker = MetricsTracker(num_rows(rows), num_rows(rows), 1, meters)

    def step(self) -> None:
        with self._on_the_clock():
            update_policy(
                self._tracker,
                self._policy,
                self._preprocessed(),
                self._optimizer,
                self._clip_norm,
                accelerator=self._accelerator,
                lr_scheduler=self._scheduler,
            )

    def forward_backward(self) -> None:
        """A micro-step in the middle of an accumulation: gradients stay."""
        loss, _ = self._policy.forward(self._preprocessed())
        self._accelerator.backward(loss)

    def loss(self, noise_BTP: Tensor, time_B: Tensor) -> Tensor:
        """Its own training loss, on draws that are given instead of its own."""
        draws = {"sample_noise": lambda shape, device: noise_BTP, "sample_time": lambda size, device: time_B}
        with torch.no_grad(), ExitStack() as replaced:
            for name, draw in draws.items():
                replaced.enter_context(_replaced(self._policy.model, name, draw))
            return self._policy.forward(self._preprocessed())[0]

    def resident(self) -> list[Tensor]:
        """What lives on an accelerator before a step; Accelerate's loader has put the batch there."""
        batch = [value for value in self._batch.values() if isinstance(value, Tensor)]
        state = [value for values in self._optimizer.state.values() for value in values.values()]
        return [*self._policy.parameters(), *self._policy.buffers(), *state, *batch]

    def close(self) -> None:
        """Accelerate holds on to what it has prepared."""
        self._accelerator.free_memory()

    def _preprocessed(self) -> dict[str, Any]:
        pictures = {k: v.to(torch.float32) / 255.0 for k, v in self._batch.items() if k.startswith(IMAGE_PREFIX)}
        return self._preprocess(self._batch | pictures)

    @contextmanager
    def _on_the_clock(self) -> Iterator[None]:
        parts = [
            (self._policy, "forward", "forward"),
            (self._accelerator, "backward", "backward"),
            (self._accelerator, "clip_grad_norm_", "optimizer"),
            (self._optimizer, "step", "optimizer"),
            (self._optimizer, "zero_grad", "optimizer"),
        ]
        with ExitStack() as replaced:
            for owner, name, phase in parts:
                replaced.enter_context(_replaced(owner, name, _timed(self.stopwatch, phase, getattr(owner, name))))
            yield


def _make_preprocessor(config: Any, base: Base, device: torch.device) -> Any:
    """As `lerobot-train` makes it: the base's own pipeline with this dataset's statistics and this device."""
    stats = {key: {name: torch.from_numpy(v) for name, v in values.items()} for key, values in base.stats().items()}
    features = {**config.input_features, **config.output_features}
    normalise = {"stats": stats, "features": features, "norm_map": config.normalization_mapping}
    preprocess, _ = make_pre_post_processors(
        config,
        str(base.folder),
        preprocessor_overrides={"device_processor": {"device": device.type}, "normalizer_processor": normalise},
        postprocessor_overrides={"unnormalizer_processor": normalise | {"features": {ACTION: features[ACTION]}}},
    )
    return preprocess


def _timed(stopwatch: Stopwatch, phase: str, call: Any) -> Any:
    def timed(*args: Any, **kwargs: Any) -> Any:
        with stopwatch.phase(phase):
            return call(*args, **kwargs)

    return timed


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of this one object, its class untouched."""
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
