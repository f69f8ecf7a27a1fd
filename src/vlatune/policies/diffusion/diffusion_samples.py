"""What Diffusion Policy's folder says, as both of its sides need it, and what it does to samples: crop, noise, time steps.

Without torch: read tasks run these.
"""

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
    """Of the delivered picture; None leaves it whole."""
    crop_is_random: bool
    """In training; a place of its own for every camera that has an encoder of its own, as LeRobot has it."""
    one_encoder: bool
    """One for all cameras."""
    num_train_timesteps: int


@dataclass(frozen=True)
class DrawDiffusion:
    """Noise (N, T, A) and time step (N,): in training pure in (seed, place in the run's order), for validation in (seed, frame).

    Distribution as LeRobot's: N(0, 1), and a step out of `num_steps`, each as likely.
    """

    seed: int
    num_steps: int
    by_frame: bool = False

    def __call__(self, columns: Columns) -> Columns:
        stream = Stream.EVAL_NOISE if self.by_frame else Stream.NOISE
        keys = ("dataset_index", "index") if self.by_frame else (SLOT,)
        numbers = np.stack([columns[key] for key in keys], axis=1).tolist()
        noise = np.empty(columns[ACTION].shape, dtype=np.float32)
        time = np.empty(len(numbers), dtype=np.int64)
        for row, key in enumerate(numbers):
            rng = make_generator(stream, self.seed, *key)
            rng.standard_normal(out=noise[row], dtype=np.float32)
            time[row] = rng.integers(self.num_steps)
        return columns | {NOISE: noise, TIME: time}


@dataclass(frozen=True)
class RandomCrop:
    """A part of every picture, where (seed, place in the run's order) say: the same for all observations of a sample."""

    cameras: tuple[str, ...]
    size_hw: tuple[int, int]
    seed: int
    same_for_all: bool = False
    """One place for all cameras."""

    def __call__(self, columns: Columns) -> Columns:
        slots = columns[SLOT].tolist()
        drawn = np.stack([self._draw(slot) for slot in slots])  # (N, cameras, 2) in [0, 1)
        cropped = {}
        for number, name in enumerate(self.cameras):
            pictures = columns[name]
            room = np.array(pictures.shape[-2:]) - self.size_hw + 1
            corners = np.floor(drawn[:, 0 if self.same_for_all else number] * room).astype(int)
            cropped[name] = np.stack(
                [_part(one, corner, self.size_hw) for one, corner in zip(pictures, corners, strict=True)]
            )
        return columns | cropped

    def _draw(self, slot: int) -> np.ndarray:
        return make_generator(Stream.CROP, self.seed, slot).random((len(self.cameras), 2))


@dataclass(frozen=True)
class CentreCrop:
    """The middle of every picture; one that has the size already stays as it is."""

    cameras: tuple[str, ...]
    size_hw: tuple[int, int]

    def __call__(self, columns: Columns) -> Columns:
        return columns | {name: self._crop(columns[name]) for name in self.cameras}

    def _crop(self, pictures: np.ndarray) -> np.ndarray:
        """Rounded as torchvision's CenterCrop does it."""
        height, width = self.size_hw
        corner = round((pictures.shape[-2] - height) / 2.0), round((pictures.shape[-1] - width) / 2.0)
        return np.ascontiguousarray(_part(pictures, corner, self.size_hw))


def _part(pictures: np.ndarray, corner: Any, size_hw: tuple[int, int]) -> np.ndarray:
    (top, left), (height, width) = corner, size_hw
    return pictures[..., top : top + height, left : left + width]
