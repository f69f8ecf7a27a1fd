"""The torch side that several policies share: layers in a dtype, kept or computed again, adapters, and flow matching.

Shapes: B batch, N tokens, D width, K draws of noise per observation, T time steps of a chunk, P padded dims of an action.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

ADAPTER = "default"
"""PEFT's name for the one adapter that a layer may carry."""


class KeyValue(NamedTuple):
    """Of the tokens that are looked at: (B, key/value heads, S, size of a head) each."""

    keys: Tensor
    values: Tensor

    def followed_by(self, other: "KeyValue") -> "KeyValue":
        return KeyValue(torch.cat([self.keys, other.keys], dim=2), torch.cat([self.values, other.values], dim=2))

    def repeated(self, times: int) -> "KeyValue":
        """Every observation `times` times in a row, for its draws of noise."""
        return KeyValue(repeat_each(self.keys, times), repeat_each(self.values, times))


def project(linear: Any, x: Tensor) -> Tensor:
    """A linear layer without a bias, in the dtype of `x`. What trains is kept in float32 and rounded here, as a bfloat16
    model's is.

    An adapter is computed in the same dtype: PEFT's own forward would keep a float32 copy of `x` for each layer.
    """
    adapted = hasattr(linear, "lora_A")
    weight = linear.base_layer.weight if adapted else linear.weight
    out = functional.linear(x, weight.to(x.dtype))
    if not adapted:
        return out
    low = functional.linear(x, linear.lora_A[ADAPTER].weight.to(x.dtype))
    return out + functional.linear(low, linear.lora_B[ADAPTER].weight.to(x.dtype)) * linear.scaling[ADAPTER]


def gated_mlp(mlp: Any, x_BND: Tensor) -> Tensor:
    """Gemma's and Llama's."""
    return project(mlp.down_proj, mlp.act_fn(project(mlp.gate_proj, x_BND)) * project(mlp.up_proj, x_BND))


LARGEST_KERNEL = 16
"""Pixels on a side up to which a convolution whose windows do not overlap is as fast as the product that it is."""
LONGEST_SUM = 2304
"""Products that are added up at once; of 6,912, two threads gave other bits than one."""


class PatchProduct(nn.Conv2d):
    """A tower's patch embedding as products of matrices: patches do not overlap, so it is nothing else.

    Kernels of convolutions are made for small windows: for 64 pictures that are one patch of 48 pixels each, forward and
    backward on a CPU take 9.7 ms with torch's, 2.9 so. Some values of a patch at a time: a longer sum is cut into parts by the
    number of threads, and another number would give other last bits.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        rows, columns = self.kernel_size
        height, width = (pixels // side for pixels, side in zip(input.shape[2:], self.kernel_size, strict=True))
        whole = input[:, :, : height * rows, : width * columns]  # a rest that fills no patch is left out, as ever
        split = whole.unflatten(2, (height, rows)).unflatten(4, (width, columns))
        patches_NK = split.permute(0, 2, 4, 1, 3, 5).reshape(len(input) * height * width, -1)
        weight_DK = self.weight.flatten(1)
        size = patches_NK.shape[1]
        groups = next(n for n in range(-(-size // LONGEST_SUM), size + 1) if size % n == 0)
        patches_GNk = patches_NK.unflatten(1, (groups, -1)).transpose(0, 1)
        out_ND = torch.bmm(patches_GNk, weight_DK.unflatten(1, (groups, -1)).permute(1, 2, 0)).sum(dim=0)
        if self.bias is not None:
            out_ND = out_ND + self.bias
        return out_ND.view(len(input), height, width, -1).permute(0, 3, 1, 2)


def multiply_large_patches(policy: nn.Module) -> None:
    """Patch embeddings of more than LARGEST_KERNEL pixels; names and weights stay as they are."""
    for layer in policy.modules():
        if type(layer) is nn.Conv2d and _is_product(layer) and min(layer.kernel_size) > LARGEST_KERNEL:
            layer.__class__ = PatchProduct


def _is_product(layer: nn.Conv2d) -> bool:
    """Whether its windows lie side by side, and each sees all channels and pixels of its own."""
    is_plain = layer.padding in ("valid", (0, 0)) and layer.dilation == (1, 1) and layer.groups == 1
    return is_plain and layer.kernel_size == layer.stride


def how_to_run[**P, R](layer_function: Callable[P, R], *, compiled: bool, checkpointed: bool) -> Callable[P, R]:
    """Compiled once and used for every layer of its kind; activations dropped and computed again where asked for."""
    run: Callable[P, R] = torch.compile(layer_function) if compiled else layer_function
    if not checkpointed:
        return run

    def run_checkpointed(*args: P.args, **kwargs: P.kwargs) -> R:
        # Nothing here is random, and saving the generator's state would wait for the device.
        kept: Any = checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        return kept

    return run_checkpointed


def add_adapters(policy: nn.Module, *, on: str, but: str, rank: int, alpha: float) -> None:
    """LoRA of the peft library on the linear layers whose whole name matches `on` and does not hold `but`.

    The adapters begin without effect, are drawn from torch's global generator, and are float32 whatever the base is.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # pyright: ignore[reportArgumentType]  (peft only divides it by the rank)
        target_modules=on,
        exclude_modules=f".*({but}).*",
    )
    inject_adapter_in_model(config, policy, adapter_name=ADAPTER)
    for name, parameter in policy.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.to(torch.float32)


