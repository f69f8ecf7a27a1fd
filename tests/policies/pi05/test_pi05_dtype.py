"""bfloat16: what is frozen has LeRobot's dtypes, what trains is float32, and the numbers are as good as LeRobot's.

Figures are in docs/precision.md. A bfloat16 is rounded by up to 3.9e-3.
"""

import re

import pytest
import torch
from pi05_parity import (
    WAYS,
    distance,
    gradients,
    lerobot_loss,
    load_lerobot,
    randomise_adapters,
    worst_distance,
)
from safetensors.torch import load_file

from vlatune.batch import ACTION
from vlatune.policies.base import ModuleOptions

BF16 = 2.0**-8
"""How far rounding to bfloat16 moves a number, relative, at most."""
TOWER = re.compile(r"vision_tower|multi_modal_projector")
NORMS = re.compile(r"norm|position_embedding")


@pytest.fixture(scope="module")
def lerobot_bf16(parity_base):
    return load_lerobot(parity_base, "bfloat16")


def load(setup, train: str, dtype: str):
    module = setup.adapter.load_module(setup.policy, setup.binding, ModuleOptions(train=train, dtype=dtype))
    randomise_adapters(module)
    return module.train()


@pytest.mark.parametrize("train", WAYS)
def test_what_trains_is_float32_and_the_rest_has_lerobots_dtypes(setup, lerobot_bf16, train):
    """But for the frozen vision tower: LeRobot keeps it in float32, ours computes in bfloat16."""
    module = load(setup, train, "bfloat16")
    theirs = dict(lerobot_bf16.named_parameters())
    for name, parameter in module.policy.named_parameters():
        if parameter.requires_grad or train == "full":
            assert parameter.dtype == torch.float32, name
        elif TOWER.search(name):
            assert parameter.dtype == (torch.float32 if NORMS.search(name) else torch.bfloat16), name
        else:
            assert parameter.dtype == theirs[name.replace(".base_layer.", ".")].dtype, name


@pytest.mark.parametrize("train", ["heads", "expert", "lora"])
def test_a_frozen_tower_computes_in_bfloat16_as_under_autocast_to_the_bit(setup, batch, lerobot_bf16, train):
    module = load(setup, train, "bfloat16")
    pixels = batch["observation.images.top"].float() / 127.5 - 1
    seen = []
    for layer in module.policy.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.register_forward_hook(lambda *call: seen.append(call[2].dtype))
    ours = module.policy.model.paligemma_with_expert.embed_image(pixels)
    assert seen == [torch.bfloat16]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = lerobot_bf16.model.paligemma_with_expert.embed_image(pixels)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("train", WAYS)
def test_lerobots_form_has_lerobots_dtypes_and_the_bases_own_tower(setup, parity_base, lerobot_bf16, train):
    """What was rounded for speed is not what is saved."""
    stored = load_file(parity_base / "model.safetensors")
    policy = load(setup, train, "bfloat16").as_lerobot()
    assert set(policy.state_dict()) == set(lerobot_bf16.state_dict())
    for name, parameter in policy.named_parameters():
        if TOWER.search(name):
            assert torch.equal(parameter, stored[name]), name
        elif "lm_head" in name:
            assert torch.equal(parameter, stored[name].to(torch.bfloat16)), name


@pytest.mark.parametrize("train", WAYS)
def test_the_loss_beside_lerobots_two_ways(setup, batch, lerobot_policy, lerobot_bf16, train):
    """The bounds of the table in docs/precision.md. Adapters begin without effect: the loss of `lora` is the base's."""
    options = ModuleOptions(train=train, dtype="bfloat16")
    ours = setup.adapter.load_module(setup.policy, setup.binding, options).train()(batch)
    plain = lerobot_loss(lerobot_bf16, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = lerobot_loss(lerobot_bf16, batch)
    exact = lerobot_loss(lerobot_policy, batch)
    assert plain != autocast
    assert max(distance(ours, theirs) for theirs in (plain, autocast, exact)) <= BF16
    assert distance(ours, exact) <= 1.5 * max(distance(plain, exact), distance(autocast, exact))


@pytest.mark.parametrize("train", ["heads", "expert", "full"])
def test_as_near_to_float32_as_lerobots_own(setup, batch, lerobot_policy, lerobot_bf16, train):
    module = load(setup, train, "bfloat16")
    our_loss, their_loss, exact_loss = (
        module(batch),
        lerobot_loss(lerobot_bf16, batch),
        lerobot_loss(lerobot_policy, batch),
    )
    assert our_loss.dtype == torch.float32
    assert distance(our_loss, exact_loss) <= BF16
    assert distance(our_loss, their_loss) <= BF16
    ours = gradients(module.policy, our_loss)
    theirs, exact = gradients(lerobot_bf16, their_loss), gradients(lerobot_policy, exact_loss)
    our_error, name = worst_distance(ours, exact)
    their_error, _ = worst_distance({name: theirs[name] for name in ours}, exact)
    assert our_error <= 1.5 * their_error, name
    assert our_error <= 0.05, name
    assert worst_distance(ours, theirs)[0] <= 0.05


def test_adapters_in_bfloat16_are_near_float32(setup, batch):
    exact, rounded = load(setup, "lora", "float32"), load(setup, "lora", "bfloat16")
    exact_loss, loss = exact(batch), rounded(batch)
    assert distance(loss, exact_loss) <= BF16
    error, name = worst_distance(gradients(rounded, loss), gradients(exact, exact_loss))
    assert error <= 0.05, name


@pytest.mark.parametrize("train", WAYS)
def test_actions_can_be_sampled_with_mixed_dtypes(setup, batch, train):
    """LeRobot's own sampling, on a frozen bfloat16 prefix and trained float32 weights."""
    exact, rounded = (load(setup, train, dtype).eval() for dtype in ("float32", "bfloat16"))
    noise = torch.randn(batch[ACTION].shape, generator=torch.Generator().manual_seed(1))
    assert distance(rounded.predict(batch, noise), exact.predict(batch, noise)) <= 0.02


def test_the_bases_own_dtype_is_the_default(setup):
    module = setup.adapter.load_module(setup.policy, setup.binding, ModuleOptions(train="heads"))
    assert {p.dtype for p in module.parameters()} == {torch.float32}
