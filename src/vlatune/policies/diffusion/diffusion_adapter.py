"""Diffusion Policy without torch: validation of its folder, and transforms of samples.

Reads LeRobot's `config.json` as plain JSON. LeRobot resizes and crops images on the device; here
the reader resizes and a transform crops, so that only used pixels are transferred. Crop, noise and
time step of a training sample depend on its slot; evaluation crops the centre and samples noise by
frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vlatune.batch import ACTION, ACTION_IS_PAD, IDS, NOISE, SLOT, STATE, TIME, Columns
from vlatune.data.transforms import Rename, Select, Transform
from vlatune.policies.base import (
    NO_OVERRIDES,
    NO_STATS,
    Binding,
    Fit,
    ModuleOptions,
    NoiseSpec,
    PolicyAdapter,
    PolicySpec,
    Stats,
)
from vlatune.policies.base_folder import (
    check_options,
    make_features,
    one_image_size,
    option_defaults,
    read_config,
    read_features,
    read_steps,
    with_defaults,
)
from vlatune.policies.diffusion import DiffusionOptions
from vlatune.policies.normalisation import make_normalisers
from vlatune.policies.processors import Schema, make_fields
from vlatune.policies.weight_files import count_flops
from vlatune.random_streams import Stream, make_generator

if TYPE_CHECKING:
    import torch

DEFAULTS = option_defaults(DiffusionOptions, {"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ACTION": "MIN_MAX"})
SMALL: Mapping[str, Any] = {
    "use_separate_rgb_encoder_per_camera": False,
    "down_dims": (64, 128),
    "diffusion_step_embed_dim": 32,
    "spatial_softmax_num_keypoints": 16,
    "num_train_timesteps": 50,
    "prediction_type": "sample",
    "noise_scheduler_type": "DDIM",
    "num_inference_steps": 10,
    "drop_n_last_frames": 0,
}
"""The tiny model of the demo and tests, where it differs from LeRobot's defaults. Predicting
actions instead of noise needs fewer training and sampling steps."""
MAX_STAGES = 8
FINAL_GROUPS = 8
"""Groups of the U-Net's last block, which LeRobot hard-codes."""

SCHEMA = Schema(
    type="diffusion",
    config=make_fields(
        size="horizon n_action_steps spatial_softmax_num_keypoints kernel_size n_groups diffusion_step_embed_dim",
        step_count="num_train_timesteps num_inference_steps",
        count="drop_n_last_frames scheduler_warmup_steps",
        # `check_options` allows only the listed choices of what LeRobot passes to getattr and diffusers.
        text="vision_backbone noise_scheduler_type prediction_type beta_schedule pretrained_backbone_weights compile_mode "
        "scheduler_name",
        sides="resize_shape crop_shape",
        number="crop_ratio beta_start beta_end clip_sample_range optimizer_lr optimizer_eps optimizer_weight_decay",
        numbers="down_dims optimizer_betas",
        flag="crop_is_random use_group_norm use_separate_rgb_encoder_per_camera use_film_scale_modulation "
        "gradient_checkpointing clip_sample compile_model do_mask_loss_for_padding",
    ),
)


@dataclass(frozen=True, kw_only=True)
class DiffusionSpec(PolicySpec):
    crop_hw: tuple[int, int] | None
    """Crop of the delivered image; None keeps all of it."""
    crop_is_random: bool
    """Crop randomly in training, independently for cameras with separate encoders, as in
    LeRobot."""
    one_encoder: bool
    """All cameras share one encoder."""
    num_train_timesteps: int


@dataclass(frozen=True)
class DiffusionNoise:
    """Sample noise (N, T, A) and time step (N,), distributed as in LeRobot."""

    noise: NoiseSpec
    num_steps: int

    def __call__(self, columns: Columns) -> Columns:
        noise = np.empty(columns[ACTION].shape, dtype=np.float32)
        time = np.empty(len(noise), dtype=np.int64)
        for row, rng in enumerate(self.noise.generators(columns)):
            rng.standard_normal(out=noise[row], dtype=np.float32)
            time[row] = rng.integers(self.num_steps)
        return columns | {NOISE: noise, TIME: time}


