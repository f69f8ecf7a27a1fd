"""Bring a decoded picture to the policy's size, as the policy itself would on the device.

`letterbox` repeats LeRobot's `resize_with_pad_torch` (PI0, PI0.5): bilinear without antialiasing, aspect
kept, black bars, the odd pixel to the right and the bottom. On uint8 it differs from LeRobot's float path
by rounding alone, at most 1/255 (a test holds it).
"""

import cv2
import numpy as np

cv2.setNumThreads(1)  # Ray gives a reader one core; OpenCV would take them all


def letterbox_box(recorded_hw: tuple[int, int], target_hw: tuple[int, int]) -> tuple[int, int, int, int]:
    """(top, left, height, width) of the picture inside the target."""
    (height, width), (target_height, target_width) = recorded_hw, target_hw
    ratio = max(width / target_width, height / target_height)
    inner_height, inner_width = int(height / ratio), int(width / ratio)
    return (target_height - inner_height) // 2, (target_width - inner_width) // 2, inner_height, inner_width


def letterbox_into(image_HWC: np.ndarray, out_CHW: np.ndarray) -> None:
    """Resize into a buffer, whatever is in it."""
    top, left, height, width = letterbox_box(image_HWC.shape[:2], out_CHW.shape[1:])
    _blacken_bars(out_CHW, top, left, height, width)
    if image_HWC.shape[:2] != (height, width):
        image_HWC = cv2.resize(image_HWC, (width, height), interpolation=cv2.INTER_LINEAR)
    inside = out_CHW[:, top : top + height, left : left + width]
    cv2.split(
        image_HWC, [inside[0], inside[1], inside[2]]
    )  # straight into the planes: 3 x faster than a transposed copy


def _blacken_bars(out_CHW: np.ndarray, top: int, left: int, height: int, width: int) -> None:
    for bar_CHW in (out_CHW[:, :top], out_CHW[:, top + height :], out_CHW[..., :left], out_CHW[..., left + width :]):
        if bar_CHW.size:
            bar_CHW.fill(0)
