"""SmolVLA in torch: LeRobot's modules and weights behind `forward(batch) -> PolicyOutput`.

LeRobot runs images, prompt, state and actions through each layer together, which runs backward
through a frozen vision-language model, and syncs with the device several times a step. Image and
prompt tokens do not attend to the state, and none of these attends to actions, so here

- images and prompt are computed once per observation, without gradients if nothing in them trains;
- the state token runs through the same layers on top of their keys and values. Only it needs
  gradients if the vision-language model is frozen and the state projection trains (the default);
- the expert runs for any number of noise samples. Its self-attention layers attend to all of that
  and to earlier actions, the others only to the prefix, whose keys and values they project once.

Nothing after the last keys and values that the expert uses is computed. Cameras without data are
skipped, which LeRobot encodes and then masks. Loss and gradients equal `VLAFlowMatching.forward`:
operations keep LeRobot's order and dtype, except for PyTorch's fused attention. Nothing syncs with
the device, and no shape depends on values. Sampling is LeRobot's.

Shapes: B observations, K noise samples, N tokens of a part, S tokens attended to, D width, H query
heads, E head size.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from lerobot.policies.smolvla import SmolVLAPolicy
from torch import Tensor, nn
from torch.nn import functional

from vlatune.batch import ACTION, ACTION_DIM_MASK, ACTION_IS_PAD, NOISE, STEP_ACTIONS, TIME, TOKENS
from vlatune.policies.base import Binding, ModuleOptions, PolicyOutput
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
    gathered,
    make_mask,
    noisy_and_target,
    num_valid,
    project,
    repeat_each,
    to_pixels,
)
from vlatune.policies.smolvla.size import SmolVLASpec
from vlatune.policies.smolvla.weights import ADAPTED, TRAINED, build_policy, set_dtypes, unused

MAX_WAVELENGTH = 10_000
SMALLEST_SHARE = 1e-6
"""Lower bound of a chunk's valid share, to avoid a division by zero; the loss is 0 then."""


