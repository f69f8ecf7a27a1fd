"""The kinds of augmentation: each draws its parameters, and does with them what torchvision or LeRobot does. Pure, on uint8.

A kind is made of the kwargs of one of `--dataset.image_transforms.tfs`, by LeRobot's names and with its defaults; tests hold each
to torchvision's or LeRobot's own with the same draw, to a level or two of 255. Pictures are (H, W, 3), RGB.

Measured on one core, 224 x 224, in microseconds: brightness 17, saturation 21, contrast 31, sharpness 49, affine 93, hue 105; what
surrounds them (generator, draws, planes to pixels and back) 40.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import cv2
import numpy as np

from vlatune.config import ImageTransformConfig
from vlatune.errors import did_you_mean
from vlatune.pipeline.image_ops import (
    CUT,
    Span,
    adjust_brightness,
    adjust_contrast,
    adjust_hue,
    adjust_saturation,
    inverse_affine,
    warp,
)

FLAG = "--dataset.image_transforms"
NEAREST, LINEAR = 0, 2
"""As torchvision numbers the ways to interpolate."""


class Kind(Protocol):
    """One kind of augmentation: what it draws, and what it does with that."""

    def draw(self, rng: np.random.Generator, hw: tuple[int, int]) -> tuple[Any, ...]: ...

    @property
    def apply(self) -> Callable[..., np.ndarray]:
        """Picture, which it may write to, and what was drawn -> picture."""
        ...


class Settings:
    """The kwargs of one of `tfs`, checked as they are taken."""

    def __init__(self, given: Mapping[str, tuple[float, ...]], where: str) -> None:
        self._given, self._where, self._known = given, where, [""]

    def span(
        self, name: str, default: Span | None, one: Callable[[float], Span], least: float, most: float = math.inf
    ) -> Any:
        """The lowest and the highest value; `one` makes both out of a single number, as the kind's own class does."""
        values = self.take(name)
        if values is None:
            return default
        low, high = one(values[0]) if len(values) == 1 else values if len(values) == 2 else (math.nan, math.nan)
        if not (least <= low <= high <= most and low < math.inf):
            limits = f"{least:g} or more" if most == math.inf else f"between {least:g} and {most:g}"
            self.refuse(name, f"a number, or two that rise, {limits}")
        return (low, high)

    def number(self, name: str, default: float, least: float, most: float) -> float:
        values = self.take(name) or (default,)
        if len(values) != 1 or not least <= values[0] <= most:
            self.refuse(name, f"a number between {least:g} and {most:g}")
        return values[0]

    def take(self, name: str) -> tuple[float, ...] | None:
        self._known.append(name)
        return self._given.get(name)

    def refuse(self, name: str, expected: str) -> None:
        shown = ", ".join(f"{value:g}" for value in self._given[name])
        raise ValueError(f"{self._where}: {name}=[{shown}]: must be {expected}")

    def close(self) -> None:
        for name in self._given:
            if name not in self._known:
                there = did_you_mean(name, self._known[1:]) or f"; there are {', '.join(self._known[1:]) or 'none'}"
                raise ValueError(f"{self._where}: there is no setting '{name}'{there}")


def make_kind(name: str, config: ImageTransformConfig) -> Kind:
    if config.type not in KINDS:
        hint = did_you_mean(config.type, KINDS)
        raise ValueError(
            f"{FLAG}.tfs: '{name}' has the type '{config.type}', which is not among those that run on uint8 in a read task{hint} "
            f"(there are {', '.join(KINDS)})"
        )
    settings = Settings(config.kwargs, f"{FLAG}.tfs: '{name}' ({config.type})")
    kind = KINDS[config.type](settings)
    settings.close()
    return kind


def _uniform(rng: np.random.Generator, low: float, high: float) -> float:
    """What `rng.uniform` draws, to the bit, in half the time."""
    return low + (high - low) * rng.random()


def _about(centre: float, value: float, *, lowest: float = -math.inf) -> Span:
    return max(centre - value, lowest), centre + value


