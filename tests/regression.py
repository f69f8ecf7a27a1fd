"""A linear regression for tests of updates."""

import torch
from torch import nn

from vlatune.config.settings import OptimizerConfig
from vlatune.policies.base import PolicyOutput
from vlatune.train.worker.optimizer import Updater, make_optimizer


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, batch):
        return PolicyOutput((self.linear(batch["x"]) - batch["y"]).square().mean())


def make_model(seed: int = 0) -> Regression:
    torch.manual_seed(seed)
    return Regression()


def make_batches(count: int, size: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(size, 3, generator=generator), "y": torch.randn(size, 1, generator=generator)}
        for _ in range(count)
    ]


def join(batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def make_updater(model: nn.Module, *, clip_norm: float = 1.0, lr: float = 0.1) -> Updater:
    optimizer = make_optimizer(model.parameters(), OptimizerConfig(lr=lr))
    return Updater(model, list(model.parameters()), optimizer, clip_norm=clip_norm)
