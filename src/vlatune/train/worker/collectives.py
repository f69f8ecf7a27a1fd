"""What all workers do after the same step: save a checkpoint, or save one and stop. No Ray.

A wish may arise on any worker at any moment: a clock, a signal, a node that is about to go. To act on it takes all
workers, after one and the same step. So every worker puts its wish into a small exchange after every step and acts on
the exchange of the step before, which is the same for all of them and has long arrived: nothing waits for it. It runs
on the host, over gloo, beside the exchanges of the device.
"""

from typing import Any

import torch
import torch.distributed as dist

from vlatune.pipeline.plan import Share
from vlatune.train.wish import Wish


class Agreement:
    def __init__(self, share: Share) -> None:
        self._share = share
        self._group = dist.new_group(backend="gloo") if share.num_workers > 1 else None
        self._largest = torch.tensor(int(Wish.NOTHING))
        self._exchange: Any = None

    def take(self) -> Wish:
        """What all workers do now: the largest wish that was given after the step before."""
        if self._exchange is not None:
            self._exchange.wait()
            self._exchange = None
        return Wish(int(self._largest))

    def give(self, wish: Wish) -> None:
        """Begin the exchange whose result the next `take` returns; call both on all workers after every step."""
        self._largest = torch.tensor(int(wish))
        if self._group is not None:
            self._exchange = dist.all_reduce(self._largest, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def gather(self, mine: Any) -> list[Any]:
        """Every worker's value, by rank; this one does wait."""
        everyone = [mine] * self._share.num_workers
        if self._group is not None:
            dist.all_gather_object(everyone, mine, group=self._group)
        return everyone
