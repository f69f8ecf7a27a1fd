"""Diffusion Policy in torch: LeRobot's encoders and U-Net behind `forward(batch) -> loss`.

The forward is `DiffusionModel.compute_loss` with resized and cropped images, noise and time steps
from the batch. Sampling is `conditional_sample`, with the same noise of DDPM's steps for every
sample, so that predictions do not depend on the rest of the batch. Nothing syncs with the device.

With BatchNorm (LeRobot's default without `use_group_norm`), training uses the statistics of the
micro-batch and updates running statistics for evaluation; checkpoints store them
(`changing_buffers`).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.diffusion import DiffusionConfig, DiffusionPolicy
from torch import Tensor, nn
from torch.nn import functional

from vlatune.batch import ACTION, ACTION_IS_PAD, NOISE, STATE, TIME
from vlatune.policies.base import ModuleOptions, PolicyOutput, Stats
from vlatune.policies.diffusion.diffusion_spec import DiffusionSpec
from vlatune.policies.loading import decode_config, fill_all
from vlatune.policies.modeling import ImageModule, num_valid
from vlatune.policies.processors import plain_processors
from vlatune.storage.files import atomic_folder

SAMPLING_SEED = 0
"""Seed of the noise that DDPM adds while sampling."""
FEATURES = ("input_features", "output_features")
ENCODER_GAIN, ENCODER_BIAS = 4.0, 1.0
"""Initial gain and bias of the tiny encoder's last layer, see `_keep_relu_active`."""


