"""Image augmentations: each samples its parameters and matches torchvision or LeRobot. On uint8.

An augmentation is built from the kwargs in `--dataset.image_transforms.tfs`, with LeRobot's names
and defaults. Tests compare each with torchvision or LeRobot for the same parameters, to within two
levels of 255. Images are (H, W, 3), RGB.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Protocol, get_args, get_type_hints

import cv2
import numpy as np

from vlatune.config.settings import ImageTransformConfig
from vlatune.errors import did_you_mean

FLAG = "--dataset.image_transforms"
NEAREST, LINEAR = 0, 2
"""torchvision's numbers of interpolation modes."""
GRAY = (0.2989, 0.587, 0.114)
"""torchvision's weights of red, green and blue."""
TRUNCATE = -0.498
"""Added before OpenCV rounds, to truncate like torchvision; -0.5 would also lower integers."""
TO_GRAY_34 = np.tile(np.array([*GRAY, TRUNCATE - 0.5]), (3, 1))
IDENTITY_34 = np.column_stack([np.eye(3), np.full(3, TRUNCATE)])
"""Mixes of red, green, blue and 1 that saturation interpolates between.

torchvision also truncates the gray image: half a level on average.
"""
HW = tuple[int, int]
Values = tuple[float, ...]
Span = tuple[float, float]
Map = tuple[Span, Span]
"""A linear map of the plane: two rows."""


class ImageTransform(Protocol):
    """An augmentation; its fields are the kwargs in `tfs`."""

    def sample(self, rng: np.random.Generator, hw: HW) -> tuple[Any, ...]:
        """Sample the parameters of `apply`."""
        ...

    @property
    def apply(self) -> Callable[..., np.ndarray]:
        """(image, which may be modified, *parameters) -> image."""
        ...


def make_image_transform(name: str, config: ImageTransformConfig) -> ImageTransform:
    """Build an augmentation from its settings; raise for unknown or invalid ones."""
    if config.type not in IMAGE_TRANSFORMS:
        raise ValueError(
            f"{FLAG}.tfs: '{name}' has the unsupported type '{config.type}'{did_you_mean(config.type, IMAGE_TRANSFORMS)} "
            f"(supported: {', '.join(IMAGE_TRANSFORMS)})"
        )
    made, where = IMAGE_TRANSFORMS[config.type], f"{FLAG}.tfs: '{name}' ({config.type})"
    known, settings = get_type_hints(made, include_extras=True), {}
    for key, values in config.kwargs.items():
        if key not in known:
            hint = did_you_mean(key, known) or f"; there are {', '.join(known) or 'none'}"
            raise ValueError(f"{where}: there is no setting '{key}'{hint}")
        parse = get_args(known[key])[1]
        try:
            settings[key] = parse(values)
        except ValueError as error:
            raise ValueError(f"{where}: {key}=[{', '.join(f'{value:g}' for value in values)}]: {error}") from None
    missing = [key for key in known if key not in settings and not hasattr(made, key)]
    if missing:
        raise ValueError(f"{where} needs '{missing[0]}', for example {{\"{missing[0]}\": [-5, 5]}}")
    return made(**settings)


@dataclass(frozen=True)
class _Range:
    """Parses a [min, max] range; `one` expands a single number."""

    least: float
    most: float = math.inf
    one: Callable[[float], Span] = lambda value: (value, value)

    def __call__(self, values: Values) -> Span:
        low, high = self.one(values[0]) if len(values) == 1 else values if len(values) == 2 else (math.nan, math.nan)
        if not (self.least <= low <= high <= self.most and low < math.inf):
            limits = f"{self.least:g} or more" if self.most == math.inf else f"between {self.least:g} and {self.most:g}"
            raise ValueError(f"must be a number or an increasing range, {limits}")
        return (low, high)


def _around(centre: float, value: float, *, lowest: float = -math.inf) -> Span:
    return max(centre - value, lowest), centre + value


FACTOR = _Range(0.0, one=partial(_around, 1.0, lowest=0.0))


@dataclass(frozen=True)
class Identity:
    def sample(self, rng: np.random.Generator, hw: HW) -> tuple[()]:
        return ()

    def apply(self, image_HWC: np.ndarray) -> np.ndarray:
        return image_HWC


