"""Diffusion Policy equals LeRobot's: loss, gradients and actions for the same noise; no host syncs."""

from typing import Any

import pytest
import torch
from diffusion_parity import (
    as_tensors,
    fixed_step_noise,
    lerobot_batch,
    lerobot_loss,
    read_rows,
)
from lerobot.policies.diffusion import DiffusionConfig
from parity.policies.flow_parity import GRADIENT_RTOL, LOSS_RTOL, distance, gradients
from torch import nn

from benchmarks.step.host_sync import HostSyncSpy
from vlatune.batch import ACTION, IDS, SLOT
from vlatune.data.transforms import apply_all
from vlatune.policies.base import Fit, trained_tensors
from vlatune.policies.diffusion.diffusion_adapter import new_settings
from vlatune.policies.diffusion.diffusion_module import FEATURES, _feature, build_policy

SILENT = "pool.nets.bias"
"""A bias that shifts all logits of the spatial softmax has no gradient but rounding."""


def as_delivered(policy: Any) -> Any:
    """Return LeRobot's policy for images that are already resized and cropped."""
    encoder = policy.diffusion.rgb_encoder
    for one in encoder if isinstance(encoder, nn.ModuleList) else [encoder]:
        one.resize, one.do_crop = None, False
    return policy


def test_loss_and_gradients_equal_lerobots(case):
    module, policy = case.load().train(), as_delivered(case.lerobot()).train()
    our_loss, their_loss = module(case.batch).loss, lerobot_loss(policy, case.theirs, case.batch)
    assert distance(our_loss, their_loss) <= LOSS_RTOL
    ours, theirs = gradients(module.policy, our_loss), gradients(policy, their_loss)
    assert ours.keys() == theirs.keys()
    whole = torch.stack([one.norm() for one in theirs.values()]).norm()
    for name, gradient in theirs.items():
        if name.endswith(SILENT):
            assert ours[name].norm() <= 1e-6 * whole
        else:
            assert distance(ours[name], gradient) <= GRADIENT_RTOL, name


def test_a_step_changes_the_running_statistics_as_lerobots(case):
    module, policy = case.load().train(), as_delivered(case.lerobot()).train()
    module(case.batch)
    lerobot_loss(policy, case.theirs, case.batch)
    found, theirs = module.changing_buffers(), dict(policy.named_buffers())
    assert bool(found) == (not policy.config.use_group_norm)
    stored = case.lerobot()
    for name, buffer in found.items():
        own = name.removeprefix("policy.")
        assert torch.allclose(buffer, theirs[own], rtol=1e-6, atol=1e-7), name
        assert not torch.equal(buffer, dict(stored.named_buffers())[own]), name
    assert trained_tensors(module).keys() == {name for name, _ in module.named_parameters()} | found.keys()


def test_actions_equal_lerobots_on_full_images(case):
    """LeRobot resizes and crops; without a resize the pixels are the same, with one they differ by up to 1/255."""
    module, policy = case.load().eval(), case.lerobot().eval()
    rows = read_rows(case.setup)
    batch = as_tensors(apply_all(case.setup.eval_transforms(0), rows))
    noise = torch.randn(batch[ACTION].shape, generator=torch.Generator().manual_seed(1))
    ours = module.predict(batch, noise)
    recorded = read_rows(case.setup, image_hw=(96, 96))
    theirs = lerobot_batch(case.setup, policy.config, recorded)
    del theirs[ACTION], theirs["action_is_pad"]
    with fixed_step_noise():
        expected = policy.predict_action_chunk(theirs, noise=noise)
    first = policy.config.n_obs_steps - 1
    assert ours.shape == noise.shape
    tolerance = 1e-6 if policy.config.resize_shape is None else 5e-3
    assert torch.allclose(ours[:, first : first + policy.config.n_action_steps], expected, rtol=1e-5, atol=tolerance)


def test_predictions_do_not_depend_on_the_rest_of_the_batch(case):
    module = case.load().eval()
    noise = torch.randn(case.batch[ACTION].shape, generator=torch.Generator().manual_seed(1))
    whole = module.predict(case.batch, noise)
    alone = module.predict({key: value[2:3] for key, value in case.batch.items()}, noise[2:3])
    assert torch.allclose(whole[2:3], alone, rtol=1e-4, atol=1e-5)


def test_gradient_checkpointing_gives_the_same_gradients(case):
    plain, again = (case.load(gradient_checkpointing=flag).train() for flag in (False, True))
    ours, theirs = (gradients(one, one(case.batch).loss) for one in (plain, again))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_step_has_no_host_sync(case):
    module = case.load().train()
    batch = {key: value for key, value in case.batch.items() if key not in (*IDS, SLOT)}
    noise = torch.randn(batch[ACTION].shape)
    schedule = module.policy.diffusion.noise_scheduler.alphas_cumprod
    with HostSyncSpy([*module.parameters(), *module.buffers(), *batch.values(), noise, schedule]) as spy:
        module(batch).loss.backward()
        module.eval().predict(batch, noise)
    assert spy.table() == []


@pytest.mark.parametrize(("cameras", "parameters"), [(1, 263_440_174), (2, 278_307_278)])
def test_the_published_size(cameras, parameters):
    """LeRobot's defaults for 14 dims and images of 480 x 640."""
    names = tuple(f"observation.images.{number}" for number in range(cameras))
    fit = Fit(names, 14, 14, 0, 0, (), 0, recorded_hw=((480, 640),) * cameras)
    settings = new_settings(fit, small=False)
    features = {key: {name: _feature(one) for name, one in settings.pop(key).items()} for key in FEATURES}
    policy = build_policy(DiffusionConfig(**features, device="cpu", **settings))
    assert {one.device.type for one in policy.parameters()} == {"meta"}
    assert sum(one.numel() for one in policy.parameters()) == parameters
