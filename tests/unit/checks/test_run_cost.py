"""Time and price of a run: the arithmetic, and the kernels counted on the meta device."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from vlatune.checks.run_cost import (
    ACCUM_BYTES,
    EMA_BYTES,
    STEP_BYTES,
    Device,
    Kernel,
    StepWork,
    count_kernels,
    estimate,
    exchange_s,
    kernels_s,
    on_meta,
    step_s,
)
from vlatune.config.settings import RunConfig
from vlatune.policies.base import PolicyOutput

PLAIN = Device("plain", 200.0, 100.0, 10.0, 1000, 4.0, 3.0, 1.0, 1.0, launch_s=0.5, shortest_s=0.1)
PRODUCT, HALF, TRAFFIC, TINY = Kernel(400, 10), Kernel(400, 10, is_half=True), Kernel(0, 30), Kernel(0, 0)


@pytest.mark.parametrize(
    ("kernels", "seconds"),
    [([PRODUCT], 4), ([HALF], 2), ([TRAFFIC], 3), ([PRODUCT, TRAFFIC], 7), ([TINY] * 10, 5), ([], 0)],
)
def test_a_kernel_takes_the_longest_of_products_traffic_and_launch(kernels, seconds):
    assert kernels_s(kernels, PLAIN) == pytest.approx(seconds)


def test_a_host_that_computes_itself_adds_the_overhead_of_operators():
    assert kernels_s([PRODUCT, TINY], replace(PLAIN, is_asynchronous=False)) == pytest.approx(4 + 0.1 + 2 * 0.5)


def test_a_step_is_its_micro_steps_the_update_and_the_exchange():
    work = StepWork([PRODUCT], micro_steps=3, trained=100, num_workers=4, ema=True)
    assert exchange_s(work, PLAIN) == pytest.approx(2 * 3 / 4 * 400 / 4)
    update = (STEP_BYTES + EMA_BYTES + 2 * ACCUM_BYTES) * 100 / 10
    assert step_s(work, PLAIN) == pytest.approx(3 * 4 + update + exchange_s(work, PLAIN))
    assert exchange_s(replace(work, num_workers=1), PLAIN) == 0


def test_the_price_is_of_all_devices_for_all_steps():
    config = RunConfig(steps=1800, batch_size=8, num_workers=2)
    work = StepWork([PRODUCT], 1, 0, num_workers=2)
    seconds = step_s(work, PLAIN)
    typical, given = (estimate(config, work, PLAIN, usd, 1001) for usd in (None, 5.0))
    assert typical.usd == pytest.approx(seconds / 2 * 2 * 3)
    assert given.usd == pytest.approx(seconds / 2 * 2 * 5)
    assert typical.samples_per_s == pytest.approx(16 / seconds)
    assert not typical.fits
    assert estimate(config, work, PLAIN, None, 1000).fits
    assert typical.bound == "products"
    assert estimate(config, replace(work, micro_step=[TRAFFIC, PRODUCT, TRAFFIC]), PLAIN, None, None).bound == "memory"
    assert estimate(config, replace(work, micro_step=[TINY] * 9), PLAIN, None, None).bound == "launches"


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.linear = nn.Embedding(1000, 16), nn.Linear(16, 16, bias=False)
        self.words.requires_grad_(requires_grad=False)

    def forward(self, batch: dict[str, torch.Tensor]) -> PolicyOutput:
        x_BND = self.linear(self.words(batch["tokens"]))
        heads = x_BND.unflatten(2, (2, 8)).transpose(1, 2)
        mask = batch["valid"][:, None, None, :]
        return PolicyOutput(functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).sum())


def test_products_and_bytes_of_a_module_are_counted_without_its_weights():
    module, batch, tokens = Small(), 6, 4
    rows = {"tokens": torch.zeros(2, tokens, dtype=torch.int64), "valid": torch.ones(2, tokens, dtype=torch.bool)}
    before = module.linear.weight.clone()
    there = on_meta(module)
    kernels = count_kernels(there, rows, batch)
    linear = 2 * 2 * batch * tokens * 16 * 16  # forward, and backward to the weight
    attention = 2 * batch * 2 * tokens * tokens * 8
    assert sum(one.flops for one in kernels) == linear + (2 + 5) * attention
    table = module.words.weight.nbytes
    assert all(one.num_bytes < table for one in kernels)  # an embedding reads only its rows
    assert sum(one.flops > 0 for one in kernels) == 4  # one kernel per attention pass
    assert all(one.is_meta for one in there.parameters())
    assert torch.equal(module.linear.weight, before)
    assert there.linear.weight.grad is None
