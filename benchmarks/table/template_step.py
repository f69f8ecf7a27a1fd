"""The training step of the public template, and the eight changes of pull request #705 to it.

Written from their descriptions. The template's mistakes belong to it: images stay in 0..255, a
batch has one action per sample instead of a chunk, the statistics that it passes are ignored, and
attention masks are cut to the length that this leaves.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.pi05 import modeling_pi05
from ray.data.collate_fn import NumpyBatchCollateFn
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from benchmarks.step.host_sync import HostSyncSpy
from vlatune.batch import ACTION, IMAGE_PREFIX, STATE, TASK, Columns
from vlatune.data.meta.dataset_meta import DatasetMeta
from vlatune.policies.loading import train_only
from vlatune.policies.model_size import building_at
from vlatune.policies.pi05.size import read_size
from vlatune.policies.pi05.weights import CLASSES, TRAINED, parse_config, unused

type Batch = dict[str, Any]
CLIP_NORM = 1.0


@dataclass(frozen=True)
class Changes:
    """The pull request's changes, in its order; False is the template before it."""

    page_locked_collate: bool
    """Collate page-locked host tensors instead of copying them to the device."""
    prefetch: bool
    """Copy a batch ahead on a separate stream."""
    performance_flags: bool
    """TF32 and cudnn.benchmark."""
    fused_optimizer: bool
    """Fused AdamW on CUDA, and one list of trainable parameters for clipping."""
    loss_on_device: bool
    """`train_step` returns the loss as a tensor instead of a float."""
    fused_images: bool
    """Write transposed images into one float32 buffer; applied by `peer_readers`."""
    sum_on_device: bool
    """Add up losses on the device; read the sum for log lines only."""
    hoisted_rows: bool
    """Convert parquet columns once per table, not once per row; applied by `peer_readers`."""


TEMPLATE, TEMPLATE_705 = "template", "template + #705"
VERSIONS = {
    TEMPLATE: Changes(*(False for _ in fields(Changes))),
    TEMPLATE_705: Changes(*(True for _ in fields(Changes))),
}


class Collate(NumpyBatchCollateFn):
    """Make tensors of a batch from Ray Data: images (B, 3, H, W) in 0..255, one action per sample."""

    def __init__(self, device: torch.device, changes: Changes) -> None:
        super().__init__()
        self._device, self._changes = device, changes
        self.first: Columns | None = None
        """A copy of the first sample."""

    def __call__(self, columns: Columns) -> Batch:
        if self.first is None:
            self.first = {key: values[:1].copy() for key, values in columns.items()}
        numbers = [key for key in columns if key.startswith(IMAGE_PREFIX) or key in (STATE, ACTION)]
        tensors = {key: torch.from_numpy(_stacked(columns[key])) for key in numbers}
        return {key: self._placed(one) for key, one in tensors.items()} | {TASK: [str(one) for one in columns[TASK]]}

    def _placed(self, tensor: Tensor) -> Tensor:
        if not self._changes.page_locked_collate:
            return tensor.to(device=self._device, non_blocking=True)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor


def _stacked(values: np.ndarray) -> np.ndarray:
    return (np.stack(list(values)) if values.dtype == object else values).astype(np.float32, copy=False)


