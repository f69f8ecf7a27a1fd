"""Bring a decoded picture to the policy's size, as the policy itself would on the device.

`letterbox` repeats LeRobot's `resize_with_pad_torch`: bilinear without antialiasing, aspect kept, black bars,
the odd pixel to the right and the bottom. Other policies put all of the bars to the left and the top
(`resize_with_pad`), or have none and stretch, with antialiasing (torchvision's `Resize`). On uint8 it differs from LeRobot's float path by rounding alone, at most 1/255 (a test holds it).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import cv2
import numpy as np
from PIL import Image

cv2.setNumThreads(1)  # Ray gives a reader one core; OpenCV would take them all


Pad = Literal["centre", "left_top", "none"]
"""Where the bars are: on both sides, or to the left and the top only; none: the picture is stretched."""


class PictureTransform(Protocol):
    """Changes a picture as it was recorded, in training: pure in the picture and the row's place in the run's order."""

    def __call__(self, image_HWC: np.ndarray, slot: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Letterbox:
    """How a decoded picture gets the delivered size."""

    pad: Pad = "centre"
    before: tuple[PictureTransform, ...] = ()
    """What is done to it before."""
    slot: int = 0
    """Of the row that it is for; only told to `before`."""

    def into(self, image_HWC: np.ndarray, out_CHW: np.ndarray) -> None:
        for transform in self.before:
            image_HWC = transform(image_HWC, self.slot)
        if self.pad == "none":
            stretch_into(image_HWC, out_CHW)
        else:
            letterbox_into(image_HWC, out_CHW, pad=self.pad)


CENTRED = Letterbox()


@dataclass(frozen=True, kw_only=True)
class Spread(Letterbox):
    """Of pictures that several rows look at: each goes to all of them, in the way of each."""

    targets: Iterator[Sequence[tuple[Letterbox, np.ndarray]]]
    """For each picture, in the order in which they are decoded."""

    def into(self, image_HWC: np.ndarray, out_CHW: np.ndarray) -> None:
        """`out_CHW` is not where it goes."""
        for letterbox, place_CHW in next(self.targets):
            letterbox.into(image_HWC, place_CHW)


def letterbox_box(
    recorded_hw: tuple[int, int], target_hw: tuple[int, int], *, pad: Pad = "centre"
) -> tuple[int, int, int, int]:
    """(top, left, height, width) of the picture inside the target."""
    (height, width), (target_height, target_width) = recorded_hw, target_hw
    ratio = max(width / target_width, height / target_height)
    inner_height, inner_width = int(height / ratio), int(width / ratio)
    parts = 2 if pad == "centre" else 1
    return (target_height - inner_height) // parts, (target_width - inner_width) // parts, inner_height, inner_width


def letterbox_into(image_HWC: np.ndarray, out_CHW: np.ndarray, *, pad: Pad = "centre") -> None:
    """Resize into a buffer, whatever is in it."""
    top, left, height, width = letterbox_box(image_HWC.shape[:2], out_CHW.shape[1:], pad=pad)
    _blacken_bars(out_CHW, top, left, height, width)
    if image_HWC.shape[:2] != (height, width):
        image_HWC = cv2.resize(image_HWC, (width, height), interpolation=cv2.INTER_LINEAR)
    inside = out_CHW[:, top : top + height, left : left + width]
    cv2.split(
        image_HWC, [inside[0], inside[1], inside[2]]
    )  # straight into the planes: 3 x faster than a transposed copy


def stretch_into(image_HWC: np.ndarray, out_CHW: np.ndarray) -> None:
    """The same without bars. PIL's filter is the one that torchvision's antialiasing repeats on floats."""
    height, width = out_CHW.shape[1:]
    if image_HWC.shape[:2] != (height, width):
        image_HWC = np.asarray(Image.fromarray(image_HWC).resize((width, height), Image.Resampling.BILINEAR))
    cv2.split(image_HWC, [out_CHW[0], out_CHW[1], out_CHW[2]])


def _blacken_bars(out_CHW: np.ndarray, top: int, left: int, height: int, width: int) -> None:
    for bar_CHW in (out_CHW[:, :top], out_CHW[:, top + height :], out_CHW[..., :left], out_CHW[..., left + width :]):
        if bar_CHW.size:
            bar_CHW.fill(0)