@dataclass(frozen=True)
class Identity:
    @classmethod
    def of(cls, settings: Settings) -> "Identity":
        return cls()

    def draw(self, rng: np.random.Generator, hw: tuple[int, int]) -> tuple[()]:
        return ()

    def apply(self, image_HWC: np.ndarray) -> np.ndarray:
        return image_HWC


@dataclass(frozen=True)
class ColorJitter:
    """Factors of those that are given, one after the other in any order."""

    brightness: Span | None = None
    contrast: Span | None = None
    saturation: Span | None = None
    hue: Span | None = None

    @classmethod
    def of(cls, settings: Settings) -> "ColorJitter":
        factors = {
            name: settings.span(name, None, partial(_about, 1.0, lowest=0.0), 0.0)
            for name in ("brightness", "contrast", "saturation")
        }
        return cls(**factors, hue=settings.span("hue", None, partial(_about, 0.0), -0.5, 0.5))

    def draw(self, rng: np.random.Generator, hw: tuple[int, int]) -> tuple[list[tuple[str, float]]]:
        given = [(name, span) for name in ADJUST if (span := getattr(self, name)) is not None]
        order = rng.permutation(len(given)) if len(given) > 1 else range(len(given))
        return ([(given[place][0], _uniform(rng, *given[place][1])) for place in order],)

    def apply(self, image_HWC: np.ndarray, factors: Sequence[tuple[str, float]]) -> np.ndarray:
        for name, factor in factors:
            image_HWC = ADJUST[name](image_HWC, factor)
        return image_HWC


ADJUST = {
    "brightness": adjust_brightness,
    "contrast": adjust_contrast,
    "saturation": adjust_saturation,
    "hue": adjust_hue,
}


@dataclass(frozen=True)
class SharpnessJitter:
    sharpness: Span = (0.5, 1.5)

    @classmethod
    def of(cls, settings: Settings) -> "SharpnessJitter":
        return cls(settings.span("sharpness", cls.sharpness, partial(_about, 1.0, lowest=0.0), 0.0))

    def draw(self, rng: np.random.Generator, hw: tuple[int, int]) -> tuple[float]:
        return (_uniform(rng, *self.sharpness),)

    def apply(self, image_HWC: np.ndarray, factor: float) -> np.ndarray:
        """Away from a blurred picture (5 in the middle, 1 around it, over 13); pixels at the edge stay."""
        if min(image_HWC.shape[:2]) <= 2:
            return image_HWC
        rest, blurred_HWC = (1 - factor) / 13, cv2.blur(image_HWC, (3, 3))
        inner_HWC = image_HWC[1:-1, 1:-1]
        cv2.addWeighted(inner_HWC, factor + 4 * rest, blurred_HWC[1:-1, 1:-1], 9 * rest, CUT, inner_HWC)
        return image_HWC