class SmolVLAModule(FlowModule):
    """A `SmolVLAPolicy` that takes batches as `batch.py` describes them."""

    trained, adapted = TRAINED, ADAPTED
    build_policy, set_dtypes, unused = staticmethod(build_policy), staticmethod(set_dtypes), staticmethod(unused)
    wavelengths: Tensor
    patch_positions: Tensor

    def __init__(self, policy: SmolVLAPolicy, spec: SmolVLASpec, binding: Binding, options: ModuleOptions) -> None:
        super().__init__(policy, spec, binding, options)
        size, device = spec.size, policy.model.action_in_proj.weight.device
        self.size, self.head_dim = size, size.vlm.head_dim
        self.register_buffer("wavelengths", make_wavelengths(size.vlm.head_dim).to(device), persistent=False)
        self.register_buffer("patch_positions", make_patch_positions(spec).to(device), persistent=False)
        joint: Any = policy.model.vlm_with_expert
        layers = joint.get_vlm_model().text_model.layers
        self.prefix_layers = nn.ModuleList(
            LayerModule(layer, prefix_layer, state_layer, options=options) for layer in layers[: size.last_used]
        )
        self.last_prefix_layer = LayerModule(layers[size.last_used], layer_key_value)
        self.expert_layers = nn.ModuleList(
            LayerModule(layer, self_layer if self._attends_to_itself(number) else cross_layer, options=options)
            for number, layer in enumerate(joint.lm_expert.layers)
        )

    @staticmethod
    def tower(policy: Any) -> Any:
        return policy.model.vlm_with_expert.get_vlm_model().vision_model

    def forward(self, batch: Mapping[str, Tensor]) -> PolicyOutput:
        """Return the mean over valid time steps, the robot's action dims and noise samples.

        In evaluation it is the mean of each sample's mean, which does not depend on the batch size.
        """
        self.check_noise(batch)
        noisy, target = noisy_and_target(batch[ACTION], batch[NOISE], batch[TIME])
        prefix = self.add_state(self.get_prefix(batch), self.padded_state(batch))
        predicted = self.velocity(prefix, noisy, encode_time(batch[TIME].flatten(), self.time_scale))
        losses_MTP = functional.mse_loss(target, predicted, reduction="none")
        samples, own_BP = batch[NOISE].shape[1], batch.get(ACTION_DIM_MASK)
        valid_MT1 = repeat_each(~batch[ACTION_IS_PAD], samples)[:, :, None]
        losses = losses_MTP[:, :, : self.action_dim]
        if own_BP is not None:
            counted = valid_MT1 * repeat_each(own_BP[:, : self.action_dim], samples)[:, None]
            loss_B = self._by_sample(losses_MTP * valid_MT1, batch)
            return PolicyOutput(loss_B.mean(), losses.detach(), counted, loss_B)
        sums = (losses * valid_MT1).sum(dim=(1, 2))
        if self.training:
            loss = sums.sum() / (num_valid(batch) * (samples * self.action_dim))
        else:
            loss = (sums / (valid_MT1.sum(dim=(1, 2)) * self.action_dim).clamp_min(1)).mean()
        return PolicyOutput(loss, losses.detach(), valid_MT1)

    def _by_sample(self, losses_MTP: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean per sample, (B,), over noise samples, own dims and valid time steps.

        In training, samples are weighted by their valid time steps within their dataset, so that
        the mean over a dataset equals LeRobot's loss on it.
        """
        share_B = (~batch[ACTION_IS_PAD]).to(losses_MTP.dtype).mean(dim=1)
        if self.training and STEP_ACTIONS in batch:
            share_B = batch[STEP_ACTIONS] / batch[ACTION_IS_PAD].numel()
        return mean_over_own_dims(losses_MTP, batch[ACTION_DIM_MASK]) / share_B.clamp_min(SMALLEST_SHARE)

    def observation(self, batch: Mapping[str, Tensor]) -> tuple[Any, ...]:
        return (*super().observation(batch), self.padded_state(batch))

    def predict(self, batch: Mapping[str, Tensor], noise_BTP: Tensor) -> Tensor:
        # LeRobot's sampling uses weights of layers without calling the layers.
        with gathered(one.layer for one in self.layers()):
            return super().predict(batch, noise_BTP)

    def embed_prompt(self, batch: Mapping[str, Tensor]) -> Tensor:
        words_BLD = self._vlm.text_model.embed_tokens(batch[TOKENS]).to(self.dtype)
        return words_BLD * math.sqrt(self.size.vlm.width)

    def encode_images(self, images_BCHW: Tensor) -> Tensor:
        tokens_BND = self._vlm.connector(run_tower(self._vlm, images_BCHW, self.patch_positions)).to(self.dtype)
        scale = tokens_BND.new_full((), math.sqrt(tokens_BND.shape[2]))  # in its dtype, as in LeRobot
        return tokens_BND * scale

    def make_rope(self, positions_BN: Tensor) -> Rope:
        """Compute rotary embeddings once for all layers."""
        radians_B1NE = (positions_BN[..., None].to(torch.float32) / self.wavelengths)[:, None]
        return Rope(torch.cos(radians_B1NE), torch.sin(radians_B1NE))

    @property
    def _vlm(self) -> Any:
        return self.policy.model.vlm_with_expert.get_vlm_model()

    def prefix_modules(self) -> tuple[nn.Module, ...]:
        """Return all but the language model's layers, which the state token passes through."""
        return self._vlm.vision_model, self._vlm.connector, self._vlm.text_model.embed_tokens

    def add_state(self, prefix: Prefix, state_BP: Tensor) -> Prefix:
        """Add the state token, which attends to images and prompt."""
        hidden_B1D = self.policy.model.state_proj(state_BP)[:, None].to(self.dtype)
        position_B1 = prefix.valid_BS.sum(dim=1, keepdim=True)
        rope = self.make_rope(position_B1)
        valid_BS = torch.cat([prefix.valid_BS, prefix.valid_BS.new_ones(position_B1.shape)], dim=1)
        layers, mask = [], make_mask(valid_BS[:, None], hidden_B1D.dtype)
        for layer, before in zip(self.prefix_layers, prefix.layers, strict=False):
            hidden_B1D, both = layer(hidden_B1D, rope, mask, before, way=1)
            layers.append(both)
        last = prefix.layers[-1].followed_by(self.last_prefix_layer(hidden_B1D, rope))
        return Prefix([*layers, last], valid_BS)

    def velocity(self, prefix: Prefix, noisy_BTP: Tensor, time_code_BD: Tensor) -> Tensor:
        """Predict noise - action in float32; B is B * K, samples of an observation adjacent."""
        model: Any = self.policy.model
        samples = len(noisy_BTP) // len(prefix.valid_BS)
        hidden_BTD = embed_actions(model, noisy_BTP, time_code_BD).to(prefix.layers[0].keys.dtype)
        steps_T = torch.arange(noisy_BTP.shape[1], device=noisy_BTP.device)
        positions_BT = prefix.valid_BS.sum(dim=1, keepdim=True) + steps_T
        self_rope = self.make_rope(repeat_each(positions_BT, samples))
        cross_rope = self.make_rope(steps_T[None])
        seen_BTS = prefix.valid_BS[:, None].expand(-1, len(steps_T), -1)
        earlier_BTT = (steps_T[:, None] >= steps_T).expand(len(seen_BTS), -1, -1)
        both_BTS = repeat_each(torch.cat([seen_BTS, earlier_BTT], dim=2), samples)
        self_mask = make_mask(both_BTS, hidden_BTD.dtype, self.size.vlm.heads // self.size.vlm.kv_heads)
        cross_mask = make_mask(prefix.valid_BS[:, None], hidden_BTD.dtype)
        for number, layer in enumerate(self.expert_layers):
            key_value = prefix.layers[number * self.size.stride]
            if self._attends_to_itself(number):
                hidden_BTD = layer(hidden_BTD, self_rope, self_mask, key_value.repeated(samples))
            else:
                hidden_BTD = layer(hidden_BTD, cross_rope, cross_mask, key_value)
        return model.action_out_proj(model.vlm_with_expert.lm_expert.norm(hidden_BTD).to(torch.float32))

    def _attends_to_itself(self, expert_layer: int) -> bool:
        return self.size.has_self_attention(expert_layer * self.size.stride)


# Images and actions


def run_tower(vlm: Any, images_BCHW: Tensor, positions_N: Tensor) -> Tensor:
    """Run the vision tower; transformers would sync to find the patch positions of each image."""
    tower = vlm.vision_model
    patches = tower.embeddings.patch_embedding
    hidden_BND = patches(to_pixels(images_BCHW).to(patches.weight.dtype)).flatten(2).transpose(1, 2)
    hidden_BND = hidden_BND + tower.embeddings.position_embedding(positions_N)
    for layer in tower.encoder.layers:
        hidden_BND = layer(hidden_BND, None)
    return tower.post_layernorm(hidden_BND)


def make_patch_positions(spec: SmolVLASpec) -> Tensor:
    """Return the row of the position embedding for each patch: the nearest at the trained size."""
    size = spec.size.vlm
    side = size.image_size // size.patch_size
    borders = torch.arange(1 / side, 1.0, 1 / side)
    rows, columns = (
        torch.bucketize((torch.arange(n, dtype=torch.float32) * (1.0 / n)).clamp(max=1.0 - 1e-6), borders, right=True)
        for n in (pixels // size.patch_size for pixels in spec.image_hw)
    )
    return (rows[:, None] * side + columns[None, :]).flatten()


# One layer, on LeRobot's modules


def prefix_layer(layer: Any, hidden_BND: Tensor, rope: Rope, mask: Tensor) -> tuple[Tensor, KeyValue]:
    """Apply self-attention to images and prompt; return their keys and values, too."""
    normed_BND = _normed(layer.input_layernorm, hidden_BND)
    own = _key_value(layer.self_attn, normed_BND, rope)
    return _finish(layer, hidden_BND, _queries(layer.self_attn, normed_BND, rope), own, mask), own


def state_layer(layer: Any, hidden_B1D: Tensor, rope: Rope, mask: Tensor, before: KeyValue) -> tuple[Tensor, KeyValue]:
    """Apply self-attention to the tokens before and the state; return the keys and values of both, too."""
    normed_B1D = _normed(layer.input_layernorm, hidden_B1D)
    both = before.followed_by(_key_value(layer.self_attn, normed_B1D, rope))
    return _finish(layer, hidden_B1D, _queries(layer.self_attn, normed_B1D, rope), both, mask), both


def self_layer(layer: Any, hidden_BTD: Tensor, rope: Rope, mask: Tensor, before: KeyValue) -> Tensor:
    """Apply the expert's self-attention to the prefix and earlier actions."""
    return state_layer(layer, hidden_BTD, rope, mask, before)[0]


def layer_key_value(layer: Any, hidden_BND: Tensor, rope: Rope) -> KeyValue:
    """Return only keys and values, for the last layer, whose output is unused."""
    return _key_value(layer.self_attn, _normed(layer.input_layernorm, hidden_BND), rope)


def cross_layer(layer: Any, hidden_BND: Tensor, rope: Rope, mask: Tensor, seen: KeyValue) -> Tensor:
    """Apply the expert's cross-attention to the prefix, shared by all noise samples."""
    attention = layer.self_attn
    normed_BND = _normed(layer.input_layernorm, hidden_BND)
    keys = _split(attention, project(attention.k_proj, _joined(seen.keys)))
    values = _split(attention, project(attention.v_proj, _joined(seen.values)))
    return _finish(layer, hidden_BND, _queries(attention, normed_BND, rope), KeyValue(keys, values), mask)


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
    hidden_BND = hidden_BND + project(layer.self_attn.o_proj, attend(queries_BHNE, seen, mask))
    return hidden_BND + gated_mlp(layer.mlp, _normed(layer.post_attention_layernorm, hidden_BND))


def _rotate(x_BHNE: Tensor, rope: Rope) -> Tensor:
    first, second = x_BHNE.to(torch.float32).chunk(2, dim=-1)
    turned = torch.cat([first * rope.cos - second * rope.sin, second * rope.cos + first * rope.sin], dim=-1)
    return turned.to(x_BHNE.dtype)


def _split(attention: Any, x_BND: Tensor) -> Tensor:
    """Split heads: (B, H, N, E)."""
    return x_BND.unflatten(2, (-1, attention.head_dim)).transpose(1, 2)


def _joined(x_BHNE: Tensor) -> Tensor:
    return x_BHNE.transpose(1, 2).flatten(2)
