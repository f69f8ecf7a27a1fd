"""Resize decoded images to the policy's input size, as the policy would on the device.

The default follows LeRobot's `resize_with_pad_torch`: bilinear without antialiasing, aspect ratio
kept, black bars, the odd pixel at the right and bottom. Other policies pad only at the left and top
(`resize_with_pad`), or stretch with antialiasing (torchvision's `Resize`). uint8 results differ
from LeRobot's float path only by rounding, at most 1/255.
"""

from typing import Literal

import cv2
import numpy as np
from PIL import Image

cv2.setNumThreads(1)  # Ray assigns one core to a reader; OpenCV would use all


Pad = Literal["centre", "left_top", "none"]
"""Position of the bars: both sides, left and top only, or none (stretch)."""


def letterbox_box(
    recorded_hw: tuple[int, int], target_hw: tuple[int, int], *, pad: Pad = "centre"
) -> tuple[int, int, int, int]:
    """Return (top, left, height, width) of the image inside the target."""
    (height, width), (target_height, target_width) = recorded_hw, target_hw
    ratio = max(width / target_width, height / target_height)
    inner_height, inner_width = int(height / ratio), int(width / ratio)
    parts = 2 if pad == "centre" else 1
    return (target_height - inner_height) // parts, (target_width - inner_width) // parts, inner_height, inner_width


def resize_into(image_HWC: np.ndarray, out_CHW: np.ndarray, *, pad: Pad = "centre") -> None:
    """Resize into a buffer and overwrite all of it."""
    top, left, height, width = 0, 0, *out_CHW.shape[1:]
    if pad != "none":
        top, left, height, width = letterbox_box(image_HWC.shape[:2], out_CHW.shape[1:], pad=pad)
    for bar_CHW in (out_CHW[:, :top], out_CHW[:, top + height :], out_CHW[..., :left], out_CHW[..., left + width :]):
        bar_CHW.fill(0)
    if image_HWC.shape[:2] != (height, width):
        if pad == "none":  # PIL's filter matches torchvision's antialiasing
            image_HWC = np.asarray(Image.fromarray(image_HWC).resize((width, height), Image.Resampling.BILINEAR))
        else:
            image_HWC = cv2.resize(image_HWC, (width, height), interpolation=cv2.INTER_LINEAR)
    inside = out_CHW[:, top : top + height, left : left + width]
    cv2.split(image_HWC, [inside[0], inside[1], inside[2]])  # directly into the planes; faster than a transposed copy
