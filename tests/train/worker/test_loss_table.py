"""Losses by group, added up on the device: the means that NumPy finds, without a wait, and nothing for the weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import Tensor, nn

from vlatune.batch import LOSS_GROUPS
from vlatune.bench.step.host_sync import HostSyncSpy
from vlatune.checkpoint.state import LOSS_SUMS, LOSSES, load_loss_sums
from vlatune.config import OptimizerConfig
from vlatune.pipeline.loss_groups import LossGroups, make_loss_groups
from vlatune.policies.base import LossParts
from vlatune.train.worker.optimizer import LossTable, Updater, make_optimizer

BATCH, DRAWS, TIMES, DIMS = 4, 2, 3, 2
GROUPS_BR = torch.tensor([[0, 4], [1, 5], [0, 5], [1, 6]])
"""Two tasks, two dims (columns 2 and 3), three episodes."""


def make_groups() -> LossGroups:
    return make_loss_groups([["a", "b"]], [3], dims=DIMS, robots=0)


class Policy(nn.Module):
    """Its loss is the mean of what counts of given errors, and a weight's."""

    def __init__(self, counted: Tensor | None, *, tells: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.counted, self.tells = counted, tells

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        errors_MTA = batch["errors"] * self.weight
        if self.tells:
            self.loss_parts = LossParts(errors_MTA.detach(), self.counted)
        if self.counted is None:
            return errors_MTA.mean()
        counted = self.counted.expand_as(errors_MTA)
        return (errors_MTA * counted).sum() / counted.sum()


class OfEachSample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["errors"].unflatten(0, (BATCH, -1)).mean(dim=(1, 2, 3)) * self.weight


def make_updater(module: Any) -> tuple[Updater, LossTable]:
    table = LossTable(make_groups(), torch.device("cpu"))
    parameters = list(module.parameters())
    optimizer = make_optimizer(parameters, OptimizerConfig(lr=0.0, weight_decay=0.0))
    return Updater(module, parameters, optimizer, clip_norm=1.0, losses=table), table


def make_batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    errors = [torch.rand(BATCH * DRAWS, TIMES, DIMS, generator=generator) for _ in range(2)]
    return [{"errors": one, LOSS_GROUPS: GROUPS_BR} for one in errors]


def inside() -> Tensor:
    """(B * K, T, 1): the last sample ends after one time step."""
    counted = torch.ones(BATCH, TIMES, 1, dtype=torch.bool)
    counted[-1, 1:] = False
    return counted.repeat_interleave(DRAWS, dim=0)


@pytest.mark.parametrize("masked", [False, True])
def test_means_are_those_that_numpy_finds(masked):
    counted = inside() if masked else None
    updater, table = make_updater(Policy(counted))
    batches = make_batches()
    updater.update(batches, 2)
    shape = (2, BATCH, DRAWS, TIMES, DIMS)
    errors = np.stack([batch["errors"].numpy() for batch in batches]).reshape(shape)
    weights = np.broadcast_to(1.0 if counted is None else counted.numpy().reshape(BATCH, DRAWS, TIMES, 1), shape)
    of_sample = np.average(errors, axis=(2, 3, 4), weights=weights)
    told = make_groups().to_metrics(table.interval_2I.flatten().tolist())
    assert told["loss_by_dim"] == pytest.approx(np.average(errors, axis=(0, 1, 2, 3), weights=weights), rel=1e-6)
    assert told["loss_by_task"] == pytest.approx(
        {"a": of_sample[:, [0, 2]].mean(), "b": of_sample[:, [1, 3]].mean()}, rel=1e-6
    )
    (worst, *_), loss = make_groups().worst_episodes(table.episodes_2E.numpy()), of_sample.mean(axis=0)
    by_episode = [loss[0], loss[[1, 2]].mean(), loss[3]]
    assert (worst["episode"], worst["loss"]) == (np.argmax(by_episode), pytest.approx(max(by_episode), rel=1e-6))
    assert table.episodes_2E[1].tolist() == [2, 4, 2]
    if not masked:
        assert np.mean(told["loss_by_dim"]) == pytest.approx(np.mean(list(told["loss_by_task"].values())), rel=1e-6)


def test_a_policy_that_tells_nothing_has_no_figures_and_one_with_samples_losses_has_all_but_dims():
    silent, table = make_updater(Policy(None, tells=False))
    silent.update(make_batches(), 2)
    assert not table.sums_2G.any()
    of_each, table = make_updater(OfEachSample())
    of_each.update(make_batches(), 2)
    assert make_groups().to_metrics(table.interval_2I.flatten().tolist()).keys() == {"loss_by_task"}
    assert table.episodes_2E[1].tolist() == [2, 4, 2]


def test_neither_the_loss_nor_the_gradient_feels_it():
    losses, norms = [], []
    for table in (None, LossTable(make_groups(), torch.device("cpu"))):
        module = Policy(inside())
        optimizer = make_optimizer(module.parameters(), OptimizerConfig())
        updater = Updater(module, list(module.parameters()), optimizer, clip_norm=1.0, losses=table)
        result = updater.update(make_batches(), 2)
        losses.append(result.losses)
        norms.append(result.grad_norm)
    assert torch.equal(*losses)
    assert torch.equal(*norms)


@pytest.mark.parametrize("module", [Policy(None), Policy(inside()), OfEachSample()])
def test_nothing_waits(module):
    updater, table = make_updater(module)
    batches = make_batches()
    updater.update(batches, 2)  # makes the optimizer's state
    resident = [*module.parameters(), table.sums_2G, *(one for batch in batches for one in batch.values())]
    with HostSyncSpy(resident) as spy:
        updater.update(batches, 2)
    assert spy.table() == []


def write(folder: Path, sums_R2G: Any) -> None:
    save_file({LOSS_SUMS: np.asarray(sums_R2G, dtype=np.float32)}, folder / LOSSES)


def test_each_rank_goes_on_with_its_own_sums_or_with_its_part_of_all(tmp_path):
    write(tmp_path, [[[1, 2, 3], [1, 1, 1]], [[5, 6, 7], [3, 3, 3]]])
    into = torch.zeros(2, 3)
    load_loss_sums(tmp_path, 1, 2, into)
    assert into.tolist() == [[5, 6, 7], [3, 3, 3]]
    load_loss_sums(tmp_path, 0, 1, into)
    assert into.tolist() == [[6, 8, 10], [4, 4, 4]]
    load_loss_sums(tmp_path, 3, 4, into)
    assert into.tolist() == [[1.5, 2, 2.5], [1, 1, 1]]


def test_checkpoints_without_sums_or_of_other_groups_begin_with_zero(tmp_path):
    into = torch.zeros(2, 3)
    load_loss_sums(tmp_path, 0, 1, into)
    write(tmp_path, np.ones((1, 2, 4)))
    load_loss_sums(tmp_path, 0, 1, into)
    assert not into.any()


@pytest.mark.parametrize("sums", [np.ones((2, 3)), np.full((1, 2, 3), np.nan)])
def test_sums_that_no_run_writes_are_refused_with_the_files_name(tmp_path, sums):
    write(tmp_path, sums)
    with pytest.raises(ValueError, match=rf"'{tmp_path / LOSSES}' is damaged .*restore the checkpoint"):
        load_loss_sums(tmp_path, 0, 1, torch.zeros(2, 3))


def test_a_file_of_sums_that_is_none_is_refused(tmp_path):
    (tmp_path / LOSSES).write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="is damaged"):
        load_loss_sums(tmp_path, 0, 1, torch.zeros(2, 3))
