"""Augmentation of training pictures: uint8 in, uint8 out, in the read task, after the resize. No torch.

`--dataset.image_transforms` has LeRobot's names, kinds and defaults (`picture_kinds.py`). Two things differ on purpose.
Pictures have the policy's size already, a fifth of the pixels: what a letterbox adds stays black, as only the picture
inside it is touched. And what is drawn is a pure function of (seed, place in the run's order, camera): neither the number
of workers nor a resume changes it. Frames of one sample and camera (a history of observations) are treated alike.

`openpi` is the augmentation that openpi trains its policies with, as it publishes it: crop to 95 % and back, rotation by
up to 5 degrees, both in one interpolation, brightness 0.3, contrast 0.4, saturation 0.5; wrist cameras get the colours only.
It acts on the whole delivered picture. The colour draws are those of openpi's PyTorch code: factors, always applied.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import batched
from typing import Any, Protocol

import cv2
import numpy as np

from vlatune.batch import SLOT, Columns
from vlatune.config import ImageTransformsConfig
from vlatune.pipeline.picture_kinds import ColorJitter, CropAndRotate, Kind, make_kind
from vlatune.random_streams import Stream, make_generator

Box = tuple[int, int, int, int]
"""(top, left, height, width) of the picture inside its letterbox."""
Steps = list[Callable[[np.ndarray], np.ndarray]]
WRIST = "wrist"
"""In the name of a camera that the hand carries."""
DRAWN_TOGETHER = 8
"""Draws are small steps of Python, whose code a picture drives out of the core's caches: one after the other they take half
the time. No more, as a picture's noise is drawn, too."""


class Chain(Protocol):
    """What a camera's pictures go through."""

    def draw(self, rng: np.random.Generator, hw: tuple[int, int]) -> Steps: ...


@dataclass(frozen=True)
class Augment:
    """The transform of rows: every picture of every camera through its chain, in place."""

    seed: int
    chains: Mapping[str, Chain]
    """By the column of the camera."""
    names: Mapping[str, str]
    """Column -> the policy's name of the camera, which the draw depends on."""
    boxes: Mapping[tuple[int, str], Box]
    """(dataset, column) -> the part that is augmented. A dataset that is not here lacks the camera."""

    def __call__(self, columns: Columns) -> Columns:
        slots, datasets = columns[SLOT].tolist(), columns["dataset_index"].tolist()
        for column, chain in self.chains.items():
            name = zlib.crc32(self.names[column].encode())
            there = [row for row, dataset in enumerate(datasets) if (dataset, column) in self.boxes]
            for rows in batched(there, DRAWN_TOGETHER):
                boxes = [self.boxes[datasets[row], column] for row in rows]
                rngs = [make_generator(Stream.PICTURES, self.seed, slots[row], name) for row in rows]
                drawn = [chain.draw(rng, box[2:]) for rng, box in zip(rngs, boxes, strict=True)]
                for row, box, steps in zip(rows, boxes, drawn, strict=True):
                    _augment(columns[column][row], box, steps)
        return columns


def _augment(pictures: np.ndarray, box: Box, steps: Steps) -> None:
    """(3, H, W), or (O, 3, H, W) of a history."""
    top, left, height, width = box
    inside = pictures[..., top : top + height, left : left + width]
    for planes in inside[None] if inside.ndim == 3 else inside:
        image_HWC = cv2.merge([planes[0], planes[1], planes[2]])
        for step in steps:
            image_HWC = step(image_HWC)
        cv2.split(image_HWC, [planes[0], planes[1], planes[2]])


@dataclass(frozen=True)
class Subset:
    """LeRobot's `RandomSubsetApply`: some of the kinds, drawn by weight without replacement, in their order or in any."""

    kinds: tuple[Kind, ...]
    weights: tuple[float, ...]
    count: int
    random_order: bool = False

    def draw(self, rng: np.random.Generator, hw: tuple[int, int]) -> Steps:
        return [partial(_apply, self.kinds[place], self.kinds[place].draw(rng, hw)) for place in self.choose(rng)]

    def choose(self, rng: np.random.Generator) -> list[int]:
        """Places of the kinds. The smallest of exponential times with these rates: the first is drawn by weight, the next by weight among the rest."""
        times = rng.standard_exponential(len(self.kinds)) / self.weights
        chosen = np.argsort(times)[: self.count].tolist()
        return chosen if self.random_order else sorted(chosen)


@dataclass(frozen=True)
class InTurn:
    """All of the kinds, in their order."""

    kinds: tuple[Kind, ...]

    def draw(self, rng: np.random.Generator, hw: tuple[int, int]) -> Steps:
        return [partial(_apply, kind, kind.draw(rng, hw)) for kind in self.kinds]


def _apply(kind: Kind, drawn: tuple[Any, ...], image_HWC: np.ndarray) -> np.ndarray:
    return kind.apply(image_HWC, *drawn)


def make_augment(
    config: ImageTransformsConfig, seed: int, cameras: Mapping[str, str], boxes: Mapping[tuple[int, str], Box]
) -> Augment:
    """`cameras`: column -> the policy's name; `boxes` as in `Augment`. A wrong setting is refused with its name."""
    if config.preset == "openpi":
        chains: dict[str, Chain] = {column: _openpi(name) for column, name in cameras.items()}
        return Augment(seed, chains, cameras, boxes)
    chain = make_subset(config)
    return Augment(seed, dict.fromkeys(cameras, chain), cameras, boxes)


def make_subset(config: ImageTransformsConfig) -> Subset:
    """Those of weight 0 take no part; more than there are cannot be drawn."""
    kinds = [(make_kind(name, one), one.weight) for name, one in config.tfs.items()]
    kept = [(kind, weight) for kind, weight in kinds if weight > 0]
    count = min(config.max_num_transforms, len(kept))
    return Subset(tuple(kind for kind, _ in kept), tuple(weight for _, weight in kept), count, config.random_order)


def _openpi(camera: str) -> InTurn:
    jitter: tuple[Kind, ...] = (
        ColorJitter(brightness=(0.7, 1.3)),
        ColorJitter(contrast=(0.6, 1.4)),
        ColorJitter(saturation=(0.5, 1.5)),
    )
    return InTurn(jitter if WRIST in camera else (CropAndRotate(), *jitter))
