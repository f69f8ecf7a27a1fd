"""PI0.5, PI0 and SmolVLA equal LeRobot's in loss, gradients and actions, in every fine-tuning mode, without waste."""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from parity.policies.flow_parity import (
    BF16,
    GRADIENT_RTOL,
    KINDS_AND_MODES,
    LOSS_RTOL,
    MODES,
    SAMPLES,
    Case,
    check_parity,
    distance,
    gradients,
    lerobot_loss,
    load_lerobot,
    observation,
    trained,
    worst_distance,
)
from safetensors.torch import load_file
from tensor_bytes import TensorBytes, bytes_of
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.step.host_sync import HostSyncSpy
from vlatune.batch import ACTION, STATE, TIME, TOKEN_MASK, TOKENS
from vlatune.policies.base import ModuleOptions
from vlatune.policies.modeling import KeyValue, LayerModule, attend, make_mask

Cases = Callable[[str], Case]
each_mode = pytest.mark.parametrize(("kind", "train"), KINDS_AND_MODES)
each_kind = pytest.mark.parametrize("kind", MODES)
frozen_and_full = pytest.mark.parametrize("train", ["expert", "full"])


def noise_like(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.randn(batch[ACTION].shape, generator=torch.Generator().manual_seed(1))


@each_mode
def test_loss_and_gradients_equal_lerobots(cases: Cases, kind: str, train: str) -> None:
    """With adapters, LeRobot's forward runs on our policy with PEFT's layers."""
    case = cases(kind)
    module = case.load(train)
    theirs = module.policy if train == "lora" else case.lerobot
    check_parity(module, theirs, module(case.batch).loss, lerobot_loss(theirs, case.batch))


@each_kind
def test_only_unused_parameters_are_frozen(cases: Cases, kind: str) -> None:
    case = cases(kind)
    found = gradients(case.lerobot, lerobot_loss(case.lerobot, case.batch))
    used = {name for name, gradient in found.items() if gradient.abs().sum() > 0}
    ours = trained(case.load("full").policy)
    assert used >= ours
    if kind != "smolvla":  # LeRobot freezes the complete last layer of SmolVLA's language model
        assert used == ours


@frozen_and_full
@each_kind
def test_several_noise_samples_give_the_mean(cases: Cases, kind: str, train: str) -> None:
    case = cases(kind)
    module = case.load(train, flow_samples=SAMPLES)
    theirs = torch.stack([lerobot_loss(case.lerobot, case.samples, number) for number in range(SAMPLES)]).mean()
    check_parity(module, case.lerobot, module(case.samples).loss, theirs)
    with pytest.raises(ValueError, match=r"--policy.flow_samples=1"):
        case.load("heads")(case.samples)
    module.eval()  # evaluation uses one noise sample with the module that trains
    assert torch.equal(module(case.batch).loss, case.load(train).eval()(case.batch).loss)


@each_kind
def test_actions_equal_lerobots_to_the_bit(cases: Cases, kind: str) -> None:
    case = cases(kind)
    module, batch = case.load("heads").eval(), case.batch
    ours = module.predict(batch, noise_like(batch))
    assert torch.equal(ours, case.lerobot.predict_action_chunk(observation(batch), noise=noise_like(batch)))
    case.lerobot.train()
    if kind != "pi05":
        other = batch | {STATE: batch[STATE] + 1.0}
        assert not torch.equal(ours, module.predict(other, noise_like(batch)))


@each_kind
def test_a_camera_without_data_equals_lerobots(cases: Cases, kind: str) -> None:
    case = cases(kind)
    first, second = case.setup.binding.cameras
    binding = replace(case.setup.binding, cameras=(first,), missing_cameras=(second[1],))
    options = ModuleOptions(train="expert", dtype="float32")
    module: Any = case.setup.adapter.load_module(case.setup.policy, binding, options)
    batch = {key: value for key, value in case.batch.items() if key != second[1]}
    check_parity(module, case.lerobot, module(batch).loss, lerobot_loss(case.lerobot, batch))
    theirs = case.lerobot.predict_action_chunk(observation(batch), noise=noise_like(batch))
    case.lerobot.train()
    torch.testing.assert_close(module.eval().predict(batch, noise_like(batch)), theirs, rtol=0, atol=1e-5)


@each_kind
def test_padding_of_prompts_has_no_effect(cases: Cases, kind: str) -> None:
    case = cases(kind)
    module, batch = case.load("full"), case.batch
    longest = int(batch[TOKEN_MASK].sum(dim=1).max())
    cut = {key: batch[key][:, :longest] for key in (TOKENS, TOKEN_MASK)}
    padded = {key: torch.nn.functional.pad(value, (0, 16)) for key, value in cut.items()}
    short, long = module(batch | cut).loss, module(batch | padded).loss
    assert distance(short, long) <= LOSS_RTOL
    assert worst_distance(gradients(module, short), gradients(module, long))[0] <= GRADIENT_RTOL


@each_kind
def test_adapters_start_without_effect_and_merge_into_lerobots_policy(cases: Cases, kind: str) -> None:
    case = cases(kind)
    options = ModuleOptions(train="lora", dtype="float32")
    new = case.setup.adapter.load_module(case.setup.policy, case.setup.binding, options).train()
    assert distance(new(case.batch).loss, case.load("heads")(case.batch).loss) <= LOSS_RTOL
    module = case.load("lora")
    expected = module(case.batch).loss
    merged = module.as_lerobot()
    assert set(merged.state_dict()) == set(case.lerobot.state_dict())
    assert distance(lerobot_loss(merged, case.batch), expected) <= 1e-5


# bfloat16


@each_mode
def test_bfloat16_is_close_to_float32_and_trains_float32_weights(cases: Cases, kind: str, train: str) -> None:
    case = cases(kind)
    exact, module = case.load(train), case.load(train, "bfloat16")
    dtypes = {module.policy.get_parameter(name).dtype for name in trained(module.policy)}
    assert dtypes == {torch.float32}
    loss, exact_loss = module(case.batch).loss, exact(case.batch).loss
    assert distance(loss, exact_loss) <= (BF16 if kind == "pi05" else 4 * BF16)
    error, name = worst_distance(gradients(module, loss), gradients(exact, exact_loss))
    assert error <= (0.05 if kind == "pi05" else 0.15), name
    noise = noise_like(case.batch)
    ours, theirs = (one.eval().predict(case.batch, noise) for one in (module, exact))
    assert distance(ours, theirs) <= 0.05


@pytest.mark.parametrize("kind", ["pi05", "pi0"])
def test_a_frozen_tower_computes_as_under_autocast_and_is_saved_unrounded(cases: Cases, kind: str) -> None:
    case = cases(kind)
    theirs = load_lerobot(case.base, dtype="bfloat16")
    module = case.load("expert", "bfloat16")
    pixels = case.batch["observation.images.top"].float() / 127.5 - 1
    ours = module.policy.model.paligemma_with_expert.embed_image(pixels)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ours, theirs.model.paligemma_with_expert.embed_image(pixels))
    stored, policy = load_file(case.base / "model.safetensors"), module.as_lerobot()
    assert set(policy.state_dict()) == set(theirs.state_dict())
    for name, parameter in policy.named_parameters():
        if not parameter.requires_grad:
            assert torch.equal(parameter, stored[name].to(parameter.dtype)), name
            assert parameter.dtype == theirs.get_parameter(name).dtype, name


