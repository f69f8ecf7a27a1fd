"""Losses and gradients that are not finite: no update is made with them, and the run stops with the samples' names.

The device decides, so that no step waits for the host. After the exchange all workers hold the same gradient, so its
norm is finite on all of them or on none. From the first norm that is not, a flag on the device makes every optimizer
step empty: weights, moments and step counts stay as the last good update left them. The host looks at the flag where
it waits for the device anyway, with the numbers of a log line and before a checkpoint; all workers stop there together.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlatune.errors import RunStoppedError

MOST_SAMPLES_NAMED = 256

Gather = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""One worker's dict -> all workers' dicts, by rank."""


class NonFiniteGuard:
    """The device's side: switches the optimizer off from the first gradient on that is not finite."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        if not all(group.get("fused") for group in optimizer.param_groups):
            raise ValueError(f"{type(optimizer).__name__}: only a fused optimizer can be switched off by the device")
        self.skipped = torch.zeros((), device=device)
        """How many updates were not made; a float, so that it travels with the other numbers of a log line."""
        self._stopped = torch.zeros((), device=device)
        # The way in that torch keeps for its GradScaler: a fused step does nothing where this tensor is 1.
        optimizer.found_inf = self._stopped  # pyright: ignore[reportAttributeAccessIssue]

    def watch(self, grad_norm: Tensor) -> None:
        """Between clipping and the optimizer's step."""
        self._stopped.logical_or_(grad_norm.isfinite().logical_not_())
        self.skipped.add_(self._stopped)


@dataclass(frozen=True)
class _Made:
    losses: Tensor
    grad_norm: Tensor
    samples: Sequence[np.ndarray]


@dataclass(frozen=True)
class Part:
    """One worker's part of an update that was not finite, in plain values."""

    losses: list[float]
    grad_norm: float
    samples: list[list[list[int]]]
    """[dataset_index, index] of every row of every micro-batch."""

    def finite(self, micro_step: int) -> bool:
        return bool(np.isfinite(self.losses[micro_step]))


class NonFiniteWatch:
    """The host's side: remembers the updates since the last look, to name the samples of the first bad one."""

    def __init__(self) -> None:
        self._since_look: list[_Made] = []

    def remember(self, losses: Tensor, grad_norm: Tensor, samples: Sequence[np.ndarray]) -> None:
        """One update: device tensors, and the (B, 2) ids of each micro-batch; nothing is transferred."""
        self._since_look.append(_Made(losses, grad_norm, samples))

    def look(self, skipped: float, optimizer_steps: int, gather: Gather) -> None:
        """Stop the run if updates were skipped; call it on all workers, with the numbers of the same step."""
        since, self._since_look = self._since_look, []
        if not skipped:
            return
        bad = since[-int(skipped)]
        # Device syncs, twice: the run ends here.
        mine = Part(bad.losses.tolist(), float(bad.grad_norm), [ids.tolist() for ids in bad.samples])
        parts = [Part(**one) for one in gather(asdict(mine))]
        raise RunStoppedError(explain(optimizer_steps - int(skipped) + 1, parts))


def explain(optimizer_step: int, parts: Sequence[Part]) -> str:
    """What was not finite, where, and in which samples; `parts` by rank."""
    culprits = [
        (rank, micro_step)
        for rank, part in enumerate(parts)
        for micro_step in range(len(part.losses))
        if not part.finite(micro_step)
    ]
    if culprits:
        what = "the loss is " + ", ".join(
            f"{parts[rank].losses[micro_step]} (rank {rank}, micro-step {micro_step})" for rank, micro_step in culprits
        )
    else:
        what = f"the gradient's norm is {parts[0].grad_norm} though every loss is finite"
        culprits = [(rank, micro_step) for rank, part in enumerate(parts) for micro_step in range(len(part.losses))]
    ids = [tuple(sample) for rank, micro_step in culprits for sample in parts[rank].samples[micro_step]]
    return (
        f"optimizer step {optimizer_step}: {what}; this update was not made, and no checkpoint holds anything of it; "
        f"samples (dataset_index, index): {_listed(ids)}; "
        f"look at these samples, lower --optimizer.lr, or leave their episodes out with --dataset.episodes"
    )


def _listed(ids: Sequence[tuple[int, ...]]) -> str:
    named = ", ".join(str(one) for one in ids[:MOST_SAMPLES_NAMED])
    more = len(ids) - MOST_SAMPLES_NAMED
    return f"{named} and {more} more" if more > 0 else named
