"""PI0.5's forward in two parts: pictures and prompt -> keys and values, and the action expert on top of them.

The prefix is computed once per observation. Nothing after the last layer's keys and values is computed, and cameras
without data take no part: LeRobot runs them through the vision tower and then masks every token of them, so nothing sees
them, and positions count valid tokens only. The expert then runs for any number of draws per observation. Together equal
to `PI05Pytorch.forward` in loss and gradients. Masks, positions and constants are made on the device: nothing waits for
it, and no shape depends on values.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lerobot.policies.pi05 import PI05Config
from torch import Tensor, nn
from torch.nn import functional

from vlatune.policies.pi05.layers import KeyValue, Rope, expert_layer, make_rope, prefix_key_value, prefix_layer

PrefixLayer = Callable[[Any, Tensor, Rope, Tensor], tuple[Tensor, KeyValue]]
ExpertLayer = Callable[[Any, Tensor, Tensor, Rope, KeyValue, Tensor], Tensor]


@dataclass(frozen=True)
class Prefix:
    layers: Sequence[KeyValue]
    valid_BS: Tensor
    """False for padded prompt tokens, and for pictures that a sample's robot lacks."""

    def repeated(self, times: int) -> "Prefix":
        """Every observation `times` times in a row, for its draws of noise."""
        layers = [KeyValue(_repeat(keys, times), _repeat(values, times)) for keys, values in self.layers]
        return Prefix(layers, _repeat(self.valid_BS, times))


def compute_prefix(
    model: Any,
    images: Sequence[Tensor],
    tokens_BL: Tensor,
    token_mask_BL: Tensor,
    *,
    dtype: torch.dtype,
    run_layer: PrefixLayer = prefix_layer,
    camera_mask_BC: Tensor | None = None,
) -> Prefix:
    """`images` are uint8 (B, 3, H, W), one per camera that has data, in the policy's order; all samples have all of them
    where there is no mask.
    """
    paligemma = model.paligemma_with_expert.paligemma.model
    words_BLD = embed_words(paligemma.language_model.embed_tokens, tokens_BL, dtype)
    hidden_BND = torch.cat([*embed_images(model, images, dtype), words_BLD], dim=1)
    num_image_tokens = hidden_BND.shape[1] - tokens_BL.shape[1]
    if camera_mask_BC is None:
        seen_BN = token_mask_BL.new_ones(len(tokens_BL), num_image_tokens)
    else:
        seen_BN = camera_mask_BC[..., None].expand(-1, -1, num_image_tokens // len(images)).flatten(1)
    valid_BN = torch.cat([seen_BN, token_mask_BL], dim=1)
    rope = make_rope(paligemma.language_model.rotary_emb, torch.cumsum(valid_BN, dim=1) - 1, dtype)
    *layers, last = paligemma.language_model.layers
    seen = []
    for layer in layers:
        hidden_BND, key_value = run_layer(layer, hidden_BND, rope, valid_BN)
        seen.append(key_value)
    return Prefix([*seen, prefix_key_value(last, hidden_BND, rope)], valid_BN)


def embed_images(model: Any, images: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """uint8 -> [-1, 1] in LeRobot's order of operations, and one pass of the vision tower for all cameras."""
    pixels = torch.cat(list(images)).to(torch.float32) / 255.0 * 2.0 - 1.0
    return model.paligemma_with_expert.embed_image(pixels).to(dtype).chunk(len(images))


def embed_words(embedding: Any, tokens_BL: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded before it is scaled, as in a model whose table is kept in `dtype`: a table that trains is float32."""
    return nn.Embedding.forward(embedding, tokens_BL).to(dtype) * embedding.embed_scale.to(dtype)


def flow_losses(
    model: Any,
    prefix: Prefix,
    action_BTP: Tensor,
    noise_BKTP: Tensor,
    time_BK: Tensor,
    *,
    time_scale: Tensor,
    run_layer: ExpertLayer = expert_layer,
) -> Tensor:
    """Squared errors of the guessed velocity, (B * K, T, P): the draws of an observation stand in a row."""
    time_BK11 = time_BK[:, :, None, None]
    noisy_BKTP = time_BK11 * noise_BKTP + (1 - time_BK11) * action_BTP[:, None]
    wanted_BKTP = noise_BKTP - action_BTP[:, None]
    time_code = encode_time(time_BK.flatten(), time_scale)
    guessed = velocity(
        model, prefix.repeated(time_BK.shape[1]), noisy_BKTP.flatten(0, 1), time_code, run_layer=run_layer
    )
    return functional.mse_loss(wanted_BKTP.flatten(0, 1), guessed, reduction="none")


def velocity(
    model: Any, prefix: Prefix, noisy_BTP: Tensor, time_code_BD: Tensor, *, run_layer: ExpertLayer = expert_layer
) -> Tensor:
    """The expert's guess of noise - action, in float32."""
    joint = model.paligemma_with_expert
    dtype = prefix.layers[0].keys.dtype
    time_BD = functional.silu(model.time_mlp_out(functional.silu(model.time_mlp_in(time_code_BD))))
    hidden_BTD = model.action_in_proj(noisy_BTP).to(dtype)
    steps_T = torch.arange(noisy_BTP.shape[1], device=noisy_BTP.device)
    positions_BT = prefix.valid_BS.sum(dim=1, keepdim=True) + steps_T
    rope = make_rope(joint.paligemma.model.language_model.rotary_emb, positions_BT, dtype)
    valid_BS = torch.cat([prefix.valid_BS, prefix.valid_BS.new_ones(positions_BT.shape)], dim=1)
    expert = joint.gemma_expert.model
    for layer, key_value in zip(expert.layers, prefix.layers, strict=True):
        hidden_BTD = run_layer(layer, hidden_BTD, time_BD, rope, key_value, valid_BS)
    normed_BTD, _ = expert.norm(hidden_BTD, cond=time_BD)
    return model.action_out_proj(normed_BTD.to(torch.float32))


def encode_time(time_B: Tensor, time_scale: Tensor) -> Tensor:
    """LeRobot's sinusoidal code of the flow time, to the bit."""
    angle_BD = time_scale[None, :] * time_B[:, None]
    return torch.cat([torch.sin(angle_BD), torch.cos(angle_BD)], dim=1).to(time_B.dtype)


def make_time_scale(config: PI05Config, action_in: nn.Linear) -> Tensor:
    """Radians per unit of flow time, slow to fast; float64, made once: LeRobot makes it in every step."""
    fraction = torch.linspace(0.0, 1.0, action_in.out_features // 2, dtype=torch.float64)
    period = config.min_period * (config.max_period / config.min_period) ** fraction
    return (1.0 / period * 2 * math.pi).to(action_in.weight.device)


def _repeat(values: Tensor, times: int) -> Tensor:
    return values[:, None].expand(-1, times, *values.shape[1:]).flatten(0, 1)
