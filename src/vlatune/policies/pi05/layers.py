"""One layer of PI0.5 or PI0, split in two: the prefix's part and the action expert's, on LeRobot's own layer modules.

LeRobot runs pictures, prompt and actions through one joint attention per layer. No picture or prompt token looks at an
action token, so the prefix's keys and values can be computed by themselves, once for any number of action chunks and
without gradients where nothing of them trains; the expert then looks at [prefix, own]. Every operation is LeRobot's, in
its order and dtype, but for the attention itself, which is PyTorch's fused one.

Shapes: B batch, N tokens of this part, S tokens that are looked at, D width, H query heads, E size of a head. There is
one key/value head, so heads are folded into tokens, head after head: nothing is repeated. What is looked at depends on
the key alone, (B, S), but for PI0's state token, which does not look at actions: then it is (B, H * N, S).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.gemma.modeling_gemma import rotate_half

from vlatune.policies.modeling import KeyValue, gated_mlp, project


class Rope(NamedTuple):
    """Rotary position code of a part's tokens, (B, 1, N, E) each."""

    cos: Tensor
    sin: Tensor


def make_rope(rotary: Any, positions_BN: Tensor, dtype: torch.dtype) -> Rope:
    """Once for all layers; LeRobot makes the same in every layer."""
    cos_BNE, sin_BNE = rotary(positions_BN.new_empty(0, dtype=dtype), positions_BN)
    return Rope(cos_BNE[:, None], sin_BNE[:, None])


def prefix_key_value(layer: Any, hidden_BND: Tensor, rope: Rope) -> KeyValue:
    """All that the last layer is asked for: its output would be thrown away."""
    normed_BND, _ = layer.input_layernorm(hidden_BND)
    return _key_value(layer.self_attn, normed_BND, rope)


def prefix_layer(layer: Any, hidden_BND: Tensor, rope: Rope, valid_BS: Tensor) -> tuple[Tensor, KeyValue]:
    normed_BND, _ = layer.input_layernorm(hidden_BND)
    own = _key_value(layer.self_attn, normed_BND, rope)
    seen_BND = _attend(layer.self_attn, normed_BND, rope, own, valid_BS)
    hidden_BND = hidden_BND + seen_BND
    normed_BND, _ = layer.post_attention_layernorm(hidden_BND)
    return hidden_BND + gated_mlp(layer.mlp, normed_BND), own


def expert_layer(
    layer: Any, hidden_BND: Tensor, time_BD: Tensor | None, rope: Rope, prefix: KeyValue, valid_BS: Tensor
) -> Tensor:
    """`time_BD` scales the norms of PI0.5; those of PI0 are plain and have no gate."""
    normed_BND, gate_B1D = layer.input_layernorm(hidden_BND, cond=time_BD)
    own = _key_value(layer.self_attn, normed_BND, rope)
    both = prefix.followed_by(own)
    hidden_BND = hidden_BND + _gated(_attend(layer.self_attn, normed_BND, rope, both, valid_BS), gate_B1D)
    normed_BND, gate_B1D = layer.post_attention_layernorm(hidden_BND, cond=time_BD)
    return hidden_BND + _gated(gated_mlp(layer.mlp, normed_BND), gate_B1D)


def _key_value(attention: Any, normed_BND: Tensor, rope: Rope) -> KeyValue:
    keys_B1NE = project(attention.k_proj, normed_BND)[:, None]
    values_B1NE = project(attention.v_proj, normed_BND)[:, None]
    return KeyValue(_rotate(keys_B1NE, rope), values_B1NE)


def _attend(attention: Any, normed_BND: Tensor, rope: Rope, seen: KeyValue, valid_BS: Tensor) -> Tensor:
    batch, tokens, _ = normed_BND.shape
    head = attention.head_dim
    queries_BHNE = project(attention.q_proj, normed_BND).view(batch, tokens, -1, head).transpose(1, 2)
    folded_B1QE = _rotate(queries_BHNE, rope).reshape(batch, 1, -1, head)
    mask = valid_BS[:, None, None, :] if valid_BS.ndim == 2 else valid_BS[:, None]
    out_B1QE = functional.scaled_dot_product_attention(
        folded_B1QE, seen.keys, seen.values, attn_mask=mask, scale=attention.scaling
    )
    out_BNHE = out_B1QE.view(batch, -1, tokens, head).transpose(1, 2)
    return project(attention.o_proj, out_BNHE.reshape(batch, tokens, -1))


def _gated(x_BND: Tensor, gate_B1D: Tensor | None) -> Tensor:
    return x_BND if gate_B1D is None else x_BND * gate_B1D


def _rotate(x_BHNE: Tensor, rope: Rope) -> Tensor:
    return x_BHNE * rope.cos + rotate_half(x_BHNE) * rope.sin
