"""Our PI0 is LeRobot's: same loss, same gradients, same actions, for every way to train; and no step waits for the device."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, fake_cuda, is_fake_cuda
from pi05_parity import (
    DRAWS,
    GRADIENT_RTOL,
    LOSS_RTOL,
    WAYS,
    distance,
    draw_batch,
    gradients,
    lerobot_loss,
    load_lerobot,
    randomise_adapters,
    worst_distance,
)
from torch.utils.flop_counter import FlopCounterMode

from vlatune.batch import ACTION, NOISE, STATE, TIME, TOKEN_MASK, TOKENS
from vlatune.bench.step.host_sync import HostSyncSpy
from vlatune.policies.base import ModuleOptions
from vlatune.policies.pi0.pi0_module import Pi0Module
from vlatune.policies.pi05 import layers

MANY = 12
"""Draws over which rounding is averaged."""


def load(setup, train: str, **options: Any) -> Any:
    chosen = ModuleOptions(train=train, **{"dtype": "float32", "lora_rank": 8, "lora_alpha": 12.0} | options)
    module = setup.adapter.load_module(setup.policy, setup.binding, chosen)
    randomise_adapters(module)
    return module.train()


@pytest.mark.parametrize("train", WAYS)
def test_loss_and_gradients_equal_lerobots(setup, batch, lerobot_policy, train):
    """With adapters LeRobot's forward runs on our policy, whose layers are PEFT's own then: they are in no file."""
    module = load(setup, train)
    assert isinstance(module, Pi0Module)
    theirs = module.policy if train == "lora" else lerobot_policy
    our_loss, their_loss = module(batch), lerobot_loss(theirs, batch)
    assert distance(our_loss, their_loss) <= LOSS_RTOL
    ours, reference = gradients(module.policy, our_loss), gradients(theirs, their_loss)
    trained = {name for name, parameter in module.policy.named_parameters() if parameter.requires_grad}
    assert ours.keys() == trained  # else DDP would hang, or search for what is unused
    assert any("state_proj" in name for name in trained)
    error, name = worst_distance(ours, reference)
    assert error <= GRADIENT_RTOL, name


def test_only_unused_parameters_are_frozen(setup, batch, lerobot_policy):
    found = gradients(lerobot_policy, lerobot_loss(lerobot_policy, batch))
    used = {name for name, gradient in found.items() if gradient.abs().sum() > 0}
    module = load(setup, "full")
    assert used == {name for name, parameter in module.policy.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("train", ["expert", "full"])
def test_many_draws_are_the_mean_of_single_ones(setup, draws, lerobot_policy, train):
    module = load(setup, train, flow_samples=DRAWS)
    our_loss = module(draws)
    their_loss = torch.stack([lerobot_loss(lerobot_policy, draws, draw) for draw in range(DRAWS)]).mean()
    assert distance(our_loss, their_loss) <= LOSS_RTOL
    error, name = worst_distance(gradients(module.policy, our_loss), gradients(lerobot_policy, their_loss))
    assert error <= GRADIENT_RTOL, name


def test_actions_equal_lerobots_to_the_bit(setup, batch, lerobot_policy):
    module = load(setup, "heads").eval()
    noise = torch.randn(batch[ACTION].shape, generator=torch.Generator().manual_seed(1))
    theirs = {key: batch[key].float() / 255.0 for key in batch if key.startswith("observation.images.")}
    theirs |= {key: batch[key] for key in (TOKENS, TOKEN_MASK, STATE)}
    assert torch.equal(module.predict(batch, noise), lerobot_policy.predict_action_chunk(theirs, noise=noise))
    lerobot_policy.train()
    elsewhere = batch | {STATE: batch[STATE] + 1.0}
    assert not torch.equal(module.predict(batch, noise), module.predict(elsewhere, noise))


def test_a_camera_without_data_is_as_lerobots_masked_one(setup, batch, lerobot_policy):
    first, second = setup.binding.cameras
    binding = replace(setup.binding, cameras=(first,), missing_cameras=(second[1],))
    module = setup.adapter.load_module(setup.policy, binding, ModuleOptions(train="expert", dtype="float32"))
    blind = {key: value for key, value in batch.items() if key != second[1]}
    assert distance(module(blind), lerobot_loss(lerobot_policy, blind)) <= LOSS_RTOL


def eager_attention(queries, keys, values, *, attn_mask, scale):
    """As LeRobot has it: the softmax rounded to the dtype of the values before it is used."""
    scores = torch.matmul(queries, keys.transpose(2, 3)) * scale
    scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(queries.dtype), values)


def test_bfloat16_is_lerobots_to_the_bit_but_for_the_frozen_tower_and_the_attention(
    setup, draws, pi0_base, monkeypatch
):
    """Whose tower computes in float32 where it trains, as LeRobot's does without autocast."""
    module, theirs = load(setup, "full", dtype="bfloat16"), load_lerobot(pi0_base, "bfloat16")
    monkeypatch.setattr(layers, "functional", SimpleNamespace(scaled_dot_product_attention=eager_attention))
    with torch.no_grad():
        for draw in range(DRAWS):
            assert torch.equal(module(one_of(draws, draw)), lerobot_loss(theirs, draws, draw))


