"""Our SmolVLA is LeRobot's: same loss, gradients and actions for every way to train; and no step waits for the device."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, fake_cuda, is_fake_cuda
from pi05_parity import DRAWS, GRADIENT_RTOL, LOSS_RTOL, distance, gradients, randomise_adapters, worst_distance
from smolvla_parity import lerobot_loss, load_lerobot, make_parity_base, observation, setup_for
from torch.utils.flop_counter import FlopCounterMode

from vlatune.batch import ACTION, STATE, TIME, TOKEN_MASK, TOKENS
from vlatune.bench.step.host_sync import HostSyncSpy
from vlatune.policies.base import ModuleOptions
from vlatune.policies.smolvla import POLICY
from vlatune.policies.smolvla.smolvla_forward import embed_images, make_places
from vlatune.policies.smolvla.smolvla_module import SmolVLAModule

WAYS = tuple(POLICY.train_ways)
FLAGS = {
    "expert": {"train_expert_only": True, "freeze_vision_encoder": True},
    "language": {"train_expert_only": False, "freeze_vision_encoder": True},
    "full": {"train_expert_only": False, "freeze_vision_encoder": False},
}
"""Ways that LeRobot has flags for."""


def load(setup, train: str, **options: Any) -> Any:
    chosen = ModuleOptions(train=train, **{"dtype": "float32", "lora_rank": 8, "lora_alpha": 12.0} | options)
    module = setup.adapter.load_module(setup.policy, setup.binding, chosen)
    randomise_adapters(module)
    return module.train()


def trained(policy: torch.nn.Module) -> set[str]:
    return {name for name, parameter in policy.named_parameters() if parameter.requires_grad}


def check_parity(module: Any, theirs: Any, our_loss: torch.Tensor, their_loss: torch.Tensor) -> None:
    assert distance(our_loss, their_loss) <= LOSS_RTOL
    ours, reference = gradients(module.policy, our_loss), gradients(theirs, their_loss)
    assert ours.keys() == trained(module.policy)  # else DDP would hang, or search for what is unused
    error, name = worst_distance(ours, reference)
    assert error <= GRADIENT_RTOL, name


# Parity


@pytest.mark.parametrize("train", WAYS)
def test_loss_and_gradients_equal_lerobots(setup, batch, lerobot_policy, train):
    """With adapters LeRobot's forward runs on our policy, whose layers are PEFT's own then: they are in no file."""
    module = load(setup, train)
    assert isinstance(module, SmolVLAModule)
    theirs = module.policy if train == "lora" else lerobot_policy
    check_parity(module, theirs, module(batch), lerobot_loss(theirs, batch))


@pytest.mark.parametrize("train", FLAGS)
@pytest.mark.parametrize("train_state_proj", [True, False])
def test_what_trains_is_what_lerobots_flags_train(dataset_v3, smolvla_base, batch, train, train_state_proj):
    overrides = {} if train_state_proj else {"train_state_proj": False}
    module = load(setup_for(dataset_v3, smolvla_base, **overrides), train)
    theirs = load_lerobot(smolvla_base, train_state_proj=train_state_proj, **FLAGS[train])
    assert trained(module.policy) == trained(theirs)
    check_parity(module, theirs, module(batch), lerobot_loss(theirs, batch))


@pytest.mark.parametrize(
    "architecture",
    [
        {"attention_mode": "self_attn"},
        {"self_attn_every_n_layers": 0},
        {"num_vlm_layers": 4, "num_expert_layers": 2, "self_attn_every_n_layers": -1},
        {"prefix_length": 60, "pad_language_to": "max_length"},
    ],
    ids=str,
)
def test_other_architectures_are_lerobots_too(dataset_v3, tmp_path, batch, architecture):
    folder = make_parity_base(tmp_path / "base", dataset_v3, **architecture)
    theirs = load_lerobot(folder, **FLAGS["full"])
    module = load(setup_for(dataset_v3, folder), "full")
    assert trained(module.policy) == trained(theirs)
    check_parity(module, theirs, module(batch), lerobot_loss(theirs, batch))


@pytest.mark.parametrize("train", ["expert", "full"])
def test_many_draws_are_the_mean_of_single_ones(setup, draws, lerobot_policy, train):
    module = load(setup, train, flow_samples=DRAWS)
    their_loss = torch.stack([lerobot_loss(lerobot_policy, draws, draw) for draw in range(DRAWS)]).mean()
    check_parity(module, lerobot_policy, module(draws), their_loss)


def test_the_loss_of_an_evaluation_is_that_of_its_samples_whatever_the_batch(setup, batch, lerobot_policy):
    module = load(setup, "expert").eval()
    single = [module({key: value[row : row + 1] for key, value in batch.items()}) for row in range(4)]
    assert distance(torch.stack(single).mean(), module(batch)) <= LOSS_RTOL
    theirs = lerobot_loss(lerobot_policy, batch, reduction="none")
    assert distance(torch.stack(single), theirs) <= LOSS_RTOL
    assert abs(float(theirs.mean()) / float(lerobot_loss(lerobot_policy, batch)) - 1) > 1e-3  # rows of other lengths
    several = load(setup, "expert", flow_samples=DRAWS).eval()  # validation takes one draw, however many training does
    assert torch.equal(several(batch), module(batch))


def test_an_evaluation_takes_one_draw_however_many_training_does(setup, batch):
    """As validation while a run trains does, with the module that trains."""
    assert torch.equal(load(setup, "expert", flow_samples=DRAWS).eval()(batch), load(setup, "expert").eval()(batch))


def test_another_number_of_draws_than_announced_is_refused(setup, draws):
    with pytest.raises(ValueError, match=r"3 draws of noise and 3 of time .* --policy.flow_samples=1"):
        load(setup, "heads")(draws)


def test_actions_equal_lerobots_to_the_bit(setup, batch, lerobot_policy):
    module = load(setup, "heads").eval()
    noise = torch.randn(batch[ACTION].shape, generator=torch.Generator().manual_seed(1))
    assert torch.equal(module.predict(batch, noise), lerobot_policy.predict_action_chunk(observation(batch), noise))
    lerobot_policy.train()
    elsewhere = batch | {STATE: batch[STATE] + 1.0}
    assert not torch.equal(module.predict(batch, noise), module.predict(elsewhere, noise))


@pytest.mark.parametrize("empty", [0, 1])
def test_a_camera_without_data_is_as_lerobots(setup, batch, smolvla_base, empty):
    """LeRobot leaves it out, or, as far as `empty_cameras` go, runs a black one and masks it."""
    first, second = setup.binding.cameras
    binding = replace(setup.binding, cameras=(first,), missing_cameras=(second[1],))
    module = setup.adapter.load_module(setup.policy, binding, ModuleOptions(train="expert", dtype="float32"))
    blind = {key: value for key, value in batch.items() if key != second[1]}
    theirs = load_lerobot(smolvla_base, empty_cameras=empty)
    check_parity(module, theirs, module(blind), lerobot_loss(theirs, blind))
    noise = torch.randn(batch[ACTION].shape, generator=torch.Generator().manual_seed(1))
    expected = theirs.predict_action_chunk(observation(blind), noise)
    torch.testing.assert_close(module.eval().predict(blind, noise), expected, rtol=0, atol=1e-5)


def test_a_prompt_cut_to_the_longest_of_the_batch_changes_nothing(setup, batch):
    module = load(setup, "full")
    longest = int(batch[TOKEN_MASK].sum(dim=1).max())
    padded = {key: torch.nn.functional.pad(batch[key][:, :longest], (0, 16)) for key in (TOKENS, TOKEN_MASK)}
    cut = {key: value[:, :longest] for key, value in padded.items()}
    assert distance(module(batch | cut), module(batch | padded)) <= LOSS_RTOL


def test_merged_adapters_are_lerobots_own_policy(setup, batch, lerobot_policy):
    module = load(setup, "lora")
    adapted = {name.removesuffix(".lora_A") for name, _ in module.policy.named_modules() if name.endswith(".lora_A")}
    assert {name.split(".layers.")[0].rpartition(".")[2] for name in adapted} == {"text_model", "lm_expert"}
    assert not any(".text_model.layers.2." in name for name in adapted)  # the last one, as LeRobot leaves it
    expected = module(batch)
    merged = module.as_lerobot()
    assert set(merged.state_dict()) == set(lerobot_policy.state_dict())
    assert distance(lerobot_loss(merged, batch), expected) <= 1e-5


@pytest.mark.parametrize("pixels", [32, 48, 64])
def test_patches_have_the_places_that_transformers_gives_them(setup, pixels):
    module = load(setup, "expert")
    vlm = module.policy.model.vlm_with_expert.get_vlm_model()
    image = torch.randint(0, 256, (2, 3, pixels, pixels), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    places = make_places((pixels, pixels), patch_size=8, image_size=32)
    ours = embed_images(vlm, image, places, torch.float32, None)
    theirs = module.policy.model.vlm_with_expert.embed_image(image.float() / 255.0 * 2.0 - 1.0)
    assert distance(ours, theirs * theirs.shape[-1] ** 0.5) <= LOSS_RTOL


# Nothing is wasted


@pytest.mark.parametrize("train", WAYS)
def test_a_step_never_waits_for_the_device(setup, draws, train):
    module = load(setup, train, flow_samples=DRAWS)
    with HostSyncSpy(resident=[*module.parameters(), *module.buffers(), *draws.values()]) as spy:
        module(draws).backward()
    assert spy.table() == []


def test_lerobots_step_does(lerobot_policy, batch):
    """So that the test above is known to see."""
    with HostSyncSpy(resident=[*lerobot_policy.parameters(), *batch.values()]) as spy:
        lerobot_loss(lerobot_policy, batch).backward()
    lerobot_policy.zero_grad()
    assert spy.count >= 4


@pytest.mark.parametrize("train", WAYS)
def test_no_value_decides_what_is_computed(setup, batch, train):
    """On the meta device there are no values: a branch, a loop or a shape that depends on one would raise."""
    module = load(setup, train).to("meta")
    module({key: value.to("meta") for key, value in batch.items()}).backward()


@pytest.mark.parametrize("train", ["heads", "expert"])
def test_of_a_frozen_vision_language_model_only_the_states_token_needs_gradients(setup, batch, train):
    module, shapes = load(setup, train), []

    def note(layer: Any, given: Any, made: torch.Tensor) -> None:
        if made.requires_grad:
            shapes.append(tuple(made.shape[:2]))

    for layer in module.policy.model.vlm_with_expert.get_vlm_model().modules():
        if "Norm" in type(layer).__name__:
            layer.register_forward_hook(note)
    module(batch).backward()
    assert shapes
    assert set(shapes) == {(4, 1)}


def check_same(plain: Any, other: Any, draws: Any) -> None:
    loss, other_loss = plain(draws), other(draws)
    assert distance(other_loss, loss) <= LOSS_RTOL
    error, name = worst_distance(gradients(other, other_loss), gradients(plain, loss))
    assert error <= GRADIENT_RTOL, name


@pytest.mark.parametrize("train", ["expert", "full"])
def test_checkpointing_changes_nothing(setup, draws, train):
    plain, again = (load(setup, train, flow_samples=DRAWS, gradient_checkpointing=one) for one in (False, True))
    check_same(plain, again, draws)


@pytest.mark.slow
@pytest.mark.parametrize("train", ["expert", "full"])
def test_compiling_changes_nothing(setup, draws, monkeypatch, train):
    """All of torch.compile but its last step, which needs a C++ compiler."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compiled(function, backend="aot_eager"))
    again = load(setup, train, flow_samples=DRAWS, gradient_checkpointing=train == "full", compile=True)
    check_same(load(setup, train, flow_samples=DRAWS), again, draws)


