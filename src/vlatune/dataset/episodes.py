"""The episodes of a dataset as columns: a numpy value per episode, so that 10^5 of them are a few MB."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class VideoSpan:
    """Where the episodes' frames are in one camera's mp4 files, a value per episode."""

    chunk: np.ndarray
    file: np.ndarray
    from_s: np.ndarray
    to_s: np.ndarray


@dataclass(frozen=True)
class Episodes:
    """A value per episode, in the order of `index`."""

    index: np.ndarray
    length: np.ndarray
    from_row: np.ndarray
    """The dataset-wide `index` of the episode's first frame."""
    data_chunk: np.ndarray
    data_file: np.ndarray
    data_offset: np.ndarray
    """Row of the episode's first frame inside its parquet file."""
    videos: Mapping[str, VideoSpan]

    def __len__(self) -> int:
        return len(self.index)
