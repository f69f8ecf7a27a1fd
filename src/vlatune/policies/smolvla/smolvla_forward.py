"""SmolVLA's forward in three parts: pictures and sentence, the state's token, and the action expert on top of both.

LeRobot runs them through each layer together. No picture or word looks at the state, and neither at an action, so
- pictures and words are computed once per observation, without gradients where nothing of them trains;
- the state is one token more, which runs through the same layers on top of their keys and values: only it needs
  gradients where the vision-language model is frozen and the state's projection trains, as LeRobot has it by default;
- the expert then runs for any number of draws of noise. In some layers it looks at all of that and at the actions before
  its own, in the others only at what was seen, through projections of its own of the keys and values, which are computed
  once per observation.
Nothing after the last keys and values that the expert sees is computed, and cameras without data take no part: LeRobot runs
them through the vision tower and then masks every token of them. Together equal to `VLAFlowMatching.forward` in loss and
gradients. Every operation is LeRobot's, in its order and dtype, but for the attention itself, which is PyTorch's fused one.
Masks, positions and constants are made on the device: nothing waits for it, and no shape depends on values.

Shapes: B observations, K draws, N tokens of a part, S tokens that are looked at, D width, H query heads, E size of a head.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vlatune.policies.modeling import KeyValue, gated_mlp, project, repeat_each, to_pixels, valid_tokens
from vlatune.policies.smolvla.smolvla_size import CONNECTOR_PART, SmolVLASize

MAX_WAVELENGTH = 10_000
PICTURE_AXES = 4


class Rope(NamedTuple):
    """Rotary position code of a part's tokens, (B, 1, N, E / 2) each, in float32."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Seen:
    """Keys and values that the expert looks at, by layer of the vision-language model."""

    layers: Sequence[KeyValue]
    valid_BS: Tensor
    """False for padded words, and for pictures that a sample's robot lacks."""


OwnLayer = Callable[[Any, Tensor, Rope, KeyValue | None, Tensor], tuple[Tensor, KeyValue]]
CrossLayer = Callable[[Any, Tensor, Rope, KeyValue, Tensor], Tensor]


# One layer, on LeRobot's modules


def own_layer(
    layer: Any, hidden_BND: Tensor, rope: Rope, before: KeyValue | None, mask: Tensor
) -> tuple[Tensor, KeyValue]:
    """Tokens look at those before them and at themselves: every layer of the vision-language model, some of the expert."""
    normed_BND = _normed(layer.input_layernorm, hidden_BND)
    own = _key_value(layer.self_attn, normed_BND, rope)
    seen = own if before is None else before.followed_by(own)
    return _finish(layer, hidden_BND, _queries(layer.self_attn, normed_BND, rope), seen, mask), own


def own_key_value(layer: Any, hidden_BND: Tensor, rope: Rope) -> KeyValue:
    """All that the last layer is asked for: its output would be thrown away."""
    return _key_value(layer.self_attn, _normed(layer.input_layernorm, hidden_BND), rope)


def cross_layer(layer: Any, hidden_BND: Tensor, rope: Rope, seen: KeyValue, mask: Tensor) -> Tensor:
    """Of the expert: it looks at what was seen alone, through projections of its own; the draws of an observation share it."""
    attention = layer.self_attn
    normed_BND = _normed(layer.input_layernorm, hidden_BND)
    keys = _split(attention, project(attention.k_proj, _joined(seen.keys)))
    values = _split(attention, project(attention.v_proj, _joined(seen.values)))
    return _finish(layer, hidden_BND, _queries(attention, normed_BND, rope), KeyValue(keys, values), mask)


def make_rope(positions_BN: Tensor, wavelengths: Tensor) -> Rope:
    """Once for all layers; LeRobot makes the same in every layer."""
    radians_B1NE = (positions_BN[..., None].to(torch.float32) / wavelengths)[:, None]
    return Rope(torch.cos(radians_B1NE), torch.sin(radians_B1NE))


