"""Run one training step of vlatune and of LeRobot, measuring seconds by phase and peak memory.

vlatune's step uses the worker's parts: prepared columns, `device_batches`, schedule, `Updater` and
the non-finite watch. LeRobot's is what `lerobot-train` does between two batches: its processor
pipeline, then `update_policy` with Accelerate, optimizer and schedule.

On CUDA the host runs ahead of the device, so phases are timed by CUDA events that are read after
the step.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot.scripts.lerobot_train import update_policy
from lerobot.utils.logging_utils import AverageMeter, MetricsTracker
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.base_models import Base, lerobot_batch
from vlatune.batch import ACTION, IMAGE_PREFIX, NOISE, PREFIX, TIME, Columns, num_rows
from vlatune.config.settings import RunConfig
from vlatune.data.transforms import cut_prompts
from vlatune.registry import get_policy_info
from vlatune.train.worker.device import device_batches
from vlatune.train.worker.non_finite_guard import NonFiniteWatch
from vlatune.train.worker.optimizer import (
    Batch,
    Updater,
    learning_rate,
    make_groups,
    make_optimizer,
    set_learning_rate,
)
from vlatune.train.worker.transfer import DeviceBatch

PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class StepTime:
    """Seconds of one micro-step; time outside of all phases is the host's."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    total_s: float

    @property
    def model_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def host_s(self) -> float:
        return max(0.0, self.total_s - self.forward_s - self.backward_s - self.optimizer_s)


@dataclass
class Stopwatch:
    """Time the phases of a step."""

    device: torch.device
    _spans: list[tuple[str, Any, Any]] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = self._now()
        yield
        self._spans.append((name, begin, self._now()))

    def time(self, step: Callable[[], object]) -> StepTime:
        self._spans = []
        begin_s = time.perf_counter()
        step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        total_s = time.perf_counter() - begin_s
        seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        for name, begin, end in self._spans:
            seconds[name] += begin.elapsed_time(end) / 1000 if self.device.type == "cuda" else end - begin
        return StepTime(seconds["forward"], seconds["backward"], seconds["optimizer"], total_s)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Return the peak memory of tensors during `call`, above the memory before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        call()
    level = highest = 0
    for size in _allocations(profiler):
        level += size
        highest = max(highest, level)
    return highest


def _allocations(profiler: Any) -> list[int]:
    """Return the bytes of every allocation and, negative, of every release, in order."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


STEPS = 30_000
"""Length of the simulated run, for learning rates only."""


class TimedUpdater(Updater):
    """Updater of training, with timed phases."""

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


def presets(kind: str) -> RunConfig:
    """Return LeRobot's training presets of a policy from its recipe."""
    return next(one.config for one in get_policy_info(kind).recipes.values() if not one.small)


class OurWay:
    def __init__(self, module: Any, base: Base, columns: Columns, device: torch.device) -> None:
        self.stopwatch = Stopwatch(device)
        self.policy = module.policy
        config = presets(base.spec.type)
        trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
        self._module, self._peak_lr, self._schedule = module, config.optimizer.lr, config.scheduler
        groups = make_groups(trained, self._peak_lr, base.adapter.rate_factors(base.spec, self._peak_lr))
        self._optimizer = make_optimizer(groups, config.optimizer)
        self._updater = TimedUpdater(
            self.stopwatch,
            module,
            list(trained.values()),
            self._optimizer,
            clip_norm=config.optimizer.grad_clip_norm,
        )
        self._watch = NonFiniteWatch()
        self._batches = device_batches(itertools.repeat(columns), device)
        self._taken: list[DeviceBatch] = []
        self._done = 0

    def step(self) -> None:
        """Run one optimizer step of one micro-step, like the worker's loop."""
        batch = self._next_batch()
        set_learning_rate(self._optimizer, learning_rate(self._done, STEPS, self._peak_lr, self._schedule))
        result = self._updater.update([batch.tensors], 1)
        self._watch.record(result.losses, result.grad_norm, [batch.samples])
        self._done += 1

    def forward_backward(self) -> None:
        """Run a micro-step without an update; gradients accumulate."""
        self._updater.backward(self._updater.forward(self._next_batch().tensors), 1.0)

    def loss(self) -> Tensor:
        with torch.no_grad():
            return self._module(self._next_batch().tensors).loss

    def resident(self) -> list[Tensor]:
        """Return the tensors on the accelerator before a step, including the next batch."""
        self._taken.append(self._next_batch())
        state = [value for values in self._optimizer.state.values() for value in values.values()]
        return [*self._module.parameters(), *self._module.buffers(), *state, *self._taken[0].tensors.values()]

    def close(self) -> None:
        self._batches.close()

    def _next_batch(self) -> DeviceBatch:
        return self._taken.pop() if self._taken else next(self._batches)


