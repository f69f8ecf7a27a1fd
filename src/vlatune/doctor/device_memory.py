"""How much memory of its device a worker needs, and what would fit 24, 48 and 80 GB.

    weights + gradients + AdamW's two moments (+ EMA)      bytes of the module's parameters, those that train in float32
    + what autograd keeps of a forward                     measured: a constant, and so much for each sample
    + batches that lie ready                               bytes of the first batch
    + what CUDA takes for itself

What autograd keeps is counted while the module's own forward runs over one and over two samples: every tensor that is saved
for the backward pass, but for the weights. On the meta device where the policy offers it (`plan_module`), so that 3.6 B
parameters take no memory to count; else on the CPU, with the weights of the run. docs/memory.md has a published policy.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlatune.batch import Columns
from vlatune.config import RunConfig
from vlatune.policies.base import ModuleOptions, PolicyAdapter
from vlatune.policies.registry import get_policy
from vlatune.report.formatting import format_bytes
from vlatune.run_setup import Setup

GB = 10**9
GPU_SIZES = (24, 48, 80)
USABLE = 0.92
"""Of a device's memory: the allocator keeps pieces that nothing fits into."""
CUDA_BYTES = 1 * GB
"""Context, kernels and the workspaces of cuBLAS and cuDNN."""
PLANNED_BYTES = 2 * GB
"""Weights of a policy that has no plan are loaded for the table up to this size."""
MAX_BATCH = 1024


