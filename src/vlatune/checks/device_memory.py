"""Estimate the device memory of a worker, and what fits GPUs of 24, 48 and 80 GB.

    weights + gradients + two AdamW moments (+ EMA)    from the parameters; trained ones are float32
    + gradients again                                  several workers with --grad_accum: in DDP's buckets
    + the forward pass                                 counted: a constant and bytes per sample
    + prefetched batches                               from the first batch
    + CUDA and NCCL overhead

Forward passes over one and two samples are counted: the most bytes at one time of what autograd
saves and what a frozen part needs while it runs, except for weights. This uses the meta device if the policy supports it (`plan_module`), else the
CPU with loaded weights. See docs/hardware.md.
"""

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlatune.batch import Columns
from vlatune.config.settings import RunConfig
from vlatune.feed.feed import queued_batches
from vlatune.policies.base import ModuleOptions, PolicyAdapter
from vlatune.run_setup import Setup

GB = 10**9
GPU_SIZES = (24, 48, 80)
USABLE = 0.92
"""Usable share of a device's memory, because of fragmentation."""
CUDA_BYTES = 1 * GB
"""CUDA context, kernels, and workspaces of cuBLAS and cuDNN."""
PLANNED_BYTES = 2 * GB
"""Maximum weight size to load for policies without `plan_module`."""
NCCL_BYTES = GB // 2
"""Buffers of NCCL's channels."""
MAX_BATCH = 1024


@dataclass(frozen=True)
class Footprint:
    """Device memory of one fine-tuning mode, in bytes."""

    weights: int
    trained: int
    """Bytes of trained float32 parameters; gradients take the same, AdamW twice that."""
    saved: int
    """Bytes of the forward pass independent of the batch size."""
    saved_per_sample: int
    row_bytes: int
    """Bytes of a sample on the device."""

    def state_bytes(self, *, ema: bool) -> int:
        return self.weights + (4 if ema else 3) * self.trained

    def needed(
        self, batch_size: int, *, ema: bool, cuda: bool = True, num_workers: int = 1, grad_accum: int = 1
    ) -> int:
        # The current batch, all that are ready, and the one being copied.
        batch_bytes = batch_size * self.row_bytes
        rows = (3 + queued_batches(max(1, batch_bytes))) * batch_bytes
        saved = self.saved + batch_size * self.saved_per_sample
        # Micro-steps without an exchange accumulate outside of the buckets.
        buckets = self.trained if num_workers > 1 and grad_accum > 1 else 0
        overhead = (CUDA_BYTES + (NCCL_BYTES if num_workers > 1 else 0)) if cuda else 0
        return self.state_bytes(ema=ema) + saved + rows + buckets + overhead

    def largest_batch(
        self, device_bytes: float, *, ema: bool, cuda: bool = True, num_workers: int = 1, grad_accum: int = 1
    ) -> int:
        """Return the largest batch size that fits; 0 if none does."""

        def needed(batch_size: int) -> int:
            return self.needed(batch_size, ema=ema, cuda=cuda, num_workers=num_workers, grad_accum=grad_accum)

        return bisect_right(range(1, MAX_BATCH + 1), USABLE * device_bytes, key=needed)

    def checkpoint_bytes(self, *, ema: bool) -> int:
        """Return the bytes of trained weights, AdamW moments, and EMA weights if enabled."""
        return (4 if ema else 3) * self.trained


def measure(module: Any, columns: Columns, device: str) -> Footprint:
    """Measure a module with forward passes over one and two rows."""
    from vlatune.train.worker.transfer import collate

    parameters = list(module.parameters())
    trained = [one for one in parameters if one.requires_grad]
    tensors = collate(columns).to_tensors().tensors
    module.train()
    saved = []
    for rows in (1, 2):
        batch = {key: rows_of(values, rows).to(device) for key, values in tensors.items()}
        with counted_bytes() as count:
            module(batch)
        saved.append(count())
    each = max(0, saved[1] - saved[0])
    return Footprint(
        weights=sum(one.nbytes for one in parameters),
        trained=4 * sum(one.numel() for one in trained),
        saved=max(0, saved[0] - each),
        saved_per_sample=each,
        row_bytes=sum(values[:1].nbytes for values in tensors.values()),
    )


def rows_of(values: Any, rows: int) -> Any:
    """Return the first rows; repeats them if there are fewer."""
    return (
        values.repeat(-(-rows // len(values)), *(1,) * (values.ndim - 1))[:rows]
        if len(values) < rows
        else values[:rows]
    )


@contextmanager
def counted_bytes() -> Iterator[Callable[[], int]]:
    """Count the most bytes that tensors of the operations within hold at one time.

    These are what autograd saves, and what a part without gradients needs while it runs.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    alive: dict[int, Any] = {}
    now = most = 0

    def free(address: int, num_bytes: int) -> None:
        nonlocal now
        del alive[address]
        now -= num_bytes

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal now, most
            given = {_address(one) for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
            made = func(*args, **(kwargs or {}))
            for one in tree_leaves(made):
                if isinstance(one, torch.Tensor) and (address := _address(one)) not in given and address not in alive:
                    storage = one.untyped_storage()
                    alive[address] = weakref.finalize(storage, free, address, storage.nbytes())
                    now += storage.nbytes()
            most = max(most, now)
            return made

    with Counter():
        yield lambda: most
    for one in alive.values():
        one.detach()


def _address(tensor: Any) -> int:
    return tensor.untyped_storage()._cdata


def plan_footprint(
    adapter: PolicyAdapter[Any], setup: Setup, options: ModuleOptions, columns: Columns, planned: Any = None
) -> Footprint | None:
    """Measure on the meta device if supported, else with loaded weights; None if too large.

    `planned` is the module on the meta device, if it was made before.
    """
    module = planned or adapter.plan_module(setup.policy, setup.binding, options)
    if module is not None:
        return measure(module, columns, "meta")
    if weight_bytes(setup.policy.folder) > PLANNED_BYTES:
        return None
    return measure(adapter.load_module(setup.policy, setup.binding, options, stats=setup.stats), columns, "cpu")


def weight_bytes(folder: str) -> int:
    """Return the stored size of all weights."""
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))


def flags_that_fit(
    config: RunConfig, own: Footprint, checkpointed: Footprint | None, device_bytes: float
) -> tuple[str, ...]:
    """Return flags that fit the device at the same global batch, smallest change first; () if none does.

    `checkpointed` is the footprint with gradient checkpointing, if the policy has that.
    """
    ema = config.optimizer.ema_decay > 0
    for flags, footprint in (((), own), (("--policy.gradient_checkpointing=true",), checkpointed)):
        if footprint is None:
            continue
        # A smaller batch accumulates.
        most = footprint.largest_batch(device_bytes, ema=ema, num_workers=config.num_workers, grad_accum=2)
        fits = [size for size in range(min(most, config.batch_size), 0, -1) if config.batch_size % size == 0]
        if fits:
            accum = config.grad_accum * config.batch_size // fits[0]
            batch = (f"--batch_size={fits[0]}", f"--grad_accum={accum}") if fits[0] != config.batch_size else ()
            return (*flags, *batch)
    return ()