# Host syncs, memory, hooks


@each_mode
def test_a_step_has_no_host_sync_and_depends_on_no_value(cases: Cases, kind: str, train: str) -> None:
    case = cases(kind)
    module = case.load(train, flow_samples=SAMPLES)
    with HostSyncSpy(resident=[*module.parameters(), *module.buffers(), *case.samples.values()]) as spy:
        module(case.samples).loss.backward()
    assert spy.table() == []
    module.to("meta")  # no values: a branch or a shape that depends on one would raise
    module({key: value.to("meta") for key, value in case.samples.items()}).loss.backward()


class AttentionSpy(TorchFunctionMode):
    """Record query, keys and mask of masked attention; a vision tower's has no mask."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention and kwargs.get("attn_mask") is not None:
            self.calls.append((args[0], args[1], kwargs["attn_mask"]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@each_kind
def test_masks_are_made_for_the_kernels_once_per_step(cases: Cases, kind: str, dtype: str) -> None:
    """Otherwise every layer would convert and pad its mask (`convert_boolean_attn_mask`, `pad_bias`)."""
    case = cases(kind)
    with AttentionSpy() as spy:
        case.load("full", dtype, flow_samples=SAMPLES)(case.samples)
    masks = {mask.data_ptr(): mask for _, _, mask in spy.calls}
    assert len(masks) == (4 if kind == "smolvla" else 2) < len(spy.calls)
    for query, _, mask in spy.calls:
        assert mask.dtype == query.dtype
        assert mask.stride(-1) == 1
        assert all(stride % 8 == 0 for stride in mask.stride()[:-1])


@pytest.mark.parametrize("train", ["expert", "lora", "full"])
@each_kind
def test_deterministic_kernels_get_expanded_heads(cases: Cases, kind: str, train: str) -> None:
    """The backward pass is not serial, as it is with folded heads; what needs no gradient stays folded."""
    from vlatune.train.worker.device import deterministic_kernels

    case = cases(kind)
    module = case.load(train, flow_samples=SAMPLES).to("meta")
    samples = {key: value.to("meta") for key, value in case.samples.items()}
    for kernels, is_expanded in ((deterministic_kernels, True), (nullcontext, False)):
        with kernels(), AttentionSpy() as spy:
            module(samples).loss.backward()
        folded, heads = (2, 6) if kind == "smolvla" else (1, 8)
        found = {query.shape[1] for query, _, _ in spy.calls if query.requires_grad}
        assert found == {heads if is_expanded else folded}
        assert all(query.shape[1] == keys.shape[1] for query, keys, _ in spy.calls)


@pytest.mark.parametrize(("kv_heads", "samples"), [(1, 1), (2, 1), (2, 3)])
def test_expanded_heads_give_the_same(kv_heads: int, samples: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2 * samples, 6, 5, 16), (2, kv_heads, 11, 16), (2, kv_heads, 11, 16)]
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    seen = torch.rand(2, 1 if samples > 1 else 5, 11, generator=generator) < 0.8
    results = []
    for groups in (6 // kv_heads, 1):
        key_value = KeyValue(*inputs[1:]) if groups > 1 else KeyValue(*inputs[1:]).expanded(6)
        out = attend(inputs[0], key_value, make_mask(seen, torch.float32, groups))
        results.append([out, *torch.autograd.grad(out.pow(2).sum(), inputs)])
    for folded, expanded in zip(*results, strict=True):
        assert distance(expanded, folded) <= LOSS_RTOL


@each_kind
def test_hooks_see_every_layer(cases: Cases, kind: str) -> None:
    """FSDP2 gathers a layer's weights in a forward hook."""
    case = cases(kind)
    module, called = case.load("full"), set()
    layers = [one for one in module.modules() if isinstance(one, LayerModule)]
    for layer in layers:
        layer.register_forward_hook(lambda layer, inputs, output: called.add(layer))
    module(case.batch)
    assert called == set(layers)
    covered = {id(parameter) for layer in layers for parameter in layer.parameters()}
    assert {name for name in trained(module.policy) if ".q_proj." in name and "vision" not in name} == {
        name for name, one in module.policy.named_parameters() if ".q_proj." in name and id(one) in covered
    } & trained(module.policy)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@each_kind
