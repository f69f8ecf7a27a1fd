"""Diffusion Policy, the torch side: LeRobot's own encoders and U-Net behind `forward(batch) -> loss`.

The forward is `DiffusionModel.compute_loss` on pictures that are resized and cropped already, and with noise and time steps
that come with the batch. Sampling is `conditional_sample` with the noise that DDPM adds in every step drawn beforehand, once
for all samples: what is predicted depends on weights, observation and start alone, whatever else is in the batch. Numbers of
the noise schedule are made when the module is loaded: nothing in a step waits for the device.

A backbone with BatchNorm (LeRobot's default; GroupNorm is `use_group_norm`) learns as in LeRobot: by the statistics of the
micro-batch, while running ones are kept for evaluation. No gradient changes those, yet they are part of what was learnt:
checkpoints carry them (`changing_buffers`).
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
from vlatune.files import whole_folder
from vlatune.policies.base import LossParts, ModuleOptions, Stats
from vlatune.policies.diffusion.diffusion_samples import DiffusionSpec
from vlatune.policies.loading import decode_config, fill_whole
from vlatune.policies.processors import plain_processors

NORMALISE_EPS = 1e-8
"""LeRobot's `NormalizerProcessorStep.eps`."""
SAMPLING_SEED = 0
"""Of the noise that DDPM adds on the way from the start to the actions."""
FEATURES = ("input_features", "output_features")
SEEN_GAIN, SEEN_BIAS = 4.0, 1.0
"""Of the last layer of the small twin's encoder, see `_keep_looking`."""


@dataclass(frozen=True)
class DenoisingStep:
    """One step of DDPM's way back, as numbers; of DDIM's only the time counts."""

    time: int
    noise_scale: float = 0.0
    """sqrt(1 - a_t): how much of the guessed noise is in the sample."""
    signal_scale: float = 1.0
    """sqrt(a_t)"""
    from_guess: float = 0.0
    """Share of the guessed actions in the next sample,"""
    from_sample: float = 0.0
    """that of this sample,"""
    spread: float = 0.0
    """and that of new noise."""


@dataclass(frozen=True)
class Schedule:
    """The noise schedule's numbers, on the host."""

    signal: Tensor
    """sqrt(a_t) by time step: the share of the actions,"""
    noise_share: Tensor
    """and sqrt(1 - a_t), that of the noise."""
    steps: tuple[DenoisingStep, ...]
    step_noise: Tensor
    """(steps, T, A): what DDPM adds after each of them."""


class DiffusionModule(nn.Module):
    """A `DiffusionPolicy` that takes batches as `batch.py` describes them."""

    signal: Tensor
    noise_share: Tensor
    step_noise: Tensor
    loss_parts: LossParts | None = None

    def __init__(self, policy: DiffusionPolicy, spec: DiffusionSpec, schedule: Schedule, stats: Stats) -> None:
        super().__init__()
        self.policy = policy
        self.spec = spec
        found: Any = policy.diffusion.rgb_encoder
        self._encoders: list[Any] = [found] if spec.one_encoder else [*found]
        for encoder in self._encoders:  # pictures come resized and cropped: it would make them large again
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

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean squared error of the guessed noise (or actions), over samples, time steps and dims."""
        config, action, noise, time = self.policy.config, batch[ACTION], batch[NOISE], batch[TIME]
        condition = self._condition(batch)
        noisy = self.signal[time][:, None, None] * action + self.noise_share[time][:, None, None] * noise
        guess = self.policy.diffusion.unet(noisy, time, global_cond=condition)
        errors = functional.mse_loss(guess, noise if config.prediction_type == "epsilon" else action, reduction="none")
        if not config.do_mask_loss_for_padding:
            self.loss_parts = LossParts(errors.detach())
            return errors.mean()
        valid = ~batch[ACTION_IS_PAD][..., None]
        self.loss_parts = LossParts(errors.detach(), counted=valid)
        return (errors * valid).sum() / (valid.sum() * errors.shape[-1]).clamp_min(1)

    @torch.no_grad()
    def predict(self, batch: Mapping[str, Tensor], noise_BTP: Tensor) -> Tensor:
        """The whole horizon, from the first observation's action on."""
        condition, sample = self._condition(batch), noise_BTP
        for step, new_noise_TA in zip(self._steps, self.step_noise, strict=True):
            time = torch.full(sample.shape[:1], step.time, dtype=torch.long, device=sample.device)
            output = self.policy.diffusion.unet(sample, time, global_cond=condition)
            sample = self._step_back(step, output, sample, new_noise_TA)
        return sample

    def as_lerobot(self) -> DiffusionPolicy:
        """For saving: resizing and cropping, which are no weights, LeRobot sets up anew from the config."""
        return self.policy

    def changing_buffers(self) -> dict[str, Tensor]:
        """Running statistics of BatchNorm, under the module's names."""
        return {
            f"{name}.{leaf}": getattr(one, leaf)
            for name, one in self.named_modules()
            if isinstance(one, nn.BatchNorm2d)
            for leaf in ("running_mean", "running_var")
        }

    def _condition(self, batch: Mapping[str, Tensor]) -> Tensor:
        """What the U-Net is told of the observations, (B, D): `_prepare_global_conditioning` without its copies of all
        pictures.
        """
        looks = [self._pixels(batch[camera], number) for number, camera in enumerate(self.spec.cameras)]
        shape = batch[STATE].shape[:2]
        if self.spec.one_encoder:
            features = self._encoders[0](torch.stack(looks, dim=2).flatten(0, 2))
            seen = features.unflatten(0, (*shape, len(looks))).flatten(2)
        else:
            features = [one(pixels.flatten(0, 1)) for one, pixels in zip(self._encoders, looks, strict=True)]
            seen = torch.cat(features, dim=-1).unflatten(0, shape)
        return torch.cat([batch[STATE], seen], dim=-1).flatten(1)

    def _pixels(self, pictures: Tensor, camera: int) -> Tensor:
        """uint8 -> as LeRobot's processor normalises them."""
        pixels = pictures.to(torch.float32) / 255.0
        if self.has_stats:
            return (pixels - getattr(self, f"mean_{camera}")) / (getattr(self, f"std_{camera}") + NORMALISE_EPS)
        if self.spec.normalisation.get("VISUAL", "IDENTITY") != "IDENTITY":
            raise RuntimeError("a Diffusion Policy that normalises pictures was loaded without their statistics")
        return pixels

    def _step_back(self, step: DenoisingStep, output: Tensor, sample: Tensor, new_noise_TA: Tensor) -> Tensor:
        """`DDPMScheduler.step` in the same order of operations, with given noise; DDIM's own takes none."""
        config: Any = self.policy.config
        scheduler: Any = self.policy.diffusion.noise_scheduler
        if config.noise_scheduler_type == "DDIM":
            return scheduler.step(output, step.time, sample).prev_sample
        actions = output
        if config.prediction_type == "epsilon":
            actions = (sample - step.noise_scale * output) / step.signal_scale
        if config.clip_sample:
            actions = actions.clamp(-config.clip_sample_range, config.clip_sample_range)
        mean = step.from_guess * actions + step.from_sample * sample
        return mean + step.spread * new_noise_TA if step.time > 0 else mean


