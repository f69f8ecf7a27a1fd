"""Parts shared by flow-matching policies: spec, noise and time samples, padded actions.

Does not import torch, because read tasks use it. The torch side is `modeling.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vlatune.batch import ACTION, NOISE, SLOT, TIME, Columns
from vlatune.policies.base import NoiseSpec, PolicySpec
from vlatune.policies.tokenizer import PromptTokenizer
from vlatune.random_streams import Stream, make_generator

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class FlowSpec(PolicySpec):
    """Spec of a flow-matching policy with a prompt."""

    has_prompt: bool = True
    tokenizer: PromptTokenizer
    vocab_size: int
    """Rows of the embedding table; token ids are below it."""
    max_tokens: int
    flow_time: tuple[float, float, float, float] = (1.5, 1.0, 0.999, 0.001)
    """Time is Beta(first, second) * third + fourth."""


@dataclass(frozen=True)
class PadActions:
    """Pad actions with zeros to the policy's number of dims."""

    dims: int

    def __call__(self, columns: Columns) -> Columns:
        action_NTA = columns[ACTION]
        padded = np.zeros((*action_NTA.shape[:-1], self.dims), dtype=np.float32)
        padded[..., : action_NTA.shape[-1]] = action_NTA
        return columns | {ACTION: padded}


@dataclass(frozen=True)
class FlowNoise:
    """Sample noise and time of flow matching, distributed as in LeRobot.

    Seeded by (seed, slot) in training, so that a repeated frame gets new noise, and by (seed,
    frame) in validation. No RNG state has to be saved, samples do not depend on the number of
    workers, and the device does no sampling.
    """

    seed: int
    horizon: int
    dims: int
    samples: int = 1
    by_frame: bool = False
    alpha: float = 1.5
    beta: float = 1.0
    scale: float = 0.999
    offset: float = 0.001

    def __call__(self, columns: Columns) -> Columns:
        stream = Stream.EVAL_NOISE if self.by_frame else Stream.NOISE
        numbers = columns["index" if self.by_frame else SLOT].tolist()
        noise = np.empty((len(numbers), self.samples, self.horizon, self.dims), dtype=np.float32)
        time = np.empty((len(numbers), self.samples), dtype=np.float32)
        for row, number in enumerate(numbers):
            rng = make_generator(stream, self.seed, number)
            for draw in range(self.samples):  # in sequence: the first must not depend on how many follow
                rng.standard_normal(out=noise[row, draw], dtype=np.float32)
                time[row, draw] = rng.beta(self.alpha, self.beta) * self.scale + self.offset
        return columns | {NOISE: noise, TIME: time}


def make_flow_noise(spec: FlowSpec, noise: NoiseSpec) -> FlowNoise:
    return FlowNoise(noise.seed, spec.horizon, spec.max_action_dim, noise.flow_samples, noise.by_frame, *spec.flow_time)


def camera_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cameras of config.json, including the empty ones that LeRobot adds."""
    named = [key for key, feature in (config["input_features"] or {}).items() if feature["type"] == "VISUAL"]
    if not named:
        raise ValueError("input_features names no camera; write the policy's cameras there")
    empty = [f"observation.images.empty_camera_{number}" for number in range(int(config["empty_cameras"]))]
    return tuple(dict.fromkeys([*named, *empty]))


def mean_over_own_dims(losses_MTP: Tensor, mask_BP: Tensor) -> Tensor:
    """Return each sample's mean, (B,), over noise samples, time steps and its robot's dims."""
    by_sample_BKTP = losses_MTP.unflatten(0, (len(mask_BP), -1))
    own_BP = mask_BP.to(losses_MTP.dtype)
    return (by_sample_BKTP.mean(dim=(1, 2)) * own_BP).sum(dim=1) / own_BP.sum(dim=1)