@dataclass(frozen=True)
class RandomAffine:
    """Rotation, translation, scale and shear about the middle; what comes from outside is `fill`."""

    degrees: Span
    translate: Span = (0.0, 0.0)
    """Largest shares of width and height."""
    scale: Span = (1.0, 1.0)
    shear: tuple[float, ...] = (0.0, 0.0)
    linear: bool = False
    fill: float = 0.0

    @classmethod
    def of(cls, settings: Settings) -> "RandomAffine":
        degrees = settings.span("degrees", None, partial(_about, 0.0), -math.inf)
        interpolation = settings.number("interpolation", NEAREST, NEAREST, LINEAR)
        translate = settings.take("translate") or cls.translate
        shear = settings.take("shear") or cls.shear
        shear = _about(0.0, shear[0]) if len(shear) == 1 else shear
        if degrees is None:
            raise ValueError(f"{FLAG}.tfs: RandomAffine needs its 'degrees', as {{\"degrees\": [-5, 5]}}")
        if len(translate) != 2 or not all(0 <= share <= 1 for share in translate):
            settings.refuse("translate", "two shares of width and height, 0 to 1")
        if len(shear) not in (2, 4):
            settings.refuse("shear", "one, two or four angles")
        if interpolation not in (NEAREST, LINEAR):
            settings.refuse("interpolation", f"{NEAREST} (nearest) or {LINEAR} (linear)")
        return cls(
            degrees,
            (translate[0], translate[1]),
            settings.span("scale", cls.scale, lambda one: (one, one), 1e-3),
            shear,
            interpolation == LINEAR,
            settings.number("fill", 0.0, 0.0, 1.0),
        )

    def draw(self, rng: np.random.Generator, hw: tuple[int, int]) -> tuple[float, tuple[int, int], float, Span]:
        angle = _uniform(rng, *self.degrees)
        most = (self.translate[0] * hw[1], self.translate[1] * hw[0])
        moved = (round(_uniform(rng, -most[0], most[0])), round(_uniform(rng, -most[1], most[1])))
        scale = _uniform(rng, *self.scale)
        shear = [_uniform(rng, low, high) for low, high in itertools.batched(self.shear, 2)]
        return angle, moved, scale, (shear[0], shear[1] if len(shear) > 1 else 0.0)

    def apply(
        self, image_HWC: np.ndarray, angle: float, moved: tuple[float, float], scale: float = 1.0, shear: Span = (0, 0)
    ) -> np.ndarray:
        (a, b), (c, d) = inverse = inverse_affine(angle, scale, shear)
        off = (-a * moved[0] - b * moved[1], -c * moved[0] - d * moved[1])
        return warp(image_HWC, inverse, off, linear=self.linear, fill=self.fill)


@dataclass(frozen=True)
class CropAndRotate:
    """openpi's geometry: a crop to `share` of both sides, back to the old size, then a turn about the middle."""

    share: float = 0.95
    degrees: Span = (-5.0, 5.0)

    def draw(self, rng: np.random.Generator, hw: tuple[int, int]) -> tuple[int, int, float]:
        """Top, left, angle."""
        top, left = (int(rng.integers(0, side - int(side * self.share) + 1)) for side in hw)
        return top, left, _uniform(rng, *self.degrees)

    def apply(self, image_HWC: np.ndarray, top: int, left: int, angle: float) -> np.ndarray:
        height, width = image_HWC.shape[:2]
        kept = (int(width * self.share), int(height * self.share))
        (a, b), (c, d) = inverse_affine(angle)
        inverse = ((a * kept[0] / width, b * kept[0] / width), (c * kept[1] / height, d * kept[1] / height))
        # The middle of the new picture shows the middle of the crop.
        off = (left + (kept[0] - width) / 2, top + (kept[1] - height) / 2)
        return warp(image_HWC, inverse, off, linear=True)


@dataclass(frozen=True)
class GammaCorrection:
    gamma: Span = (0.5, 2.0)

    @classmethod
    def of(cls, settings: Settings) -> "GammaCorrection":
        return cls(settings.span("gamma", cls.gamma, lambda one: (min(one, 1 / one), max(one, 1 / one)), 1e-3))

    def draw(self, rng: np.random.Generator, hw: tuple[int, int]) -> tuple[float]:
        return (math.exp(_uniform(rng, math.log(self.gamma[0]), math.log(self.gamma[1]))),)

    def apply(self, image_HWC: np.ndarray, gamma: float) -> np.ndarray:
        levels = 255.0 * (np.arange(256) / 255.0) ** gamma
        return cv2.LUT(image_HWC, levels.round().astype(np.uint8))


@dataclass(frozen=True)
class GaussianNoise:
    """Slow: a millisecond for a picture, nearly all of it for the draw."""

    std: Span = (5.0, 25.0)
    """In levels of 255."""

    @classmethod
    def of(cls, settings: Settings) -> "GaussianNoise":
        return cls(settings.span("std", cls.std, lambda one: (0.0, one), 0.0))

    def draw(self, rng: np.random.Generator, hw: tuple[int, int]) -> tuple[float, np.ndarray]:
        std = _uniform(rng, *self.std)
        return std, rng.standard_normal((*hw, 3), dtype=np.float32)

    def apply(self, image_HWC: np.ndarray, std: float, noise_HWC: np.ndarray) -> np.ndarray:
        return cv2.addWeighted(image_HWC, 1.0, noise_HWC, std, 0.0, dtype=cv2.CV_8U)


