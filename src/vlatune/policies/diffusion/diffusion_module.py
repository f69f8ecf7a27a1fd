"""Diffusion Policy in torch: LeRobot's encoders and U-Net behind `forward(batch) -> loss`.

The forward is `DiffusionModel.compute_loss` with resized and cropped images, noise and time steps
from the batch. Sampling is `conditional_sample` with DDPM's step noise fixed in advance, so that
predictions do not depend on the rest of the batch. The noise schedule is computed at load time, so
that no step syncs with the device.

With BatchNorm (LeRobot's default without `use_group_norm`), training uses the statistics of the
micro-batch and updates running statistics for evaluation; checkpoints store them
(`changing_buffers`).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.diffusion import DiffusionConfig, DiffusionPolicy
from torch import Tensor, nn
from torch.nn import functional

from vlatune.batch import ACTION, ACTION_IS_PAD, NOISE, STATE, TIME
from vlatune.policies.base import ModuleOptions, PolicyOutput, Stats
from vlatune.policies.diffusion.diffusion_samples import DiffusionSpec
from vlatune.policies.loading import decode_config, fill_all
from vlatune.policies.modeling import num_valid
from vlatune.policies.processors import plain_processors
from vlatune.storage.files import atomic_folder

NORMALISE_EPS = 1e-8
"""LeRobot's `NormalizerProcessorStep.eps`."""
SAMPLING_SEED = 0
"""Seed of the noise that DDPM adds while sampling."""
FEATURES = ("input_features", "output_features")
ENCODER_GAIN, ENCODER_BIAS = 4.0, 1.0
"""Initial gain and bias of the tiny encoder's last layer, see `_keep_relu_active`."""


@dataclass(frozen=True)
class DenoisingStep:
    """Coefficients of one DDPM sampling step; DDIM uses only `time`."""

    time: int
    noise_scale: float = 0.0
    """sqrt(1 - a_t), the share of the predicted noise in the sample."""
    signal_scale: float = 1.0
    """sqrt(a_t)"""
    from_prediction: float = 0.0
    """Coefficient of the predicted actions in the next sample."""
    from_sample: float = 0.0
    """Coefficient of the current sample in the next one."""
    spread: float = 0.0
    """Standard deviation of the added noise."""


@dataclass(frozen=True)
class Schedule:
    """Coefficients of the noise schedule, on the host."""

    signal: Tensor
    """sqrt(a_t) by time step, the coefficient of the actions."""
    noise_share: Tensor
    """sqrt(1 - a_t) by time step, the coefficient of the noise."""
    steps: tuple[DenoisingStep, ...]
    step_noise: Tensor
    """(steps, T, A), the noise that DDPM adds after each step."""