@dataclass(frozen=True)
class RandomCrop:
    """Crop at a position set by (seed, slot), the same for all observations of a sample."""

    cameras: tuple[str, ...]
    size_hw: tuple[int, int]
    seed: int
    same_for_all: bool = False
    """Use one position for all cameras."""

    def __call__(self, columns: Columns) -> Columns:
        slots = columns[SLOT].tolist()
        offsets = np.stack([self._offsets(slot) for slot in slots])  # (N, cameras, 2) in [0, 1)
        cropped = {}
        for number, name in enumerate(self.cameras):
            images = columns[name]
            free = np.array(images.shape[-2:]) - self.size_hw + 1
            corners = np.floor(offsets[:, 0 if self.same_for_all else number] * free).astype(int)
            cropped[name] = np.stack(
                [_part(one, corner, self.size_hw) for one, corner in zip(images, corners, strict=True)]
            )
        return columns | cropped

    def _offsets(self, slot: int) -> np.ndarray:
        return make_generator(Stream.CROP, self.seed, slot).random((len(self.cameras), 2))


@dataclass(frozen=True)
class CentreCrop:
    """Crop the centre of every image; images of the right size are unchanged."""

    cameras: tuple[str, ...]
    size_hw: tuple[int, int]

    def __call__(self, columns: Columns) -> Columns:
        return columns | {name: self._crop(columns[name]) for name in self.cameras}

    def _crop(self, images: np.ndarray) -> np.ndarray:
        """Round as torchvision's CenterCrop does."""
        height, width = self.size_hw
        corner = round((images.shape[-2] - height) / 2.0), round((images.shape[-1] - width) / 2.0)
        return np.ascontiguousarray(_part(images, corner, self.size_hw))


def _part(images: np.ndarray, corner: Any, size_hw: tuple[int, int]) -> np.ndarray:
    (top, left), (height, width) = corner, size_hw
    return images[..., top : top + height, left : left + width]


class DiffusionAdapter(PolicyAdapter[DiffusionSpec]):
    schema = SCHEMA

    def read_spec(self, folder: Path, overrides: Mapping[str, Any] = NO_OVERRIDES) -> DiffusionSpec:
        """Read and validate the folder; loading compares it with the weights."""
        config = with_defaults(read_config(folder, SCHEMA, overrides), DEFAULTS)
        read_steps(folder, SCHEMA)
        return _make_spec(folder, config, f"policy '{folder}'")

    def make_base(self, folder: Path, fit: Fit, *, small: bool, place: Path) -> None:
        from vlatune.policies.diffusion.diffusion_module import save_random

        save_random(folder, new_settings(fit, small=small), fit.seed, small=small)

    def make_transforms(
        self, spec: DiffusionSpec, binding: Binding, stats: Stats, noise: NoiseSpec
    ) -> tuple[Transform, ...]:
        """Rename, crop, normalise, sample noise; images are normalised on the device."""
        cropped = (CentreCrop(spec.cameras, spec.crop_hw),) if spec.crop_hw else ()
        return (
            Rename(dict(binding.cameras)),
            *cropped,
            *make_normalisers(spec, stats),
            DiffusionNoise(noise, spec.num_train_timesteps),
            Select((*spec.cameras, STATE, ACTION, ACTION_IS_PAD, NOISE, TIME, *IDS, SLOT)),
        )

    def augment_rows(self, spec: DiffusionSpec, binding: Binding, noise: NoiseSpec) -> tuple[Transform, ...]:
        if spec.crop_hw is None or not spec.crop_is_random:
            return ()
        own = {target: name for name, target in binding.cameras}
        return (RandomCrop(tuple(own[name] for name in spec.cameras), spec.crop_hw, noise.seed, spec.one_encoder),)

    def step_flops(self, spec: DiffusionSpec, binding: Binding, options: ModuleOptions) -> float:
        num_images = len(spec.observation_offsets or (0,)) * (len(spec.cameras) if spec.one_encoder else 1)
        image_hw, uses = spec.crop_hw or spec.image_hw, {r"\.unet\.(down|up|mid)_modules\..*conv": spec.horizon / 2}
        return count_flops(Path(spec.folder), uses, image_hw=image_hw, num_images=num_images)

    def load_module(
        self,
        spec: DiffusionSpec,
        binding: Binding,
        options: ModuleOptions,
        device: torch.device | str = "cpu",
        *,
        stats: Stats = NO_STATS,
    ) -> torch.nn.Module:
        from vlatune.policies.diffusion.diffusion_module import load_diffusion

        return load_diffusion(spec, options, device, stats)


