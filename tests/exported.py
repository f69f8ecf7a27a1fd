"""Use an export as a robot's program does: through LeRobot's classes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from torch import Tensor

from vlatune.batch import STATE, TASK
from vlatune.config.settings import ExportConfig
from vlatune.evaluate.predictions import in_own_units
from vlatune.export.export import export_run
from vlatune.policies.base import Binding, PolicySpec
from vlatune.policies.model_size import building_at
from vlatune.policies.pi05.size import read_size


def load_lerobot(folder: Path) -> Any:
    """Load the policy with LeRobot's factory at the size of the tiny model."""
    size = read_size(folder)
    assert size is not None
    with building_at(size):
        return get_policy_class(PreTrainedConfig.from_pretrained(folder).type).from_pretrained(folder)


def check_actions(run: Any, folder: Path) -> None:
    """Export the checkpoint of a SmallRun to `folder`, and compare the actions of LeRobot with ours."""
    export_run(run.config.run_dir, folder, ExportConfig(), warn=pytest.fail)
    setup, noise = run.start.setup, noise_for(run.start.setup.policy, run.rows)
    chunk = run.module.eval().predict(run.batch(), noise).numpy()
    ours = in_own_units(setup.eval_transforms(0), chunk, run.rows[STATE])
    theirs = lerobot_actions(folder, load_lerobot(folder), run.rows, setup.binding, noise)
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-6)


def noise_for(spec: PolicySpec, rows: Mapping[str, np.ndarray]) -> Tensor:
    shape = len(rows["index"]), spec.horizon, spec.max_action_dim
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def lerobot_actions(
    folder: Path, policy: Any, rows: Mapping[str, np.ndarray], binding: Binding, noise: Tensor, **overrides: Any
) -> np.ndarray:
    """Return LeRobot's actions in the robot's units, from images in [0, 1] and the robot's names."""
    config = PreTrainedConfig.from_pretrained(folder)
    before, after = make_pre_post_processors(config, str(folder), preprocessor_overrides=overrides)
    cameras = {name: torch.from_numpy(rows[name]) / 255.0 for name, _ in binding.cameras}
    observation = cameras | {STATE: torch.from_numpy(rows[STATE]), TASK: list(rows[TASK])}
    with torch.no_grad():
        chunk = policy.predict_action_chunk(before(observation), noise=noise)
    return after(chunk).numpy()
