"""Colours and maps of a picture, as torchvision computes them: pure, on (H, W, 3) of uint8, RGB.

OpenCV rounds where torchvision cuts off: hence CUT.
"""

import math
import threading

import cv2
import numpy as np

GRAY = (0.2989, 0.587, 0.114)
"""torchvision's weights of red, green and blue."""
CUT = -0.498
"""Added before OpenCV rounds, where torchvision cuts off; not -0.5, which would take whole numbers down, too."""
TO_GRAY_34 = np.tile(np.array([*GRAY, CUT - 0.5]), (3, 1))
AS_IS_34 = np.column_stack([np.eye(3), np.full(3, CUT)])
"""Mixes of red, green, blue and 1 that a saturation lies between; torchvision cuts the gray picture, too: half a level, in the mean."""
Span = tuple[float, float]
Map = tuple[Span, Span]
"""A linear map of the plane: two rows."""


def adjust_brightness(image_HWC: np.ndarray, factor: float) -> np.ndarray:
    return cv2.convertScaleAbs(image_HWC, alpha=factor, beta=CUT)


def adjust_contrast(image_HWC: np.ndarray, factor: float) -> np.ndarray:
    """Away from the mean of the gray picture, which torchvision cuts down to whole levels first: half a level, in the mean."""
    sums = cv2.sumElems(image_HWC)  # seven times as fast as cv2.mean
    mean = sum(weight * one for weight, one in zip(GRAY, sums, strict=False)) / (image_HWC.size // 3) - 0.5
    return cv2.addWeighted(image_HWC, factor, image_HWC, 0.0, (1 - factor) * mean + CUT)


def adjust_saturation(image_HWC: np.ndarray, factor: float) -> np.ndarray:
    """Away from the gray picture: a mix of the three colours, in one pass."""
    return cv2.transform(image_HWC, (1 - factor) * TO_GRAY_34 + factor * AS_IS_34)


def adjust_hue(image_HWC: np.ndarray, turn: float) -> np.ndarray:
    """Exact to a level, and in bytes: HSV in float32 takes half as long again, with hues of 8 bits it is off by up to six.

    A third of a turn hands every plane to the next one. What is left of a turn is a sixth at most, forwards, or backwards:
    then it is forwards with two planes swapped.
    """
    thirds = round(3 * turn)
    sixths = 6 * turn - 2 * thirds
    order = (0, 1, 2) if sixths >= 0 else (0, 2, 1)
    memory = _memory(image_HWC.shape[:2])
    cv2.split(image_HWC, [memory[place] for place in order])
    turned_3HW = _turn_planes(memory, abs(sixths))
    return cv2.merge([turned_3HW[(order[(place - thirds) % 3] - 1) % 3] for place in range(3)], image_HWC)


def _turn_planes(memory: np.ndarray, sixths: float) -> np.ndarray:
    """The first three planes, turned and in the order (1, 2, 0).

    Two planes of a pixel have its most and its least, the third one says how far its hue is between them. Turned by a part of
    the span between most and least, each is least + own - next + (part if the plane before is the most, else span - part),
    kept between least and most.
    """
    planes_5HW, added_3HW, made_3HW, below_3HW = memory[:5], memory[5:8], memory[8:11], memory[11:14]
    most_HW, least_HW, part_HW = memory[14:]
    planes_5HW[3:] = planes_5HW[:2]
    for extreme, made_HW in ((np.maximum, most_HW), (np.minimum, least_HW)):
        extreme(extreme(planes_5HW[0], planes_5HW[1], out=made_HW), planes_5HW[2], out=made_HW)
    for before_HW, is_most_HW in zip(planes_5HW, added_3HW, strict=False):
        cv2.compare(before_HW, most_HW, cv2.CMP_EQ, is_most_HW)  # 255 or 0: the bits of one or of the other are taken
    span_HW = np.subtract(most_HW, least_HW, out=most_HW)
    cv2.convertScaleAbs(span_HW, part_HW, alpha=sixths)
    rest_HW = np.subtract(span_HW, part_HW, out=below_3HW[0])
    added_3HW &= np.bitwise_xor(part_HW, rest_HW, out=part_HW)
    added_3HW ^= rest_HW
    # A byte has no sign: own - next is kept as what it is above 0 and what it is below, and no sum leaves a byte.
    own_3HW, next_3HW = planes_5HW[1:4], planes_5HW[2:5]
    np.maximum(own_3HW, next_3HW, out=made_3HW)
    np.subtract(made_3HW, own_3HW, out=below_3HW)
    made_3HW -= next_3HW
    room_3HW = np.subtract(span_HW, added_3HW, out=planes_5HW[:3])
    np.minimum(made_3HW, room_3HW, out=made_3HW)
    made_3HW += added_3HW
    np.maximum(made_3HW, below_3HW, out=made_3HW)
    made_3HW -= below_3HW
    made_3HW += least_HW
    return made_3HW


_OWN = threading.local()


def _memory(hw: tuple[int, int]) -> np.ndarray:
    """(17, H, W) bytes, the same for every picture of a thread: pages given back and fetched anew cost three times the work."""
    held = getattr(_OWN, "memory", None)
    if held is None or held.shape[1:] != hw:
        held = _OWN.memory = np.empty((17, *hw), np.uint8)
    return held


def inverse_affine(angle: float, scale: float = 1.0, shear: Span = (0.0, 0.0)) -> Map:
    """Place in the new picture -> place in the old one, both (right, down) seen from the middle."""
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    along_x, along_y = (math.tan(math.radians(one)) for one in shear)
    # Turned after sheared along y after sheared along x, [[a, b], [c, d]], whose determinant is 1.
    a, c = cos + sin * along_y, sin - cos * along_y
    b, d = -sin - a * along_x, cos - c * along_x
    return (d / scale, -b / scale), (-c / scale, a / scale)


def warp(image_HWC: np.ndarray, inverse: Map, off: Span, *, linear: bool, fill: float = 0.0) -> np.ndarray:
    """The picture under an affine map; its middle shows what is `off` (right, down) from the middle of the old one."""
    height, width = image_HWC.shape[:2]
    x, y = (width - 1) / 2, (height - 1) / 2
    # In Python's numbers: arrays of six take longer than a tenth of the warp.
    rows = [(a, b, at - a * x - b * y + by) for (a, b), at, by in zip(inverse, (x, y), off, strict=True)]
    flags = (cv2.INTER_LINEAR if linear else cv2.INTER_NEAREST) | cv2.WARP_INVERSE_MAP
    return cv2.warpAffine(image_HWC, np.array(rows), (width, height), flags=flags, borderValue=(round(255 * fill),) * 3)
