"""The forward of PI0.5 and PI0 in two parts: pictures and prompt -> keys and values, and the action expert on top of them.

The prefix is computed once per observation. Nothing after the last layer's keys and values is computed, and cameras
without data take no part: LeRobot runs them through the vision tower and then masks every token of them, so nothing sees
them, and positions count valid tokens only. The expert then runs for any number of draws per observation; what tokens it
is given is all that differs between the two policies (`Suffix`). Together equal to LeRobot's forward in loss and gradients. Masks, positions and constants are made on the device: nothing waits for
it, and no shape depends on values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vlatune.policies.modeling import KeyValue, encode_time, noisy_and_wanted, repeat_each, to_pixels, valid_tokens
from vlatune.policies.pi05.layers import Rope, expert_layer, make_rope, prefix_key_value, prefix_layer
from vlatune.policies.pi05.size import NUM_HEADS

PrefixLayer = Callable[[Any, Tensor, Rope, Tensor], tuple[Tensor, KeyValue]]
ExpertLayer = Callable[[Any, Tensor, Tensor | None, Rope, KeyValue, Tensor], Tensor]


@dataclass(frozen=True)
class Prefix:
    layers: Sequence[KeyValue]
    valid_BS: Tensor
    """False for padded prompt tokens, and for pictures that a sample's robot lacks."""

    def repeated(self, times: int) -> "Prefix":
        """Every observation `times` times in a row, for its draws of noise."""
        return Prefix([layer.repeated(times) for layer in self.layers], repeat_each(self.valid_BS, times))


@dataclass(frozen=True)
class Suffix:
    """The expert's own tokens; the last of them are the actions."""

    hidden_BND: Tensor
    time_BD: Tensor | None
    """Scales the expert's norms, where the policy has it so."""
    num_blind: int = 0
    """Tokens at the front that do not look at those behind them."""


EmbedSuffix = Callable[[Any, Tensor, Tensor], Suffix]
"""(model, noisy_BTP, time_code_BD) -> tokens."""


def embed_actions(model: Any, noisy_BTP: Tensor, time_code_BD: Tensor) -> Suffix:
    """PI0.5's: a token per action, and the time beside them."""
    time_BD = functional.silu(model.time_mlp_out(functional.silu(model.time_mlp_in(time_code_BD))))
    return Suffix(model.action_in_proj(noisy_BTP), time_BD)


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
    valid_BN = valid_tokens(token_mask_BL, camera_mask_BC, num_image_tokens)
    rope = make_rope(paligemma.language_model.rotary_emb, torch.cumsum(valid_BN, dim=1) - 1, dtype)
    *layers, last = paligemma.language_model.layers
    seen = []
    for layer in layers:
        hidden_BND, key_value = run_layer(layer, hidden_BND, rope, valid_BN)
        seen.append(key_value)
    return Prefix([*seen, prefix_key_value(last, hidden_BND, rope)], valid_BN)


def embed_images(model: Any, images: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """One pass of the vision tower for all cameras."""
    pixels = to_pixels(torch.cat(list(images)))
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
    embed: EmbedSuffix = embed_actions,
    run_layer: ExpertLayer = expert_layer,
) -> Tensor:
    """Squared errors of the guessed velocity, (B * K, T, P): the draws of an observation stand in a row."""
    noisy, wanted = noisy_and_wanted(action_BTP, noise_BKTP, time_BK)
    time_code = encode_time(time_BK.flatten(), time_scale)
    suffix = embed(model, noisy, time_code)
    guessed = velocity(model, prefix.repeated(time_BK.shape[1]), suffix, run_layer=run_layer)
    return functional.mse_loss(wanted, guessed, reduction="none")


def velocity(model: Any, prefix: Prefix, suffix: Suffix, *, run_layer: ExpertLayer = expert_layer) -> Tensor:
    """The expert's guess of noise - action, in float32."""
    joint = model.paligemma_with_expert
    dtype = prefix.layers[0].keys.dtype
    hidden_BND = suffix.hidden_BND.to(dtype)
    places_N = torch.arange(hidden_BND.shape[1], device=hidden_BND.device)
    positions_BN = prefix.valid_BS.sum(dim=1, keepdim=True) + places_N
    rope = make_rope(joint.paligemma.model.language_model.rotary_emb, positions_BN, dtype)
    valid_BS = torch.cat([prefix.valid_BS, prefix.valid_BS.new_ones(positions_BN.shape)], dim=1)
    if suffix.num_blind:
        valid_BS = _seen_by_each(valid_BS, places_N, suffix.num_blind)
    expert = joint.gemma_expert.model
    for layer, key_value in zip(expert.layers, prefix.layers, strict=True):
        hidden_BND = run_layer(layer, hidden_BND, suffix.time_BD, rope, key_value, valid_BS)
    normed_BTD, _ = expert.norm(hidden_BND[:, suffix.num_blind :], cond=suffix.time_BD)
    return model.action_out_proj(normed_BTD.to(torch.float32))


def _seen_by_each(valid_BS: Tensor, places_N: Tensor, num_blind: int) -> Tensor:
    """Who looks at whom, (B, H * N, S), as heads are folded into tokens: made once for all layers."""
    own_NN = (places_N[:, None] >= num_blind) | (places_N[None, :] < num_blind)
    num_prefix = valid_BS.shape[1] - len(places_N)
    all_NS = torch.cat([own_NN.new_ones(len(places_N), num_prefix), own_NN], dim=1)
    return (valid_BS[:, None] & all_NS).repeat(1, NUM_HEADS, 1)