class DiffusionModule(nn.Module):
    """A `DiffusionPolicy` that takes batches as `batch.py` describes them."""

    signal: Tensor
    noise_share: Tensor
    step_noise: Tensor

    def __init__(self, policy: DiffusionPolicy, spec: DiffusionSpec, schedule: Schedule, stats: Stats) -> None:
        super().__init__()
        self.policy = policy
        self.spec = spec
        found: Any = policy.diffusion.rgb_encoder
        self._encoders: list[Any] = [found] if spec.one_encoder else [*found]
        for encoder in self._encoders:  # images arrive resized and cropped
            encoder.resize, encoder.do_crop = None, False
        self._steps = schedule.steps
        device = next(policy.parameters()).device
        for name in ("signal", "noise_share", "step_noise"):
            self.register_buffer(name, getattr(schedule, name).to(device), persistent=False)
        self.has_stats = all(camera in stats for camera in spec.cameras)
        for number, camera in enumerate(spec.cameras if self.has_stats else ()):
            for name in ("mean", "std"):
                values = torch.from_numpy(stats[camera][name]).to(torch.float32)
                self.register_buffer(f"{name}_{number}", values.to(device), persistent=False)

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
        for step, new_noise_TA in zip(self._steps, self.step_noise, strict=True):
            time = torch.full(sample.shape[:1], step.time, dtype=torch.long, device=sample.device)
            output = self.policy.diffusion.unet(sample, time, global_cond=condition)
            sample = self._step_back(step, output, sample, new_noise_TA)
        return sample

    def as_lerobot(self) -> DiffusionPolicy:
        """Return the policy for saving; LeRobot restores resize and crop from the config."""
        return self.policy

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
        pixels = images.to(torch.float32) / 255.0
        if self.has_stats:
            return (pixels - getattr(self, f"mean_{camera}")) / (getattr(self, f"std_{camera}") + NORMALISE_EPS)
        if self.spec.normalisation.get("VISUAL", "IDENTITY") != "IDENTITY":
            raise RuntimeError("image statistics are missing for a Diffusion Policy that normalises images")
        return pixels

    def _step_back(self, step: DenoisingStep, output: Tensor, sample: Tensor, new_noise_TA: Tensor) -> Tensor:
        """Apply `DDPMScheduler.step` with the given noise, or DDIM's own step."""
        config: Any = self.policy.config
        scheduler: Any = self.policy.diffusion.noise_scheduler
        if config.noise_scheduler_type == "DDIM":
            return scheduler.step(output, step.time, sample).prev_sample
        actions = output
        if config.prediction_type == "epsilon":
            actions = (sample - step.noise_scale * output) / step.signal_scale
        if config.clip_sample:
            actions = actions.clamp(-config.clip_sample_range, config.clip_sample_range)
        mean = step.from_prediction * actions + step.from_sample * sample
        return mean + step.spread * new_noise_TA if step.time > 0 else mean


def make_schedule(diffusion: Any, spec: DiffusionSpec) -> Schedule:
    """Compute the schedule of LeRobot's `DiffusionModel`, and set its scheduler up for sampling."""
    scheduler = diffusion.noise_scheduler
    scheduler.set_timesteps(diffusion.num_inference_steps)
    steps, alphas = tuple(_denoising_steps(scheduler)), scheduler.alphas_cumprod
    shape = len(steps), spec.horizon, spec.max_action_dim
    step_noise = torch.randn(shape, generator=torch.Generator().manual_seed(SAMPLING_SEED))
    return Schedule(alphas**0.5, (1 - alphas) ** 0.5, steps, step_noise)


def _denoising_steps(scheduler: Any) -> Iterator[DenoisingStep]:
    """Yield the scheduler's steps, with DDPM's coefficients in float32 as it computes them."""
    times = [int(time) for time in scheduler.timesteps]
    if type(scheduler).__name__ == "DDIMScheduler":
        yield from (DenoisingStep(time) for time in times)
        return
    alphas, one = scheduler.alphas_cumprod, scheduler.one
    for time in times:
        before = int(scheduler.previous_timestep(time))
        signal, signal_before = alphas[time], alphas[before] if before >= 0 else one
        noise, noise_before = 1 - signal, 1 - signal_before
        alpha = signal / signal_before
        yield DenoisingStep(
            time=time,
            noise_scale=float(noise**0.5),
            signal_scale=float(signal**0.5),
            from_prediction=float((signal_before**0.5 * (1 - alpha)) / noise),
            from_sample=float(alpha**0.5 * noise_before / noise),
            spread=float((noise_before / noise * (1 - alpha)).clamp(min=1e-20) ** 0.5),
        )


def load_diffusion(
    spec: DiffusionSpec, options: ModuleOptions, device: torch.device | str, stats: Stats
) -> DiffusionModule:
    """Load a pretrained_model folder on `device` with all weights trainable."""
    folder, device = Path(spec.folder), torch.device(device)
    policy = build_policy(read_lerobot_config(folder, spec.overrides))
    schedule = make_schedule(policy.diffusion, spec)
    fill_all(policy, folder, device, "Diffusion Policy")
    policy.config.gradient_checkpointing = options.gradient_checkpointing
    return DiffusionModule(policy, spec, schedule, stats)


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
