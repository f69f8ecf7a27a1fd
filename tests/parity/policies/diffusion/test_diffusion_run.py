"""Runs of Diffusion Policy: bit-exact resume, and exports that LeRobot loads."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusion_parity import CASES, fixed_step_noise, make_base, run_config
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from safetensors.numpy import load_file
from small_run import make_finished, running

from vlatune.batch import ACTION, STATE
from vlatune.checkpoint.local_store import folder_name
from vlatune.checkpoint.state import load_result
from vlatune.config.settings import ExportConfig, OptimizerConfig
from vlatune.data.transforms import apply_all
from vlatune.evaluate.held_out import read_held_out
from vlatune.export.export import export_run
from vlatune.policies.base import Fit, ModuleOptions, trained_tensors
from vlatune.policies.diffusion.diffusion_adapter import DiffusionAdapter
from vlatune.run_setup import Setup, make_setup


@pytest.fixture(scope="module")
def batch_norm_base(dataset_v3, tmp_path_factory) -> Path:
    """A base with batch norms, whose running statistics change without a gradient."""
    folder = tmp_path_factory.mktemp("bases") / "batch_norm"
    return make_base(folder, dataset_v3, **CASES["batch norm, shared encoder, DDIM"])


def weights_of(run: Any) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in run.trainable.items()}


def test_a_killed_run_resumes_bit_exactly_with_running_statistics_and_averages(dataset_v3, batch_norm_base, tmp_path):
    optimizer = OptimizerConfig(lr=1e-3, ema_decay=0.9)
    config = run_config(dataset_v3, batch_norm_base, optimizer=optimizer, output_dir=str(tmp_path / "straight"))
    with running(config) as straight:
        losses = [straight.step() for _ in range(4)]
        expected, averages = weights_of(straight), straight.ema.tensors()
    config = replace(config, output_dir=str(tmp_path / "killed"))
    with running(config) as first:
        before = [first.step() for _ in range(2)]
        first.save()
    with running(config) as second:
        assert second.done == 2
        after = [second.step() for _ in range(2)]
        found = weights_of(second)
        assert all(torch.equal(second.ema.tensors()[name], one) for name, one in averages.items())
    assert before + after == losses
    assert any("running_var" in name for name in found)
    assert all(torch.equal(found[name], one) for name, one in expected.items())


def as_recorded(setup: Setup) -> Setup:
    """Return a set-up whose images have the recorded size: LeRobot's policy resizes and crops them."""
    cameras = tuple(replace(one, height=96, width=96) for one in setup.specs[0].cameras)
    return replace(setup, specs=(replace(setup.specs[0], cameras=cameras),))


@pytest.fixture(params=["grouped", "batch_norm_base"])
def base(request) -> Path:
    return request.getfixturevalue(request.param)


def test_lerobots_factory_loads_the_export_and_gives_the_same_actions(base, dataset_v3, tmp_path):
    config = run_config(dataset_v3, base, output_dir=str(tmp_path / "run"), optimizer=OptimizerConfig(lr=1e-3))
    run_dir = make_finished(config)
    exported = export_run(run_dir, tmp_path / "exported", ExportConfig(), warn=pytest.fail).folder
    setup = make_setup(config)
    module: Any = setup.adapter.load_module(
        setup.policy, setup.binding, ModuleOptions(train="full"), stats=setup.stats
    ).eval()
    load_result(run_dir / "checkpoints" / folder_name(2), trained_tensors(module))
    rows = read_held_out(setup, 3)
    recorded = read_held_out(as_recorded(setup), 3)
    columns = apply_all(setup.eval_transforms(0), rows)
    noise = torch.randn(columns[ACTION].shape, generator=torch.Generator().manual_seed(1))
    batch = {key: torch.from_numpy(value) for key, value in columns.items()}
    normaliser = next(one for one in setup.eval_transforms(0) if getattr(one, "key", None) == ACTION)
    ours = normaliser.inverse(module.predict(batch, noise).numpy())

    lerobots = PreTrainedConfig.from_pretrained(exported)
    policy = get_policy_class(lerobots.type).from_pretrained(exported).eval()
    before, after = make_pre_post_processors(lerobots, str(exported))
    images = {name: torch.from_numpy(recorded[name]) / 255.0 for name, _ in setup.binding.cameras}
    with fixed_step_noise():
        chunk = policy.predict_action_chunk(before(images | {STATE: torch.from_numpy(rows[STATE])}), noise=noise)
    first = lerobots.n_obs_steps - 1
    theirs = after(chunk).numpy()
    tolerance = 1e-5 if lerobots.resize_shape is None else 1e-2  # of pixels by up to 1/255
    assert np.allclose(theirs, ours[:, first : first + lerobots.n_action_steps], rtol=1e-5, atol=tolerance)

    steps = json.loads((exported / "policy_preprocessor.json").read_text())["steps"]
    (state_file,) = (step["state_file"] for step in steps if step.get("state_file"))
    stored = load_file(exported / state_file)
    assert stored[f"{setup.policy.cameras[0]}.mean"].shape == (3, 1, 1)
    assert {f"{key}.{name}" for key in (STATE, ACTION) for name in ("min", "max")} <= stored.keys()
    spec = DiffusionAdapter().read_spec(exported)  # and it is a base to train on
    assert spec.cameras == setup.policy.cameras


# Tiny models


def small_fit(**changes: Any) -> Fit:
    cameras = ("observation.images.top", "observation.images.wrist")
    given: dict[str, Any] = {"cameras": cameras, "state_dim": 3, "action_dim": 3, "horizon": 9, "image_size": 48}
    return Fit(**{**given, "tasks": (), "seed": 4, "recorded_hw": ((96, 96),) * 2} | changes)


def test_the_tiny_model_is_lerobots(tmp_path):
    DiffusionAdapter().make_base(tmp_path, small_fit(), small=True, place=tmp_path)
    spec = DiffusionAdapter().read_spec(tmp_path)
    assert spec.horizon == 12
    assert spec.image_hw == (48, 48)
    assert spec.action_offsets[0] == -1
    config = PreTrainedConfig.from_pretrained(tmp_path)
    policy = get_policy_class("diffusion").from_pretrained(tmp_path)
    assert sum(parameter.numel() for parameter in policy.parameters()) < 15e6
    make_pre_post_processors(config, str(tmp_path))


def test_a_camera_of_another_size_needs_a_resize(tmp_path):
    fit = small_fit(recorded_hw=((96, 96), (48, 64)))
    with pytest.raises(ValueError, match=r"these differ: .*wrist 48 x 64.*--policy.resize_shape"):
        DiffusionAdapter().make_base(tmp_path / "base", fit, small=False, place=tmp_path)
    DiffusionAdapter().make_base(tmp_path / "small", fit, small=True, place=tmp_path)
    assert DiffusionAdapter().read_spec(tmp_path / "small").image_hw == (48, 48)
