"""Patch embeddings as matrix products."""

import copy

import pytest
import torch
from torch import nn

from vlatune.policies.modeling import LARGEST_KERNEL, PatchProduct, multiply_large_patches


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
