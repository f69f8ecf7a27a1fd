"""What our forward does not do: keep activations of a frozen prefix, wait for the device, compute what nobody reads.

Memory is counted in bytes that autograd keeps for the backward pass, so that nothing here depends on the machine.
"""

from functools import partial
from typing import Any

import pytest
import torch
from lerobot.policies.common.vla_utils import create_sinusoidal_pos_embedding
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
from torch.utils.flop_counter import FlopCounterMode

from vlatune.batch import TIME
from vlatune.bench.step.host_sync import HostSyncSpy
from vlatune.policies.base import ModuleOptions
from vlatune.policies.modeling import encode_time
from vlatune.policies.pi05.trainable import set_trainable
from vlatune.train.worker.device import deterministic_kernels


def load(setup, train: str, **options: Any):
    chosen = ModuleOptions(train=train, dtype="float32", **options)
    module = setup.adapter.load_module(setup.policy, setup.binding, chosen)
    randomise_adapters(module)
    return module.train()


def kept_bytes(module: torch.nn.Module, forward) -> int:
    """Bytes of activations that a forward keeps for its backward, each memory once; weights do not count."""
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # held, so that its address is not given out again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("train", ["heads", "expert"])
def test_a_frozen_prefix_keeps_no_activations(setup, batch, parity_base, train):
    module, theirs = load(setup, train), load_lerobot(parity_base)
    set_trainable(theirs, train)
    ours_kept = kept_bytes(module, lambda: module(batch))
    theirs_kept = kept_bytes(theirs, lambda: lerobot_loss(theirs, batch))
    assert ours_kept <= 0.5 * theirs_kept


@pytest.mark.parametrize("train", ["lora", "full"])
def test_checkpointing_keeps_less_and_changes_nothing(setup, batch, train):
    plain, again = load(setup, train), load(setup, train, gradient_checkpointing=True)
    assert kept_bytes(again, lambda: again(batch)) <= 0.5 * kept_bytes(plain, lambda: plain(batch))
    loss, again_loss = plain(batch), again(batch)
    assert torch.equal(loss, again_loss)
    error, name = worst_distance(gradients(again, again_loss), gradients(plain, loss))
    assert error <= LOSS_RTOL, name


@pytest.mark.parametrize(("train", "again"), [("expert", False), ("lora", True)])
def test_compiled_layers_give_the_same(setup, draws, monkeypatch, train, again):
    """All of torch.compile but its last step, which needs a C++ compiler. Layers of a kind share a graph, unbroken."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    plain = load(setup, train, flow_samples=DRAWS)
    compiled = load(setup, train, flow_samples=DRAWS, compile=True, gradient_checkpointing=again)
    loss, compiled_loss = plain(draws), compiled(draws)
    assert distance(compiled_loss, loss) <= LOSS_RTOL
    error, name = worst_distance(gradients(compiled, compiled_loss), gradients(plain, loss))
    assert error <= GRADIENT_RTOL, name
    # With adapters the first layer has a graph of its own: its input, unlike the others', needs no gradient.
    assert counters["stats"]["unique_graphs"] == (3 if train == "lora" else 2)
    assert not counters["graph_break"]


@pytest.mark.parametrize("train", WAYS)
def test_a_step_never_waits_for_the_device(setup, batch, train):
    module = load(setup, train)
    with HostSyncSpy(resident=[*module.parameters(), *module.buffers(), *batch.values()]) as spy:
        module(batch).backward()
    assert spy.table() == []


def test_lerobots_step_does(parity_base, batch):
    """So that the test above is known to see."""
    policy = load_lerobot(parity_base)
    with HostSyncSpy(resident=[*policy.parameters(), *policy.buffers(), *batch.values()]) as spy:
        lerobot_loss(policy, batch).backward()
    assert spy.count >= 4


@pytest.mark.parametrize("train", WAYS)
def test_no_value_decides_what_is_computed(setup, batch, train):
    """On the meta device there are no values: a branch, a loop or a shape that depends on one would raise."""
    module = load(setup, train).to("meta")
    module({key: value.to("meta") for key, value in batch.items()}).backward()


def test_the_last_layers_output_is_not_computed(setup, batch):
    module = load(setup, "heads")
    last = module.policy.model.paligemma_with_expert.paligemma.model.language_model.layers[-1]
    for linear in (last.self_attn.q_proj, last.self_attn.o_proj, *last.mlp.children()):
        if isinstance(linear, torch.nn.Linear):
            linear.weight = None
    assert module(batch).isfinite()


def test_the_time_code_is_lerobots_to_the_bit(setup, draws):
    module = load(setup, "heads")
    config, width = module.policy.config, module.policy.model.action_in_proj.out_features
    time = draws[TIME].flatten()
    theirs = create_sinusoidal_pos_embedding(time, width, config.min_period, config.max_period, device=time.device)
    assert torch.equal(encode_time(time, module.time_scale), theirs.type(time.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("train", WAYS)
def test_a_step_on_cuda_never_waits(setup, batch, train):
    """CUDA's own watch over synchronising calls, and the numbers of the CPU."""
    module = load(setup, train)
    loss = module(batch)
    reference = gradients(module, loss)
    module.to("cuda")
    there = {key: value.to("cuda") for key, value in batch.items()}
    module(there).backward()  # the first call may allocate and tune
    module.zero_grad()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cuda_loss = module(there)
        cuda_loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert distance(cuda_loss.cpu(), loss) <= 1e-4
    ours = {name: p.grad.cpu() for name, p in module.named_parameters() if p.grad is not None}
    error, name = worst_distance(ours, reference)
    assert error <= 1e-3, name


@pytest.mark.parametrize("train", WAYS)
@pytest.mark.parametrize("flow_samples", [1, DRAWS])
def test_a_step_costs_about_what_the_adapter_says(setup, batch, draws, train, flow_samples):
    """Cores are shared out by it; attention and the small layers are left out, and lora computes fewer gradients."""
    options = ModuleOptions(train=train, dtype="float32", flow_samples=flow_samples)
    module = load(setup, train, flow_samples=flow_samples)
    with FlopCounterMode(display=False) as counter:
        module(batch if flow_samples == 1 else draws).backward()
    counted = counter.get_total_flops() / len(batch[TIME])
    assert 0.5 < setup.adapter.step_flops(setup.policy, setup.binding, options) / counted < 2


@pytest.mark.gpu
@pytest.mark.parametrize("train", WAYS)
def test_on_cuda_deterministic_kernels_give_the_same_bits_each_time(setup, batch, train):
    module = load(setup, train).to("cuda")
    there = {key: value.to("cuda") for key, value in batch.items()}
    with deterministic_kernels():
        first, second = (gradients(module, module(there)) for _ in range(2))
    assert all(torch.equal(second[name], gradient) for name, gradient in first.items())