@dataclass(frozen=True)
class MotionBlur:
    kernel_size: Span = (3, 11)

    @classmethod
    def of(cls, settings: Settings) -> "MotionBlur":
        low, high = settings.span("kernel_size", cls.kernel_size, lambda one: (one, one), 1, 99)
        if int(low) | 1 > high:
            settings.refuse("kernel_size", "an odd number, or a range that has one")
        return cls((int(low), int(high)))

    def draw(self, rng: np.random.Generator, hw: tuple[int, int]) -> tuple[int, float]:
        first = int(self.kernel_size[0]) | 1
        size = first + 2 * int(rng.integers(0, (int(self.kernel_size[1]) - first) // 2 + 1))
        return size, _uniform(rng, 0, 360)

    def apply(self, image_HWC: np.ndarray, size: int, angle: float) -> np.ndarray:
        radius = size // 2
        along = np.arange(-radius, radius + 1, dtype=np.float32)
        kernel = np.zeros((size, size), np.float32)
        across, down = (
            np.rint(along * np.float32(one(math.radians(angle)))).astype(int) for one in (math.cos, math.sin)
        )
        kernel[down + radius, across + radius] = 1
        return cv2.filter2D(image_HWC, -1, kernel / kernel.sum(), borderType=cv2.BORDER_REPLICATE)


@dataclass(frozen=True)
class JPEGCompression:
    quality: Span = (15, 75)

    @classmethod
    def of(cls, settings: Settings) -> "JPEGCompression":
        return cls(settings.span("quality", cls.quality, lambda one: (one, one), 1, 100))

    def draw(self, rng: np.random.Generator, hw: tuple[int, int]) -> tuple[int]:
        return (int(rng.integers(int(self.quality[0]), int(self.quality[1]) + 1)),)

    def apply(self, image_HWC: np.ndarray, quality: int) -> np.ndarray:
        bgr = cv2.cvtColor(image_HWC, cv2.COLOR_RGB2BGR)
        packed = cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, quality])[1]
        unpacked = cv2.imdecode(packed, cv2.IMREAD_COLOR)
        assert unpacked is not None  # it has just been packed
        return cv2.cvtColor(unpacked, cv2.COLOR_BGR2RGB)