def merge_adapters(policy: nn.Module) -> None:
    """Fold every adapter into its layer, in float32: the policy is then LeRobot's own again, module by module."""
    adapted = [(name, module) for name, module in policy.named_modules() if hasattr(module, "lora_A")]
    for name, module in adapted:
        layer: Any = module
        a, b = (part[ADAPTER].weight.detach() for part in (layer.lora_A, layer.lora_B))
        merged = layer.base_layer.weight.detach().to(torch.float32) + layer.scaling[ADAPTER] * (b @ a)
        layer.base_layer.weight = nn.Parameter(merged, requires_grad=False)
        owner, _, leaf = name.rpartition(".")
        setattr(policy.get_submodule(owner), leaf, layer.base_layer)


# Flow matching


def noisy_and_wanted(action_BTP: Tensor, noise_BKTP: Tensor, time_BK: Tensor) -> tuple[Tensor, Tensor]:
    """Noisy actions and the velocity that is to be guessed of them, (B * K, T, P): draws of an observation in a row."""
    time_BK11 = time_BK[:, :, None, None]
    noisy_BKTP = time_BK11 * noise_BKTP + (1 - time_BK11) * action_BTP[:, None]
    wanted_BKTP = noise_BKTP - action_BTP[:, None]
    return noisy_BKTP.flatten(0, 1), wanted_BKTP.flatten(0, 1)


def encode_time(time_B: Tensor, time_scale: Tensor) -> Tensor:
    """LeRobot's sinusoidal code of the flow time, to the bit."""
    angle_BD = time_scale[None, :] * time_B[:, None]
    return torch.cat([torch.sin(angle_BD), torch.cos(angle_BD)], dim=1).to(time_B.dtype)


def make_time_scale(config: Any, action_in: nn.Linear) -> Tensor:
    """Radians per unit of flow time, slow to fast; float64, made once: LeRobot makes it in every step."""
    fraction = torch.linspace(0.0, 1.0, action_in.out_features // 2, dtype=torch.float64)
    period = config.min_period * (config.max_period / config.min_period) ** fraction
    return (1.0 / period * 2 * math.pi).to(action_in.weight.device)


def check_draws(noise_BKTP: Tensor, time_BK: Tensor, flow_samples: int) -> None:
    """Another number would train all the same, at another cost and with another meaning of an epoch."""
    drawn = (noise_BKTP.shape[1], time_BK.shape[1])
    if drawn != (flow_samples, flow_samples):
        raise ValueError(
            f"the batch brings {drawn[0]} draws of noise and {drawn[1]} of time per observation, the module was "
            f"loaded for --policy.flow_samples={flow_samples}; give `Draw` the same number"
        )


def valid_tokens(token_mask_BL: Tensor, camera_mask_BC: Tensor | None, num_image_tokens: int) -> Tensor:
    """(B, N): of image tokens, camera by camera, and words: False for padded words, and for pictures that a sample's robot
    lacks. Without a mask of cameras all samples have all of them.
    """
    if camera_mask_BC is None:
        seen_BN = token_mask_BL.new_ones(len(token_mask_BL), num_image_tokens)
    else:
        num_cameras = camera_mask_BC.shape[1]
        seen_BN = camera_mask_BC[..., None].expand(-1, -1, num_image_tokens // num_cameras).flatten(1)
    return torch.cat([seen_BN, token_mask_BL], dim=1)


def repeat_each(values: Tensor, times: int) -> Tensor:
    """Every row `times` times in a row."""
    return values[:, None].expand(-1, times, *values.shape[1:]).flatten(0, 1)


def to_pixels(images: Tensor) -> Tensor:
    """uint8 -> [-1, 1], in LeRobot's order of operations."""
    return images.to(torch.float32) / 255.0 * 2.0 - 1.0
