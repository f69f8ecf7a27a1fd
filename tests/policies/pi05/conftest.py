"""A PI0.5 on disk and a batch of a real dataset for it, for the tests that hold ours against LeRobot's."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pi05_parity import DRAWS, SIZE, load_lerobot, make_base

from vlatune.batch import NOISE, TIME
from vlatune.config import DatasetConfig, PolicyConfig, RunConfig
from vlatune.dataset.meta.dataset_meta import load_meta
from vlatune.dataset.reader import make_unit, read_unit
from vlatune.pipeline.transforms import apply_all
from vlatune.policies.base import Draw
from vlatune.run_setup import make_setup


@pytest.fixture(scope="session")
def parity_base(dataset_v3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    meta = load_meta(str(dataset_v3))
    state, action = (meta.features[key].shape[0] for key in ("observation.state", "action"))
    folder = tmp_path_factory.mktemp("base") / "parity"
    return make_base(
        folder,
        SIZE,
        cameras=meta.cameras,
        state_dim=state,
        action_dim=action,
        horizon=5,
        image_size=48,
        tasks=meta.tasks,
    )


@pytest.fixture(scope="session")
def setup(dataset_v3, parity_base):
    config = RunConfig(dataset=DatasetConfig(root=(str(dataset_v3),)), policy=PolicyConfig(path=str(parity_base)))
    return make_setup(config)


@pytest.fixture(scope="session")
def draws(setup) -> dict[str, torch.Tensor]:
    """Four samples of the dataset with three draws of noise and time each, as training gets them."""
    frames = np.arange(4)
    rows = read_unit(setup.specs[0], make_unit(setup.metas[0], setup.specs[0], 1, frames, frames))
    draw = Draw(seed=7, flow_samples=DRAWS)
    transforms = setup.adapter.make_transforms(setup.policy, setup.binding, setup.stats, draw)
    return {key: torch.from_numpy(values) for key, values in apply_all(transforms, rows).items()}


@pytest.fixture(scope="session")
def batch(draws) -> dict[str, torch.Tensor]:
    return draws | {NOISE: draws[NOISE][:, :1], TIME: draws[TIME][:, :1]}


@pytest.fixture(scope="session")
def lerobot_policy(parity_base):
    return load_lerobot(parity_base)
