"""The interface through which the reader gets the frames of a camera.

Video files (decoder.py), images in parquet (images.py) and the frame cache (cache.py) implement
`FrameSource`. The reader does not know which of them it reads.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vlatune.data.frames.recorded import Recorded
from vlatune.data.frames.resize import Pad


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


class FrameSource(Protocol):
    """Frames of one camera of a dataset."""

    def read_into(self, unit: Unit, frames: np.ndarray, times_s: np.ndarray, out: np.ndarray) -> int:
        """Fill row n of `out` with frame `frames[n]` of the unit's episode, recorded at `times_s[n]`.

        `frames` do not descend. Return how many frames came from a cache.
        """
        ...


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