def test_loading_takes_the_model_and_one_tensor(cases: Cases, kind: str, dtype: str) -> None:
    case = cases(kind)
    largest = max(bytes_of([tensor]) for tensor in load_file(case.base / "model.safetensors").values())
    options = ModuleOptions(train="expert", dtype=dtype)
    with TensorBytes() as counter:
        module = case.setup.adapter.load_module(case.setup.policy, case.setup.binding, options)
    assert counter.peak["cpu"] <= bytes_of([*module.parameters(), *module.buffers()]) + largest


def kept_bytes(module: torch.nn.Module, forward: Callable[[], Any]) -> int:
    """Return the bytes of activations that a forward keeps for its backward, each storage once."""
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # keeps the storage alive, so that its address is not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in kept.values())


@each_kind
def test_a_frozen_prefix_keeps_no_activations(cases: Cases, kind: str) -> None:
    case = cases(kind)
    module, theirs = case.load("expert"), load_lerobot(case.base)
    for name, parameter in theirs.named_parameters():
        parameter.requires_grad_(name in trained(module.policy))
    ours = kept_bytes(module, lambda: module(case.batch))
    assert ours <= 0.5 * kept_bytes(theirs, lambda: lerobot_loss(theirs, case.batch))


@frozen_and_full
@each_kind
def test_gradient_checkpointing_keeps_less_and_changes_nothing(cases: Cases, kind: str, train: str) -> None:
    case = cases(kind)
    plain, again = case.load(train), case.load(train, gradient_checkpointing=True)
    assert kept_bytes(again, lambda: again(case.batch)) <= 0.7 * kept_bytes(plain, lambda: plain(case.batch))
    loss, again_loss = plain(case.batch).loss, again(case.batch).loss
    assert torch.equal(loss, again_loss)
    assert worst_distance(gradients(again, again_loss), gradients(plain, loss))[0] <= LOSS_RTOL


