"""bfloat16: what is frozen has LeRobot's dtypes, what trains is float32, and the numbers are as good as LeRobot's.

Figures at depth 3 and width 64, relative to float32 (loss; worst of all parameters' gradients, by norm): LeRobot's own
bfloat16 3.0e-4 and 2.3e-2, ours 1.6e-3 and 2.3e-2; ours against LeRobot's bfloat16 1.3e-3 and 1.9e-2. A bfloat16 is
rounded by up to 3.9e-3.
"""

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

from vlatune.batch import ACTION
from vlatune.policies.base import ModuleOptions

BF16 = 2.0**-8
"""How far rounding to bfloat16 moves a number, relative, at most."""


@pytest.fixture(scope="module")
def lerobot_bf16(parity_base):
    return load_lerobot(parity_base, "bfloat16")


def load(setup, train: str, dtype: str):
    module = setup.adapter.load_module(setup.policy, setup.binding, ModuleOptions(train=train, dtype=dtype))
    randomise_adapters(module)
    return module.train()


@pytest.mark.parametrize("train", WAYS)
def test_what_trains_is_float32_and_the_rest_has_lerobots_dtypes(setup, lerobot_bf16, train):
    module = load(setup, train, "bfloat16")
    theirs = dict(lerobot_bf16.named_parameters())
    kept = set()
    for name, parameter in module.policy.named_parameters():
        if parameter.requires_grad or (train == "full" and "lm_head" not in name):
            assert parameter.dtype == torch.float32, name
        else:
            kept.add(parameter.dtype)
            assert parameter.dtype == theirs[name.replace(".base_layer.", ".")].dtype, name
    assert torch.bfloat16 in kept


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
