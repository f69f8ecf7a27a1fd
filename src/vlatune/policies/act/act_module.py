"""ACT in torch: LeRobot's modules and weights behind `forward(batch) -> loss`.

Same operations and order as LeRobot's `ACT.forward` and `ACTPolicy.forward`, but the latent's noise
comes with the sample, all cameras share one backbone pass, image tokens stay one tensor, attention
returns no weights, and nothing syncs with the device. The backbone uses `FrozenBatchNorm2d`, whose
buffers no step changes.

Shapes in addition to batch.py's: V cameras, D width of the transformers, L dims of the latent.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import draccus
import torch
import torch.nn.functional as F  # noqa: N812
from lerobot.policies.act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from safetensors import safe_open
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from vlatune.batch import ACTION, ACTION_IS_PAD, NOISE, STATE
from vlatune.policies.act.act_adapter import PRETRAINED, ActSpec
from vlatune.policies.base import PolicyOutput, Stats
from vlatune.policies.loading import fill_all
from vlatune.policies.modeling import ImageModule, num_valid
from vlatune.policies.weight_files import SINGLE_FILE
from vlatune.storage.files import real_path
from vlatune.storage.hub import fetch as fetch_from_hub

BRANCH_GAIN = 0.25
"""Gain of the tiny model's residual branches; its untrained batch norms do not limit the
variance."""


class ActModule(ImageModule):
    """An `ACTPolicy` that takes batches as `batch.py` describes them."""

    def __init__(self, policy: ACTPolicy, spec: ActSpec, stats: Stats) -> None:
        super().__init__(policy, spec, stats)
        self.has_latent = spec.latent_dim > 0
        self.kl_weight = float(spec.config["kl_weight"])
        for part in policy.modules():
            if isinstance(part, nn.MultiheadAttention):
                part.register_forward_pre_hook(_skip_weights, with_kwargs=True)

    def forward(self, batch: Mapping[str, Tensor]) -> PolicyOutput:
        """Return LeRobot's loss: masked L1 and, in training, the KL divergence of the latent.

        The errors exclude the KL divergence.
        """
        if not (self.has_latent and self.training):
            return self._action_loss(self._decode(batch, self._zero_latent(batch)), batch)
        mean_BL, log_variance_BL = self._encode(batch)
        latent_BL = mean_BL + log_variance_BL.div(2).exp() * batch[NOISE]
        divergence_BL = -0.5 * (1 + log_variance_BL - mean_BL.pow(2) - log_variance_BL.exp())
        output = self._action_loss(self._decode(batch, latent_BL), batch)
        return output._replace(loss=output.loss + divergence_BL.sum(-1).mean() * self.kl_weight)

    @torch.no_grad()
    def predict(self, batch: Mapping[str, Tensor], noise_BTP: Tensor | None = None) -> Tensor:
        """Predict without dropout and with a zero latent, as LeRobot does."""
        was_training = self.training
        self.eval()
        try:
            return self._decode(batch, self._zero_latent(batch))
        finally:
            self.train(was_training)

    def _action_loss(self, predicted_BTA: Tensor, batch: Mapping[str, Tensor]) -> PolicyOutput:
        error_BTA = F.l1_loss(batch[ACTION], predicted_BTA, reduction="none")
        valid_BT1 = ~batch[ACTION_IS_PAD][..., None]
        loss = (error_BTA * valid_BT1).sum() / (num_valid(batch) * error_BTA.shape[-1])
        return PolicyOutput(loss, error_BTA.detach(), counted=valid_BT1)

    def _zero_latent(self, batch: Mapping[str, Tensor]) -> Tensor:
        state = batch[STATE]
        return torch.zeros(len(state), self.policy.config.latent_dim, dtype=torch.float32, device=state.device)

    def _encode(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return mean and log variance of the latent; padded actions are masked."""
        model: Any = self.policy.model
        state_BD, actions_BTD = (
            model.vae_encoder_robot_state_input_proj(batch[STATE]),
            model.vae_encoder_action_input_proj(batch[ACTION]),
        )
        summary_B1D = model.vae_encoder_cls_embed.weight.expand(len(state_BD), 1, -1)
        tokens = torch.cat([summary_B1D, state_BD[:, None], actions_BTD], dim=1)
        padded = F.pad(batch[ACTION_IS_PAD], (2, 0), value=False)  # the summary and the state are never masked
        positions = model.vae_encoder_pos_enc
        assert isinstance(positions, Tensor)  # a buffer
        encoded = model.vae_encoder(
            tokens.transpose(0, 1), pos_embed=positions.transpose(0, 1), key_padding_mask=padded
        )
        return model.vae_encoder_latent_output_proj(encoded[0]).tensor_split(2, dim=1)

    def _decode(self, batch: Mapping[str, Tensor], latent_BL: Tensor) -> Tensor:
        """Return action chunks (B, T, A) from a latent and an observation."""
        model: Any = self.policy.model
        image_tokens, image_positions = self._encode_images(batch)
        state_BD = model.encoder_robot_state_input_proj(batch[STATE])
        tokens = torch.cat([model.encoder_latent_input_proj(latent_BL)[None], state_BD[None], image_tokens])
        positions = torch.cat([model.encoder_1d_feature_pos_embed.weight[:, None], image_positions])
        encoded = model.encoder(tokens, pos_embed=positions)
        config = self.policy.config
        queries = torch.zeros(
            config.chunk_size, len(latent_BL), config.dim_model, dtype=positions.dtype, device=positions.device
        )
        decoded = model.decoder(
            queries,
            encoded,
            encoder_pos_embed=positions,
            decoder_pos_embed=model.decoder_pos_embed.weight[:, None],
        )
        return model.action_head(decoded.transpose(0, 1))

    def _encode_images(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return image tokens (V * H * W, B, D) and positions (V * H * W, 1, D)."""
        model: Any = self.policy.model
        num_cameras = len(self.cameras)
        images_VB3HW = torch.stack([batch[camera] for camera in self.cameras]).to(torch.float32) / 255.0
        scaled = (images_VB3HW - self.image_mean_V311[:, None]) / self.image_std_V311[:, None]
        features = model.backbone(scaled.flatten(0, 1))["feature_map"]
        positions_1DHW = model.encoder_cam_feat_pos_embed(features)
        tokens = model.encoder_img_feat_input_proj(features).unflatten(0, (num_cameras, -1))
        tokens = tokens.permute(0, 3, 4, 1, 2).flatten(0, 2)
        return tokens, positions_1DHW.flatten(2).permute(2, 0, 1).repeat(num_cameras, 1, 1)


def _skip_weights(
    attention: nn.Module, inputs: tuple[Any, ...], settings: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    return inputs, {**settings, "need_weights": False}


def make_config(config: Mapping[str, Any]) -> ACTConfig:
    """Return LeRobot's config without pretrained weights, which it would download."""
    given = {key: value for key, value in config.items() if key != "type"}
    given["replace_final_stride_with_dilation"] = int(config["replace_final_stride_with_dilation"])
    return draccus.decode(ACTConfig, given | {"pretrained_backbone_weights": None, "device": "cpu"})


def build_policy(config: Mapping[str, Any]) -> ACTPolicy:
    """Build the model on the meta device."""
    with torch.device("meta"):
        return ACTPolicy(make_config(config))


def load_act(spec: ActSpec, device: torch.device | str, stats: Stats) -> ActModule:
    """Load a folder's policy on `device`, all weights trainable; raise on mismatched tensors."""
    policy = build_policy(spec.config)
    fill_all(policy, Path(spec.folder), device, "ACT")
    return ActModule(policy, spec, stats).to(device)


def save_new(folder: Path, config: Mapping[str, Any], seed: int, *, small: bool, fetch: bool) -> None:
    """Write config.json and weights of a new model; `fetch` allows downloading the backbone."""
    wanted = config["pretrained_backbone_weights"]
    pretrained = None if wanted is None else read_pretrained(wanted, fetch=fetch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = ACTPolicy(make_config(config))
    if small:
        _scale_residual_branches(policy)
    if pretrained is not None:
        policy.model.backbone.load_state_dict(pretrained)  # strict: names and shapes
    policy.save_pretrained(folder)


def _scale_residual_branches(policy: ACTPolicy) -> None:
    for block in policy.model.backbone.modules():
        if isinstance(block, BasicBlock):
            norm: Any = block.bn2  # a FrozenBatchNorm2d: its weight is a buffer
            norm.weight.fill_(BRANCH_GAIN)


def read_pretrained(name: str, *, fetch: bool) -> dict[str, Tensor]:
    """Read torchvision's backbone weights as safetensors, from the cache or, with `fetch`, the hub.

    torchvision's own files are pickles, which are not opened here.
    """
    repository = PRETRAINED[name][1]
    flag = "--policy.pretrained_backbone_weights"
    try:
        file = fetch_from_hub(
            repository, lambda hub: hub.hf_hub_download(repository, SINGLE_FILE, local_files_only=not fetch)
        )
    except ValueError as error:
        if fetch:
            raise ValueError(f"{flag}={name}: {error}, or start from random weights with {flag}=null") from error
        raise ValueError(
            f"a new ACT starts from torchvision's {name}, and {repository} is not in the hub's cache; download it with "
            f"{flag}={name} (50 to 100 MB), or start from random weights with {flag}=null"
        ) from error
    with safe_open(real_path(file.parent, file.name), framework="pt") as stored:
        names = [key for key in stored.keys() if not key.startswith("fc.") and not key.endswith("num_batches_tracked")]  # noqa: SIM118
        return {key: stored.get_tensor(key) for key in names}
