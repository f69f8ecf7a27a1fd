"""Diffusion Policy's options and spec, and the transforms for crop, noise and time steps. Without torch."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from vlatune.batch import ACTION, NOISE, SLOT, TIME, Columns
from vlatune.config.fields import setting
from vlatune.policies.base import NoiseSpec, PolicySpec
from vlatune.random_streams import Stream, make_generator
from vlatune.storage.limits import limit

MAX_STEPS = limit("sampling_steps")


@dataclass(frozen=True)
class DiffusionOptions:
    """Fields of LeRobot's `DiffusionConfig` that a run may set."""

    n_obs_steps: int = setting(2, minimum=1)
    """Number of observations: the newest and the ones before it."""
    horizon: int = setting(64, minimum=1)
    """Number of actions in a chunk, from the oldest observation; a multiple of 2 ^ len(down_dims)."""
    n_action_steps: int = setting(32, minimum=1, with_base="any")
    """Number of actions that a robot executes before it queries the policy again."""
    drop_n_last_frames: int = setting(7, minimum=0, with_base="any")
    """Number of frames at the end of each episode that start no training sample."""
    vision_backbone: Literal["resnet18", "resnet34", "resnet50"] = setting("resnet18")
    """Image encoder."""
    resize_shape: tuple[int, int] | None = setting(None, minimum=1)
    """Height and width to resize images to (default: as recorded)."""
    crop_ratio: float = setting(1.0, above=0, maximum=1)
    """Fraction of the height and width of resized images to crop to."""
    crop_shape: tuple[int, int] | None = setting(None, minimum=1)
    """Height and width to crop images to, if they are not resized."""
    crop_is_random: bool = setting(True, with_base="any")
    """Crop training images at random; evaluation always crops the centre."""
    use_group_norm: bool = setting(False)
    """Use GroupNorm instead of BatchNorm in the backbone (new models: true)."""
    spatial_softmax_num_keypoints: int = setting(32, minimum=1)
    """Number of spatial-softmax keypoints."""
    use_separate_rgb_encoder_per_camera: bool = setting(True)
    """Use a separate image encoder for each camera."""
    down_dims: tuple[int, ...] = setting((512, 1024, 2048), minimum=1)
    """Widths of the U-Net's stages; each halves the length."""
    kernel_size: int = setting(5, minimum=1)
    """Kernel size of the U-Net's convolutions."""
    n_groups: int = setting(8, minimum=1)
    """Number of groups of the U-Net's GroupNorm."""
    diffusion_step_embed_dim: int = setting(128, minimum=4)
    """Width of the embedding of the diffusion step."""
    use_film_scale_modulation: bool = setting(True)
    """Let observations scale, not only shift, the U-Net's features (FiLM)."""
    noise_scheduler_type: Literal["DDPM", "DDIM"] = setting("DDPM", with_base="any")
    """Sampling algorithm."""
    num_train_timesteps: int = setting(100, minimum=1, maximum=MAX_STEPS)
    """Number of diffusion steps."""
    num_inference_steps: int | None = setting(None, minimum=1, maximum=MAX_STEPS, with_base="any")
    """Number of sampling steps (default: all diffusion steps)."""
    beta_schedule: Literal["squaredcos_cap_v2", "linear", "scaled_linear", "sigmoid"] = setting("squaredcos_cap_v2")
    """Noise schedule."""
    beta_start: float = setting(1e-4, minimum=0)
    """Noise of the first diffusion step."""
    beta_end: float = setting(0.02, minimum=0)
    """Noise of the last diffusion step."""
    prediction_type: Literal["epsilon", "sample"] = setting("epsilon")
    """Predict the noise (epsilon) or the actions (sample)."""
    clip_sample: bool = setting(True, with_base="any")
    """Clip predicted actions while sampling."""
    clip_sample_range: float = setting(1.0, minimum=0, with_base="any")
    """Maximum absolute value of normalised actions with clip_sample."""
    do_mask_loss_for_padding: bool = setting(False, with_base="any")
    """Exclude actions after the end of the episode from the loss."""


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
