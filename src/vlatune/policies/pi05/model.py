"""PI0.5 and PI0 in torch: LeRobot's modules and weights behind `forward(batch) -> PolicyOutput`.

LeRobot runs images, prompt and actions through joint attention, so that a frozen prefix still runs
backward, and syncs with the device several times a step. Prefix tokens (images and prompt) do not
attend to actions, so here their keys and values are computed once per observation, without
gradients if nothing in the prefix trains, up to the last layer's keys and values. The action expert
then attends to [prefix, own] for any number of noise samples. Cameras without data are skipped,
which LeRobot encodes and then masks; positions count valid tokens only.

Operations keep LeRobot's order and dtype, except for PyTorch's fused attention. Nothing syncs with
the device, and no shape depends on values. Sampling is LeRobot's. PI0 differs only in the
expert's tokens (`Suffix`).

Shapes: B batch, N tokens of this part, S tokens attended to, D width, H query heads, E head size.
Masks are `make_mask`'s.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.gemma.modeling_gemma import rotate_half

from vlatune.batch import ACTION, ACTION_DIM_MASK, NOISE, TIME, TOKENS
from vlatune.policies.base import Binding, ModuleOptions, PolicyOutput, PolicySpec
from vlatune.policies.flow_matching import mean_over_own_dims
from vlatune.policies.modeling import (
    FlowModule,
    KeyValue,
    LayerModule,
    Prefix,
    Rope,
    attend,
    embed_actions,
    encode_time,
    gated_mlp,
    make_mask,
    noisy_and_target,
    project,
    repeat_each,
    to_pixels,
)
from vlatune.policies.pi05.size import NUM_HEADS
from vlatune.policies.pi05.weights import ADAPTED, TOWER, TRAINED, PiPolicy, build_policy, set_dtypes, unused


class Suffix(NamedTuple):
    """Tokens of the expert, ending with the actions."""

    hidden_BND: Tensor
    time_BD: Tensor | None
    """Scales the expert's norms (PI0.5 only)."""
    num_blind: int = 0
    """Number of leading tokens that do not attend to the ones after them."""


