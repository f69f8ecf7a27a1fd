"""Losses by group are summed on the device: equal to NumPy's means, without host syncs or effect on training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import Tensor, nn

from benchmarks.step.host_sync import HostSyncSpy
from vlatune.batch import LOSS_GROUPS
from vlatune.checkpoint.state import LOSS_SUMS, LOSSES, load_loss_sums
from vlatune.config.settings import OptimizerConfig
from vlatune.data.loss_groups import LossGroups, make_loss_groups
from vlatune.policies.base import PolicyOutput
from vlatune.train.worker.optimizer import LossTable, Updater, make_optimizer

BATCH, SAMPLES, TIMES, DIMS = 4, 2, 3, 2
GROUPS_BR = torch.tensor([[0, 4], [1, 5], [0, 5], [1, 6]])
"""Two tasks, two dims (columns 2 and 3), three episodes."""


def make_groups() -> LossGroups:
    return make_loss_groups([["a", "b"]], [3], dims=DIMS, robots=0)


class Policy(nn.Module):
    """Returns the mean of the counted errors, scaled by a weight."""

    def __init__(self, counted: Tensor | None, *, returns_errors: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.counted, self.returns_errors = counted, returns_errors

    def forward(self, batch: dict[str, Tensor]) -> PolicyOutput:
        errors_MTA = batch["errors"] * self.weight
        counted = torch.ones(()) if self.counted is None else self.counted
        counted = counted.expand_as(errors_MTA)
        loss = (errors_MTA * counted).sum() / counted.sum()
        return PolicyOutput(loss, errors_MTA.detach() if self.returns_errors else None, self.counted)


class OfEachSample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch: dict[str, Tensor]) -> PolicyOutput:
        loss_B = batch["errors"].unflatten(0, (BATCH, -1)).mean(dim=(1, 2, 3)) * self.weight
        return PolicyOutput(loss_B.mean(), loss_B=loss_B)


def make_updater(module: Any) -> tuple[Updater, LossTable]:
    table = LossTable(make_groups(), torch.device("cpu"))
    parameters = list(module.parameters())
    optimizer = make_optimizer(parameters, OptimizerConfig(lr=0.0, weight_decay=0.0))
    return Updater(module, parameters, optimizer, clip_norm=1.0, losses=table), table


def make_batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    errors = [torch.rand(BATCH * SAMPLES, TIMES, DIMS, generator=generator) for _ in range(2)]
    return [{"errors": one, LOSS_GROUPS: GROUPS_BR} for one in errors]


def inside() -> Tensor:
    """(B * K, T, 1): the last sample ends after one time step."""
    counted = torch.ones(BATCH, TIMES, 1, dtype=torch.bool)
    counted[-1, 1:] = False
    return counted.repeat_interleave(SAMPLES, dim=0)


@pytest.mark.parametrize("masked", [False, True])
def test_means_equal_numpys(masked):
    counted = inside() if masked else None
    updater, table = make_updater(Policy(counted))
    batches = make_batches()
    updater.update(batches, 2)
    shape = (2, BATCH, SAMPLES, TIMES, DIMS)
    errors = np.stack([batch["errors"].numpy() for batch in batches]).reshape(shape)
    weights = np.broadcast_to(1.0 if counted is None else counted.numpy().reshape(BATCH, SAMPLES, TIMES, 1), shape)
    of_sample = np.average(errors, axis=(2, 3, 4), weights=weights)
    reported = make_groups().to_metrics(table.interval_2I.flatten().tolist())
    assert reported["loss_by_dim"] == pytest.approx(np.average(errors, axis=(0, 1, 2, 3), weights=weights), rel=1e-6)
    assert reported["loss_by_task"] == pytest.approx(
        {"a": of_sample[:, [0, 2]].mean(), "b": of_sample[:, [1, 3]].mean()}, rel=1e-6
    )
    (worst, *_), loss = make_groups().worst_episodes(table.episodes_2E.numpy()), of_sample.mean(axis=0)
    by_episode = [loss[0], loss[[1, 2]].mean(), loss[3]]
    assert (worst["episode"], worst["loss"]) == (np.argmax(by_episode), pytest.approx(max(by_episode), rel=1e-6))
    assert table.episodes_2E[1].tolist() == [2, 4, 2]
    if not masked:
        assert np.mean(reported["loss_by_dim"]) == pytest.approx(
            np.mean(list(reported["loss_by_task"].values())), rel=1e-6
        )


def test_losses_by_group_depend_on_what_the_policy_returns():
    silent, table = make_updater(Policy(None, returns_errors=False))
    silent.update(make_batches(), 2)
    assert not table.sums_2G.any()
    of_each, table = make_updater(OfEachSample())
    of_each.update(make_batches(), 2)
    assert make_groups().to_metrics(table.interval_2I.flatten().tolist()).keys() == {"loss_by_task"}
    assert table.episodes_2E[1].tolist() == [2, 4, 2]


def test_losses_by_group_do_not_change_training():
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
def test_an_update_has_no_host_sync(module):
    updater, table = make_updater(module)
    batches = make_batches()
    updater.update(batches, 2)  # makes the optimizer's state
    resident = [*module.parameters(), table.sums_2G, *(one for batch in batches for one in batch.values())]
    with HostSyncSpy(resident) as spy:
        updater.update(batches, 2)
    assert spy.table() == []


def write(folder: Path, sums_R2G: Any) -> None:
    save_file({LOSS_SUMS: np.asarray(sums_R2G, dtype=np.float32)}, folder / LOSSES)


def test_sums_are_restored_per_rank_or_divided_among_other_ranks(tmp_path):
    write(tmp_path, [[[1, 2, 3], [1, 1, 1]], [[5, 6, 7], [3, 3, 3]]])
    into = torch.zeros(2, 3)
    load_loss_sums(tmp_path, 1, 2, into)
    assert into.tolist() == [[5, 6, 7], [3, 3, 3]]
    load_loss_sums(tmp_path, 0, 1, into)
    assert into.tolist() == [[6, 8, 10], [4, 4, 4]]
    load_loss_sums(tmp_path, 3, 4, into)
    assert into.tolist() == [[1.5, 2, 2.5], [1, 1, 1]]


def test_without_sums_of_these_groups_the_sums_start_at_zero(tmp_path):
    into = torch.zeros(2, 3)
    load_loss_sums(tmp_path, 0, 1, into)
    write(tmp_path, np.ones((1, 2, 4)))
    load_loss_sums(tmp_path, 0, 1, into)
    assert not into.any()


@pytest.mark.parametrize("sums", [np.ones((2, 3)), np.full((1, 2, 3), np.nan)])
def test_damaged_sums_are_rejected_with_the_name_of_the_file(tmp_path, sums):
    write(tmp_path, sums)
    with pytest.raises(ValueError, match=rf"'{tmp_path / LOSSES}' is damaged .*restore the checkpoint"):
        load_loss_sums(tmp_path, 0, 1, torch.zeros(2, 3))


def test_a_damaged_file_is_rejected(tmp_path):
    (tmp_path / LOSSES).write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="is damaged"):
        load_loss_sums(tmp_path, 0, 1, torch.zeros(2, 3))
