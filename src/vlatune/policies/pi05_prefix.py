"""PI0.5's prefix: pictures and prompt -> the keys and values that the action expert looks at, layer by layer.

Computed once per observation. Nothing after the last layer's keys and values is computed, and cameras without data take
no part: LeRobot runs them through the vision tower and then masks every token of them, so nothing sees them, and
positions count valid tokens only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vlatune.policies.pi05_layers import KeyValue, Rope, make_rope, prefix_key_value, prefix_layer

PrefixLayer = Callable[[Any, Tensor, Rope, Tensor], tuple[Tensor, KeyValue]]


@dataclass(frozen=True)
class Prefix:
    layers: Sequence[KeyValue]
    valid_BS: Tensor
    """False for padded prompt tokens."""

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
) -> Prefix:
    """`images` are uint8 (B, 3, H, W), one per camera that has data, in the policy's order."""
    paligemma = model.paligemma_with_expert.paligemma.model
    words_BLD = embed_words(paligemma.language_model.embed_tokens, tokens_BL, dtype)
    hidden_BND = torch.cat([*embed_images(model, images, dtype), words_BLD], dim=1)
    num_image_tokens = hidden_BND.shape[1] - tokens_BL.shape[1]
    valid_BN = torch.cat([token_mask_BL.new_ones(len(tokens_BL), num_image_tokens), token_mask_BL], dim=1)
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


def _repeat(values: Tensor, times: int) -> Tensor:
    return values[:, None].expand(-1, times, *values.shape[1:]).flatten(0, 1)
