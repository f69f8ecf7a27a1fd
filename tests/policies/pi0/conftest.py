"""A PI0 on disk and a batch of a real dataset for it. What both policies' tests use lies with PI0.5's."""

import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS / "policies" / "pi05"), str(TESTS / "checkpoint")]  # pi05_parity, small_run

from pi05_parity import draw_batch, first_draw, load_lerobot, make_parity_base, setup_for  # noqa: E402

from vlatune.policies.pi05.weights import PI0  # noqa: E402


@pytest.fixture(scope="session")
def pi0_base(dataset_v3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parity_base(tmp_path_factory.mktemp("base") / "pi0", dataset_v3, kind=PI0)


@pytest.fixture(scope="session")
def setup(dataset_v3, pi0_base):
    return setup_for(dataset_v3, pi0_base, kind=PI0)


@pytest.fixture(scope="session")
def draws(setup) -> dict[str, torch.Tensor]:
    return draw_batch(setup)


@pytest.fixture(scope="session")
def batch(draws) -> dict[str, torch.Tensor]:
    return first_draw(draws)


@pytest.fixture(scope="session")
def lerobot_policy(pi0_base):
    return load_lerobot(pi0_base)
