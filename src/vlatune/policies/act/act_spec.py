"""ACT's spec and the noise of its latent. Does not import torch, because read tasks use it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vlatune.batch import NOISE, SLOT, Columns
from vlatune.policies.base import PolicySpec
from vlatune.random_streams import Stream, make_generator

WEIGHTS = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class ActSpec(PolicySpec):
    fixed_inputs: bool = True
    latent_dim: int
    """0 if trained without a latent."""
    lr_backbone: float
    config: Mapping[str, Any] = field(repr=False)
    """config.json with LeRobot's defaults and the run's overrides."""


@dataclass(frozen=True)
class LatentNoise:
    """Sample N(0, 1) noise of the latent, by (seed, slot) in training, else by (seed, frame)."""

    seed: int
    dims: int
    by_frame: bool = False

    def __call__(self, columns: Columns) -> Columns:
        stream = Stream.EVAL_NOISE if self.by_frame else Stream.NOISE
        numbers = columns["index" if self.by_frame else SLOT].tolist()
        noise_NL = np.empty((len(numbers), self.dims), dtype=np.float32)
        for row, number in enumerate(numbers):
            make_generator(stream, self.seed, number).standard_normal(out=noise_NL[row], dtype=np.float32)
        return columns | {NOISE: noise_NL}
