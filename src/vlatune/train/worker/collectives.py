"""What workers tell each other, and what all of them do after the same step: save a checkpoint, or save one and stop.

A request may arise on any worker at any moment: a clock, a signal, a node that is about to go. To act on it takes all
workers, after one and the same step. So every worker puts its request into a small exchange after every step and acts on
the exchange of the step before, which is the same for all of them and has long arrived: nothing waits for it. It runs
on the host, over gloo, beside the exchanges of the device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vlatune.pipeline.plan import Share
from vlatune.train.heartbeat import Request


class Consensus:
    def __init__(self, share: Share) -> None:
        self._share = share
        self._group = dist.new_group(backend="gloo") if share.num_workers > 1 else None
        self._largest = torch.tensor(int(Request.NOTHING))
        self._exchange: Any = None

    def take(self) -> Request:
        """What all workers do now: the largest request that was given after the step before."""
        if self._exchange is not None:
            self._exchange.wait()
            self._exchange = None
        return Request(int(self._largest))

    def give(self, request: Request) -> None:
        """Begin the exchange whose result the next `take` returns; call both on all workers after every step."""
        self._largest = torch.tensor(int(request))
        if self._group is not None:
            self._exchange = dist.all_reduce(self._largest, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def gather(self, mine: Any) -> list[Any]:
        """Every worker's value, by rank; this one does wait."""
        everyone = [mine] * self._share.num_workers
        if self._group is not None:
            dist.all_gather_object(everyone, mine, group=self._group)
        return everyone


def mean_and_each(
    means: Tensor, mine: Sequence[float], share: Share, add_over_workers: Callable[[Tensor], object]
) -> tuple[list[float], list[list[float]]]:
    """`means` averaged over the workers, and every worker's `mine`, by rank. `add_over_workers` sums in place.

    What workers tell each other at a log step: one collective, one transfer to the host. Each worker's own numbers, e.g.
    to find the slowest, travel in the same sum, in a table with a row for every worker in which all rows but its own are
    zero.
    """
    table_WM = means.new_zeros(share.num_workers, len(mine))
    table_WM[share.rank] = means.new_tensor(mine)  # device sync
    values = torch.cat([means, table_WM.flatten()])
    if share.num_workers > 1:
        add_over_workers(values)
        values[: len(means)] /= share.num_workers
    plain = values.tolist()  # device sync: once per log line, whose numbers these are
    own = plain[len(means) :]
    return plain[: len(means)], [own[at : at + len(mine)] for at in range(0, len(own), len(mine))]
