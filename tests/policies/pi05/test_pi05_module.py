"""Our PI0.5 is LeRobot's: same loss, same gradients, same actions, for every way to train; and it wastes nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot.policies.pi05 import PI05Policy
from pi05_parity import (
    DRAWS,
    GRADIENT_RTOL,
    LOSS_RTOL,
    WAYS,
    distance,
    gradients,
    lerobot_loss,
    load_lerobot,
    randomise_adapters,
    worst_distance,
)

from vlatune.batch import ACTION, TOKEN_MASK, TOKENS
from vlatune.policies.base import ModuleOptions
from vlatune.policies.pi05.module import Pi05Module

RANK, ALPHA = 8, 12


def load(setup, train: str, **options: Any) -> Pi05Module:
    chosen = ModuleOptions(train=train, dtype="float32", lora_rank=RANK, lora_alpha=ALPHA, **options)
    module = setup.adapter.load_module(setup.policy, setup.binding, chosen)
    randomise_adapters(module)
    return module.train()


def with_peft(parity_base: Path, module: Pi05Module) -> PI05Policy:
    """LeRobot's policy with PEFT's own layers on the same modules, by name, and with the same adapters."""
    import peft

    theirs = load_lerobot(parity_base)
    adapted = [name.removesuffix(".lora_A") for name, _ in module.policy.named_modules() if name.endswith(".lora_A")]
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=adapted)
    wrapped = peft.get_peft_model(theirs, config).get_base_model()
    ours = dict(module.policy.named_parameters())
    for name, parameter in wrapped.named_parameters():
        if "lm_head" in name:  # ours has none: no forward uses it
            parameter.requires_grad_(False)
            continue
        parameter.data.copy_(ours[name].data)
        parameter.requires_grad_(ours[name].requires_grad)
    return wrapped


# Parity


@pytest.mark.parametrize("train", WAYS)
def test_loss_and_gradients_equal_lerobots(setup, batch, parity_base, lerobot_policy, train):
    module = load(setup, train)
    theirs = with_peft(parity_base, module) if train == "lora" else lerobot_policy
    our_loss, their_loss = module(batch), lerobot_loss(theirs, batch)
    assert distance(our_loss, their_loss) <= LOSS_RTOL
    ours, reference = gradients(module.policy, our_loss), gradients(theirs, their_loss)
    error, name = worst_distance(ours, reference)
    assert error <= GRADIENT_RTOL, name


@pytest.mark.parametrize("train", WAYS)
def test_exactly_what_trains_gets_a_gradient(setup, batch, train):
    """Otherwise DDP would hang or need to search for unused parameters."""
    module = load(setup, train)
    module(batch).backward()
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert trained
    assert {name for name, p in module.named_parameters() if p.grad is not None} == trained
    silent = {name for name in trained if module.get_parameter(name).grad.abs().sum() == 0}
    assert all(name.endswith("k_proj.bias") for name in silent)  # it moves all logits of a softmax alike


@pytest.mark.parametrize("train", ["expert", "full"])
def test_only_unused_parameters_are_frozen(setup, batch, lerobot_policy, train):
    module = load(setup, train)
    used = {
        name for name, gradient in gradients(lerobot_policy, lerobot_loss(lerobot_policy, batch)).items()
        if gradient.abs().sum() > 0
    }  # fmt: skip
    if train == "expert":
        used = {name for name in used if "paligemma.model" not in name}
    assert used == {name for name, p in module.policy.named_parameters() if p.requires_grad}


def test_adapters_are_on_every_linear_layer_that_counts(setup):
    module = load(setup, "lora")
    adapted = {name.removesuffix(".lora_A") for name, _ in module.policy.named_modules() if name.endswith(".lora_A")}
    joint = "model.paligemma_with_expert."
    towers = (f"{joint}paligemma.model.language_model.layers.", f"{joint}gemma_expert.model.layers.")
    linears = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    everywhere = {f"{tower}{layer}.{linear}" for tower in towers for layer in range(3) for linear in linears}
    unused = {f"{towers[0]}2.{linear}" for linear in linears if linear not in ("self_attn.k_proj", "self_attn.v_proj")}
    assert adapted == everywhere - unused
    heads = ("action_in_proj", "action_out_proj", "time_mlp_in", "time_mlp_out")
    assert all(getattr(module.policy.model, head).weight.requires_grad for head in heads)


def test_new_adapters_change_nothing(setup, batch):
    options = ModuleOptions(train="lora", dtype="float32", lora_rank=4, lora_alpha=8.0)
    module = setup.adapter.load_module(setup.policy, setup.binding, options)
    plain = setup.adapter.load_module(setup.policy, setup.binding, ModuleOptions(train="heads", dtype="float32"))
    assert distance(module(batch), plain(batch)) <= LOSS_RTOL
    layer = module.policy.model.paligemma_with_expert.gemma_expert.model.layers[0].mlp.up_proj
    assert layer.lora_A["default"].weight.shape[0] == 4
    assert layer.scaling["default"] == 2.0


def test_merged_adapters_are_lerobots_own_policy(setup, batch, lerobot_policy):
    module = load(setup, "lora")
    expected = module(batch)
    merged = module.as_lerobot()
    assert set(merged.state_dict()) == set(lerobot_policy.state_dict())
    assert distance(lerobot_loss(merged, batch), expected) <= 1e-5


def test_actions_equal_lerobots_to_the_bit(setup, batch, lerobot_policy):
    module = load(setup, "heads").eval()
    noise = torch.randn(batch[ACTION].shape, generator=torch.Generator().manual_seed(1))
    ours = module.predict(batch, noise)
    theirs = {key: batch[key].float() / 255.0 for key in batch if key.startswith("observation.images.")}
    theirs |= {TOKENS: batch[TOKENS], TOKEN_MASK: batch[TOKEN_MASK]}
    assert torch.equal(ours, lerobot_policy.predict_action_chunk(theirs, noise=noise))
    lerobot_policy.train()


# Cameras, prompts, draws


@pytest.mark.parametrize("train", ["heads", "full"])
def test_a_camera_without_data_is_as_lerobots_masked_one(setup, batch, lerobot_policy, train):
    first, second = setup.binding.cameras
    binding = replace(setup.binding, cameras=(first,), missing_cameras=(second[1],))
    module = setup.adapter.load_module(setup.policy, binding, ModuleOptions(train=train, dtype="float32"))
    blind = {key: value for key, value in batch.items() if key != second[1]}
    our_loss, their_loss = module(blind), lerobot_loss(lerobot_policy, blind)
    assert distance(our_loss, their_loss) <= LOSS_RTOL
    error, name = worst_distance(gradients(module.policy, our_loss), gradients(lerobot_policy, their_loss))
    assert error <= GRADIENT_RTOL, name
    images, masks = module._images(blind)
    assert masks[0].all()
    assert not masks[1].any()
    assert (images[1] == -1.0).all()


def test_a_prompt_cut_to_the_longest_of_the_batch_changes_nothing(setup, batch):
    module = load(setup, "full")
    longest = int(batch[TOKEN_MASK].sum(dim=1).max())
    padded = {
        TOKENS: torch.nn.functional.pad(batch[TOKENS][:, :longest], (0, 16)),
        TOKEN_MASK: torch.nn.functional.pad(batch[TOKEN_MASK][:, :longest], (0, 16)),
    }
    cut = {key: value[:, :longest] for key, value in padded.items()}
    whole_loss, cut_loss = module(batch | padded), module(batch | cut)
    assert distance(cut_loss, whole_loss) <= LOSS_RTOL
    error, name = worst_distance(gradients(module, cut_loss), gradients(module, whole_loss))
    assert error <= GRADIENT_RTOL, name


@pytest.mark.parametrize("train", ["heads", "full"])
def test_many_draws_are_the_mean_of_single_ones(setup, draws, lerobot_policy, train):
    module = load(setup, train, flow_samples=DRAWS)
    our_loss = module(draws)
    losses = [lerobot_loss(lerobot_policy, draws, draw) for draw in range(DRAWS)]
    assert len({float(loss.detach()) for loss in losses}) == DRAWS
    their_loss = torch.stack(losses).mean()
    assert distance(our_loss, their_loss) <= LOSS_RTOL
    error, name = worst_distance(gradients(module.policy, our_loss), gradients(lerobot_policy, their_loss))
    assert error <= GRADIENT_RTOL, name


def test_another_number_of_draws_than_announced_is_refused(setup, draws):
    with pytest.raises(ValueError, match=r"3 draws of noise and 3 of time .* --policy.flow_samples=1"):
        load(setup, "heads")(draws)


def test_pictures_reach_the_model_between_minus_one_and_one(setup, batch):
    images, masks = load(setup, "heads")._images(batch)
    assert len(images) == len(masks) == len(setup.policy.cameras)
    for image in images:
        assert image.min() >= -1.0
        assert image.max() <= 1.0
        assert image.max() - image.min() > 0.5  # a picture, not a constant