class DiffusionModule(ImageModule):
    """A `DiffusionPolicy` that takes batches as `batch.py` describes them."""

    signal: Tensor
    """sqrt(a_t) by time step, the coefficient of the actions."""
    noise_share: Tensor
    """sqrt(1 - a_t) by time step, the coefficient of the noise."""

    def __init__(self, policy: DiffusionPolicy, spec: DiffusionSpec, stats: Stats) -> None:
        super().__init__(policy, spec, stats)
        self.spec = spec
        self._scheduler: Any = policy.diffusion.noise_scheduler
        self._scheduler.set_timesteps(policy.diffusion.num_inference_steps)
        self._times = self._scheduler.timesteps.tolist()
        found: Any = policy.diffusion.rgb_encoder
        self._encoders: list[Any] = [found] if spec.one_encoder else [*found]
        for encoder in self._encoders:  # images arrive resized and cropped
            encoder.resize, encoder.do_crop = None, False
        alphas = self._scheduler.alphas_cumprod
        self.register_buffer("signal", alphas**0.5, persistent=False)
        self.register_buffer("noise_share", (1 - alphas) ** 0.5, persistent=False)

    def forward(self, batch: Mapping[str, Tensor]) -> PolicyOutput:
        """Return the mean squared error of the predicted noise or actions."""
        config, action, noise, time = self.policy.config, batch[ACTION], batch[NOISE], batch[TIME]
        condition = self._condition(batch)
        noisy = self.signal[time][:, None, None] * action + self.noise_share[time][:, None, None] * noise
        predicted = self.policy.diffusion.unet(noisy, time, global_cond=condition)
        errors = functional.mse_loss(
            predicted, noise if config.prediction_type == "epsilon" else action, reduction="none"
        )
        if not config.do_mask_loss_for_padding:
            return PolicyOutput(errors.mean(), errors.detach())
        valid = ~batch[ACTION_IS_PAD][..., None]
        loss = (errors * valid).sum() / (num_valid(batch) * errors.shape[-1])
        return PolicyOutput(loss, errors.detach(), counted=valid)

    @torch.no_grad()
    def predict(self, batch: Mapping[str, Tensor], noise_BTP: Tensor) -> Tensor:
        """Predict the full horizon, starting at the first observation's action."""
        condition, sample = self._condition(batch), noise_BTP
        # On the CPU, so that the actions are the same on every device.
        generators = [torch.Generator().manual_seed(SAMPLING_SEED) for _ in sample]
        for time in self._times:
            time_B = torch.full(sample.shape[:1], time, dtype=torch.long, device=sample.device)
            output = self.policy.diffusion.unet(sample, time_B, global_cond=condition)
            sample = self._scheduler.step(output, time, sample, generator=generators).prev_sample
        return sample

    def changing_buffers(self) -> dict[str, Tensor]:
        """Return BatchNorm's running statistics by the module's names."""
        return {
            f"{name}.{leaf}": getattr(one, leaf)
            for name, one in self.named_modules()
            if isinstance(one, nn.BatchNorm2d)
            for leaf in ("running_mean", "running_var")
        }

    def _condition(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the conditioning of the U-Net, (B, D), without LeRobot's copies of all images."""
        images = [self._pixels(batch[camera], number) for number, camera in enumerate(self.spec.cameras)]
        shape = batch[STATE].shape[:2]
        if self.spec.one_encoder:
            features = self._encoders[0](torch.stack(images, dim=2).flatten(0, 2))
            encoded = features.unflatten(0, (*shape, len(images))).flatten(2)
        else:
            features = [one(pixels.flatten(0, 1)) for one, pixels in zip(self._encoders, images, strict=True)]
            encoded = torch.cat(features, dim=-1).unflatten(0, shape)
        return torch.cat([batch[STATE], encoded], dim=-1).flatten(1)

    def _pixels(self, images: Tensor, camera: int) -> Tensor:
        """Normalise uint8 images as LeRobot's processor does."""
        return (images.to(torch.float32) / 255.0 - self.image_mean_V311[camera]) / self.image_std_V311[camera]


def load_diffusion(
    spec: DiffusionSpec, options: ModuleOptions, device: torch.device | str, stats: Stats
) -> DiffusionModule:
    """Load a pretrained_model folder on `device` with all weights trainable."""
    folder, device = Path(spec.folder), torch.device(device)
    policy = build_policy(read_lerobot_config(folder, spec.overrides))
    fill_all(policy, folder, device, "Diffusion Policy")
    policy.config.gradient_checkpointing = options.gradient_checkpointing
    return DiffusionModule(policy, spec, stats).to(device)


def read_lerobot_config(folder: Path, overrides: Mapping[str, Any]) -> DiffusionConfig:
    """Parse config.json as LeRobot does, with the run's overrides and without downloads."""
    ours = {"pretrained_backbone_weights": None, "compile_model": False, "device": "cpu"}
    return decode_config(folder, DiffusionConfig, {**overrides, **ours})


def build_policy(config: DiffusionConfig) -> DiffusionPolicy:
    """Build LeRobot's class on the meta device, except for the noise schedule."""
    with torch.device("meta"):
        policy = DiffusionPolicy(config)
    scheduler: Any = policy.diffusion.noise_scheduler
    policy.diffusion.noise_scheduler = type(scheduler).from_config(scheduler.config)
    return policy


def save_random(folder: Path, settings: dict[str, Any], seed: int, *, small: bool = False) -> None:
    """Save LeRobot's policy of these settings with random weights."""
    features = {key: {name: _feature(one) for name, one in settings.pop(key).items()} for key in FEATURES}
    config = DiffusionConfig(**features, device="cpu", push_to_hub=False, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = DiffusionPolicy(config)
    if small:
        _keep_relu_active(policy)
    with atomic_folder(folder) as temporary:
        policy.save_pretrained(temporary)
        for name, content in plain_processors().items():
            (temporary / name).write_text(json.dumps(content, indent=2))


def _keep_relu_active(policy: DiffusionPolicy) -> None:
    """Keep the ReLU after the tiny encoder active until the backbone is trained."""
    found: Any = policy.diffusion.rgb_encoder
    encoders: list[Any] = [*found] if isinstance(found, nn.ModuleList) else [found]
    with torch.no_grad():
        for encoder in encoders:
            encoder.out.weight.mul_(ENCODER_GAIN)
            encoder.out.bias.fill_(ENCODER_BIAS)


def _feature(stored: Mapping[str, Any]) -> PolicyFeature:
    return PolicyFeature(FeatureType(stored["type"]), tuple(stored["shape"]))