def with_kept_prefix(module: Any, base: Base, columns: Columns, device: torch.device) -> Columns:
    """Return the columns with PREFIX in place of images."""
    cut = cut_prompts(columns)
    batch = {key: torch.from_numpy(np.ascontiguousarray(values)).to(device) for key, values in cut.items()}
    images = {name for _, name in base.binding.cameras}
    rest = {key: values for key, values in columns.items() if key not in images}
    return rest | {PREFIX: module.compute_kept(batch).cpu().numpy()}


METERS = ("loss", "grad_norm", "lr", "update_s", "gpu_mem_gb")


def make_accelerator(device: torch.device) -> Accelerator:
    return Accelerator(step_scheduler_with_optimizer=False, mixed_precision="no", cpu=device.type == "cpu")


class LeRobotWay:
    """Train LeRobot's `policy` on `rows`."""

    def __init__(self, policy: Any, base: Base, rows: Columns, accelerator: Accelerator) -> None:
        self.policy = policy
        self._device = accelerator.device
        self.stopwatch = Stopwatch(self._device)
        self._preprocess = _make_preprocessor(policy.config, base, self._device)
        self._batch = lerobot_batch(rows, self._device)
        preset, schedule = policy.config.get_optimizer_preset(), policy.config.get_scheduler_preset()
        optimizer = preset.build(policy.get_optim_params())
        scheduler = schedule.build(optimizer, STEPS) if schedule is not None else None
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
        """Run a micro-step without an update; gradients accumulate."""
        loss, _ = self._policy.forward(self._preprocessed())
        self._accelerator.backward(loss)

    def loss(self, columns: Columns) -> Tensor:
        """Return LeRobot's training loss with our noise samples."""
        self._policy.train()
        drawn = {key: torch.from_numpy(columns[key]).to(self._device) for key in (NOISE, TIME) if key in columns}
        with torch.no_grad(), ExitStack() as replaced:
            for owner, name, draw in _draws(self._policy, drawn):
                replaced.enter_context(_replaced(owner, name, draw))
            return self._policy.forward(self._preprocessed())[0]

    def resident(self) -> list[Tensor]:
        """Return the tensors on the accelerator before a step, including the batch."""
        batch = [value for value in self._batch.values() if isinstance(value, Tensor)]
        state = [value for values in self._optimizer.state.values() for value in values.values()]
        return [*self._policy.parameters(), *self._policy.buffers(), *state, *batch]

    def close(self) -> None:
        """Free what Accelerate holds."""
        self._accelerator.free_memory()

    def _preprocessed(self) -> dict[str, Any]:
        images = {k: v.to(torch.float32) / 255.0 for k, v in self._batch.items() if k.startswith(IMAGE_PREFIX)}
        return self._preprocess(self._batch | images)

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


def load_lerobot(base: Base, module: Any) -> Any:
    """Return LeRobot's policy. It is shared with vlatune's module, except for ACT and Diffusion
    Policy, whose modules modify LeRobot's parts."""
    if base.spec.type not in ("act", "diffusion"):
        return module.policy
    return get_policy_class(base.spec.type).from_pretrained(base.folder).to(next(module.parameters()).device).train()


def _draws(policy: Any, drawn: dict[str, Tensor]) -> list[tuple[Any, str, Any]]:
    """Return (owner, name, replacement) of the noise functions in LeRobot's forward."""
    noise, time = drawn.get(NOISE), drawn.get(TIME)
    if policy.config.type == "act":  # noise of the latent, if any
        return [] if noise is None else [(torch, "randn_like", lambda mean: noise)]
    if policy.config.type == "diffusion":
        return [(torch, "randn", lambda *shape, **_: noise), (torch, "randint", lambda **_: time)]
    assert noise is not None  # flow matching: the first noise sample of each observation
    assert time is not None
    given = {"sample_noise": noise[:, 0], "sample_time": time[:, 0]}
    return [(policy.model, name, lambda *_, value=value: value) for name, value in given.items()]


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Disable dropout, so that forward passes are equal."""
    places = [(part, "p") for part in model.modules() if isinstance(part, nn.Dropout)]
    places += [(part, "dropout") for part in model.modules() if isinstance(part, nn.MultiheadAttention)]
    with ExitStack() as replaced:
        for part, name in places:
            replaced.enter_context(_replaced(part, name, 0.0))
        yield


def _make_preprocessor(config: Any, base: Base, device: torch.device) -> Any:
    """Load the base's processor pipeline like `lerobot-train`, with our statistics and device."""
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
    """Replace an attribute of one object temporarily."""
    own = vars(owner)
    before = [own[name]] if name in own else []
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        for one in before:
            setattr(owner, name, one)
