"""PI0.5's action expert on top of a prefix, and the flow-matching loss over any number of draws per observation.

Together with `pi05_prefix.py` equal to `PI05Pytorch.forward` in loss and gradients. Masks, positions and constants are
made on the device: nothing waits for it, and no shape depends on values.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from lerobot.policies.pi05 import PI05Config
from torch import Tensor, nn
from torch.nn import functional

from vlatune.policies.pi05_layers import KeyValue, Rope, expert_layer, make_rope
from vlatune.policies.pi05_prefix import Prefix

ExpertLayer = Callable[[Any, Tensor, Tensor, Rope, KeyValue, Tensor], Tensor]


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