def prefetched(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield batches on the device, each copied while the one before it is used."""
    stream = torch.cuda.Stream() if device.type == "cuda" else None

    def copied(batch: Batch) -> Batch:
        with torch.cuda.stream(stream) if stream else nullcontext():
            return {
                key: value.to(device=device, non_blocking=True) if isinstance(value, Tensor) else value
                for key, value in batch.items()
            }

    ahead: Batch | None = None
    for batch in batches:
        ready, ahead = ahead, copied(batch)
        if ready is not None:
            yield _released(ready, stream)
    if ahead is not None:
        yield _released(ahead, stream)


def _released(batch: Batch, stream: Any) -> Batch:
    """Make the current stream wait for the copy of a batch."""
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
        for value in batch.values():
            if isinstance(value, Tensor):
                value.record_stream(torch.cuda.current_stream())
    return batch


def load_policy(base: Path, train: str) -> Any:
    """Load LeRobot's policy in float32, with `train` trainable."""
    config, size = parse_config(base), read_size(base)
    config.dtype = "float32"
    with building_at(size) if size is not None else nullcontext():
        policy = CLASSES[config.type][1].from_pretrained(base, config=config)
    train_only(policy, TRAINED[train], unused=unused(policy))
    return policy.train()


def load_preprocessor(config: Any, base: Path, meta: DatasetMeta, device: torch.device) -> Callable[[Batch], Batch]:
    """Load the base's processors; LeRobot ignores statistics that are not passed as overrides."""
    stats = {key: {name: torch.as_tensor(v) for name, v in meta.stats[key].items()} for key in (STATE, ACTION)}
    overrides = {"device_processor": {"device": device.type}}
    return make_pre_post_processors(config, str(base), dataset_stats=stats, preprocessor_overrides=overrides)[0]


@contextmanager
def masks_cut() -> Iterator[None]:
    """Cut attention masks to the number of tokens, which hides that action chunks are missing."""
    make_masks = modeling_pi05.make_att_2d_masks
    modeling_pi05.make_att_2d_masks = lambda pad, att: make_masks(pad, att[:, : pad.shape[1]])
    try:
        yield
    finally:
        modeling_pi05.make_att_2d_masks = make_masks


class TemplateTrainer:
    """Policy, optimizer and schedule of one worker."""

    def __init__(
        self,
        policy: Any,
        preprocess: Callable[[Batch], Batch],
        changes: Changes,
        device: torch.device,
        *,
        lr: float,
        steps: int,
        wrap: Callable[[Any], Any] = lambda policy: policy,
    ) -> None:
        self.policy, self.changes, self.device = wrap(policy.to(device)), changes, device
        if changes.performance_flags:
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.benchmark = True
        self._preprocess = preprocess
        trainable = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        self._trainable = trainable if changes.fused_optimizer else None
        fused = changes.fused_optimizer and device.type == "cuda"
        self.optimizer = torch.optim.AdamW(trainable, lr=lr, weight_decay=0.01, fused=fused)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: _rate(step, steps))
        self._scaler = GradScaler(device.type, enabled=device.type == "cuda")
        self.loss_sum: Any = torch.zeros((), device=device) if changes.sum_on_device else 0.0

    def batches(self, collated: Iterable[Batch]) -> Iterator[Batch]:
        return prefetched(collated, self.device) if self.changes.prefetch else iter(collated)

    def step(self, batch: Batch) -> None:
        """Run forward, backward and an update, and add up the loss."""
        loss = self.train_step(batch)
        self._scaler.unscale_(self.optimizer)
        clipped = self._trainable or [one for one in self.policy.parameters() if one.requires_grad]
        torch.nn.utils.clip_grad_norm_(clipped, CLIP_NORM)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self._schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss_sum += loss if self.changes.sum_on_device else float(loss)

    def train_step(self, batch: Batch) -> Tensor | float:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss, _ = self.policy.forward(self._preprocess(batch))
        self._scaler.scale(loss).backward()
        return loss.detach() if self.changes.loss_on_device else float(loss.detach())

    def count_host_syncs(self, columns: Columns) -> int:
        """Count what makes the host wait from a batch of Ray Data to the next one."""
        self.step(next(self.batches([Collate(self.device, self.changes)(columns)])))  # the optimizer's state exists
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        sums = [self.loss_sum] if isinstance(self.loss_sum, Tensor) else []
        with HostSyncSpy([*self.policy.parameters(), *self.policy.buffers(), *state, *sums]) as spy:
            self.step(next(self.batches([Collate(self.device, self.changes)(columns)])))
        return spy.count


def _rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate: 0 at the first step, warm-up, then a cosine."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return step / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))