def make_schedule(diffusion: Any, spec: DiffusionSpec) -> Schedule:
    """Of LeRobot's `DiffusionModel`; its scheduler is ready to step back afterwards."""
    scheduler = diffusion.noise_scheduler
    scheduler.set_timesteps(diffusion.num_inference_steps)
    steps, alphas = tuple(_denoising_steps(scheduler)), scheduler.alphas_cumprod
    shape = len(steps), spec.horizon, spec.max_action_dim
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(SAMPLING_SEED))
    return Schedule(alphas**0.5, (1 - alphas) ** 0.5, steps, drawn)


def _denoising_steps(scheduler: Any) -> Iterator[DenoisingStep]:
    """The scheduler's steps, with DDPM's coefficients in float32, as it computes them itself in every step."""
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
            from_guess=float((signal_before**0.5 * (1 - alpha)) / noise),
            from_sample=float(alpha**0.5 * noise_before / noise),
            spread=float((noise_before / noise * (1 - alpha)).clamp(min=1e-20) ** 0.5),
        )


def load_diffusion(
    spec: DiffusionSpec, options: ModuleOptions, device: torch.device | str, stats: Stats
) -> DiffusionModule:
    """The policy of a pretrained_model folder on `device`; every weight trains."""
    folder, device = Path(spec.folder), torch.device(device)
    policy = build_policy(read_lerobot_config(folder, spec.overrides))
    schedule = make_schedule(policy.diffusion, spec)
    fill_whole(policy, folder, device, "Diffusion Policy")
    policy.config.gradient_checkpointing = options.gradient_checkpointing
    return DiffusionModule(policy, spec, schedule, stats)


def read_lerobot_config(folder: Path, overrides: Mapping[str, Any]) -> DiffusionConfig:
    """config.json as LeRobot parses it, with a run's own values. Weights of the backbone are in the folder: none are fetched."""
    ours = {"pretrained_backbone_weights": None, "compile_model": False, "device": "cpu"}
    return decode_config(folder, DiffusionConfig, {**overrides, **ours})


def build_policy(config: DiffusionConfig) -> DiffusionPolicy:
    """LeRobot's own class without memory for its tensors; the schedule's few numbers are real."""
    with torch.device("meta"):
        policy = DiffusionPolicy(config)
    scheduler: Any = policy.diffusion.noise_scheduler
    policy.diffusion.noise_scheduler = type(scheduler).from_config(scheduler.config)
    return policy


def save_random(folder: Path, settings: dict[str, Any], seed: int, *, small: bool = False) -> None:
    """A folder with LeRobot's own policy of these settings, with random weights."""
    features = {key: {name: _feature(one) for name, one in settings.pop(key).items()} for key in FEATURES}
    config = DiffusionConfig(**features, device="cpu", push_to_hub=False, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = DiffusionPolicy(config)
    if small:
        _keep_looking(policy)
    with whole_folder(folder) as aside:
        policy.save_pretrained(aside)
        for name, content in plain_processors().items():
            (aside / name).write_text(json.dumps(content, indent=2))


def _keep_looking(policy: DiffusionPolicy) -> None:
    """What the small twin's encoder tells of a picture goes through a ReLU that learns as fast as the rest, and its points hardly
    move at first: it would be off for good, before the backbone has learnt to see, after a few hundred large steps.
    """
    found: Any = policy.diffusion.rgb_encoder
    encoders: list[Any] = [*found] if isinstance(found, nn.ModuleList) else [found]
    with torch.no_grad():
        for encoder in encoders:
            encoder.out.weight.mul_(SEEN_GAIN)
            encoder.out.bias.fill_(SEEN_BIAS)


def _feature(stored: Mapping[str, Any]) -> PolicyFeature:
    return PolicyFeature(FeatureType(stored["type"]), tuple(stored["shape"]))
