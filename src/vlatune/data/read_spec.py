"""Describe what to read from a dataset and how it is delivered (`ReadSpec`), and where it is stored (`Unit`)."""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from vlatune.data.frames.recorded import Recorded
from vlatune.data.frames.resize import Pad
from vlatune.storage.root import Root

INDEX_COLUMNS = ("index", "episode_index", "frame_index", "timestamp", "task_index")
DERIVABLE = ("index", "frame_index", "timestamp", "task_index")
"""Index columns that a data file may lack; they are then derived from meta/."""


@dataclass(frozen=True)
class CameraSpec:
    name: str
    kind: str
    """`video` or `image`: how the dataset stores it; `absent` for a camera of other datasets."""
    height: int
    width: int
    """Size of the delivered image in pixels."""
    offsets: tuple[int, ...] | None = None
    """Frame offsets to deliver along a second axis; only the row's own frame when None."""
    recorded: Recorded | None = None
    """Image properties stated in info.json; not checked when None."""
    called: str | None = None
    """Name of the delivered column; the dataset's own name when None."""
    pad: Pad = "centre"
    """How images are resized to the delivered size."""

    @property
    def column(self) -> str:
        return self.called or self.name

    def empty(self, *shape: int) -> np.ndarray:
        """Return an uninitialised array for rows with these leading dims."""
        return np.empty((*shape, 3, self.height, self.width), dtype=np.uint8)


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

    def empty(self, *shape: int) -> np.ndarray:
        """Return an uninitialised array for rows with these leading dims."""
        delivered = self.shape if self.dims is None else (len(self.dims),)
        delivered = delivered if self.widened is None else (self.widened,)
        return np.empty((*shape, *delivered), dtype=self.dtype)

    def used(self, values: np.ndarray) -> np.ndarray:
        """Return the used dims of recorded rows, (n, *shape)."""
        values = values.reshape(len(values), *self.shape)
        return values if self.dims is None else values.take(self.dims, axis=1)


@dataclass(frozen=True)
class Unit:
    """Some frames of one episode and the files they are read from."""

    dataset_index: int
    episode_index: int
    length: int
    from_row: int
    data_path: str
    data_offset: int
    videos: tuple[tuple[str, str, float], ...]
    """(camera, file, start of the episode in the file in seconds)."""
    frames: np.ndarray
    slots: np.ndarray
    """Position of each row in the consumer's order."""
    task: int = -1
    """Task index of the episode, see `Episodes.task`."""
    has_own_videos: bool = False
    """True if its mp4 files contain no other episode."""
    num_video_frames: int | None = None
    """Required number of frames of its mp4 files; not checked when None."""
    skips_images: bool | None = None
    """True if its images are not needed, because the samples' prefix is kept; None if no run keeps it."""


@dataclass(frozen=True)
class CacheSettings:
    """Folder and budget of a run's frame cache; every reader receives them."""

    folder: str
    max_bytes: int
    reserve_bytes: int
    """Free bytes to leave on the disk."""
    started_s: float
    """Start of the run (seconds since the epoch); parts not used since then may be evicted."""

    def leaving(self, num_bytes: int) -> "CacheSettings":
        """Return settings for parts that leave this much of the budget to others."""
        max_bytes = max(0, self.max_bytes - num_bytes)
        return replace(self, max_bytes=max_bytes, reserve_bytes=self.reserve_bytes + num_bytes)


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


def frame_place(root: Root, episode_index: int, camera: str, file: str) -> str:
    """Return where the images of an episode are stored, for messages."""
    return f"dataset '{root.url}': episode {episode_index}, camera '{camera}', {file}"


class FrameSource(Protocol):
    """Frames of one camera: mp4 files (decoder.py), images in parquet (images.py), the cache (cache.py)."""

    def read_into(self, unit: Unit, frames: np.ndarray, times_s: np.ndarray, out: np.ndarray) -> int:
        """Fill row n of `out` with frame `frames[n]` of the unit's episode, recorded at `times_s[n]`.

        `frames` do not descend. Return how many frames came from a cache.
        """
        ...
