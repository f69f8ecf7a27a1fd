"""An update over micro-batches equals one over the whole batch, and what it returns stays a tensor."""

import copy

import pytest
import torch
from torch import nn

from vlatune.config import OptimizerConfig
from vlatune.train.optim import make_optimizer
from vlatune.train.step import Updater


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, batch):
        return (self.linear(batch["x"]) - batch["y"]).square().mean()


def make_batches(count: int, size: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(size, 3, generator=generator), "y": torch.randn(size, 1, generator=generator)}
        for _ in range(count)
    ]


def make_updater(model: nn.Module, clip_norm: float = 1.0) -> Updater:
    optimizer = make_optimizer(model.parameters(), OptimizerConfig(lr=0.1))
    return Updater(model, list(model.parameters()), optimizer, clip_norm=clip_norm)


def test_accumulation_equals_the_whole_batch():
    torch.manual_seed(0)
    one, four = Regression(), Regression()
    four.load_state_dict(copy.deepcopy(one.state_dict()))
    parts = make_batches(4, 2)
    whole = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    result_one = make_updater(one).update([whole], grad_accum=1)
    result_four = make_updater(four).update(parts, grad_accum=4)
    assert torch.allclose(result_one.loss, result_four.loss, rtol=1e-6)
    assert torch.allclose(result_one.grad_norm, result_four.grad_norm, rtol=1e-6)
    for ours, theirs in zip(one.parameters(), four.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_gradients_are_clipped_and_the_norm_is_from_before():
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    batch = {"x": torch.full((2, 3), 100.0), "y": torch.zeros(2, 1)}
    result = Updater(model, list(model.parameters()), optimizer, clip_norm=0.5).update([batch], grad_accum=1)
    moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)]).norm()
    assert result.grad_norm > 0.5
    assert moved == pytest.approx(0.5, rel=1e-4)


def test_loss_and_norm_stay_on_the_device():
    model = Regression()
    result = make_updater(model).update(make_batches(1, 2), grad_accum=1)
    assert isinstance(result.loss, torch.Tensor)
    assert isinstance(result.grad_norm, torch.Tensor)
    assert not result.loss.requires_grad
    assert all(p.grad is None for p in model.parameters())
