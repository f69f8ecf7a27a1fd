"""Skip updates with non-finite losses or gradients, and stop the run with the samples' ids.

The decision is made on the device, so that no step waits for the host. After the all-reduce, all
workers have the same gradient norm. From the first non-finite norm, a flag on the device disables
the optimizer, so the state of the last good update is preserved. The host checks the flag at log
steps and before checkpoints, where all workers stop together.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlatune.errors import RunStoppedError

MAX_SAMPLES_NAMED = 256

Gather = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""One worker's dict -> all workers' dicts by rank."""


class NonFiniteGuard:
    """Device side: disables the optimizer from the first non-finite gradient."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        if not all(group.get("fused") for group in optimizer.param_groups):
            raise ValueError(f"{type(optimizer).__name__}: only a fused optimizer can be disabled by the device")
        self.skipped = torch.zeros((), device=device)
        """Number of skipped updates; a float, to be reduced with the other numbers to log."""
        self._stopped = torch.zeros((), device=device)
        # Same mechanism as GradScaler: a fused step does nothing if this tensor is 1.
        optimizer.found_inf = self._stopped  # pyright: ignore[reportAttributeAccessIssue]

    def watch(self, grad_norm: Tensor) -> None:
        """Check the gradient norm; call before the optimizer step."""
        self._stopped.logical_or_(grad_norm.isfinite().logical_not_())
        self.skipped.add_(self._stopped)


@dataclass(frozen=True)
class Part:
    """One worker's part of an update, as plain values."""

    losses: list[float]
    grad_norm: float
    samples: list[list[list[int]]]
    """[dataset_index, index] of every row of every micro-batch."""


class NonFiniteWatch:
    """Host side: records updates since the last check, to name the samples of the first bad one."""

    def __init__(self) -> None:
        self._updates: list[tuple[Tensor, Tensor, Sequence[np.ndarray]]] = []

    def record(self, losses: Tensor, grad_norm: Tensor, samples: Sequence[np.ndarray]) -> None:
        """Record one update: device tensors and the (B, 2) ids of each micro-batch; no transfer."""
        self._updates.append((losses, grad_norm, samples))

    def check(self, skipped: float, optimizer_steps: int, gather: Gather) -> None:
        """Stop the run if updates were skipped; call on all workers at the same step."""
        updates, self._updates = self._updates, []
        if not skipped:
            return
        losses, grad_norm, samples = updates[-int(skipped)]
        mine = Part(losses.tolist(), float(grad_norm), [ids.tolist() for ids in samples])  # device sync: the run ends
        parts = [Part(**one) for one in gather(asdict(mine))]
        raise RunStoppedError(explain(optimizer_steps - int(skipped) + 1, parts))


def explain(optimizer_step: int, parts: Sequence[Part]) -> str:
    """Describe what was not finite and in which samples; `parts` are ordered by rank."""
    steps = [(rank, micro_step) for rank, part in enumerate(parts) for micro_step in range(len(part.losses))]
    culprits = [(rank, micro_step) for rank, micro_step in steps if not np.isfinite(parts[rank].losses[micro_step])]
    if culprits:
        losses = [f"{parts[rank].losses[step]} (rank {rank}, micro-step {step})" for rank, step in culprits]
        what = f"the loss is {', '.join(losses)}"
    else:
        what = f"the gradient norm is {parts[0].grad_norm}, although every loss is finite"
    ids = [tuple(sample) for rank, step in culprits or steps for sample in parts[rank].samples[step]]
    more = f" and {len(ids) - MAX_SAMPLES_NAMED} more" if len(ids) > MAX_SAMPLES_NAMED else ""
    return (
        f"optimizer step {optimizer_step}: {what}; the update was skipped, and no checkpoint contains it; samples "
        f"(dataset_index, index): {', '.join(map(str, ids[:MAX_SAMPLES_NAMED]))}{more}; check these samples, lower "
        f"--optimizer.lr, or exclude their episodes with --dataset.episodes"
    )
