"""ACT, the torch side: LeRobot's own modules and weights behind `forward(batch) -> loss`.

The forward is LeRobot's `ACT.forward` and `ACTPolicy.forward` in the same order, without what they waste: the latent's noise comes
with the sample, all cameras go through the backbone together, image tokens stay one tensor instead of a list of hundreds,
attention computes no map that nobody reads, and nothing waits for the device. The backbone's batch norms are LeRobot's
`FrozenBatchNorm2d`: buffers, which no step changes.

Legend beside batch.py's: V cameras, D width of the transformers, L dims of the latent.
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
from vlatune.dataset.storage.hub import fetch as fetch_from_hub
from vlatune.files import real_path
from vlatune.pipeline.transforms import NORMALISE_EPS
from vlatune.policies.act.act_options import PRETRAINED
from vlatune.policies.act.act_spec import WEIGHTS, ActSpec
from vlatune.policies.base import LossParts, Stats
from vlatune.policies.loading import fill_whole
from vlatune.policies.normalisation import STATS_OF_MODE

BACKBONE = "model.backbone."
BRANCH_GAIN = 0.25
"""Of the small twin's residual branches: its batch norms do nothing yet, and each branch would double the signal's variance."""


class ActModule(nn.Module):
    """An `ACTPolicy` that takes batches as `batch.py` describes them."""

    picture_low_V311: Tensor
    picture_span_V311: Tensor
    loss_parts: LossParts | None = None
    """Without the latent's divergence."""

    def __init__(self, policy: ACTPolicy, spec: ActSpec, stats: Stats) -> None:
        super().__init__()
        self.policy = policy
        self.cameras = spec.cameras
        self.has_latent = spec.latent_dim > 0
        self.kl_weight = float(spec.config["kl_weight"])
        low, span = picture_scale(spec, stats)
        self.register_buffer("picture_low_V311", low, persistent=False)
        self.register_buffer("picture_span_V311", span, persistent=False)
        for part in policy.modules():
            if isinstance(part, nn.MultiheadAttention):
                part.register_forward_pre_hook(_without_map, with_kwargs=True)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """LeRobot's loss: the mean absolute error of actions that belong to their episode, and in training the latent's divergence."""
        if not (self.has_latent and self.training):
            return self._action_loss(self._decode(batch, self._no_latent(batch)), batch)
        mean_BL, log_variance_BL = self._encode(batch)
        latent_BL = mean_BL + log_variance_BL.div(2).exp() * batch[NOISE]
        divergence_BL = -0.5 * (1 + log_variance_BL - mean_BL.pow(2) - log_variance_BL.exp())
        return self._action_loss(self._decode(batch, latent_BL), batch) + divergence_BL.sum(-1).mean() * self.kl_weight

    @torch.no_grad()
    def predict(self, batch: Mapping[str, Tensor], noise_BTP: Tensor | None = None) -> Tensor:
        """Without dropout and with the latent's mean, 0, as LeRobot does; there is nothing to sample."""
        was_training = self.training
        self.eval()
        try:
            return self._decode(batch, self._no_latent(batch))
        finally:
            self.train(was_training)

    def as_lerobot(self) -> ACTPolicy:
        return self.policy

    def _action_loss(self, predicted_BTA: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        error_BTA = F.l1_loss(batch[ACTION], predicted_BTA, reduction="none")
        valid_BT1 = ~batch[ACTION_IS_PAD][..., None]
        self.loss_parts = LossParts(error_BTA.detach(), counted=valid_BT1)
        num_valid = valid_BT1.sum() * error_BTA.shape[-1]
        return (error_BTA * valid_BT1).sum() / num_valid.clamp_min(1)

    def _no_latent(self, batch: Mapping[str, Tensor]) -> Tensor:
        state = batch[STATE]
        return torch.zeros(len(state), self.policy.config.latent_dim, dtype=torch.float32, device=state.device)

    def _encode(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The latent's mean and log variance, of state and actions; actions past the episode's end are not looked at."""
        model: Any = self.policy.model
        state_BD, actions_BTD = (
            model.vae_encoder_robot_state_input_proj(batch[STATE]),
            model.vae_encoder_action_input_proj(batch[ACTION]),
        )
        summary_B1D = model.vae_encoder_cls_embed.weight.expand(len(state_BD), 1, -1)
        tokens = torch.cat([summary_B1D, state_BD[:, None], actions_BTD], dim=1)
        padded = F.pad(batch[ACTION_IS_PAD], (2, 0), value=False)  # the summary and the state are always there
        positions = model.vae_encoder_pos_enc
        assert isinstance(positions, Tensor)  # a buffer
        encoded = model.vae_encoder(
            tokens.transpose(0, 1), pos_embed=positions.transpose(0, 1), key_padding_mask=padded
        )
        return model.vae_encoder_latent_output_proj(encoded[0]).tensor_split(2, dim=1)

    def _decode(self, batch: Mapping[str, Tensor], latent_BL: Tensor) -> Tensor:
        """Action chunks (B, T, A) of a latent and an observation."""
        model: Any = self.policy.model
        image_tokens, image_places = self._look(batch)
        state_BD = model.encoder_robot_state_input_proj(batch[STATE])
        tokens = torch.cat([model.encoder_latent_input_proj(latent_BL)[None], state_BD[None], image_tokens])
        places = torch.cat([model.encoder_1d_feature_pos_embed.weight[:, None], image_places])
        encoded = model.encoder(tokens, pos_embed=places)
        config = self.policy.config
        asked = torch.zeros(
            config.chunk_size, len(latent_BL), config.dim_model, dtype=places.dtype, device=places.device
        )
        decoded = model.decoder(
            asked,
            encoded,
            encoder_pos_embed=places,
            decoder_pos_embed=model.decoder_pos_embed.weight[:, None],
        )
        return model.action_head(decoded.transpose(0, 1))

    def _look(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Image tokens (V * H * W, B, D) and their places (V * H * W, 1, D), camera by camera, row by row."""
        model: Any = self.policy.model
        num_cameras = len(self.cameras)
        pictures_VB3HW = torch.stack([batch[camera] for camera in self.cameras]).to(torch.float32) / 255.0
        scaled = (pictures_VB3HW - self.picture_low_V311[:, None]) / self.picture_span_V311[:, None]
        features = model.backbone(scaled.flatten(0, 1))["feature_map"]
        places_1DHW = model.encoder_cam_feat_pos_embed(features)
        tokens = model.encoder_img_feat_input_proj(features).unflatten(0, (num_cameras, -1))
        tokens = tokens.permute(0, 3, 4, 1, 2).flatten(0, 2)
        return tokens, places_1DHW.flatten(2).permute(2, 0, 1).repeat(num_cameras, 1, 1)


def _without_map(attention: nn.Module, inputs: tuple[Any, ...], settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return inputs, {**settings, "need_weights": False}


def picture_scale(spec: ActSpec, stats: Stats) -> tuple[Tensor, Tensor]:
    """What is taken from pictures in [0, 1] and by what they are divided, (V, 3, 1, 1) each, as LeRobot's normaliser does."""
    mode = spec.normalisation.get("VISUAL", "IDENTITY")
    if mode not in ("IDENTITY", "MEAN_STD"):
        raise ValueError(f"policy '{spec.folder}': it normalises pictures by {mode}, expected MEAN_STD or IDENTITY")
    if mode == "IDENTITY" or not stats:  # without statistics nothing is computed: an export
        return torch.zeros(len(spec.cameras), 3, 1, 1), torch.ones(len(spec.cameras), 3, 1, 1)
    mean, deviation = (
        torch.stack([torch.from_numpy(stats[camera][name]).float().reshape(3, 1, 1) for camera in spec.cameras])
        for name in STATS_OF_MODE[mode]
    )
    return mean, deviation + float(NORMALISE_EPS)


def make_config(config: Mapping[str, Any]) -> ACTConfig:
    """LeRobot's own; its pretrained weights are never named to it, as it would fetch them."""
    given = {key: value for key, value in config.items() if key != "type"}
    given["replace_final_stride_with_dilation"] = int(config["replace_final_stride_with_dilation"])
    return draccus.decode(ACTConfig, given | {"pretrained_backbone_weights": None, "device": "cpu"})


def build_policy(config: Mapping[str, Any]) -> ACTPolicy:
    """Names and shapes of a model without its memory."""
    with torch.device("meta"):
        return ACTPolicy(make_config(config))


def load_act(spec: ActSpec, device: torch.device | str, stats: Stats) -> ActModule:
    """The policy of a folder on `device`, every weight trainable; its file is held to the model, tensor by tensor."""
    policy = build_policy(spec.config)
    fill_whole(policy, Path(spec.folder), device, "ACT")
    return ActModule(policy, spec, stats).to(device)


def save_new(folder: Path, config: Mapping[str, Any], seed: int, *, small: bool, fetch: bool) -> None:
    """Write config.json and weights of a new model; `fetch` allows the network for those of its backbone."""
    wanted = config["pretrained_backbone_weights"]
    pretrained = None if wanted is None else read_pretrained(wanted, fetch=fetch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = ACTPolicy(make_config(config))
    if small:
        _quieten_branches(policy)
    if pretrained is not None:
        policy.model.backbone.load_state_dict(pretrained)  # strict: names and shapes
    policy.save_pretrained(folder)


def _quieten_branches(policy: ACTPolicy) -> None:
    for block in policy.model.backbone.modules():
        if isinstance(block, BasicBlock):
            norm: Any = block.bn2  # a FrozenBatchNorm2d: its weight is a buffer
            norm.weight.fill_(BRANCH_GAIN)


def read_pretrained(name: str, *, fetch: bool) -> dict[str, Tensor]:
    """torchvision's weights of a backbone as safetensors: from the hub's cache or, where `fetch` allows it, from the hub.

    torchvision's own files are pickles, which are not opened here.
    """
    repository = PRETRAINED[name][1]
    flag = "--policy.pretrained_backbone_weights"
    try:
        file = fetch_from_hub(
            repository, lambda hub: hub.hf_hub_download(repository, WEIGHTS, local_files_only=not fetch)
        )
    except ValueError as error:
        if fetch:
            raise ValueError(f"{flag}={name}: {error}, or begin with random weights: {flag}=null") from error
        raise ValueError(
            f"a new ACT begins with a backbone that knows pictures, torchvision's {name}, and the hub's cache does not have "
            f"{repository}; give {flag}={name} to fetch it (about 50 to 100 MB), or {flag}=null to begin with random weights"
        ) from error
    with safe_open(real_path(file.parent, file.name), framework="pt") as stored:
        names = [key for key in stored.keys() if not key.startswith("fc.") and not key.endswith("num_batches_tracked")]  # noqa: SIM118
        return {key: stored.get_tensor(key) for key in names}