@dataclass(frozen=True)
class CoarseDropout:
    """Rectangles of one colour."""

    max_holes: int = 8
    max_height_frac: float = 0.07
    max_width_frac: float = 0.07
    fill_value: float = 0.0

    @classmethod
    def of(cls, settings: Settings) -> "CoarseDropout":
        return cls(
            int(settings.number("max_holes", cls.max_holes, 1, 1000)),
            settings.number("max_height_frac", cls.max_height_frac, 1e-6, 1.0),
            settings.number("max_width_frac", cls.max_width_frac, 1e-6, 1.0),
            settings.number("fill_value", cls.fill_value, 0.0, 1.0),
        )

    def draw(self, rng: np.random.Generator, hw: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Heights and widths, and places, as shares of the picture."""
        holes = int(rng.integers(1, self.max_holes + 1))
        return rng.random((holes, 2)) * (self.max_height_frac, self.max_width_frac), rng.random((holes, 2))

    def apply(self, image_HWC: np.ndarray, sizes_N2: np.ndarray, places_N2: np.ndarray) -> np.ndarray:
        hw = np.array(image_HWC.shape[:2])
        sizes = np.clip(np.rint(sizes_N2 * hw), 1, hw)
        begins = np.rint(places_N2 * (hw - sizes)).astype(int)
        for (top, left), (bottom, right) in zip(begins, begins + sizes.astype(int), strict=True):
            image_HWC[top:bottom, left:right] = round(255 * self.fill_value)
        return image_HWC


@dataclass(frozen=True)
class GaussianPatchBrightness:
    """Spots that are lighter or darker."""

    num_patches: Span = (1, 4)
    sigma_range: Span = (0.05, 0.25)
    factor_range: Span = (0.4, 1.6)

    @classmethod
    def of(cls, settings: Settings) -> "GaussianPatchBrightness":
        return cls(
            settings.span("num_patches", cls.num_patches, lambda one: (one, one), 1, 100),
            settings.span("sigma_range", cls.sigma_range, lambda one: (one, one), 1e-3),
            settings.span("factor_range", cls.factor_range, lambda one: (one, one), 0.0),
        )

    def draw(self, rng: np.random.Generator, hw: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Middles (down, right), widths and factors."""
        spots = int(rng.integers(int(self.num_patches[0]), int(self.num_patches[1]) + 1))
        return rng.random((spots, 2)), rng.uniform(*self.sigma_range, spots), rng.uniform(*self.factor_range, spots)

    def apply(
        self, image_HWC: np.ndarray, middles_N2: np.ndarray, sigmas_N: np.ndarray, factors_N: np.ndarray
    ) -> np.ndarray:
        height, width = image_HWC.shape[:2]
        down, right = np.linspace(0, 1, height, dtype=np.float32), np.linspace(0, 1, width, dtype=np.float32)
        light_HW = np.ones((height, width), np.float32)
        for (y, x), sigma, factor in zip(middles_N2, sigmas_N, factors_N, strict=True):
            column, row = (np.exp(-((at - c) ** 2) / (2 * sigma**2)) for at, c in ((down, y), (right, x)))
            spot_HW = np.outer((factor - 1) * column, row).astype(np.float32)
            spot_HW += 1
            light_HW *= spot_HW
        return _lit(image_HWC, light_HW)


@dataclass(frozen=True)
class RandomShadow:
    """An upright band that is darker or lighter, with soft edges."""

    opacity: Span = (0.3, 0.6)

    @classmethod
    def of(cls, settings: Settings) -> "RandomShadow":
        return cls(settings.span("opacity", cls.opacity, lambda one: (one, one), 0.0, 1.0))

    def draw(self, rng: np.random.Generator, hw: tuple[int, int]) -> tuple[float, float, float, float]:
        """Opacity, where it begins, how wide it is, and -1 for darker, 1 for lighter."""
        return (
            _uniform(rng, *self.opacity),
            rng.random(),
            _uniform(rng, 1 / 3, 2 / 3),
            -1.0 if rng.random() < 0.5 else 1.0,
        )

    def apply(self, image_HWC: np.ndarray, opacity: float, start: float, share: float, direction: float) -> np.ndarray:
        height, width = image_HWC.shape[:2]
        band = max(1, min(width, round(share * width)))
        begin = round(start * (width - band))
        light_W = np.ones(width, np.float32)
        light_W[begin : begin + band] = 1 + direction * opacity
        coarse = min(8, height, width)
        whole = light_W[: width // coarse * coarse].reshape(1, -1, coarse).mean(axis=2)
        light_W = cv2.resize(whole, (width, 1), interpolation=cv2.INTER_LINEAR)[0]
        return _lit(image_HWC, light_W[None])


def _lit(image_HWC: np.ndarray, light_HW: np.ndarray) -> np.ndarray:
    """Every colour times the light, which is not negative. Not cv2.multiply: of two types it is fifty times as slow."""
    return cv2.merge([cv2.convertScaleAbs(plane * light_HW) for plane in cv2.split(image_HWC)])


KINDS: dict[str, Callable[[Settings], Kind]] = {
    kind.__name__: kind.of
    for kind in (
        Identity,
        ColorJitter,
        SharpnessJitter,
        RandomAffine,
        GammaCorrection,
        GaussianNoise,
        MotionBlur,
        JPEGCompression,
        CoarseDropout,
        GaussianPatchBrightness,
        RandomShadow,
    )
}
"""LeRobot's name -> how it is made of its kwargs. LeRobot also takes any class of torchvision, and has PlanckianJitter."""