@dataclass(frozen=True)
class Footprint:
    """Bytes on the device of one way to train."""

    weights: int
    trained: int
    """Of the parameters that train, which are float32; gradients take as much again, and the optimizer twice that."""
    kept: int
    """By autograd, whatever the batch."""
    kept_per_sample: int
    row_bytes: int
    """Of a sample on the device."""
    num_weights: int = 0
    num_trained: int = 0

    def state_bytes(self, *, ema: bool) -> int:
        return self.weights + (4 if ema else 3) * self.trained

    def needed(self, batch_size: int, *, ema: bool, ahead: int, cuda: bool = True) -> int:
        rows = (1 + ahead) * batch_size * self.row_bytes
        kept = self.kept + batch_size * self.kept_per_sample
        return self.state_bytes(ema=ema) + kept + rows + (CUDA_BYTES if cuda else 0)

    def largest_batch(self, device_bytes: float, *, ema: bool, ahead: int, cuda: bool = True) -> int:
        """Samples that fit; 0 where not even one does."""
        fixed = self.needed(0, ema=ema, ahead=ahead, cuda=cuda)
        each = max(1, self.kept_per_sample + (1 + ahead) * self.row_bytes)
        return int(max(0, min(MAX_BATCH, (USABLE * device_bytes - fixed) // each)))

    def checkpoint_bytes(self, *, ema: bool) -> int:
        """The trained weights, AdamW's moments, and the averaged weights where there are some."""
        return (4 if ema else 3) * self.trained


@dataclass(frozen=True)
class Fitting:
    """One way to train, and the largest batch for each size of GPU."""

    train: str
    gradient_checkpointing: bool
    footprint: Footprint
    batches: Mapping[int, int]
    """GB -> samples; 0: it does not fit."""

    @property
    def flags(self) -> tuple[str, ...]:
        again = ("--policy.gradient_checkpointing=true",) if self.gradient_checkpointing else ()
        return (f"--policy.train={self.train}", *again)


def measure(module: Any, columns: Columns, device: str) -> Footprint:
    """By two forward passes of the module, over one row and over two."""
    from vlatune.train.worker.transfer import collate

    parameters = list(module.parameters())
    trained = [one for one in parameters if one.requires_grad]
    tensors = collate(columns).wrapped().tensors
    module.train()
    kept = []
    for rows in (1, 2):
        batch = {key: _rows(values, rows).to(device) for key, values in tensors.items()}
        with counted_saves(parameters) as count:
            module(batch)
        kept.append(count())
    each = max(0, kept[1] - kept[0])
    return Footprint(
        weights=sum(one.nbytes for one in parameters),
        trained=4 * sum(one.numel() for one in trained),
        kept=max(0, kept[0] - each),
        kept_per_sample=each,
        row_bytes=sum(values[:1].nbytes for values in tensors.values()),
        num_weights=sum(one.numel() for one in parameters),
        num_trained=sum(one.numel() for one in trained),
    )


def _rows(values: Any, rows: int) -> Any:
    """The first rows; a batch of one is repeated."""
    return values[:rows] if len(values) >= rows else values[:1].repeat(rows, *(1,) * (values.ndim - 1))


@contextmanager
def counted_saves(parameters: list[Any]) -> Iterator[Callable[[], int]]:
    """Bytes that autograd saves inside, each storage once, without the weights themselves."""
    import torch

    own = {_address(one) for one in parameters}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if _address(tensor) not in own:
            kept[_address(tensor)] = tensor.untyped_storage()  # held, so that its place is not given out again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield lambda: sum(storage.nbytes() for storage in kept.values())


def _address(tensor: Any) -> int:
    """Tells storages apart, also those on the meta device, which have no memory and so no address of their own."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() or storage._cdata


def fitting_ways(config: RunConfig, setup: Setup, columns: Columns) -> list[Fitting]:
    """Every way to train of the policy, with and without computing layers again, against the usual sizes of GPUs."""
    card = get_policy(config.policy.type)
    again = (False, True) if "gradient_checkpointing" in card.settings else (False,)
    ema, found = config.optimizer.ema_decay > 0, []
    for train in card.train_ways:
        for checkpointed in again:
            options = _options(config, train=train, gradient_checkpointing=checkpointed)
            footprint = plan_footprint(setup.adapter, setup, options, columns)
            if footprint is None:
                return []
            ahead = config.prefetch_batches
            batches = {size: footprint.largest_batch(size * GB, ema=ema, ahead=ahead) for size in GPU_SIZES}
            found.append(Fitting(train, checkpointed, footprint, batches))
    return found


def plan_footprint(
    adapter: PolicyAdapter[Any], setup: Setup, options: ModuleOptions, columns: Columns
) -> Footprint | None:
    """Without memory where the policy offers it, else of small weights that are loaded; None of large ones."""
    module = adapter.plan_module(setup.policy, setup.binding, options)
    if module is not None:
        return measure(module, columns, "meta")
    if weight_bytes(setup.policy.folder) > PLANNED_BYTES:
        return None
    return measure(adapter.load_module(setup.policy, setup.binding, options, stats=setup.stats), columns, "cpu")


def _options(config: RunConfig, **changes: Any) -> ModuleOptions:
    return replace(ModuleOptions.of(config.policy), compile=False, **changes)


def weight_bytes(folder: str) -> int:
    """Of the files, as they are stored."""
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))


def smaller(config: RunConfig, ways: list[Fitting], own: Footprint, device_bytes: float) -> tuple[str, ...]:
    """Flags with which the run fits the device, at the same global batch; the least change first, none where nothing does."""
    ema, ahead = config.optimizer.ema_decay > 0, config.prefetch_batches
    tried = [((), own)]
    same = [one for one in ways if one.train == config.policy.train and one.gradient_checkpointing]
    tried += [(one.flags[1:], one.footprint) for one in same]
    tried += [(one.flags, one.footprint) for one in sorted(ways, key=lambda one: -one.footprint.num_trained)]
    for flags, footprint in tried:
        most = footprint.largest_batch(device_bytes, ema=ema, ahead=ahead)
        fits = [size for size in range(min(most, config.batch_size), 0, -1) if config.batch_size % size == 0]
        if fits:
            accum = config.grad_accum * config.batch_size // fits[0]
            batch = (f"--batch_size={fits[0]}", f"--grad_accum={accum}") if fits[0] != config.batch_size else ()
            return (*flags, *batch)
    return ()


def table_rows(ways: list[Fitting]) -> list[list[str]]:
    """(way, weights with optimizer, for each sample, largest batch of each size) for people."""
    rows = []
    for one in ways:
        name = f"{one.train}{', layers computed again' if one.gradient_checkpointing else ''}"
        fits = [str(one.batches[size]) if one.batches[size] else "does not fit" for size in GPU_SIZES]
        fits = [f"{MAX_BATCH} and more" if text == str(MAX_BATCH) else text for text in fits]
        state = format_bytes(one.footprint.state_bytes(ema=False) + one.footprint.kept)
        rows.append([name, state, format_bytes(one.footprint.kept_per_sample), *fits])
    return rows
