"""What ACT's folder says, as both of its sides need it, and the noise of its latent. Without torch: read tasks draw it."""

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
    """0 where it learns without a latent."""
    lr_backbone: float
    config: Mapping[str, Any] = field(repr=False)
    """All of config.json, LeRobot's defaults and a run's own values in place."""


@dataclass(frozen=True)
class DrawLatent:
    """Noise of the latent: N(0, 1), in training a pure function of (seed, place in the run's order), else of (seed, frame)."""

    seed: int
    dims: int
    by_frame: bool = False

    def __call__(self, columns: Columns) -> Columns:
        stream = Stream.EVAL_NOISE if self.by_frame else Stream.NOISE
        keys = ("dataset_index", "index") if self.by_frame else (SLOT,)
        numbers = np.stack([columns[key] for key in keys], axis=1).tolist()
        noise_NL = np.empty((len(numbers), self.dims), dtype=np.float32)
        for row, key in enumerate(numbers):
            make_generator(stream, self.seed, *key).standard_normal(out=noise_NL[row], dtype=np.float32)
        return columns | {NOISE: noise_NL}
