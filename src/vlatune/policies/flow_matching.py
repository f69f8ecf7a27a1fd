"""What vision-language-action policies that learn by flow matching share: their spec, draws of noise and time, wide actions.

Without torch: read tasks run these. The torch side that they share is `modeling.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vlatune.batch import ACTION, NOISE, SLOT, TIME, Columns
from vlatune.policies.base import Draw, PolicySpec
from vlatune.random_streams import Stream, make_generator

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class FlowSpec(PolicySpec):
    """Of a policy that reads a prompt and learns to undo noise."""

    has_prompt: bool = True
    tokenizer_file: str = ""
    pad_id: int
    max_tokens: int
    flow_time: tuple[float, float, float, float] = (1.5, 1.0, 0.999, 0.001)
    """Time is Beta(first, second) * third + fourth."""


@dataclass(frozen=True)
class PadActions:
    """Actions widened with zeros to the policy's number of dims."""

    dims: int

    def __call__(self, columns: Columns) -> Columns:
        action_NTA = columns[ACTION]
        padded = np.zeros((*action_NTA.shape[:-1], self.dims), dtype=np.float32)
        padded[..., : action_NTA.shape[-1]] = action_NTA
        return columns | {ACTION: padded}


@dataclass(frozen=True)
class DrawFlow:
    """Noise and time of flow matching: in training a pure function of (seed, place in the run's order), so that a frame
    that comes again draws anew; for validation of (seed, frame), the same whenever a frame is looked at.

    No generator's state has to be saved, the draws do not depend on the number of workers, and nothing is
    drawn on the device's critical path. Distribution as LeRobot's: N(0, 1) and Beta(alpha, beta) * scale + offset.
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
        keys = ("dataset_index", "index") if self.by_frame else (SLOT,)
        numbers = np.stack([columns[key] for key in keys], axis=1).tolist()
        noise = np.empty((len(numbers), self.samples, self.horizon, self.dims), dtype=np.float32)
        time = np.empty((len(numbers), self.samples), dtype=np.float32)
        for row, key in enumerate(numbers):
            rng = make_generator(stream, self.seed, *key)
            for draw in range(self.samples):  # one after the other: the first does not depend on how many follow
                rng.standard_normal(out=noise[row, draw], dtype=np.float32)
                time[row, draw] = rng.beta(self.alpha, self.beta) * self.scale + self.offset
        return columns | {NOISE: noise, TIME: time}


def draw_flow(spec: FlowSpec, draw: Draw) -> DrawFlow:
    """Of a policy's chunks."""
    return DrawFlow(draw.seed, spec.horizon, spec.max_action_dim, draw.flow_samples, draw.by_frame, *spec.flow_time)


def camera_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Of config.json, with the empty ones, which LeRobot adds when it builds the policy."""
    named = [key for key, feature in (config["input_features"] or {}).items() if feature["type"] == "VISUAL"]
    if not named:
        raise ValueError("input_features names no camera; write the policy's cameras there")
    empty = [f"observation.images.empty_camera_{number}" for number in range(int(config["empty_cameras"]))]
    return tuple(dict.fromkeys([*named, *empty]))


def mean_over_own_dims(losses_MTP: Tensor, mask_BP: Tensor) -> Tensor:
    """(B,): each sample's mean over its draws, time steps and the action dims that its robot has. M is B times the draws."""
    by_sample_BKTP = losses_MTP.unflatten(0, (len(mask_BP), -1))
    own_BP = mask_BP.to(losses_MTP.dtype)
    return (by_sample_BKTP.mean(dim=(1, 2)) * own_BP).sum(dim=1) / own_BP.sum(dim=1)
