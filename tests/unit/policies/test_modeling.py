"""Layers that the policies share: patch embeddings as matrix products, and LoRA."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vlatune.policies.modeling import ADAPTER, LARGEST_KERNEL, PatchProduct, multiply_large_patches, project


def as_product(layer: nn.Conv2d) -> nn.Module:
    policy = nn.Sequential(copy.deepcopy(layer))
    multiply_large_patches(policy)
    return policy[0]


@pytest.mark.parametrize("image_hw", [(48, 96), (60, 100)], ids=["two patches", "pixels that fill no patch"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("side", [17, 48])
def test_output_and_gradients_equal_the_convolutions(image_hw, bias, side):
    layer = nn.Conv2d(3, 8, kernel_size=side, stride=side, bias=bias).double()
    product = as_product(layer)
    assert isinstance(product, PatchProduct)
    pixels = torch.rand(5, 3, *image_hw, dtype=torch.float64)
    found, gradients = [], []
    for one in (layer, product):
        seen = pixels.clone().requires_grad_()
        out = one(seen)
        out.pow(2).sum().backward()
        found.append(out.detach())
        gradients.append([seen.grad, *(parameter.grad for parameter in one.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-12)
    assert product.state_dict().keys() == layer.state_dict().keys()


def test_the_result_does_not_depend_on_the_number_of_threads():
    """Validation in a worker and `vlatune eval` may use different numbers of threads."""
    product = as_product(nn.Conv2d(3, 96, kernel_size=48, stride=48))
    pixels, before, found = torch.rand(10, 3, 48, 48), torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(product(pixels))
    torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 8, kernel_size=LARGEST_KERNEL, stride=LARGEST_KERNEL),
        nn.Conv2d(3, 8, kernel_size=48, stride=24),
        nn.Conv2d(3, 8, kernel_size=48, stride=48, padding=4),
        nn.Conv2d(6, 8, kernel_size=48, stride=48, groups=2),
        nn.Conv2d(3, 8, kernel_size=48, stride=48, dilation=2),
    ],
    ids=["small", "overlap", "padding", "groups", "dilation"],
)
def test_other_convolutions_are_not_converted(layer):
    assert type(as_product(layer)) is nn.Conv2d


class Products(TorchDispatchMode):
    """Counts elementwise products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket is torch.ops.aten.mul
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("scaling", "products"), [(1.0, 0), (0.75, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_multiplies_only_by_a_scaling_that_changes_something(scaling, products, dtype):
    layer, low, high = nn.Linear(8, 6, bias=False), nn.Linear(8, 2, bias=False), nn.Linear(2, 6, bias=False)
    adapted = SimpleNamespace(
        base_layer=layer, lora_A={ADAPTER: low}, lora_B={ADAPTER: high}, scaling={ADAPTER: scaling}
    )
    x = torch.randn(5, 8, dtype=dtype)
    with torch.no_grad(), Products() as counted:
        out = project(adapted, x)
    assert counted.count == products
    weights = [one.weight.to(dtype) for one in (layer, low, high)]
    assert torch.equal(out, x @ weights[0].T + (x @ weights[1].T) @ weights[2].T * scaling)
