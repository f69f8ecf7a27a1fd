"""Training that goes on from stored state does exactly what it would have done."""

import pytest
import torch
from torch import nn

from vlatune.checkpoint.state import TrainState, load_optimizer, load_trainable, read_state, write_state
from vlatune.config import OptimizerConfig
from vlatune.train.optim import make_optimizer

STATE = TrainState(optimizer_step=3, lanes=8, loss_sum=1.25, loss_count=2, fingerprints={"config": "abc"})


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def trainable_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_resumed_training_is_bit_equal(tmp_path):
    whole = make_model()
    optimizer = make_optimizer(trainable_of(whole).values(), OptimizerConfig(lr=1e-2))
    take_steps(whole, optimizer, 0, 3)
    write_state(tmp_path, STATE, trainable_of(whole), optimizer)
    take_steps(whole, optimizer, 3, 6)

    resumed = make_model()
    optimizer = make_optimizer(trainable_of(resumed).values(), OptimizerConfig(lr=1e-2))
    load_trainable(tmp_path, trainable_of(resumed))
    load_optimizer(tmp_path, list(trainable_of(resumed)), optimizer)
    take_steps(resumed, optimizer, 3, 6)

    for name, value in whole.named_parameters():
        assert torch.equal(value, resumed.get_parameter(name)), name


def test_numbers_come_back(tmp_path):
    model = make_model()
    write_state(tmp_path, STATE, trainable_of(model), make_optimizer(model.parameters(), OptimizerConfig()))
    assert read_state(tmp_path) == STATE


def test_another_set_of_parameters_is_refused(tmp_path):
    model = make_model()
    write_state(tmp_path, STATE, trainable_of(model), make_optimizer(model.parameters(), OptimizerConfig()))
    model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"other parameters than this run \(0.weight"):
        load_trainable(tmp_path, trainable_of(model))


def test_another_format_is_refused(tmp_path):
    (tmp_path / "state.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format 99"):
        read_state(tmp_path)
