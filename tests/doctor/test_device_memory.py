"""The arithmetic of a device's memory, on figures that can be worked out by hand; and which cameras are whose."""

import numpy as np
import pytest

from vlatune.config import PolicyConfig, RunConfig
from vlatune.doctor.device_memory import CUDA_BYTES, GB, MAX_BATCH, USABLE, Fitting, Footprint, smaller
from vlatune.doctor.feature_checks import best_match

HEADS = Footprint(weights=7 * GB, trained=10**7, kept=0, kept_per_sample=GB // 10, row_bytes=0, num_trained=1)
FULL = Footprint(weights=13 * GB, trained=13 * GB, kept=4 * GB, kept_per_sample=5 * GB, row_bytes=0, num_trained=9)
AGAIN = Footprint(weights=13 * GB, trained=13 * GB, kept=0, kept_per_sample=GB // 5, row_bytes=0, num_trained=9)
WAYS = [
    Fitting("heads", False, HEADS, {}),
    Fitting("full", False, FULL, {}),
    Fitting("full", True, AGAIN, {}),
]


def test_what_is_needed_is_the_sum_of_its_parts():
    assert FULL.needed(2, ema=False, ahead=1) == (13 + 3 * 13 + 4 + 2 * 5) * GB + CUDA_BYTES
    assert FULL.needed(2, ema=True, ahead=1) - FULL.needed(2, ema=False, ahead=1) == 13 * GB
    assert FULL.needed(2, ema=False, ahead=1, cuda=False) == FULL.needed(2, ema=False, ahead=1) - CUDA_BYTES
    rows = Footprint(0, 0, 0, 0, row_bytes=100)
    assert rows.needed(3, ema=False, ahead=2, cuda=False) == 3 * 3 * 100, "the batch, and those that lie ready"


@pytest.mark.parametrize("footprint", [HEADS, FULL, AGAIN])
@pytest.mark.parametrize("size", [24, 48, 80, 141])
def test_the_largest_batch_fits_and_one_more_does_not(footprint, size):
    most = footprint.largest_batch(size * GB, ema=False, ahead=1)
    room = USABLE * size * GB
    assert most == 0 or footprint.needed(most, ema=False, ahead=1) <= room
    assert most == MAX_BATCH or footprint.needed(most + 1, ema=False, ahead=1) > room


@pytest.mark.parametrize(
    ("train", "footprint", "size", "flags"),
    [
        ("heads", HEADS, 12, ("--batch_size=16", "--grad_accum=4")),
        ("full", FULL, 80, ("--batch_size=2", "--grad_accum=32")),
        ("full", FULL, 64, ("--policy.gradient_checkpointing=true", "--batch_size=16", "--grad_accum=4")),
        ("full", FULL, 24, ("--policy.train=heads",)),
        ("full", FULL, 4, ()),
    ],
)
def test_the_least_change_that_fits(train, footprint, size, flags):
    config = RunConfig(batch_size=32, grad_accum=2, policy=PolicyConfig(train=train))
    assert smaller(config, WAYS, footprint, size * GB) == flags


def looks(*colours: tuple[int, int, int], seed: int) -> np.ndarray:
    """(cameras, frames, 12 * 12 * 3) of one colour each, with noise."""
    rng = np.random.default_rng(seed)
    plain = np.array([np.repeat(colour, 144) for colour in colours], np.float64)
    return np.clip(plain[:, None] + rng.normal(0, 12, (len(colours), 8, 432)), 0, 255)


def test_cameras_are_matched_by_how_they_look():
    red, green, grey = (200, 40, 40), (40, 180, 60), (128, 128, 128)
    first = looks(red, green, grey, seed=0)
    assert best_match(first, looks(red, green, grey, seed=1)) == (0, 1, 2)
    assert best_match(first, looks(green, red, grey, seed=1)) == (1, 0, 2)
    assert best_match(first, looks(grey, red, green, seed=1)) == (1, 2, 0)


def test_cameras_that_look_alike_are_left_as_they_are():
    grey = (128, 128, 128)
    assert best_match(looks(grey, grey, seed=0), looks(grey, grey, seed=1)) == (0, 1)
