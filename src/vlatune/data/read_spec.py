"""What to read from a dataset: vectors, cameras and how they are delivered. Plain values."""

from dataclasses import dataclass

import numpy as np

from vlatune.data.frames.cache import CacheSettings
from vlatune.data.frames.frame_source import CameraSpec, Unit
from vlatune.storage.root import Root

INDEX_COLUMNS = ("index", "episode_index", "frame_index", "timestamp", "task_index")
DERIVABLE = ("index", "frame_index", "timestamp", "task_index")
"""Index columns that a data file may lack; they are then derived from meta/."""


@dataclass(frozen=True)
class VectorSpec:
    name: str
    dtype: str
    shape: tuple[int, ...]
    """Recorded shape."""
    offsets: tuple[int, ...] | None = None
    recorded_dtype: str | None = None
    """The dtype in info.json; not checked when None."""
    called: str | None = None
    """Name of the delivered column; the dataset's own name when None."""
    widened: int | None = None
    """Zero-pad the delivered vector to this many dims; not padded when None."""
    dims: tuple[int, ...] | None = None
    """Recorded dims to use, in this order; all when None."""

    @property
    def column(self) -> str:
        return self.called or self.name

    @property
    def delivered_shape(self) -> tuple[int, ...]:
        if self.widened is not None:
            return (self.widened,)
        return self.shape if self.dims is None else (len(self.dims),)

    def used(self, values: np.ndarray) -> np.ndarray:
        """Return the used dims of recorded rows, (n, *shape)."""
        values = values.reshape(len(values), *self.shape)
        return values if self.dims is None else values.take(self.dims, axis=1)


@dataclass(frozen=True)
class ReadSpec:
    """Describes what to read from one dataset."""

    root: Root
    dataset_index: int
    tolerance_s: float
    cameras: tuple[CameraSpec, ...]
    vectors: tuple[VectorSpec, ...]
    tasks: tuple[str, ...]
    absent: tuple[CameraSpec, ...] = ()
    """Cameras that only other datasets have; their columns are filled with black images."""
    fps: float | None = None
    """Locate frames by frame_index / fps; use the recorded timestamps when None."""
    cache: CacheSettings | None = None
    """Keep decoded frames on the local disk; not cached when None."""

    @property
    def columns(self) -> list[str]:
        """Columns to read from a data file; those in DERIVABLE may be missing."""
        return [*INDEX_COLUMNS, *(vector.name for vector in self.vectors)]

    def place(self, unit: Unit) -> str:
        """Return dataset, episode and data file, for messages."""
        return f"dataset '{self.root.url}': episode {unit.episode_index}, {unit.data_path}"
