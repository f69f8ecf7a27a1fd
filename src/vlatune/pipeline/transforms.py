"""What happens to rows on the CPU before the policy sees them: small frozen callables, columns -> columns.

Here are those that every policy may use; what belongs to some only lies with them (`policies/`). Each repeats one step of
LeRobot's processors on numpy columns, equal to the last bit (tests hold it against LeRobot's own), without torch, so that a
read worker need not import it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from vlatune.batch import ACTION, ACTION_DIM_MASK, CAMERA_MASK, DATASET, STATE, TOKEN_MASK, TOKENS, Columns

PROMPT_MULTIPLE = 8
"""Prompts are cut to a multiple of this: few different shapes for the allocator and for torch.compile."""
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
    """q99, max or std. Of several robots both are tables, (datasets, dims): a row takes its dataset's line."""

    def __call__(self, columns: Columns) -> Columns:
        values = columns[self.key]
        own = self.of_rows(columns["dataset_index"], values.ndim) if self.low.ndim == 2 else self
        return columns | {self.key: own.forward(values)}

    def of_rows(self, dataset_N: np.ndarray, ndim: int) -> "Normalise":
        """Out of the tables, ready for values of so many axes."""
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
class MixtureMasks:
    """Of several robots: what of a row its own robot has, for the module to leave the rest out."""

    action_dims: tuple[int, ...]
    """Of each dataset."""
    cameras: tuple[tuple[bool, ...], ...]
    """Of each dataset, whether it has the cameras, in the order in which the module has them."""
    dims: int
    """Of the padded actions."""

    def __call__(self, columns: Columns) -> Columns:
        dataset_N = columns["dataset_index"]
        has_dim_DP = np.arange(self.dims) < np.array(self.action_dims)[:, None]
        masks = {ACTION_DIM_MASK: has_dim_DP[dataset_N], CAMERA_MASK: np.array(self.cameras, dtype=bool)[dataset_N]}
        return columns | masks | {DATASET: dataset_N}


@dataclass(frozen=True)
class Select:
    """Keep these columns only; strings and what the policy does not use stay behind."""

    keys: tuple[str, ...] = field(default=())

    def __call__(self, columns: Columns) -> Columns:
        return {key: columns[key] for key in self.keys}


def cut_prompts(columns: Columns) -> Columns:
    """Tokens and their mask cut behind the batch's longest prompt, rounded up; what is cut off is padding in every row.

    mask_BL   1 1 1 0 0 0 0 0 0 0 ... 0        longest 3 -> 8 of 200 columns stay
              1 1 0 0 0 0 0 0 0 0 ... 0
    """
    used = np.flatnonzero(columns[TOKEN_MASK].any(axis=0))
    longest = int(used[-1]) + 1 if len(used) else 1  # a policy is never given prompts of no columns at all
    kept = -(-longest // PROMPT_MULTIPLE) * PROMPT_MULTIPLE  # beyond the last column a slice ends by itself
    return columns | {key: columns[key][:, :kept] for key in (TOKENS, TOKEN_MASK)}
