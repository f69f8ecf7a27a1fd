"""ACT resumes bit-exactly from a checkpoint, with dropout and two rates; its export is LeRobot's."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from safetensors.torch import load_file
from small_run import SmallRun, running, small_config

from vlatune.batch import ACTION, STATE, TASK
from vlatune.checkpoint.store import list_checkpoints
from vlatune.config.settings import ExportConfig, OptimizerConfig, PolicyConfig, RunConfig
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.export.export import export_run
from vlatune.policies.act.act_adapter import ActAdapter
from vlatune.train.driver.resume_rules import find_resume_point
from vlatune.train.driver.tiny_base import fit_datasets

OVERRIDES = {"dropout": 0.3, "optimizer_lr_backbone": 3e-4, "kl_weight": 2.0, "n_action_steps": 3}


@pytest.fixture(scope="module")
def base(dataset_v3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("act") / "base"
    sizes = {"chunk_size": 4, "dim_model": 16, "n_heads": 2, "dim_feedforward": 16}
    fit = fit_datasets((load_meta(str(dataset_v3)),), seed=3, max_dims=100)
    ActAdapter().make_base(folder, replace(fit, overrides=sizes), small=True, place=folder)
    return folder


def config_in(run_dir: Path, dataset: Path, base: Path) -> RunConfig:
    policy = PolicyConfig(path=str(base), type="act", train="full", overrides=OVERRIDES)
    return small_config(dataset, base, run_dir, policy=policy, optimizer=OptimizerConfig(lr=1e-3))


def killed_after_a_save(config: RunConfig) -> None:
    """Two steps, a checkpoint, and one step that no checkpoint holds."""
    with running(config) as run:
        run.step()
        run.step()
        run.save()
        run.step()


@pytest.fixture(scope="module")
def runs(dataset_v3, base, tmp_path_factory) -> tuple[SmallRun, list[float], SmallRun, list[float]]:
    """A run of four steps, and the same one killed on its way: both at their ends, with the losses of steps 3 and 4."""
    folder = tmp_path_factory.mktemp("runs")
    with running(config_in(folder / "whole", dataset_v3, base)) as whole:
        losses = [whole.step() for _ in range(4)][2:]
        whole.save()
    again = config_in(folder / "killed", dataset_v3, base)
    killed_after_a_save(again)
    with running(again) as resumed:
        assert resumed.done == 2
        resumed_losses = [resumed.step() for _ in range(2)]
        resumed.save()
    return whole, losses, resumed, resumed_losses


def test_it_resumes_bit_exactly(runs):
    whole, losses, resumed, resumed_losses = runs
    assert resumed_losses == losses
    assert all(torch.equal(resumed.trainable[name], weight) for name, weight in whole.trainable.items())
    assert [group["lr"] for group in resumed.optimizer.param_groups] == pytest.approx([1e-3, 3e-4])
    ends = [list_checkpoints(run.config.run_dir)[-1] for run in (whole, resumed)]
    for name in ("trainable.safetensors", "optimizer.safetensors", "rng.safetensors"):
        assert (ends[0] / name).read_bytes() == (ends[1] / name).read_bytes(), name
    before = load_file(list_checkpoints(resumed.config.run_dir)[-2] / "rng.safetensors")
    after = load_file(ends[1] / "rng.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in after)  # dropout draws from them


def test_its_settings_must_be_the_same(runs):
    config = runs[0].config
    changed = replace(config, policy=replace(config.policy, overrides=OVERRIDES | {"kl_weight": 5.0}))
    with pytest.raises(ValueError, match=r"--policy.kl_weight was 2.0, now 5.0.*--allow_changed=config"):
        find_resume_point(changed, say=pytest.fail)


def test_its_export_is_lerobots_and_gives_the_same_actions(runs, tmp_path):
    run = runs[0]
    export_run(run.config.run_dir, tmp_path / "exported", ExportConfig(), warn=pytest.fail)
    policy = get_policy_class("act").from_pretrained(tmp_path / "exported")
    assert (policy.config.n_action_steps, policy.config.kl_weight) == (3, 2.0)
    before, after = make_pre_post_processors(policy.config, str(tmp_path / "exported"))
    rows = run.rows
    cameras = {name: torch.from_numpy(rows[name]) / 255.0 for name, _ in run.start.setup.binding.cameras}
    chunk = policy.predict_action_chunk(
        before(cameras | {STATE: torch.from_numpy(rows[STATE]), TASK: list(rows[TASK])})
    )
    unscale = next(t for t in run.start.setup.eval_transforms(0) if getattr(t, "key", None) == ACTION)
    ours = unscale.inverse(run.module.predict(run.batch()).numpy())
    np.testing.assert_allclose(ours, after(chunk).numpy(), rtol=1e-5, atol=1e-6)
