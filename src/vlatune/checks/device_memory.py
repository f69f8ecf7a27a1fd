"""Estimate the device memory of a worker, and what fits GPUs of 24, 48 and 80 GB.

    weights + gradients + two AdamW moments (+ EMA)    from the parameters; trained ones are float32
    --fsdp: all of these divided by the workers, + what is gathered at one time
    + the forward pass                                 counted: a constant and bytes per sample
    + prefetched batches                               from the first batch
    + CUDA and NCCL overhead

Forward passes over one and two samples are counted: the most bytes at one time of what autograd
saves and what a frozen part needs while it runs, except for weights. This uses the meta device if the policy supports it (`plan_module`), else the
CPU with loaded weights. See docs/hardware.md.
"""

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
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
"""Maximum batch size that is reported."""


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
    gathered: int = 0
    """Most bytes that FSDP2 gathers at one time; 0 if the policy cannot be sharded."""

    def state_bytes(self, *, ema: bool, num_workers: int = 1, fsdp: bool = False) -> int:
        total = self.weights + (4 if ema else 3) * self.trained
        return -(-total // num_workers) + self.gathered if fsdp else total

    def needed(self, batch_size: int, *, ema: bool, cuda: bool = True, num_workers: int = 1, fsdp: bool = False) -> int:
        # The current batch, all that are ready, and the one being copied.
        batch_bytes = batch_size * self.row_bytes
        rows = (3 + queued_batches(max(1, batch_bytes))) * batch_bytes
        saved = self.saved + batch_size * self.saved_per_sample
        overhead = (CUDA_BYTES + (NCCL_BYTES if num_workers > 1 else 0)) if cuda else 0
        state = self.state_bytes(ema=ema, num_workers=num_workers, fsdp=fsdp)
        # Every worker loads the complete weights before it keeps its part of them.
        return max(state + saved + rows, self.weights) + overhead

    def largest_batch(self, device_bytes: float, **shared: Any) -> int:
        """Return the largest batch size that fits; 0 if none does. `shared` are options of `needed`."""
        sizes = range(1, MAX_BATCH + 1)
        return bisect_right(sizes, USABLE * device_bytes, key=lambda size: self.needed(size, **shared))

    def checkpoint_bytes(self, *, ema: bool) -> int:
        """Return the bytes of trained weights, AdamW moments, and EMA weights if enabled."""
        return (4 if ema else 3) * self.trained


def measure(module: Any, columns: Columns, device: str) -> Footprint:
    """Measure a module with forward passes over one and two rows."""
    from vlatune.policies.modeling import FlowModule
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
        gathered=_gathered_bytes(module) if isinstance(module, FlowModule) else 0,
    )


def _gathered_bytes(module: Any) -> int:
    """Return the most bytes of gathered weights, their gradients, and buffers of the exchange.

    What is outside of layers stays gathered until its gradients are exchanged at the end of a step. A
    layer needs memory while the next one is gathered into a buffer.
    """
    layers = [*module.tower_layers(), *(one.layer for one in module.layers())]
    inside = {id(one) for layer in layers for one in layer.parameters()}
    outside = [one for one in module.parameters() if id(one) not in inside]
    largest = max((list(layer.parameters()) for layer in layers), key=_weight_and_gradient_bytes)
    weights, gradients = _weight_and_gradient_bytes(outside)
    layer_weights, layer_gradients = _weight_and_gradient_bytes(largest)
    return weights + max(2 * gradients, 3 * layer_weights + 2 * layer_gradients)


def _weight_and_gradient_bytes(parameters: Sequence[Any]) -> tuple[int, int]:
    return sum(one.nbytes for one in parameters), sum(4 * one.numel() for one in parameters if one.requires_grad)


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
    shared = {"ema": config.optimizer.ema_decay > 0, "num_workers": config.num_workers}
    kept, saving = ((), own, config.fsdp), (("--policy.gradient_checkpointing=true",), checkpointed, config.fsdp)
    sharded = [(("--fsdp=true", *flags), one, True) for flags, one, _ in (kept, saving)]
    excluded = config.fsdp or config.policy.compile == "true" or config.policy.keep_prefix == "true"
    can_shard = config.num_workers > 1 and own.gathered > 0 and not excluded
    for flags, footprint, fsdp in (kept, saving, *(sharded if can_shard else ())):
        if footprint is None:
            continue
        most = footprint.largest_batch(device_bytes, **shared, fsdp=fsdp)
        fits = [size for size in range(min(most, config.batch_size), 0, -1) if config.batch_size % size == 0]
        if fits:
            accum = config.grad_accum * config.batch_size // fits[0]
            batch = (f"--batch_size={fits[0]}", f"--grad_accum={accum}") if fits[0] != config.batch_size else ()
            return (*flags, *batch)
    return ()
