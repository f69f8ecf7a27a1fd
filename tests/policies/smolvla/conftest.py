"""A SmolVLA on disk and a batch of a real dataset for it. What tests of several policies use lies with PI0.5's."""

import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS / "policies" / "pi05"), str(TESTS / "checkpoint")]  # pi05_parity, small_run

from pi05_parity import draw_batch, first_draw  # noqa: E402
from smolvla_parity import load_lerobot, make_parity_base, setup_for  # noqa: E402

from vlatune.batch import ACTION_IS_PAD, TOKEN_MASK, TOKENS  # noqa: E402


@pytest.fixture(scope="session")
def smolvla_base(dataset_v3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parity_base(tmp_path_factory.mktemp("base") / "smolvla", dataset_v3)


@pytest.fixture(scope="session")
def setup(dataset_v3, smolvla_base):
    return setup_for(dataset_v3, smolvla_base)


@pytest.fixture(scope="session")
def draws(setup) -> dict[str, torch.Tensor]:
    """Four samples with three draws each; one prompt is shorter, and some actions lie behind their episode's end."""
    batch = draw_batch(setup)
    batch[ACTION_IS_PAD][2:, 3:] = True
    short = int(batch[TOKEN_MASK][0].sum()) - 2
    batch[TOKEN_MASK][0, short:] = False
    batch[TOKENS][0, short:] = setup.policy.pad_id
    return batch


@pytest.fixture(scope="session")
def batch(draws) -> dict[str, torch.Tensor]:
    return first_draw(draws)


@pytest.fixture(scope="session")
def lerobot_policy(smolvla_base):
    """With every parameter trainable."""
    return load_lerobot(smolvla_base).requires_grad_(True)
