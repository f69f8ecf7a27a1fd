"""Diffusion Policy's spec, and the transforms for crop, noise and time steps. Without torch."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from vlatune.batch import ACTION, NOISE, SLOT, TIME, Columns
from vlatune.policies.base import PolicySpec
from vlatune.random_streams import Stream, make_generator

WEIGHTS = "model.safetensors"


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
    """Sample noise (N, T, A) and time step (N,), distributed as in LeRobot.

    Depends only on (seed, slot) in training and on (seed, frame) in validation.
    """

    seed: int
    num_steps: int
    by_frame: bool = False

    def __call__(self, columns: Columns) -> Columns:
        stream = Stream.EVAL_NOISE if self.by_frame else Stream.NOISE
        numbers = columns["index" if self.by_frame else SLOT].tolist()
        noise = np.empty(columns[ACTION].shape, dtype=np.float32)
        time = np.empty(len(numbers), dtype=np.int64)
        for row, number in enumerate(numbers):
            rng = make_generator(stream, self.seed, number)
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
