"""A frame's (episode, frame) burned into its picture, so that a test can ask a pixel array where it came from.

Six by six black or white cells fill the top-left square of side H/4, H the picture's height. Row by row they hold
16 bits of episode index, 12 of frame index and 8 of checksum. Cells are grey levels only and are read at their
middle, so an id survives lossy video (4:2:0 chroma) and a bilinear resize down to cells of two pixels; what does not
carry an id reads as None, flat black or white included.

Letterboxed pictures need the content's `box`: `resize.letterbox_box` says where LeRobot's `resize_with_pad_torch` puts it.
"""

import binascii
from functools import lru_cache

import numpy as np

GRID = 6
"""Cells per side."""
CORNER_SHARE = 4
"""The square's side is the picture's height over this."""
MAX_EPISODES = 1 << 16
MAX_FRAMES = 1 << 12
MIN_HEIGHT = 48
"""Pixels: below it a cell is narrower than two of them."""

_NUM_BITS = GRID * GRID
_SHIFTS = np.arange(_NUM_BITS - 1, -1, -1, dtype=np.uint64)
_CHECKERBOARD = 0b101010_010101_101010_010101_101010_010101  # turned over in every id, so that none is flat
_LUMA_WEIGHTS = np.array([0.299, 0.587, 0.114], np.float32)


def draw_frame_id(image_HWC: np.ndarray, episode_index: int, frame_index: int) -> None:
    """Write the id over the picture's top-left corner, in place."""
    height, width = image_HWC.shape[:2]
    if not (0 <= episode_index < MAX_EPISODES and 0 <= frame_index < MAX_FRAMES):
        raise ValueError(
            f"frame id ({episode_index}, {frame_index}): an id holds {MAX_EPISODES} episodes of {MAX_FRAMES} frames"
        )
    if height < MIN_HEIGHT or width * CORNER_SHARE < height:
        raise ValueError(
            f"picture of {height}x{width}: a frame id needs a height of {MIN_HEIGHT} or more and a width of height/4 or more"
        )
    cells = _cell_of_pixel(height)
    image_HWC[: len(cells), : len(cells)] = _grid(episode_index, frame_index)[np.ix_(cells, cells)][..., None]


def read_frame_id(image: np.ndarray, *, box: tuple[int, int, int, int] | None = None) -> tuple[int, int] | None:
    """The (episode, frame) drawn into a uint8 picture, HWC or CHW; None where no intact id is.

    `box` is the content's (top, left, height, width) when the picture has padding around it.
    """
    image_HWC = _channels_last(np.asarray(image))
    top, left, height, _ = box or (0, 0, *image_HWC.shape[:2])
    weights_GP = _cell_weights(height)
    side = weights_GP.shape[1]
    luma_PP = image_HWC[top : top + side, left : left + side] @ _LUMA_WEIGHTS
    bits_GG = weights_GP @ luma_PP @ weights_GP.T > 127.5
    return _unpack(int((bits_GG.reshape(-1).astype(np.uint64) << _SHIFTS).sum()))


def _grid(episode_index: int, frame_index: int) -> np.ndarray:
    """The cells' grey levels, (GRID, GRID)."""
    packed = (episode_index << 20 | frame_index << 8 | _checksum(episode_index, frame_index)) ^ _CHECKERBOARD
    bits = np.uint64(packed) >> _SHIFTS & np.uint64(1)
    return (bits * 255).astype(np.uint8).reshape(GRID, GRID)


def _unpack(packed: int) -> tuple[int, int] | None:
    packed ^= _CHECKERBOARD
    episode_index, frame_index, checksum = packed >> 20, packed >> 8 & 0xFFF, packed & 0xFF
    return (episode_index, frame_index) if checksum == _checksum(episode_index, frame_index) else None


def _checksum(episode_index: int, frame_index: int) -> int:
    """Eight bits of CRC-16; the start value keeps flat pictures from being valid ids."""
    return binascii.crc_hqx((episode_index << 12 | frame_index).to_bytes(4, "big"), 0xFFFF) & 0xFF


@lru_cache(maxsize=64)
def _cell_of_pixel(height: int) -> np.ndarray:
    """For each pixel along the square's side, the cell that its middle lies in."""
    middles = np.arange(round(height / CORNER_SHARE)) + 0.5
    return np.minimum((middles * GRID * CORNER_SHARE / height).astype(int), GRID - 1)


@lru_cache(maxsize=64)
def _cell_weights(height: int) -> np.ndarray:
    """(GRID, pixels) weights that average, for each cell, the pixels in the inner half of it, or else the middle one."""
    cell = height / (GRID * CORNER_SHARE)
    middles = np.arange(round(height / CORNER_SHARE)) + 0.5
    distance_GP = np.abs(middles[None, :] - (np.arange(GRID)[:, None] + 0.5) * cell)
    reach_G1 = np.maximum(cell / 4, distance_GP.min(axis=1, keepdims=True))
    inner_GP = (distance_GP <= reach_G1 + 1e-6).astype(np.float32)
    return inner_GP / inner_GP.sum(axis=1, keepdims=True)


def _channels_last(image: np.ndarray) -> np.ndarray:
    if image.dtype != np.uint8 or image.ndim != 3 or 3 not in (image.shape[0], image.shape[-1]):
        raise ValueError(
            f"picture of {image.dtype} {image.shape}: expected uint8, (height, width, 3) or (3, height, width); "
            "LeRobotDataset gives it with return_uint8=True"
        )
    return image if image.shape[-1] == 3 else image.transpose(1, 2, 0)