def make_wavelengths(head_dim: int) -> Tensor:
    exponents = (2.0 / head_dim) * torch.arange(head_dim // 2, dtype=torch.float32)
    return MAX_WAVELENGTH**exponents


def _normed(norm: Any, x_BND: Tensor) -> Tensor:
    return norm(x_BND).to(x_BND.dtype)


def _queries(attention: Any, normed_BND: Tensor, rope: Rope) -> Tensor:
    return _rotate(_split(attention, project(attention.q_proj, normed_BND)), rope)


def _key_value(attention: Any, normed_BND: Tensor, rope: Rope) -> KeyValue:
    keys = _split(attention, project(attention.k_proj, normed_BND))
    return KeyValue(_rotate(keys, rope), _split(attention, project(attention.v_proj, normed_BND)))


def _finish(layer: Any, hidden_BND: Tensor, queries_BHNE: Tensor, seen: KeyValue, mask: Tensor) -> Tensor:
    hidden_BND = hidden_BND + project(layer.self_attn.o_proj, _attend(queries_BHNE, seen, mask))
    return hidden_BND + gated_mlp(layer.mlp, _normed(layer.post_attention_layernorm, hidden_BND))


def _attend(queries_BHNE: Tensor, seen: KeyValue, mask: Tensor) -> Tensor:
    """Query heads of one key/value head, and draws that look at the same, are folded into tokens: nothing is repeated."""
    tokens, size = queries_BHNE.shape[2:]
    batch, kv_heads = seen.keys.shape[:2]
    draws, groups = len(queries_BHNE) // batch, queries_BHNE.shape[1] // kv_heads
    apart = queries_BHNE.reshape(batch, draws, kv_heads, groups * tokens, size)
    folded = apart.transpose(1, 2).reshape(batch, kv_heads, draws * groups * tokens, size)
    out = functional.scaled_dot_product_attention(folded, seen.keys, seen.values, attn_mask=mask)
    out = out.reshape(batch, kv_heads, draws, groups, tokens, size).permute(0, 2, 4, 1, 3, 5)
    return out.reshape(batch * draws, tokens, kv_heads * groups * size)


def _rotate(x_BHNE: Tensor, rope: Rope) -> Tensor:
    first, second = x_BHNE.to(torch.float32).chunk(2, dim=-1)
    turned = torch.cat([first * rope.cos - second * rope.sin, second * rope.cos + first * rope.sin], dim=-1)
    return turned.to(x_BHNE.dtype)


def _split(attention: Any, x_BND: Tensor) -> Tensor:
    """Heads apart: (B, H, N, E)"""
    return x_BND.unflatten(2, (-1, attention.head_dim)).transpose(1, 2)


def _joined(x_BHNE: Tensor) -> Tensor:
    return x_BHNE.transpose(1, 2).flatten(2)


# Pictures and words


def look(
    model: Any,
    images: Sequence[Tensor],
    tokens_BL: Tensor,
    token_mask_BL: Tensor,
    *,
    size: SmolVLASize,
    places_N: Tensor,
    wavelengths: Tensor,
    dtype: torch.dtype,
    run_layer: OwnLayer = own_layer,
    camera_mask_BC: Tensor | None = None,
    kept_part: str | None = None,
) -> Seen:
    """`images` are uint8 (B, 3, H, W), one per camera that has data, in the policy's order, or what `kept_part` has made of
    them, (B, N, D); all samples have all of them where there is no mask.
    """
    vlm = model.vlm_with_expert.get_vlm_model()
    words_BLD = vlm.text_model.embed_tokens(tokens_BL).to(dtype) * math.sqrt(size.vlm.width)
    tokens_BND = embed_images(vlm, torch.cat(list(images)), places_N, dtype, kept_part).chunk(len(images))
    hidden_BND = torch.cat([*tokens_BND, words_BLD], dim=1)
    num_image_tokens = hidden_BND.shape[1] - tokens_BL.shape[1]
    valid_BN = valid_tokens(token_mask_BL, camera_mask_BC, num_image_tokens)
    rope = make_rope(torch.cumsum(valid_BN, dim=1) - 1, wavelengths)
    mask = valid_BN[:, None, None, :]
    seen = []
    for layer in list(vlm.text_model.layers)[: size.last_seen]:
        hidden_BND, own = run_layer(layer, hidden_BND, rope, None, mask)
        seen.append(own)
    last = own_key_value(vlm.text_model.layers[size.last_seen], hidden_BND, rope)
    return Seen([*seen, last], valid_BN)


def embed_images(vlm: Any, images: Tensor, places_N: Tensor, dtype: torch.dtype, kept_part: str | None) -> Tensor:
    """Image tokens of pictures of all cameras, in one pass, or of what was kept of them: that has an axis less."""
    if images.ndim == PICTURE_AXES:
        return connect(vlm, run_tower(vlm, images, places_N), dtype)
    kept_BND = from_bits(images)
    return kept_BND if kept_part == CONNECTOR_PART else connect(vlm, kept_BND, dtype)


def run_tower(vlm: Any, images_BCHW: Tensor, places_N: Tensor) -> Tensor:
    """The vision tower. The places of patches are known: transformers finds them anew for each picture, by a mask, which
    makes the host wait.
    """
    tower = vlm.vision_model
    patches = tower.embeddings.patch_embedding
    hidden_BND = patches(to_pixels(images_BCHW).to(patches.weight.dtype)).flatten(2).transpose(1, 2)
    hidden_BND = hidden_BND + tower.embeddings.position_embedding(places_N)
    for layer in tower.encoder.layers:
        hidden_BND = layer(hidden_BND, None)
    return tower.post_layernorm(hidden_BND)


def connect(vlm: Any, hidden_BND: Tensor, dtype: torch.dtype) -> Tensor:
    """Patches to the language model's tokens."""
    tokens_BND = vlm.connector(hidden_BND).to(dtype)
    scale = tokens_BND.new_full((), math.sqrt(tokens_BND.shape[2]))  # in its dtype, as LeRobot has it
    return tokens_BND * scale


def to_bits(kept_BND: Tensor) -> Tensor:
    """As numpy can have it: bfloat16 as the bits that it is."""
    return kept_BND.view(torch.int16) if kept_BND.dtype == torch.bfloat16 else kept_BND


def from_bits(kept_BND: Tensor) -> Tensor:
    return kept_BND.view(torch.bfloat16) if kept_BND.dtype == torch.int16 else kept_BND


def make_places(image_hw: tuple[int, int], *, patch_size: int, image_size: int) -> Tensor:
    """Which row of the position embedding belongs to each patch: the nearest of the pictures that the tower grew up with."""
    side = image_size // patch_size
    borders = torch.arange(1 / side, 1.0, 1 / side)
    rows, columns = (
        torch.bucketize((torch.arange(n, dtype=torch.float32) * (1.0 / n)).clamp(max=1.0 - 1e-6), borders, right=True)
        for n in (pixels // patch_size for pixels in image_hw)
    )
    return (rows[:, None] * side + columns[None, :]).flatten()


# The state's token, and the expert


def add_state(
    model: Any,
    seen: Seen,
    state_BP: Tensor,
    *,
    size: SmolVLASize,
    wavelengths: Tensor,
    dtype: torch.dtype,
    run_layer: OwnLayer = own_layer,
) -> Seen:
    """Its token looks at all pictures and words, and the expert at it."""
    *layers, last_layer = list(model.vlm_with_expert.get_vlm_model().text_model.layers)[: size.last_seen + 1]
    hidden_B1D = model.state_proj(state_BP)[:, None].to(dtype)
    place_B1 = seen.valid_BS.sum(dim=1, keepdim=True)
    rope = make_rope(place_B1, wavelengths)
    valid_BS = torch.cat([seen.valid_BS, seen.valid_BS.new_ones(place_B1.shape)], dim=1)
    mask, joined = valid_BS[:, None, None, :], []
    for layer, before in zip(layers, seen.layers, strict=False):
        hidden_B1D, own = run_layer(layer, hidden_B1D, rope, before, mask)
        joined.append(before.followed_by(own))
    last = seen.layers[-1].followed_by(own_key_value(last_layer, hidden_B1D, rope))
    return Seen([*joined, last], valid_BS)


def velocity(
    model: Any,
    seen: Seen,
    noisy_BTP: Tensor,
    time_code_BD: Tensor,
    *,
    size: SmolVLASize,
    wavelengths: Tensor,
    run_own: OwnLayer = own_layer,
    run_cross: CrossLayer = cross_layer,
) -> Tensor:
    """The expert's guess of noise - action, in float32; the draws of an observation stand in a row (here B is B * K)."""
    draws = len(noisy_BTP) // len(seen.valid_BS)
    expert, dtype = model.vlm_with_expert.lm_expert, seen.layers[0].keys.dtype
    hidden_BTD = embed_actions(model, noisy_BTP, time_code_BD).to(dtype)
    steps_T = torch.arange(noisy_BTP.shape[1], device=noisy_BTP.device)
    places_BT = seen.valid_BS.sum(dim=1, keepdim=True) + steps_T
    own_rope = make_rope(repeat_each(places_BT, draws), wavelengths)
    cross_rope = make_rope(steps_T[None], wavelengths)
    own_mask = repeat_each(_own_mask(seen.valid_BS, steps_T, size), draws)
    cross_mask = seen.valid_BS[:, None, None, :]
    for number, layer in enumerate(expert.layers):
        place = number * size.stride
        if size.looks_at_itself(place):
            before = seen.layers[place].repeated(draws)
            hidden_BTD, _ = run_own(layer, hidden_BTD, own_rope, before, own_mask)
        else:
            hidden_BTD = run_cross(layer, hidden_BTD, cross_rope, seen.layers[place], cross_mask)
    return model.action_out_proj(expert.norm(hidden_BTD).to(torch.float32))


def embed_actions(model: Any, noisy_BTP: Tensor, time_code_BD: Tensor) -> Tensor:
    """A token per action, with the flow time in each."""
    action_BTD = model.action_in_proj(noisy_BTP)
    both = torch.cat([action_BTD, time_code_BD[:, None].expand_as(action_BTD)], dim=2)
    return model.action_time_mlp_out(functional.silu(model.action_time_mlp_in(both)))


def _own_mask(valid_BS: Tensor, steps_T: Tensor, size: SmolVLASize) -> Tensor:
    """What was seen, and actions up to the own one: (B, 1, G * T, S + T), for the G query heads of a key/value head."""
    earlier_TT = steps_T[:, None] >= steps_T[None, :]
    seen_BTS = valid_BS[:, None].expand(-1, len(steps_T), -1)
    mask_BTS = torch.cat([seen_BTS, earlier_TT.expand(len(valid_BS), -1, -1)], dim=2)
    return mask_BTS.repeat(1, size.vlm.heads // size.vlm.kv_heads, 1)[:, None]