def compare_compiled(case: Case, train: str, *, again: bool) -> None:
    """Compare loss and gradients of compiled layers, including the vision tower, with those of plain ones."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    plain = case.load(train, flow_samples=SAMPLES)
    compiled = case.load(train, flow_samples=SAMPLES, compile=True, gradient_checkpointing=again)
    loss, compiled_loss = plain(case.samples).loss, compiled(case.samples).loss
    assert distance(compiled_loss, loss) <= LOSS_RTOL
    assert worst_distance(gradients(compiled, compiled_loss), gradients(plain, loss))[0] <= GRADIENT_RTOL
    assert not counters["graph_break"]
    assert 3 <= counters["stats"]["unique_graphs"] <= 6  # layers of the tower, the prefix and the expert share graphs


@pytest.mark.parametrize(("kind", "train"), [("pi05", "heads"), ("smolvla", "lora")])
def test_compiled_layers_give_the_same_before_code_is_generated(
    cases: Cases, kind: str, train: str, monkeypatch
) -> None:
    """All of torch.compile but its last step, which takes long. Validation needs further versions of each function."""
    compile_function = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_function(function, backend="aot_eager"))
    case = cases(kind)
    compare_compiled(case, train, again=False)
    module, plain = case.load(train, compile=True).eval(), case.load(train).eval()
    with torch.no_grad(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        assert distance(module(case.batch).loss, plain(case.batch).loss) <= LOSS_RTOL


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(
    ("kind", "train", "again"), [("pi05", "expert", False), ("pi0", "lora", True), ("smolvla", "full", False)]
)
def test_compiled_layers_give_the_same(cases: Cases, kind: str, train: str, again: bool) -> None:
    """Each of torch.compile's C++ files takes g++ seconds, so a policy is compiled in one mode."""
    compare_compiled(cases(kind), train, again=again)


@each_mode
def test_a_step_costs_about_as_many_operations_as_estimated(cases: Cases, kind: str, train: str) -> None:
    case = cases(kind)
    module = case.load(train)
    with FlopCounterMode(display=False) as counter:
        module(case.batch).loss.backward()
    counted = counter.get_total_flops() / len(case.batch[TIME])
    options = ModuleOptions(train=train, dtype="float32")
    assert 0.5 < case.setup.adapter.step_flops(case.setup.policy, case.setup.binding, options) / counted < 2


@pytest.mark.gpu
@each_mode
def test_a_step_on_cuda_has_no_host_sync_and_is_repeatable(cases: Cases, kind: str, train: str) -> None:
    from vlatune.train.worker.device import deterministic_kernels

    case = cases(kind)
    module = case.load(train)
    loss = module(case.batch).loss
    reference = gradients(module, loss)
    module.to("cuda")
    there = {key: value.to("cuda") for key, value in case.batch.items()}
    module(there).loss.backward()  # the first call may allocate and tune
    module.zero_grad()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cuda_loss = module(there).loss
        cuda_loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert distance(cuda_loss.cpu(), loss) <= 1e-4
    ours = {name: p.grad.cpu() for name, p in module.named_parameters() if p.grad is not None}
    assert worst_distance(ours, reference)[0] <= 1e-3
    with deterministic_kernels():
        first, second = (gradients(module, module(there).loss) for _ in range(2))
    assert all(torch.equal(second[name], gradient) for name, gradient in first.items())
