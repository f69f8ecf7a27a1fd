"""Transforms of rows on the CPU: small frozen callables, columns -> columns.

Policy-specific transforms are in `policies/`. Each repeats one step of LeRobot's processors on
numpy columns, bitwise equal (tested), without torch, so that read workers need not import it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from vlatune.batch import ACTION, ACTION_DIM_MASK, CAMERA_MASK, DATASET, STATE, TOKEN_MASK, TOKENS, Columns

PROMPT_MULTIPLE = 8
"""Prompts are trimmed to a multiple of this, to limit the number of distinct shapes."""
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
    """Rename columns from the dataset's to the policy's names."""

    names: Mapping[str, str]

    def __call__(self, columns: Columns) -> Columns:
        return {self.names.get(name, name): values for name, values in columns.items()}


@dataclass(frozen=True)
class Normalise:
    """Normalise one column as LeRobot does: QUANTILES, MIN_MAX or MEAN_STD."""

    key: str
    mode: str
    low: np.ndarray
    """q01, min or mean."""
    high: np.ndarray
    """q99, max or std. With several robots, `low` and `high` are (datasets, dims)."""

    def __call__(self, columns: Columns) -> Columns:
        values = columns[self.key]
        own = self.of_rows(columns["dataset_index"], values.ndim) if self.low.ndim == 2 else self
        return columns | {self.key: own.forward(values)}

    def of_rows(self, dataset_N: np.ndarray, ndim: int) -> "Normalise":
        """Return the statistics of each row, broadcastable to values with `ndim` axes."""
        shape = (len(dataset_N), *(1,) * (ndim - 2), -1)
        return replace(self, low=self.low[dataset_N].reshape(shape), high=self.high[dataset_N].reshape(shape))

    def of_dataset(self, number: int, dims: int) -> "Normalise":
        return replace(self, low=self.low[number, :dims], high=self.high[number, :dims])

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
    """Subtract the row's state from actions before normalisation, as LeRobot does."""

    is_relative: np.ndarray
    """True for relative action dims; (datasets, dims) with several robots."""

    def __call__(self, columns: Columns) -> Columns:
        mask = self.is_relative if self.is_relative.ndim == 1 else self.is_relative[columns["dataset_index"]]
        return columns | {ACTION: columns[ACTION] - _state_offset(columns[STATE], mask)}

    def of_dataset(self, number: int, dims: int) -> "RelativeActions":
        return RelativeActions(self.is_relative[number, :dims])

    def inverse(self, action_NTA: np.ndarray, state_NS: np.ndarray) -> np.ndarray:
        return action_NTA + _state_offset(state_NS, self.is_relative)


def _state_offset(state_NS: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the offset of all actions of a chunk, (N, 1, A); `mask` is (A,) or (N, A)."""
    return (state_NS[:, : mask.shape[-1]] * mask.astype(np.float32))[:, None]


def _span(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    span = high - low
    return np.where(span == 0, NORMALISE_EPS, span)


@dataclass(frozen=True)
class MixtureMasks:
    """Add masks of the dims and cameras that each row's robot has."""

    action_dims: tuple[int, ...]
    """Number of action dims of each dataset."""
    cameras: tuple[tuple[bool, ...], ...]
    """True for each camera that a dataset has, in the order of the module."""
    dims: int
    """Number of padded action dims."""

    def __call__(self, columns: Columns) -> Columns:
        dataset_N = columns["dataset_index"]
        has_dim_DP = np.arange(self.dims) < np.array(self.action_dims)[:, None]
        masks = {ACTION_DIM_MASK: has_dim_DP[dataset_N], CAMERA_MASK: np.array(self.cameras, dtype=bool)[dataset_N]}
        return columns | masks | {DATASET: dataset_N}


@dataclass(frozen=True)
class Select:
    """Keep only these columns."""

    keys: tuple[str, ...] = field(default=())

    def __call__(self, columns: Columns) -> Columns:
        return {key: columns[key] for key in self.keys}


def cut_prompts(columns: Columns) -> Columns:
    """Trim tokens and mask to the longest prompt of the batch, rounded up.

    mask_BL   1 1 1 0 0 0 0 0 0 0 ... 0        longest 3 -> 8 of 200 columns remain
              1 1 0 0 0 0 0 0 0 0 ... 0
    """
    used = np.flatnonzero(columns[TOKEN_MASK].any(axis=0))
    longest = int(used[-1]) + 1 if len(used) else 1  # keep at least one column
    kept = -(-longest // PROMPT_MULTIPLE) * PROMPT_MULTIPLE  # slices may exceed the array
    return columns | {key: columns[key][:, :kept] for key in (TOKENS, TOKEN_MASK)}
