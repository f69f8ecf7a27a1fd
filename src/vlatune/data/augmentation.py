"""Augmentation of training images (uint8) in the read task, after resizing. No torch.

`--dataset.image_transforms` has LeRobot's names, transforms and defaults (`image_transforms.py`), with two
differences: images already have the policy's size, and letterbox padding stays black.
Parameters are a pure function of (seed, slot, camera), so they do not depend on the number of
workers or on resuming. All frames of one sample and camera get the same parameters.

`openpi` is openpi's published augmentation: crop to 95 % and rotation by up to 5 degrees in one
interpolation, brightness 0.3, contrast 0.4, saturation 0.5; wrist cameras get colour jitter only.
It applies to the full image, with colour factors as in openpi's PyTorch code.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import cv2
import numpy as np

from vlatune.batch import SLOT, Columns
from vlatune.config.settings import ImageTransformsConfig
from vlatune.data.image_transforms import ColorJitter, CropAndRotate, ImageTransform, make_image_transform
from vlatune.random_streams import Stream, make_generator

Box = tuple[int, int, int, int]
"""(top, left, height, width) of the image inside its letterbox."""
WRIST = "wrist"
"""Part of the name of wrist cameras."""


@dataclass(frozen=True)
class Subset:
    """Apply `count` transforms, as LeRobot's `RandomSubsetApply`, or all in order if None."""

    transforms: tuple[ImageTransform, ...]
    weights: tuple[float, ...] = ()
    count: int | None = None
    random_order: bool = False

    def choose(self, rng: np.random.Generator) -> list[int]:
        """Return indices of transforms, sampled by weight as the smallest exponential variates."""
        if self.count is None:
            return list(range(len(self.transforms)))
        times = rng.standard_exponential(len(self.transforms)) / self.weights
        chosen = np.argsort(times)[: self.count].tolist()
        return chosen if self.random_order else sorted(chosen)


@dataclass(frozen=True)
class Augment:
    """Augment every image of every camera in place."""

    seed: int
    subsets: Mapping[str, Subset]
    """Camera column -> its transforms."""
    names: Mapping[str, str]
    """Camera column -> the policy's camera name, which seeds the random parameters."""
    boxes: Mapping[tuple[int, str], Box]
    """(dataset, column) -> augmented region; missing if the dataset lacks the camera."""

    def __call__(self, columns: Columns) -> Columns:
        slots, datasets = columns[SLOT].tolist(), columns["dataset_index"].tolist()
        for column, subset in self.subsets.items():
            name = zlib.crc32(self.names[column].encode())
            for row, (slot, dataset) in enumerate(zip(slots, datasets, strict=True)):
                box = self.boxes.get((dataset, column))
                if box is not None:
                    rng = make_generator(Stream.AUGMENTATION, self.seed, slot, name)
                    _augment(columns[column][row], box, subset, rng)
        return columns


def _augment(images: np.ndarray, box: Box, subset: Subset, rng: np.random.Generator) -> None:
    """Augment an image (3, H, W), or several (O, 3, H, W), with the same parameters."""
    top, left, height, width = box
    chosen = [subset.transforms[at] for at in subset.choose(rng)]
    sampled = [(one, one.sample(rng, (height, width))) for one in chosen]
    for image in images[None] if images.ndim == 3 else images:
        planes = image[:, top : top + height, left : left + width]
        image_HWC = cv2.merge([planes[0], planes[1], planes[2]])
        for transform, parameters in sampled:
            image_HWC = transform.apply(image_HWC, *parameters)
        cv2.split(image_HWC, [planes[0], planes[1], planes[2]])


def make_augment(
    config: ImageTransformsConfig, seed: int, cameras: Mapping[str, str], boxes: Mapping[tuple[int, str], Box]
) -> Augment:
    """Build the augmentation from the config; `cameras` maps columns to the policy's names."""
    if config.preset == "lerobot":
        return Augment(seed, dict.fromkeys(cameras, make_subset(config)), cameras, boxes)
    jitter = (
        ColorJitter(brightness=(0.7, 1.3)),
        ColorJitter(contrast=(0.6, 1.4)),
        ColorJitter(saturation=(0.5, 1.5)),
    )
    fixed, wrist = Subset((CropAndRotate(), *jitter)), Subset(jitter)
    return Augment(
        seed, {column: wrist if WRIST in name else fixed for column, name in cameras.items()}, cameras, boxes
    )


def make_subset(config: ImageTransformsConfig) -> Subset:
    """Build a `Subset`; transforms of weight 0 are omitted."""
    made = [(make_image_transform(name, one), one.weight) for name, one in config.tfs.items()]
    used = [(transform, weight) for transform, weight in made if weight > 0]
    count = min(config.max_num_transforms, len(used))
    return Subset(tuple(one for one, _ in used), tuple(weight for _, weight in used), count, config.random_order)
