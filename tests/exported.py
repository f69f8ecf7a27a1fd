"""Use an export as a robot's program does: through LeRobot's classes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import make_pre_post_processors
from parity.policies.flow_parity import load_lerobot
from torch import Tensor

from vlatune.batch import STATE, TASK
from vlatune.config.settings import ExportConfig
from vlatune.evaluate.predictions import in_own_units
from vlatune.export.export import export_run
from vlatune.policies.base import Binding, PolicySpec


def our_actions(run: Any) -> np.ndarray:
    """Return the actions of a SmallRun's held-out rows as evaluation computes them."""
    setup = run.start.setup
    chunk = run.module.eval().predict(run.batch(), noise_for(setup.policy, run.rows)).numpy()
    return in_own_units(setup.eval_transforms(0), chunk, run.rows[STATE])


def check_actions(run: Any, folder: Path, *, atol: float = 1e-6) -> None:
    """Export the checkpoint of a SmallRun to `folder`, and compare the actions of LeRobot with ours."""
    export_run(run.config.run_dir, folder, ExportConfig(), warn=pytest.fail)
    setup, policy = run.start.setup, load_lerobot(folder)
    theirs = lerobot_actions(folder, policy, run.rows, setup.binding, noise_for(setup.policy, run.rows))
    np.testing.assert_allclose(theirs, our_actions(run), rtol=0, atol=atol)


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
