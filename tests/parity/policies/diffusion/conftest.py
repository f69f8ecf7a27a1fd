"""Folders of LeRobot's Diffusion Policy, their set-ups, and LeRobot's policy loaded from them; one per case of `CASES`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_parity import CASES, as_tensors, lerobot_batch, make_base, read_rows, setup_of
from lerobot.policies.diffusion import DiffusionPolicy
from torch import Tensor

from vlatune.data.transforms import apply_all
from vlatune.policies.base import ModuleOptions, NoiseSpec
from vlatune.run_setup import Setup


@dataclass(frozen=True)
class Case:
    setup: Setup
    base: Path
    batch: dict[str, Tensor]
    """A training batch for our module."""
    theirs: dict[str, Tensor]
    """The same pixels through LeRobot's processor."""

    def load(self, **options: Any):
        chosen = ModuleOptions(train="full", **options)
        return self.setup.adapter.load_module(self.setup.policy, self.setup.binding, chosen, stats=self.setup.stats)

    def lerobot(self) -> DiffusionPolicy:
        return DiffusionPolicy.from_pretrained(self.base)


@pytest.fixture(scope="session", params=CASES)
def case(request, dataset_v3, tmp_path_factory) -> Case:
    base = make_base(tmp_path_factory.mktemp("diffusion") / "base", dataset_v3, **CASES[request.param])
    setup = setup_of(dataset_v3, base)
    rows = read_rows(setup)
    ours = as_tensors(apply_all(setup.training_transforms(), rows))
    noise = NoiseSpec(setup.order.seed, setup.flow_samples)
    cropped = apply_all(setup.adapter.augment_rows(setup.policy, setup.binding, noise), rows)
    config = DiffusionPolicy.from_pretrained(base).config
    return Case(setup, base, ours, lerobot_batch(setup, config, cropped))


@pytest.fixture(scope="session")
def grouped(dataset_v3, tmp_path_factory) -> Path:
    """A base with GroupNorm and a crop."""
    return make_base(tmp_path_factory.mktemp("diffusion") / "grouped", dataset_v3, **CASES["group norm, cropped"])


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Sums of several threads may come in another order each time; the models are too small to gain from them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