def new_settings(fit: Fit, *, small: bool) -> dict[str, Any]:
    """Return LeRobot's settings for a new model where they differ from its defaults.

    LeRobot starts from an ImageNet backbone with BatchNorm, which has to be downloaded. Random
    backbones use GroupNorm, as in the paper, which does not depend on the rest of the batch.
    """
    given, side = fit.overrides, fit.image_size
    made: dict[str, Any] = {"pretrained_backbone_weights": None, "use_group_norm": True}
    if small:
        stages = given.get("down_dims", SMALL["down_dims"])
        made |= {
            **SMALL,
            "resize_shape": (side, side),
            "horizon": -(-fit.horizon // 2 ** len(stages)) * 2 ** len(stages),
        }
    made |= given
    horizon, num_obs = made.get("horizon", 64), made.get("n_obs_steps", 2)
    made.setdefault("n_action_steps", max(1, min(horizon - num_obs + 1, horizon if small else 32)))
    image_hw = made.get("resize_shape")
    if image_hw is None or len(set(fit.recorded_hw)) == 1:
        image_hw = one_image_size(fit, "Diffusion Policy", "resize all images with --policy.resize_shape=[240,320]")
    own = make_features(fit, image_hw)
    _make_spec(Path(), with_defaults(made | own, DEFAULTS), "--policy.type=diffusion")
    return made | own


def _make_spec(folder: Path, config: Mapping[str, Any], where: str) -> DiffusionSpec:
    _check_config(config, where)
    features, num_obs, horizon = read_features(config, where), int(config["n_obs_steps"]), int(config["horizon"])
    resize = config["resize_shape"]
    height, width = resize or features.image_hw
    crop = _crop_of(config)
    if crop and (crop[0] > height or crop[1] > width):
        raise ValueError(f"{where}: crop_shape {list(crop)} is larger than the images ({height} x {width})")
    return DiffusionSpec(
        type="diffusion",
        folder=str(folder),
        cameras=features.cameras,
        image_hw=(int(height), int(width)),
        pad="none" if resize else "centre",
        fixed_inputs=True,
        action_offsets=tuple(range(1 - num_obs, 1 - num_obs + horizon)),
        observation_offsets=tuple(range(1 - num_obs, 1)),
        drop_last_frames=int(config["drop_n_last_frames"]),
        max_state_dim=features.state_dim,
        max_action_dim=features.action_dim,
        normalisation=dict(config["normalization_mapping"]),
        crop_hw=crop if crop != (height, width) else None,
        crop_is_random=config["crop_is_random"],
        one_encoder=not config["use_separate_rgb_encoder_per_camera"],
        num_train_timesteps=int(config["num_train_timesteps"]),
        overrides={"pretrained_backbone_weights": None},  # the folder has them; LeRobot would download them
    )


def _crop_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the crop size as in LeRobot: with a resize, crop_ratio replaces crop_shape."""
    if config["resize_shape"] is None:
        return None if config["crop_shape"] is None else (int(config["crop_shape"][0]), int(config["crop_shape"][1]))
    height, width = (int(side * config["crop_ratio"]) for side in config["resize_shape"])
    return (height, width) if config["crop_ratio"] < 1.0 else None


def _check_config(config: Mapping[str, Any], where: str) -> None:
    """Raise on values that LeRobot cannot build or would build differently."""
    check_options(config, DiffusionOptions, where)
    stages, horizon = [int(width) for width in config["down_dims"]], config["horizon"]
    _require(1 <= len(stages) <= MAX_STAGES, f"{where}: down_dims has {len(stages)} widths, expected 1 to {MAX_STAGES}")
    _require(
        horizon % 2 ** len(stages) == 0,
        f"{where}: horizon is {horizon}, expected a multiple of {2 ** len(stages)}, because each of the {len(stages)} down_dims "
        f"halves it; change --policy.horizon",
    )
    _require(
        all(width % config["n_groups"] == 0 for width in stages) and stages[0] % FINAL_GROUPS == 0,
        f"{where}: down_dims {stages} must be multiples of n_groups={config['n_groups']}, the first of {FINAL_GROUPS}",
    )
    ahead = horizon - config["n_obs_steps"] + 1
    _require(
        config["n_action_steps"] <= ahead,
        f"{where}: n_action_steps is {config['n_action_steps']}, but a chunk has only {ahead} actions from the newest of "
        f"{config['n_obs_steps']} observations on; use --policy.n_action_steps={ahead} or less",
    )
    most, used = config["num_train_timesteps"], config["num_inference_steps"]
    _require(
        used is None or used <= most, f"{where}: num_inference_steps is {used}, more than num_train_timesteps={most}"
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
