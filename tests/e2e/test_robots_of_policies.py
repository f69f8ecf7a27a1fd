"""Several robots in one run of PI0 and of SmolVLA. The tests of rows and losses in test_robots.py, which uses PI0.5, are repeated here."""

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
    test_loss_of_a_mixed_batch_equals_each_robots_loss,
    test_noise_samples_of_one_sample_are_averaged,
    test_rows_equal_those_of_a_run_on_one_robot,
)

from vlatune import cli
from vlatune.batch import ACTION, STATE, Columns
from vlatune.config.settings import DatasetConfig, PolicyConfig, RunConfig
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.data.transforms import apply_all
from vlatune.policies.base import ModuleOptions
from vlatune.registry import get_adapter
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
def test_actions_equal_those_of_a_run_on_one_robot(
    config: RunConfig,
    setup: Setup,  # noqa: F811
    module: Any,  # noqa: F811
    mixed: Columns,  # noqa: F811
    number: int,
) -> None:
    """A batch has all robots, with different cameras and dims."""
    single, part, mine = alone(config, number), setup.binding.parts[number], mixed["dataset_index"] == number
    raw = rows_of(setup, number) | {"dataset_index": np.zeros(mine.sum(), np.int64)}
    raw |= {STATE: raw[STATE][..., : part.state_dim], ACTION: raw[ACTION][..., : part.action_dim]}
    columns = apply_all(single.eval_transforms(0), raw)
    own: Any = single.adapter.load_module(single.policy, single.binding, ModuleOptions("full", "float32")).eval()
    noise, chosen = noise_for(setup.policy, mixed), torch.from_numpy(mine)
    module.eval()
    made = module.predict(as_batch(mixed), noise)[chosen][..., : part.action_dim]
    torch.testing.assert_close(made, own.predict(as_batch(columns), noise[chosen]), rtol=1e-5, atol=1e-5)
    module.train()


@pytest.mark.parametrize("name", ["act", "diffusion"])
def test_policy_for_one_robot_rejects_several(
    name: str,
    roots: list[Path],  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [f"--dataset.root={root}" for root in roots]
    assert cli.main(["train", f"--recipe={name}-tiny", *flags, f"--output_dir={tmp_path / 'run'}"]) == cli.MISUSED
    error = capsys.readouterr().err
    assert f"--policy.type={name} does not support several robots" in error
    assert not (tmp_path / "run" / "base").exists()
