"""What happens to rows on the CPU before the policy sees them: small frozen callables, columns -> columns.

Here are those that every policy may use; what belongs to some only lies with them (`policies/`). Each repeats one step of
LeRobot's processors on numpy columns, equal to the last bit (tests hold it against LeRobot's own), without torch, so that a
read worker need not import it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from vlatune.batch import ACTION, STATE, Columns

NORMALISE_EPS = np.float32(1e-8)
"""LeRobot's `NormalizerProcessorStep.eps`."""


class Transform(Protocol):
    def __call__(self, columns: Columns) -> Columns: ...


def apply_all(transforms: Sequence[Transform], columns: Columns) -> Columns:
    for transform in transforms:
        columns = transform(columns)
    return columns


@dataclass(frozen=True)
class Rename:
    """Columns under the policy's names instead of the dataset's."""

    names: Mapping[str, str]

    def __call__(self, columns: Columns) -> Columns:
        return {self.names.get(name, name): values for name, values in columns.items()}


@dataclass(frozen=True)
class Normalise:
    """One column onto the policy's scale: QUANTILES, MIN_MAX or MEAN_STD, as LeRobot does."""

    key: str
    mode: str
    low: np.ndarray
    """q01, min or mean."""
    high: np.ndarray
    """q99, max or std."""

    def __call__(self, columns: Columns) -> Columns:
        return columns | {self.key: self.forward(columns[self.key])}

    def forward(self, values: np.ndarray) -> np.ndarray:
        low, high = self.low.astype(np.float32), self.high.astype(np.float32)
        if self.mode == "MEAN_STD":
            return (values - low) / (high + NORMALISE_EPS)
        return np.float32(2.0) * (values - low) / _span(low, high) - np.float32(1.0)

    def inverse(self, values: np.ndarray) -> np.ndarray:
        low, high = self.low.astype(np.float32), self.high.astype(np.float32)
        if self.mode == "MEAN_STD":
            return values * high + low
        return (values + np.float32(1.0)) * _span(low, high) / np.float32(2.0) + low


@dataclass(frozen=True)
class RelativeActions:
    """Actions as the way from the row's state, before both are normalised; as LeRobot does."""

    is_relative: tuple[bool, ...]
    """Of each action dim; the others stay as they are."""

    def __call__(self, columns: Columns) -> Columns:
        return columns | {ACTION: columns[ACTION] - self._offset(columns[STATE])}

    def inverse(self, action_NTA: np.ndarray, state_NS: np.ndarray) -> np.ndarray:
        return action_NTA + self._offset(state_NS)

    def _offset(self, state_NS: np.ndarray) -> np.ndarray:
        mask_A = np.array(self.is_relative, dtype=np.float32)
        return (state_NS[:, : len(mask_A)] * mask_A)[:, None]


def _span(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    span = high - low
    return np.where(span == 0, NORMALISE_EPS, span)


@dataclass(frozen=True)
class Select:
    """Keep these columns only; strings and what the policy does not use stay behind."""

    keys: tuple[str, ...] = field(default=())

    def __call__(self, columns: Columns) -> Columns:
        return {key: columns[key] for key in self.keys}
