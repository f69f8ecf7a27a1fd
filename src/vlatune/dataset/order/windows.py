"""From a frame and its offsets to row numbers and pad masks. Pure.

    episode of 5 frames, offsets 0..3, frame 3:   frames 3 4 4 4   pad . . x x
                                                             ^clamped to the last frame

LeRobot clamps at both ends of the episode and marks what it clamped; so do we.
"""

from collections.abc import Sequence

import numpy as np


def window_frames(frame_index_N: np.ndarray, offsets_T: Sequence[int], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Frame numbers (N, T) inside an episode of `length` frames, and True where the offset left the episode."""
    wanted_NT = frame_index_N[:, None] + np.asarray(offsets_T, dtype=np.int64)[None, :]
    is_pad_NT = (wanted_NT < 0) | (wanted_NT >= length)
    return np.clip(wanted_NT, 0, length - 1), is_pad_NT


def offsets_from_timestamps(deltas_s: Sequence[float], fps: float, tolerance_s: float, key: str) -> tuple[int, ...]:
    """Offsets in frames for offsets in seconds, refused where a delta does not lie on the frame grid."""
    offsets = tuple(round(delta * fps) for delta in deltas_s)
    for delta, offset in zip(deltas_s, offsets, strict=True):
        if abs(delta - offset / fps) > tolerance_s:
            raise ValueError(
                f"delta_timestamps['{key}']: {delta} s is not a multiple of 1/{fps} s (nearest {offset / fps:.6f} s); "
                f"use multiples of the frame time"
            )
    return offsets
