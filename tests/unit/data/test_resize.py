"""Resizing of uint8 images equals LeRobot's: the same box, black bars, pixels within 1/255."""

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from lerobot.policies.common.vla_utils import resize_with_pad, resize_with_pad_torch

from vlatune.data.frames.resize import letterbox_box, resize_into

sizes = st.tuples(st.integers(16, 120), st.integers(16, 120))


def ours(image_HWC: np.ndarray, target_hw: tuple[int, int]) -> np.ndarray:
    out = np.full((3, *target_hw), 77, np.uint8)  # all of it must be overwritten
    resize_into(image_HWC, out)
    return out


def lerobots(image_HWC: np.ndarray, target_hw: tuple[int, int]) -> np.ndarray:
    """(3, H, W) in [0, 1]"""
    image_1CHW = torch.from_numpy(image_HWC).permute(2, 0, 1)[None].float() / 255.0
    return resize_with_pad_torch(image_1CHW, *target_hw)[0].numpy()


@given(sizes, sizes, st.integers(0, 2**32 - 1))
@example((480, 640), (224, 224), 0)
@example((96, 96), (48, 48), 0)  # exactly half
@example((96, 96), (96, 96), 0)  # unchanged
@example((37, 113), (224, 224), 0)  # larger
@example((101, 100), (50, 51), 0)  # an odd bar
def test_pixels_are_lerobots_within_one_step(recorded_hw, target_hw, seed):
    image = np.random.default_rng(seed).integers(0, 256, (*recorded_hw, 3), dtype=np.uint8)
    difference = np.abs(ours(image, target_hw) / 255.0 - lerobots(image, target_hw))
    assert difference.max() <= 1 / 255 + 1e-6


@given(sizes, sizes)
@example((480, 640), (224, 224))
@example((101, 100), (50, 51))
def test_the_image_lies_where_lerobot_puts_it_and_the_bars_are_black(recorded_hw, target_hw):
    white = np.full((*recorded_hw, 3), 255, np.uint8)
    assert np.array_equal(ours(white, target_hw) > 0, lerobots(white, target_hw) > 0)
    top, left, height, width = letterbox_box(recorded_hw, target_hw)
    inside = np.zeros((3, *target_hw), bool)
    inside[:, top : top + height, left : left + width] = True
    assert np.array_equal(ours(white, target_hw), np.where(inside, 255, 0))


@given(sizes, sizes, st.integers(0, 2**32 - 1))
@example((480, 640), (512, 512), 0)
@example((101, 100), (50, 51), 0)
def test_bars_to_the_left_and_the_top_are_lerobots(recorded_hw, target_hw, seed):
    image = np.random.default_rng(seed).integers(0, 256, (*recorded_hw, 3), dtype=np.uint8)
    out = np.full((3, *target_hw), 77, np.uint8)
    resize_into(image, out, pad="left_top")
    image_1CHW = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255.0
    theirs = resize_with_pad(image_1CHW, *target_hw, pad_value=0)[0].numpy()
    assert np.abs(out / 255.0 - theirs).max() <= 1 / 255 + 1e-6


@given(sizes, sizes, st.integers(0, 2**32 - 1))
@example((480, 640), (96, 128), 0)
@example((96, 96), (96, 96), 0)  # unchanged
@example((30, 40), (224, 224), 0)  # larger
def test_a_stretched_image_is_torchvisions_within_one_step(recorded_hw, target_hw, seed):
    """`Resize` on floats, with antialiasing, as LeRobot's Diffusion Policy does it."""
    from torchvision.transforms import Resize

    image = np.random.default_rng(seed).integers(0, 256, (*recorded_hw, 3), dtype=np.uint8)
    out = np.full((3, *target_hw), 77, np.uint8)
    resize_into(image, out, pad="none")
    theirs = Resize(target_hw)(torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255.0)[0].numpy()
    assert np.abs(out / 255.0 - theirs).max() <= 1.5 / 255  # rounded twice, once per axis