@pytest.mark.parametrize("train", WAYS)
def test_bfloat16_is_near_to_float32(setup, batch, lerobot_policy, train):
    module = load(setup, train, dtype="bfloat16")
    kept = {parameter.dtype for name, parameter in module.policy.named_parameters() if name in trained(module.policy)}
    assert kept == {torch.float32}
    assert module.policy.model.action_in_proj.weight.dtype == torch.float32
    loss = module(batch)
    if train != "lora":
        assert distance(loss, lerobot_loss(lerobot_policy, batch)) <= 2.0**-6
    loss.backward()
    actions = module.eval().predict(batch, torch.zeros_like(batch[ACTION]))
    assert actions.isfinite().all()


@pytest.mark.parametrize(("train", "dtype"), [("expert", "bfloat16"), ("full", "float32")])
def test_loading_the_loss_and_sampling_stay_on_the_device(setup, batch, train, dtype):
    with fake_cuda():
        options = ModuleOptions(train=train, dtype=dtype, gradient_checkpointing=True)
        module = setup.adapter.load_module(setup.policy, setup.binding, options, CUDA).train()
        assert all(is_fake_cuda(one) for one in (*module.parameters(), *module.buffers()))
        there = {key: value.to(CUDA) for key, value in batch.items()}
        assert is_fake_cuda(module(there))


@pytest.mark.parametrize("train", WAYS)
def test_a_step_costs_about_what_the_adapter_says(setup, batch, train):
    """Cores are shared out by it; attention and the small layers are left out, and lora computes fewer gradients."""
    module = load(setup, train)
    with FlopCounterMode(display=False) as counter:
        module(batch).backward()
    counted = counter.get_total_flops() / len(batch[TIME])
    said = setup.adapter.step_flops(setup.policy, setup.binding, ModuleOptions(train=train, dtype="float32"))
    assert 0.5 < said / counted < 2