def test_bfloat16_is_as_near_to_float32_as_lerobots(setup, lerobot_policy, pi0_base):
    """Over many draws, as the rounding of one is chance. A frozen tower is as under autocast, so `lerobot-train` runs it; without
    one, the fused attention is nearer than LeRobot's.
    """
    draws, rounded = draw_batch(setup, MANY), load_lerobot(pi0_base, "bfloat16")
    with torch.no_grad():
        exact = [lerobot_loss(lerobot_policy, draws, draw) for draw in range(MANY)]
        plain = off_by(exact, [lerobot_loss(rounded, draws, draw) for draw in range(MANY)])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            autocast = off_by(exact, [lerobot_loss(rounded, draws, draw) for draw in range(MANY)])
        for train, theirs in (("expert", autocast), ("full", plain)):
            module = load(setup, train, dtype="bfloat16")
            ours = off_by(exact, [module(one_of(draws, draw)) for draw in range(MANY)])
            assert ours <= min(1.25 * theirs, 2.0**-8), train


def one_of(draws: dict[str, Any], draw: int) -> dict[str, Any]:
    return {**draws, NOISE: draws[NOISE][:, draw : draw + 1], TIME: draws[TIME][:, draw : draw + 1]}


def off_by(exact: list[torch.Tensor], losses: list[torch.Tensor]) -> float:
    """Root of the mean square, relative."""
    return float((torch.stack(losses) / torch.stack(exact) - 1).square().mean().sqrt())


def test_gradients_in_bfloat16_are_as_near_to_float32s_as_lerobots(setup, batch, lerobot_policy, pi0_base):
    module, rounded = load(setup, "expert", dtype="bfloat16"), load_lerobot(pi0_base, "bfloat16")
    ours = gradients(module.policy, module(batch))
    exact = gradients(lerobot_policy, lerobot_loss(lerobot_policy, batch))
    found = gradients(rounded, lerobot_loss(rounded, batch))
    theirs = {name: gradient for name, gradient in found.items() if name in ours}
    assert worst_distance(ours, exact)[0] <= min(0.05, 2 * worst_distance(theirs, exact)[0])


@pytest.mark.parametrize("train", WAYS)
def test_a_step_never_waits_for_the_device(setup, draws, train):
    module = load(setup, train, flow_samples=DRAWS)
    with HostSyncSpy(resident=[*module.parameters(), *module.buffers(), *draws.values()]) as spy:
        module(draws).backward()
    assert spy.table() == []


@pytest.mark.parametrize(("train", "dtype"), [("expert", "bfloat16"), ("full", "float32")])
def test_loading_the_loss_and_sampling_stay_on_the_device(setup, batch, train, dtype):
    with fake_cuda():
        options = ModuleOptions(train=train, dtype=dtype, gradient_checkpointing=True)
        module = setup.adapter.load_module(setup.policy, setup.binding, options, CUDA).train()
        assert all(is_fake_cuda(one) for one in (*module.parameters(), *module.buffers()))
        there = {key: value.to(CUDA) for key, value in batch.items()}
        assert is_fake_cuda(module(there))
        assert is_fake_cuda(module.eval().predict(there, torch.randn_like(there[ACTION])))


@pytest.mark.parametrize("train", ["expert", "full"])
def test_a_step_costs_about_what_the_adapter_says(setup, batch, train):
    """Cores are shared out by it; attention and the small layers are left out."""
    module = load(setup, train)
    with FlopCounterMode(display=False) as counter:
        module(batch).backward()
    counted = counter.get_total_flops() / len(batch[TIME])
    said = setup.adapter.step_flops(setup.policy, setup.binding, ModuleOptions(train=train, dtype="float32"))
    assert 0.5 < said / counted < 2