@dataclass(frozen=True)
class ColorJitter:
    """Adjust the given properties in random order."""

    brightness: Annotated[Span | None, FACTOR] = None
    contrast: Annotated[Span | None, FACTOR] = None
    saturation: Annotated[Span | None, FACTOR] = None
    hue: Annotated[Span | None, _Range(-0.5, 0.5, one=partial(_around, 0.0))] = None

    def sample(self, rng: np.random.Generator, hw: HW) -> tuple[list[tuple[str, float]]]:
        given = [(name, span) for name in ADJUST if (span := getattr(self, name)) is not None]
        order = rng.permutation(len(given)) if len(given) > 1 else range(len(given))
        return ([(given[at][0], rng.uniform(*given[at][1])) for at in order],)

    def apply(self, image_HWC: np.ndarray, factors: Sequence[tuple[str, float]]) -> np.ndarray:
        for name, factor in factors:
            image_HWC = ADJUST[name](image_HWC, factor)
        return image_HWC


def adjust_brightness(image_HWC: np.ndarray, factor: float) -> np.ndarray:
    return cv2.convertScaleAbs(image_HWC, alpha=factor, beta=TRUNCATE)


def adjust_contrast(image_HWC: np.ndarray, factor: float) -> np.ndarray:
    """Blend with the mean of the gray image, which torchvision truncates (half a level)."""
    sums = cv2.sumElems(image_HWC)  # much faster than cv2.mean
    mean = sum(weight * one for weight, one in zip(GRAY, sums, strict=False)) / (image_HWC.size // 3) - 0.5
    return cv2.addWeighted(image_HWC, factor, image_HWC, 0.0, (1 - factor) * mean + TRUNCATE)


def adjust_saturation(image_HWC: np.ndarray, factor: float) -> np.ndarray:
    """Blend with the gray image, as one mix of the channels."""
    return cv2.transform(image_HWC, (1 - factor) * TO_GRAY_34 + factor * IDENTITY_34)


def adjust_hue(image_HWC: np.ndarray, turn: float) -> np.ndarray:
    """Rotate the hue by a fraction of a full turn, in float32: 8-bit HSV is off by several levels."""
    hsv_HWC = cv2.cvtColor(image_HWC.astype(np.float32), cv2.COLOR_RGB2HSV)
    hsv_HWC[..., 0] = (hsv_HWC[..., 0] + 360 * turn) % 360
    return cv2.convertScaleAbs(cv2.cvtColor(hsv_HWC, cv2.COLOR_HSV2RGB))


ADJUST = {
    "brightness": adjust_brightness,
    "contrast": adjust_contrast,
    "saturation": adjust_saturation,
    "hue": adjust_hue,
}


@dataclass(frozen=True)
class SharpnessJitter:
    sharpness: Annotated[Span, FACTOR] = (0.5, 1.5)

    def sample(self, rng: np.random.Generator, hw: HW) -> tuple[float]:
        return (rng.uniform(*self.sharpness),)

    def apply(self, image_HWC: np.ndarray, factor: float) -> np.ndarray:
        """Blend with a blurred image (kernel 5 at the centre, 1 around, / 13), except at edges."""
        if min(image_HWC.shape[:2]) <= 2:
            return image_HWC
        rest, blurred_HWC = (1 - factor) / 13, cv2.blur(image_HWC, (3, 3))
        inner_HWC = image_HWC[1:-1, 1:-1]
        cv2.addWeighted(inner_HWC, factor + 4 * rest, blurred_HWC[1:-1, 1:-1], 9 * rest, TRUNCATE, inner_HWC)
        return image_HWC


def inverse_affine(angle: float, scale: float = 1.0) -> Map:
    """Return the map from output to input positions (x, y), both relative to the centre."""
    cos, sin = math.cos(math.radians(angle)) / scale, math.sin(math.radians(angle)) / scale
    return (cos, sin), (-sin, cos)


def warp(image_HWC: np.ndarray, inverse: Map, off: Span, *, linear: bool) -> np.ndarray:
    """Apply an affine map; the output's centre shows the input at `off` (x, y) from its centre."""
    height, width = image_HWC.shape[:2]
    x, y = (width - 1) / 2, (height - 1) / 2
    # Python floats are faster than small arrays.
    rows = [(a, b, at - a * x - b * y + by) for (a, b), at, by in zip(inverse, (x, y), off, strict=True)]
    flags = (cv2.INTER_LINEAR if linear else cv2.INTER_NEAREST) | cv2.WARP_INVERSE_MAP
    return cv2.warpAffine(image_HWC, np.array(rows), (width, height), flags=flags)


def _parse_translate(values: Values) -> Values:
    if len(values) != 2 or not all(0 <= share <= 1 for share in values):
        raise ValueError("must be two fractions of width and height, 0 to 1")
    return values


def _parse_interpolation(values: Values) -> float:
    if values not in ((NEAREST,), (LINEAR,)):
        raise ValueError(f"must be {NEAREST} (nearest) or {LINEAR} (linear)")
    return values[0]


@dataclass(frozen=True)
class RandomAffine:
    """Rotation, translation and scale about the centre; the outside is black."""

    degrees: Annotated[Span, _Range(-math.inf, one=partial(_around, 0.0))]
    translate: Annotated[Span, _parse_translate] = (0.0, 0.0)
    """Maximum fractions of width and height."""
    scale: Annotated[Span, _Range(1e-3)] = (1.0, 1.0)
    interpolation: Annotated[float, _parse_interpolation] = NEAREST

    def sample(self, rng: np.random.Generator, hw: HW) -> tuple[float, tuple[int, int], float]:
        angle = rng.uniform(*self.degrees)
        most = (self.translate[0] * hw[1], self.translate[1] * hw[0])
        moved = (round(rng.uniform(-most[0], most[0])), round(rng.uniform(-most[1], most[1])))
        return angle, moved, rng.uniform(*self.scale)

    def apply(self, image_HWC: np.ndarray, angle: float, moved: tuple[float, float], scale: float = 1.0) -> np.ndarray:
        (a, b), (c, d) = inverse = inverse_affine(angle, scale)
        off = (-a * moved[0] - b * moved[1], -c * moved[0] - d * moved[1])
        return warp(image_HWC, inverse, off, linear=self.interpolation == LINEAR)


@dataclass(frozen=True)
class CropAndRotate:
    """openpi's geometry: crop to `share` of both sides, resize back, rotate about the centre."""

    share: float = 0.95
    degrees: Span = (-5.0, 5.0)

    def sample(self, rng: np.random.Generator, hw: HW) -> tuple[int, int, float]:
        """Return top, left and angle."""
        top, left = (int(rng.integers(0, side - int(side * self.share) + 1)) for side in hw)
        return top, left, rng.uniform(*self.degrees)

    def apply(self, image_HWC: np.ndarray, top: int, left: int, angle: float) -> np.ndarray:
        height, width = image_HWC.shape[:2]
        kept = (int(width * self.share), int(height * self.share))
        (a, b), (c, d) = inverse_affine(angle)
        inverse = ((a * kept[0] / width, b * kept[0] / width), (c * kept[1] / height, d * kept[1] / height))
        # The centre of the output shows the centre of the crop.
        off = (left + (kept[0] - width) / 2, top + (kept[1] - height) / 2)
        return warp(image_HWC, inverse, off, linear=True)


@dataclass(frozen=True)
class GammaCorrection:
    gamma: Annotated[Span, _Range(1e-3, one=lambda value: (min(value, 1 / value), max(value, 1 / value)))] = (0.5, 2.0)

    def sample(self, rng: np.random.Generator, hw: HW) -> tuple[float]:
        return (math.exp(rng.uniform(math.log(self.gamma[0]), math.log(self.gamma[1]))),)

    def apply(self, image_HWC: np.ndarray, gamma: float) -> np.ndarray:
        levels = 255.0 * (np.arange(256) / 255.0) ** gamma
        return cv2.LUT(image_HWC, levels.round().astype(np.uint8))


@dataclass(frozen=True)
class GaussianNoise:
    """Additive noise; slow to sample."""

    std: Annotated[Span, _Range(0.0, one=lambda value: (0.0, value))] = (5.0, 25.0)
    """Standard deviation in levels of 255."""

    def sample(self, rng: np.random.Generator, hw: HW) -> tuple[float, np.ndarray]:
        std = rng.uniform(*self.std)
        return std, rng.standard_normal((*hw, 3), dtype=np.float32)

    def apply(self, image_HWC: np.ndarray, std: float, noise_HWC: np.ndarray) -> np.ndarray:
        return cv2.addWeighted(image_HWC, 1.0, noise_HWC, std, 0.0, dtype=cv2.CV_8U)


IMAGE_TRANSFORMS: dict[str, type[Any]] = {
    one.__name__: one for one in (Identity, ColorJitter, SharpnessJitter, RandomAffine, GammaCorrection, GaussianNoise)
}
"""LeRobot's names; its other augmentations and torchvision classes are not supported."""