class Pi05Module(FlowModule):
    """A `PI05Policy` that takes batches as `batch.py` describes them."""

    trained, adapted, rounded = TRAINED, ADAPTED, TOWER
    build_policy, set_dtypes, unused = staticmethod(build_policy), staticmethod(set_dtypes), staticmethod(unused)

    def __init__(self, policy: PiPolicy, spec: PolicySpec, binding: Binding, options: ModuleOptions) -> None:
        super().__init__(policy, spec, binding, options)
        joint: Any = policy.model.paligemma_with_expert
        *prefix, last = joint.paligemma.model.language_model.layers
        self.head_dim = last.self_attn.head_dim
        self.prefix_layers = nn.ModuleList(LayerModule(layer, prefix_layer, options=options) for layer in prefix)
        self.last_prefix_layer = LayerModule(last, prefix_key_value)
        self.expert_layers = nn.ModuleList(
            LayerModule(layer, expert_layer, options=options) for layer in joint.gemma_expert.model.layers
        )

    @staticmethod
    def tower(policy: Any) -> Any:
        return policy.model.paligemma_with_expert.paligemma.model.vision_tower.vision_model

    def forward(self, batch: Mapping[str, Tensor]) -> PolicyOutput:
        """Return the mean loss over noise samples, time steps and the robot's action dims."""
        self.check_noise(batch)
        prefix = self.get_prefix(batch)
        noisy, target = noisy_and_target(batch[ACTION], batch[NOISE], batch[TIME])
        suffix = self.embed_suffix(batch, noisy, encode_time(batch[TIME].flatten(), self.time_scale))
        losses_BTP = functional.mse_loss(target, self.velocity(prefix, suffix), reduction="none")
        losses_BTA, own_BP = losses_BTP[:, :, : self.action_dim], batch.get(ACTION_DIM_MASK)
        if own_BP is None:
            return PolicyOutput(losses_BTA.mean(), losses_BTA.detach())
        own_BA = repeat_each(own_BP[:, : self.action_dim], batch[TIME].shape[1])
        loss_B = mean_over_own_dims(losses_BTP, own_BP)
        return PolicyOutput(loss_B.mean(), losses_BTA.detach(), own_BA[:, None], loss_B)

    def as_lerobot(self) -> PiPolicy:
        super().as_lerobot()
        # LeRobot's loader copies the head over the embedding if it comes later in the file. With the
        # embedding's dtype it comes first: safetensors sorts by dtype, then by name.
        paligemma = self.policy.model.paligemma_with_expert.paligemma
        paligemma.lm_head.to(paligemma.model.language_model.embed_tokens.weight.dtype)
        return self.policy

    def encode_images(self, images_BCHW: Tensor) -> Tensor:
        return self.policy.model.paligemma_with_expert.embed_image(to_pixels(images_BCHW)).to(self.dtype)

    def embed_prompt(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Embed tokens, rounded to `dtype` before scaling, as in a model stored in `dtype`."""
        embedding = self._language.embed_tokens
        return nn.Embedding.forward(embedding, batch[TOKENS]).to(self.dtype) * embedding.embed_scale.to(self.dtype)

    def make_rope(self, positions_BN: Tensor) -> Rope:
        """Compute rotary embeddings once for all layers."""
        cos_BNE, sin_BNE = self._language.rotary_emb(positions_BN.new_empty(0, dtype=self.dtype), positions_BN)
        return Rope(cos_BNE[:, None], sin_BNE[:, None])

    @property
    def _language(self) -> Any:
        return self.policy.model.paligemma_with_expert.paligemma.model.language_model

    def prefix_modules(self) -> tuple[nn.Module, ...]:
        vision = self.policy.model.paligemma_with_expert.paligemma.model
        return vision.vision_tower, vision.multi_modal_projector, self._language.embed_tokens, self._language.layers

    def embed_suffix(self, batch: Mapping[str, Tensor], noisy_BTP: Tensor, time_code_BD: Tensor) -> Suffix:
        """Return the expert's tokens: one per action, and the time embedding."""
        model: Any = self.policy.model
        time_BD = functional.silu(model.time_mlp_out(functional.silu(model.time_mlp_in(time_code_BD))))
        return Suffix(model.action_in_proj(noisy_BTP), time_BD)

    def velocity(self, prefix: Prefix, suffix: Suffix) -> Tensor:
        """Predict noise - action in float32, (B * noise samples, T, P)."""
        model: Any = self.policy.model
        samples = len(suffix.hidden_BND) // len(prefix.valid_BS)
        prefix_valid_BS = repeat_each(prefix.valid_BS, samples)
        hidden_BND = suffix.hidden_BND.to(prefix.layers[0].keys.dtype)
        index_N = torch.arange(hidden_BND.shape[1], device=hidden_BND.device)
        positions_BN = prefix_valid_BS.sum(dim=1, keepdim=True) + index_N
        rope = self.make_rope(positions_BN)
        valid_BS = torch.cat([prefix_valid_BS, prefix_valid_BS.new_ones(positions_BN.shape)], dim=1)
        seen_BNS = valid_BS[:, None]
        if suffix.num_blind:
            own_NN = (index_N[:, None] >= suffix.num_blind) | (index_N[None, :] < suffix.num_blind)
            seen_BNS = seen_BNS & functional.pad(own_NN, (prefix_valid_BS.shape[1], 0), value=True)
        mask = make_mask(seen_BNS, hidden_BND.dtype, NUM_HEADS)
        for layer, key_value in zip(self.expert_layers, prefix.layers, strict=True):
            hidden_BND = layer(hidden_BND, suffix.time_BD, rope, key_value.repeated(samples), mask)
        expert = model.paligemma_with_expert.gemma_expert.model
        normed_BTD, _ = expert.norm(hidden_BND[:, suffix.num_blind :], cond=suffix.time_BD)
        return model.action_out_proj(normed_BTD.to(torch.float32))


class Pi0Module(Pi05Module):
    """A `PI0Policy` that takes batches as `batch.py` describes them."""

    def embed_suffix(self, batch: Mapping[str, Tensor], noisy_BTP: Tensor, time_code_BD: Tensor) -> Suffix:
        """Return the state token, which attends to no action, and a token per action with the time.

        The state has one row per observation, the actions one per noise sample, adjacent.
        """
        model: Any = self.policy.model
        state_BP = self.padded_state(batch)
        state_B1D = repeat_each(model.state_proj(state_BP)[:, None], len(noisy_BTP) // len(state_BP))
        actions_BTD = embed_actions(model, noisy_BTP, time_code_BD)
        return Suffix(torch.cat([state_B1D, actions_BTD], dim=1), time_BD=None, num_blind=1)

    def observation(self, batch: Mapping[str, Tensor]) -> tuple[Any, ...]:
        return (*super().observation(batch), self.padded_state(batch))


# One layer, on LeRobot's layer modules


def prefix_key_value(layer: Any, hidden_BND: Tensor, rope: Rope) -> KeyValue:
    """Return only keys and values, for the last layer, whose output is unused."""
    normed_BND, _ = layer.input_layernorm(hidden_BND)
    return _key_value(layer.self_attn, normed_BND, rope)


def prefix_layer(layer: Any, hidden_BND: Tensor, rope: Rope, mask: Tensor) -> tuple[Tensor, KeyValue]:
    normed_BND, _ = layer.input_layernorm(hidden_BND)
    own = _key_value(layer.self_attn, normed_BND, rope)
    hidden_BND = hidden_BND + _attend(layer.self_attn, normed_BND, rope, own, mask)
    normed_BND, _ = layer.post_attention_layernorm(hidden_BND)
    return hidden_BND + gated_mlp(layer.mlp, normed_BND), own


def expert_layer(
    layer: Any, hidden_BND: Tensor, time_BD: Tensor | None, rope: Rope, prefix: KeyValue, mask: Tensor
) -> Tensor:
    """Apply a layer of the expert; `time_BD` scales PI0.5's norms, PI0's have no gate."""
    normed_BND, gate_B1D = layer.input_layernorm(hidden_BND, cond=time_BD)
    both = prefix.followed_by(_key_value(layer.self_attn, normed_BND, rope))
    hidden_BND = hidden_BND + _gated(_attend(layer.self_attn, normed_BND, rope, both, mask), gate_B1D)
    normed_BND, gate_B1D = layer.post_attention_layernorm(hidden_BND, cond=time_BD)
    return hidden_BND + _gated(gated_mlp(layer.mlp, normed_BND), gate_B1D)


def _key_value(attention: Any, normed_BND: Tensor, rope: Rope) -> KeyValue:
    keys_B1NE = project(attention.k_proj, normed_BND)[:, None]
    values_B1NE = project(attention.v_proj, normed_BND)[:, None]
    return KeyValue(_rotate(keys_B1NE, rope), values_B1NE)


def _attend(attention: Any, normed_BND: Tensor, rope: Rope, seen: KeyValue, mask: Tensor) -> Tensor:
    batch, tokens, _ = normed_BND.shape
    head = attention.head_dim
    queries_BHNE = project(attention.q_proj, normed_BND).view(batch, tokens, -1, head).transpose(1, 2)
    attended_BND = attend(_rotate(queries_BHNE, rope), seen, mask, attention.scaling)
    return project(attention.o_proj, attended_BND)


def _gated(x_BND: Tensor, gate_B1D: Tensor | None) -> Tensor:
    return x_BND if gate_B1D is None else x_BND * gate_B1D


def _rotate(x_BHNE: Tensor, rope: Rope) -> Tensor:
    return x_BHNE * rope.cos + rotate_half(x_BHNE) * rope.sin
