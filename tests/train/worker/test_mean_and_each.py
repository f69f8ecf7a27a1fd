"""One sum over the workers carries means and each worker's own numbers."""

import pytest
import torch

from vlatune.pipeline.plan import Share
from vlatune.train.worker.collectives import mean_and_each


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_means_and_every_workers_own(rank):
    means, own = [[1.0, 10.0], [2.0, 20.0], [6.0, 0.0]], [[0.5, 7.0], [0.25, 8.0], [4.0, 9.0]]

    def add_the_others(values: torch.Tensor) -> None:
        for other in {0, 1, 2} - {rank}:
            table = torch.zeros(3, 2)
            table[other] = torch.tensor(own[other])
            values += torch.cat([torch.tensor(means[other]), table.flatten()])

    mean, each = mean_and_each(torch.tensor(means[rank]), own[rank], Share(rank, 3), add_the_others)
    assert mean == [3.0, 10.0]
    assert each == own


def test_one_worker_asks_nobody():
    def must_not_be_called(values: torch.Tensor) -> None:
        raise AssertionError(values)

    assert mean_and_each(torch.tensor([2.0]), [0.5], Share(0, 1), must_not_be_called) == ([2.0], [[0.5]])
