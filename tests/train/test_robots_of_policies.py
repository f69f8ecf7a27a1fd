"""Several robots in one run of PI0 and of SmolVLA: each robot's rows, losses, gradients and actions are those that it has alone.

PI0.5's, and the whole run, are in test_robots.py, whose tests of rows and losses run here again. What cannot mix, refuses.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import noise_for
from test_robots import (  # noqa: F401  (fixtures, and tests that every policy must pass)
    WEIGHTS,
    alone,
    as_batch,
    mixed,
    module,
    roots,
    rows_of,
    setup,
    test_a_mixed_batchs_loss_is_each_robots_own,
    test_a_robots_rows_are_those_of_a_run_on_it_alone,
    test_draws_of_one_sample_are_averaged,
    test_losses_by_dataset_are_added_up_without_a_wait,
)

from vlatune import cli
from vlatune.batch import ACTION, STATE, Columns
from vlatune.config import DatasetConfig, PolicyConfig, RunConfig
from vlatune.dataset.meta.dataset_meta import load_meta
from vlatune.pipeline.transforms import apply_all
from vlatune.policies.base import ModuleOptions
from vlatune.policies.registry import get_adapter
from vlatune.run_setup import Setup
from vlatune.train.driver.tiny_base import fit_datasets


@pytest.fixture(scope="module", params=["pi0", "smolvla"])
def config(request: pytest.FixtureRequest, roots: list[Path], tmp_path_factory: pytest.TempPathFactory) -> RunConfig:  # noqa: F811
    fit = fit_datasets(tuple(load_meta(str(root)) for root in roots), seed=0, max_dims=32, mixed=True)
    folder = tmp_path_factory.mktemp("base") / request.param
    get_adapter(request.param).make_base(folder, replace(fit, horizon=5), small=True, place=folder)
    return RunConfig(
        dataset=DatasetConfig(
            root=tuple(map(str, roots)), weight=WEIGHTS, eval_split=0.25, run_length=4, window_rows=8
        ),
        policy=PolicyConfig(type=request.param, path=str(folder), train="full"),
        batch_size=8,
    )


@pytest.mark.parametrize("number", range(3))
def test_a_robots_actions_and_evaluation_are_its_own(
    config: RunConfig,
    setup: Setup,  # noqa: F811
    module: Any,  # noqa: F811
    mixed: Columns,  # noqa: F811
    number: int,
) -> None:
    """In a batch of all robots, whose cameras and dims others lack."""
    single, part, mine = alone(config, number), setup.binding.parts[number], mixed["dataset_index"] == number
    raw = rows_of(setup, number) | {"dataset_index": np.zeros(mine.sum(), np.int64)}
    raw |= {STATE: raw[STATE][..., : part.state_dim], ACTION: raw[ACTION][..., : part.action_dim]}
    columns = apply_all(single.eval_transforms(0), raw)
    own: Any = single.adapter.load_module(single.policy, single.binding, ModuleOptions("full", "float32")).eval()
    noise, chosen = noise_for(setup.policy, mixed), torch.from_numpy(mine)
    module.eval()
    made = module.predict(as_batch(mixed), noise)[chosen][..., : part.action_dim]
    torch.testing.assert_close(made, own.predict(as_batch(columns), noise[chosen]), rtol=1e-5, atol=1e-5)
    noise_of_own = {key: mixed[key][mine] for key in ("noise", "time")}
    with torch.no_grad():
        losses, loss = module(as_batch(mixed)), own(as_batch(columns | noise_of_own))
    module.train()
    torch.testing.assert_close(losses[chosen].mean(), loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["act", "diffusion"])
def test_a_policy_made_for_one_robot_says_so(
    name: str,
    roots: list[Path],  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [f"--dataset.root={root}" for root in roots]
    assert cli.main(["train", f"--recipe={name}-tiny", *flags, f"--output_dir={tmp_path / 'run'}"]) == cli.MISUSED
    told = capsys.readouterr().err
    assert f"--policy.type={name} cannot be trained on several robots at once" in told
    assert not (tmp_path / "run" / "base").exists()
