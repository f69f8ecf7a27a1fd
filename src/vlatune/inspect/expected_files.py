"""Which files the metadata points to, and how many frames each mp4 file must have. Pure, over the columns of `Episodes`."""

import numpy as np

from vlatune.dataset.listing import one_per_file
from vlatune.dataset.meta import DatasetMeta


def data_rows(meta: DatasetMeta) -> dict[str, int]:
    """Data file -> rows that it must have, up to the end of its last episode."""
    positions, group = one_per_file(meta)
    ends = np.zeros(len(positions), dtype=np.int64)
    np.maximum.at(ends, group, meta.episodes.data_offset + meta.episodes.length)
    return dict(zip((meta.data_path(position) for position in positions), ends.tolist(), strict=True))


def video_files(meta: DatasetMeta, camera: str, *, fps: float) -> dict[str, int]:
    """mp4 file of a camera -> frames that it must have at this rate, up to the last row of its last episode.

    Empty for a camera whose pictures are in the data files.
    """
    if camera not in meta.episodes.videos:
        return {}
    last_s = meta.episodes.videos[camera].from_s + (meta.episodes.length - 1) / meta.fps
    frames = np.round(np.nan_to_num(last_s) * fps).astype(np.int64) + 1
    positions, group = one_per_file(meta, camera)
    most = np.zeros(len(positions), dtype=np.int64)
    np.maximum.at(most, group, frames)
    names = (meta.video_path(position, camera) for position in positions)
    return dict(zip(names, most.tolist(), strict=True))
