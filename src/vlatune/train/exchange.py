"""What workers tell each other at a log step: one collective, one transfer to the host.

Some numbers are averaged over the workers. Of others each worker's own is wanted, e.g. to find the slowest: they travel
in the same sum, in a table with a row for every worker in which all rows but its own are zero.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vlatune.pipeline.plan import Share


def mean_and_each(
    means: Tensor, mine: Sequence[float], share: Share, add_over_workers: Callable[[Tensor], object]
) -> tuple[list[float], list[list[float]]]:
    """`means` averaged over the workers, and every worker's `mine`, by rank. `add_over_workers` sums in place."""
    table_WM = means.new_zeros(share.num_workers, len(mine))
    table_WM[share.rank] = means.new_tensor(mine)  # device sync
    values = torch.cat([means, table_WM.flatten()])
    if share.num_workers > 1:
        add_over_workers(values)
        values[: len(means)] /= share.num_workers
    plain = values.tolist()  # device sync: once per log line, whose numbers these are
    own = plain[len(means) :]
    return plain[: len(means)], [own[at : at + len(mine)] for at in range(0, len(own), len(mine))]
