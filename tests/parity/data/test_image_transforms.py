"""Image augmentations compared with torchvision and LeRobot."""

import dataclasses
import json
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from lerobot.transforms import transforms as lerobot
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as vision

from vlatune.config.settings import ImageTransformConfig, ImageTransformsConfig
from vlatune.data import image_transforms as ours
from vlatune.data.augmentation import make_subset
from vlatune.data.image_transforms import make_image_transform


def make_image(content: str, hw: tuple[int, int] = (60, 80)) -> np.ndarray:
    """Return (H, W, 3); noise has every colour next to every other, smooth is like camera images."""
    rng = np.random.default_rng(7)
    if content == "noise":
        return rng.integers(0, 256, (*hw, 3), dtype=np.uint8)
    small = rng.integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return cv2.resize(small, hw[::-1], interpolation=cv2.INTER_CUBIC)


def chw(image_HWC: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(image_HWC).permute(2, 0, 1)


def difference(made_HWC: np.ndarray, wanted_CHW: torch.Tensor) -> np.ndarray:
    assert made_HWC.dtype == np.uint8
    return np.abs(made_HWC.astype(int) - wanted_CHW.permute(1, 2, 0).numpy().astype(int))


@pytest.mark.parametrize("content", ["noise", "smooth"])
@pytest.mark.parametrize(
    ("name", "factors", "most"),
    [
        ("brightness", (0.0, 0.8, 1.0, 1.2, 2.5), 1),
        ("contrast", (0.0, 0.6, 1.0, 1.4, 2.5), 1),
        ("saturation", (0.0, 0.5, 1.0, 1.5, 3.0), 2),
        ("hue", (-0.5, -0.37, -0.2, -0.05, 0.0, 0.013, 0.05, 0.17, 0.25, 0.4, 0.5), 1),
        ("sharpness", (0.0, 0.5, 1.0, 1.5, 3.0), 2),
    ],
)
def test_adjustments_equal_torchvision(name: str, factors: tuple[float, ...], most: int, content: str) -> None:
    image, adjust = make_image(content), ours.ADJUST | {"sharpness": ours.SharpnessJitter().apply}
    for factor in factors:
        found = difference(adjust[name](image.copy(), factor), getattr(vision, f"adjust_{name}")(chw(image), factor))
        assert found.max() <= most, f"{name} {factor}: {found.max()} levels"
        assert found.mean() <= 0.5, f"{name} {factor}: {found.mean()} levels on average"


def test_neutral_adjustments_leave_grays_unchanged() -> None:
    image = np.repeat(np.arange(256, dtype=np.uint8)[:, None, None], 3, axis=2).repeat(4, axis=1)
    for name, neutral in {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0}.items():
        np.testing.assert_array_equal(ours.ADJUST[name](image.copy(), neutral), image, err_msg=name)
    np.testing.assert_array_equal(ours.SharpnessJitter().apply(image.copy(), 1.0), image)


@pytest.mark.parametrize(
    "parameters",
    [(5.0, (0, 0), 1.0), (-4.2, (3, -2), 1.0), (12.0, (1, 4), 1.3)],
)
def test_affine_maps_equal_torchvision(parameters: tuple[Any, ...]) -> None:
    angle, moved, scale = parameters
    shear = [0.0, 0.0]
    noise, smooth = make_image("noise"), make_image("smooth")
    wanted = vision.affine(chw(noise), angle, list(moved), scale, shear)
    made = ours.RandomAffine((0, 0)).apply(noise, *parameters)
    assert (difference(made, wanted) > 0).any(axis=2).mean() <= 0.02  # positions halfway between two pixels
    wanted = vision.affine(chw(smooth), angle, list(moved), scale, shear, InterpolationMode.BILINEAR)
    found = difference(ours.RandomAffine((0, 0), interpolation=ours.LINEAR).apply(smooth, *parameters), wanted)
    assert np.quantile(found, 0.99) <= 2
    assert found.mean() <= 0.6


def test_openpi_crop_and_rotation_equal_two_torchvision_steps() -> None:
    image, top, left, angle = make_image("smooth", (80, 80)), 3, 1, 4.0
    made = ours.CropAndRotate().apply(image, top, left, angle)
    cropped = vision.resized_crop(chw(image), top, left, 76, 76, [80, 80], antialias=False)
    wanted = vision.rotate(cropped, -angle, InterpolationMode.BILINEAR)  # torchvision rotates counter-clockwise
    found = difference(made, wanted)[8:-8, 8:-8]
    assert found.mean() <= 1.0
    assert found.max() <= 8


def test_gamma_correction_gives_lerobots_images() -> None:
    image = make_image("smooth", (64, 80))
    wanted = lerobot.GammaCorrection().transform(chw(image).float() / 255, {"gamma": 0.6})
    made = make_image_transform("it", ImageTransformConfig(type="GammaCorrection")).apply(image.copy(), 0.6)
    assert difference(made, (wanted * 255).round()).max() <= 1


def test_gaussian_noise_has_the_sampled_spread() -> None:
    image = np.full((60, 80, 3), 128, np.uint8)
    parameters = ours.GaussianNoise((9.0, 9.0)).sample(np.random.default_rng(0), (60, 80))
    made = ours.GaussianNoise().apply(image, *parameters).astype(float)
    assert made.std() == pytest.approx(9.0, rel=0.03)
    assert made.mean() == pytest.approx(128, abs=0.4)


def test_defaults_equal_lerobots() -> None:
    mine, theirs = (
        json.loads(json.dumps(dataclasses.asdict(one)))
        for one in (ImageTransformsConfig(), lerobot.ImageTransformsConfig())
    )
    assert mine.pop("preset") == "lerobot"
    assert mine == theirs
    assert list(mine["tfs"]) == list(theirs["tfs"])
    for name in ("SharpnessJitter", "GammaCorrection", "GaussianNoise"):
        own: Any = make_image_transform("it", ImageTransformConfig(type=name))
        other = getattr(lerobot, name)(**({"sharpness": (0.5, 1.5)} if name == "SharpnessJitter" else {}))
        for setting in dataclasses.fields(own):
            assert getattr(own, setting.name) == getattr(other, setting.name), (name, setting.name)


@pytest.mark.parametrize("random_order", [False, True])
def test_transforms_are_chosen_as_often_as_in_lerobot(random_order: bool) -> None:
    weights, rounds = [1.0, 2.0, 4.0, 0.5], 4000
    tfs = {str(n): ImageTransformConfig(weight, "Identity") for n, weight in enumerate([*weights, 0.0])}
    subset = make_subset(ImageTransformsConfig(max_num_transforms=2, random_order=random_order, tfs=tfs))
    rng = np.random.default_rng(0)
    mine = np.array([subset.choose(rng) for _ in range(rounds)])
    torch.manual_seed(0)
    seen: list[int] = []
    transforms = [lambda image, n=n: seen.append(n) or image for n in range(len(weights))]
    apply = lerobot.RandomSubsetApply(transforms, weights, 2, random_order)
    for _ in range(rounds):
        apply(torch.zeros(3, 2, 2))
    theirs = np.array(seen).reshape(rounds, 2)
    for place in range(2):  # the same frequencies as the first and as the second transform
        frequencies = [np.bincount(one[:, place], minlength=4) / rounds for one in (mine, theirs)]
        np.testing.assert_allclose(*frequencies, atol=0.035)
