"""Our Diffusion Policy is LeRobot's: same loss, gradients and actions on the same draws; nothing waits for the device."""

from typing import Any

import pytest
import torch
from diffusion_parity import GRADIENT_RTOL, LOSS_RTOL, adding, as_tensors, lerobot_batch, lerobot_loss, read_rows
from lerobot.policies.diffusion import DiffusionConfig
from torch import nn

from vlatune.batch import ACTION, IDS, SLOT
from vlatune.bench.step.host_sync import HostSyncSpy
from vlatune.pipeline.transforms import apply_all
from vlatune.policies.base import Fit, ModuleOptions, trained_tensors
from vlatune.policies.diffusion import diffusion_module as diffusion
from vlatune.policies.diffusion.diffusion_adapter import new_settings
from vlatune.policies.diffusion.diffusion_module import FEATURES, _feature, build_policy

SILENT = "pool.nets.bias"
"""Moves all logits of a softmax over places alike."""


def gradients(module: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    module.zero_grad()
    loss.backward()
    return {name: one.grad.clone() for name, one in module.named_parameters() if one.grad is not None}


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.detach() - theirs.detach()).norm() / theirs.detach().norm())


def as_delivered(policy: Any) -> Any:
    """LeRobot's policy for pictures that are resized and cropped already."""
    encoder = policy.diffusion.rgb_encoder
    for one in encoder if isinstance(encoder, nn.ModuleList) else [encoder]:
        one.resize, one.do_crop = None, False
    return policy


def test_loss_and_gradients_equal_lerobots(case):
    module, policy = case.load().train(), as_delivered(case.lerobot()).train()
    our_loss, their_loss = module(case.batch), lerobot_loss(policy, case.theirs, case.batch)
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


def test_actions_equal_lerobots_on_whole_pictures(case):
    """LeRobot resizes and crops by itself; without a resize the pixels are the same, with one they differ by up to 1/255."""
    module, policy = case.load().eval(), case.lerobot().eval()
    rows = read_rows(case.setup)
    batch = as_tensors(apply_all(case.setup.eval_transforms(0), rows))
    noise = torch.randn(batch[ACTION].shape, generator=torch.Generator().manual_seed(1))
    ours = module.predict(batch, noise)
    recorded = read_rows(case.setup, image_hw=(96, 96))
    theirs = lerobot_batch(case.setup, policy.config, recorded)
    del theirs[ACTION], theirs["action_is_pad"]
    with adding(module.step_noise):
        expected = policy.predict_action_chunk(theirs, noise=noise)
    first = policy.config.n_obs_steps - 1
    assert ours.shape == noise.shape
    tolerance = 1e-6 if policy.config.resize_shape is None else 5e-3
    assert torch.allclose(ours[:, first : first + policy.config.n_action_steps], expected, rtol=1e-5, atol=tolerance)


def test_what_is_predicted_does_not_depend_on_the_rest_of_the_batch(case):
    module = case.load().eval()
    noise = torch.randn(case.batch[ACTION].shape, generator=torch.Generator().manual_seed(1))
    whole = module.predict(case.batch, noise)
    alone = module.predict({key: value[2:3] for key, value in case.batch.items()}, noise[2:3])
    assert torch.allclose(whole[2:3], alone, rtol=1e-4, atol=1e-5)


def test_exactly_what_trains_gets_a_gradient(case):
    module = case.load().train()
    module(case.batch).backward()
    assert {name for name, one in module.named_parameters() if one.grad is None} == set()


def test_blocks_computed_again_give_the_same_gradients(case):
    plain, again = (case.load(gradient_checkpointing=flag).train() for flag in (False, True))
    ours, theirs = (gradients(one, one(case.batch)) for one in (plain, again))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_nothing_waits_for_the_device(case):
    module = case.load().train()
    batch = {key: value for key, value in case.batch.items() if key not in (*IDS, SLOT)}
    noise = torch.randn(batch[ACTION].shape)
    with HostSyncSpy([*module.parameters(), *module.buffers(), *batch.values(), noise]) as spy:
        module(batch).backward()
        module.eval().predict(batch, noise)
    assert spy.table() == []


def test_lerobots_own_step_does_wait(case):
    """So that the spy is known to see it."""
    policy = case.lerobot().train()
    policy.diffusion.noise_scheduler.alphas_cumprod = policy.diffusion.noise_scheduler.alphas_cumprod.clone()
    with HostSyncSpy([*policy.parameters(), *policy.buffers(), *case.theirs.values()]) as spy:
        policy.forward(case.theirs)[0].backward()
    assert spy.count > 0


def test_loading_the_loss_and_sampling_stay_on_the_device(case, monkeypatch):
    from fake_cuda import CUDA, _outside, fake_cuda, is_fake_cuda

    monkeypatch.setattr(diffusion, "build_policy", _outside(diffusion.build_policy))
    monkeypatch.setattr(diffusion, "make_schedule", _outside(diffusion.make_schedule))
    setup = case.setup
    with fake_cuda():
        options = ModuleOptions(train="full")
        module = setup.adapter.load_module(setup.policy, setup.binding, options, CUDA, stats=setup.stats).train()
        assert all(is_fake_cuda(one) for one in (*module.parameters(), *module.buffers()))
        there = {key: value.to(CUDA) for key, value in case.batch.items()}
        loss = module(there)
        assert is_fake_cuda(loss)
        assert loss.requires_grad
        assert is_fake_cuda(module.eval().predict(there, torch.randn_like(there[ACTION])))


@pytest.mark.parametrize(("cameras", "parameters"), [(1, 263_440_174), (2, 278_307_278)])
def test_the_published_size_without_memory(cameras, parameters):
    """LeRobot's defaults for 14 dims and pictures of 480 x 640."""
    names = tuple(f"observation.images.{number}" for number in range(cameras))
    fit = Fit(names, 14, 14, 0, 0, (), 0, recorded_hw=((480, 640),) * cameras)
    settings = new_settings(fit, small=False)
    features = {key: {name: _feature(one) for name, one in settings.pop(key).items()} for key in FEATURES}
    policy = build_policy(DiffusionConfig(**features, device="cpu", **settings))
    assert {one.device.type for one in policy.parameters()} == {"meta"}
    assert sum(one.numel() for one in policy.parameters()) == parameters


def test_pictures_without_statistics_are_not_taken_for_normalised_ones(case):
    module = case.setup.adapter.load_module(case.setup.policy, case.setup.binding, ModuleOptions(train="full"))
    with pytest.raises(RuntimeError, match="without their statistics"):
        module(case.batch)
