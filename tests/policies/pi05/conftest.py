"""A PI0.5 on disk and a batch of a real dataset for it, for the tests that hold ours against LeRobot's."""

from pathlib import Path

import pytest
import torch
from pi05_parity import draw_batch, first_draw, load_lerobot, make_parity_base, setup_for


@pytest.fixture(scope="session")
def parity_base(dataset_v3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parity_base(tmp_path_factory.mktemp("base") / "parity", dataset_v3)


@pytest.fixture(scope="session")
def setup(dataset_v3, parity_base):
    return setup_for(dataset_v3, parity_base)


@pytest.fixture(scope="session")
def draws(setup) -> dict[str, torch.Tensor]:
    return draw_batch(setup)


@pytest.fixture(scope="session")
def batch(draws) -> dict[str, torch.Tensor]:
    return first_draw(draws)


@pytest.fixture(scope="session")
def lerobot_policy(parity_base):
    return load_lerobot(parity_base)
