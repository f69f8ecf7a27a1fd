"""Host columns -> a batch as the policy takes it: ids set apart, the prompt's padding cut. Pure numpy, but for wrapping.

Everything that decides a tensor's shape is decided here, on the host, before a byte goes to the device: asking the
device for the longest prompt would make the host wait for it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vlatune.batch import IDS, SLOT, TOKEN_MASK, TOKENS, Columns

PROMPT_MULTIPLE = 8
"""Prompts are cut to a multiple of this: few different shapes for the allocator and for torch.compile."""


@dataclass(frozen=True)
class DeviceBatch:
    tensors: dict[str, Tensor]
    samples: np.ndarray
    """(B, 2): dataset_index and index of every row, on the host."""


@dataclass(frozen=True)
class HostBatch:
    columns: Columns
    """What goes to the device, key by key; views of the feed's arrays."""
    samples: np.ndarray

    def wrapped(self) -> DeviceBatch:
        """Tensors over the same memory; only a column that was cut is copied, to be in one piece again."""
        whole = {key: np.ascontiguousarray(values) for key, values in self.columns.items()}
        return DeviceBatch({key: torch.from_numpy(values) for key, values in whole.items()}, self.samples)


def collate(columns: Columns) -> HostBatch:
    """A batch of the feed as the policy takes it."""
    samples = np.stack([columns["dataset_index"], columns["index"]], axis=1)
    if TOKEN_MASK in columns:
        columns = cut_prompts(columns)
    return HostBatch({key: values for key, values in columns.items() if key not in (*IDS, SLOT)}, samples)


def cut_prompts(columns: Columns) -> Columns:
    """Tokens and their mask cut behind the batch's longest prompt, rounded up; what is cut off is padding in every row.

    mask_BL   1 1 1 0 0 0 0 0 0 0 ... 0        longest 3 -> 8 of 200 columns stay
              1 1 0 0 0 0 0 0 0 0 ... 0
    """
    used = np.flatnonzero(columns[TOKEN_MASK].any(axis=0))
    longest = int(used[-1]) + 1 if len(used) else 1  # a policy is never given prompts of no columns at all
    kept = -(-longest // PROMPT_MULTIPLE) * PROMPT_MULTIPLE  # beyond the last column a slice ends by itself
    return columns | {key: columns[key][:, :kept] for key in (TOKENS, TOKEN_MASK)}
