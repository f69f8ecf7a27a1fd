"""Augmentation: reproducible parameters, regions, validation of settings, and its use in training only."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vlatune.batch import SLOT, Columns
from vlatune.config.flags import config_from_dict, parse_flags
from vlatune.config.settings import (
    DatasetConfig,
    ImageTransformConfig,
    ImageTransformsConfig,
    PolicyConfig,
    RunConfig,
    to_json,
)
from vlatune.config.validate import validate
from vlatune.data import image_transforms as ours
from vlatune.data.augmentation import make_augment, make_subset
from vlatune.data.image_transforms import make_image_transform
from vlatune.data.reader import read_unit
from vlatune.data.transforms import apply_all
from vlatune.feed.plan import Share, make_units, plan_steps
from vlatune.random_streams import Stream, make_generator
from vlatune.run_setup import Setup, make_setup
from vlatune.train.driver.resume_rules import config_changes

TOP, WRIST = "observation.images.top", "wrist"
CAMERAS = {TOP: "observation.images.base_0_rgb", WRIST: "observation.images.left_wrist_0_rgb"}
BOXES = {(0, column): (0, 0, 24, 32) for column in CAMERAS}


def rows(slots: list[int]) -> Columns:
    """Return rows of two cameras, the first with two observation steps."""
    rng = np.random.default_rng(7)
    image = np.broadcast_to(rng.integers(0, 256, (3, 24, 32), dtype=np.uint8), (len(slots), 2, 3, 24, 32))
    datasets = np.zeros(len(slots), np.int64)
    return {SLOT: np.array(slots), "dataset_index": datasets, TOP: image.copy(), WRIST: image[:, 0].copy()}


@pytest.mark.parametrize("numbers", [(0, 0, 0), (5, 7, 2**32 - 1), (2**32, 1, 0), (2**63 + 9, 3, 4)])
def test_random_parameters_equal_numpys_for_the_same_seed(numbers: tuple[int, ...]) -> None:
    """Our faster construction and sampling must not change the numbers."""
    plain = np.random.Generator(np.random.Philox(np.random.SeedSequence([int(Stream.AUGMENTATION), *numbers])))
    rng = make_generator(Stream.AUGMENTATION, *numbers)
    affine = ours.RandomAffine((-5.0, 5.0), scale=(0.7, 1.9))
    for _ in range(100):
        angle, _, scale = affine.sample(rng, (60, 80))
        spans = (affine.degrees, (0.0, 0.0), (0.0, 0.0), affine.scale)
        wanted = [plain.uniform(low, high) for low, high in spans]
        assert (angle, scale) == (wanted[0], wanted[3])


def test_parameters_fill_their_ranges() -> None:
    rng = np.random.default_rng(1)
    jitter: Any = make_image_transform("it", ImageTransformConfig(1.0, "ColorJitter", {"contrast": (0.25,)}))
    contrasts = np.array([jitter.sample(rng, (60, 80))[0][0][1] for _ in range(2000)])
    assert 0.75 <= contrasts.min() < 0.76 < 1.24 < contrasts.max() <= 1.25
    settings = {"degrees": (5.0,), "translate": (0.1, 0.05)}
    affine: Any = make_image_transform("it", ImageTransformConfig(1.0, "RandomAffine", settings))
    angles, moves, scales = zip(*(affine.sample(rng, (60, 80)) for _ in range(2000)), strict=True)
    assert -5 <= min(angles) < -4.9 < 4.9 < max(angles) <= 5
    assert {abs(right) for right, _ in moves} == set(range(9))
    assert {abs(down) for _, down in moves} == set(range(4))
    assert set(scales) == {1.0}


@pytest.mark.parametrize("preset", ["lerobot", "openpi"])
def test_parameters_depend_only_on_seed_slot_and_camera(preset: Any) -> None:
    config = ImageTransformsConfig(enable=True, preset=preset)
    block = make_augment(config, 5, CAMERAS, BOXES)(rows([3, 9, 4]))
    again = make_augment(config, 5, CAMERAS, BOXES)(rows([4]))
    other = make_augment(config, 6, CAMERAS, BOXES)(rows([4]))
    for column in CAMERAS:
        np.testing.assert_array_equal(block[column][2], again[column][0])
        assert not np.array_equal(again[column], other[column])
        assert len(np.unique(block[column].reshape(3, -1), axis=0)) == 3
    np.testing.assert_array_equal(block[TOP][:, 0], block[TOP][:, 1])  # equal for all frames of a sample
    assert not np.array_equal(block[TOP][:, 0], block[WRIST])


def test_openpi_changes_only_colours_of_wrist_cameras() -> None:
    columns, halves = rows([0, 1, 2, 3]), np.zeros((4, 3, 24, 32), np.uint8)
    halves[..., 16:] = 200
    columns |= {WRIST: halves.copy(), TOP: halves[:, None].copy()}
    made = make_augment(ImageTransformsConfig(enable=True, preset="openpi"), 0, CAMERAS, BOXES)(columns)
    for half in (made[WRIST][..., :16], made[WRIST][..., 16:]):
        assert (half == half[..., :1, :1]).all()  # the edge between the halves did not move
    assert all(len(np.unique(one[0, 0])) > 2 for one in made[TOP])


def test_letterbox_padding_stays_black() -> None:
    columns, padded = rows([0, 1, 2, 3]), np.zeros((4, 3, 32, 32), np.uint8)
    padded[:, :, 4:28] = columns[WRIST] // 2 + 100
    tfs = {"contrast": ImageTransformConfig(type="ColorJitter", kwargs={"contrast": (0.1, 0.2)})}
    augment = make_augment(ImageTransformsConfig(enable=True, tfs=tfs), 0, {WRIST: "w"}, {(0, WRIST): (4, 0, 24, 32)})
    made = augment(columns | {WRIST: padded.copy()})[WRIST]
    assert not made[:, :, :4].any()
    assert not made[:, :, 28:].any()
    assert made[:, :, 4:28].std() < padded[:, :, 4:28].std() / 2


@pytest.mark.parametrize(
    ("tfs", "named"),
    [
        ("{a: {type: ColourJitter}}", "did you mean ColorJitter?"),
        ("{a: {type: PlanckianJitter}}", "'PlanckianJitter'"),
        (
            "{a: {type: ColorJitter, kwargs: {huee: 0.1}}}",
            "'a' (ColorJitter): there is no setting 'huee'; did you mean",
        ),
        ("{a: {type: ColorJitter, kwargs: {hue: 0.9}}}", "hue=[0.9]"),
        ("{a: {type: ColorJitter, kwargs: {contrast: [2, 1]}}}", "contrast=[2, 1]"),
        ("{a: {type: RandomAffine}}", "needs 'degrees'"),
        ("{a: {type: RandomAffine, kwargs: {degrees: 5, translate: [2, 0]}}}", "translate=[2, 0]"),
        ("{a: {type: RandomAffine, kwargs: {degrees: 5, interpolation: 1}}}", "0 (nearest) or 2 (linear)"),
    ],
)
def test_invalid_transforms_are_rejected(tfs: str, named: str) -> None:
    config = parse_flags([f"--dataset.image_transforms.tfs={tfs}"], RunConfig).dataset.image_transforms
    with pytest.raises(ValueError, match="image_transforms") as caught:
        make_subset(config)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["tfs={a: {weigth: 1}}"], "did you mean weight?"),
        (["tfs={a: 1}"], "weight, type, kwargs"),
        (["tfs={a: {weight: -1}}"], "'a'"),
        (["enable", "tfs={}"], "weight"),
        (["max_num_transforms=0"], "max_num_transforms=0"),
        (["preset=openpi", "random_order=true"], "random_order"),
        (["preset=pi"], "lerobot, openpi"),
    ],
)
def test_invalid_flags_are_rejected(flags: list[str], named: str) -> None:
    flags = [f"--dataset.image_transforms.{flag}" for flag in flags]
    with pytest.raises(ValueError, match="image_transforms") as caught:
        validate(parse_flags(["--dataset.root=x", "--recipe=tiny", *flags], RunConfig))
    assert named in str(caught.value)


def test_settings_are_stored_and_may_not_change_on_resume() -> None:
    flags = ['--dataset.image_transforms.tfs={"hue": {"kwargs": {"hue": 0.1}, "type": "ColorJitter"}}']
    config = parse_flags(["--dataset.image_transforms.enable", *flags], RunConfig)
    stored = to_json(config)
    assert config_from_dict(RunConfig, stored, "config.json") == config
    assert not list(config_changes(config, stored, "checkpoint"))
    plain = parse_flags(["--dataset.image_transforms.enable"], RunConfig)
    changes = list(config_changes(plain, stored, "checkpoint"))
    assert {change.group for change in changes} == {"config"}
    assert any("tfs.hue.kwargs.hue" in change.text for change in changes)


def trained_rows(setup: Setup, share: Share) -> dict[int, Columns]:
    """Map positions in the run's order to the rows that a worker gets in the first two steps."""
    plan, found = setup.data_plan, {}
    for unit in make_units(plan, share, plan_steps(plan.order, share, 0, 2)):
        columns = apply_all(plan.transforms, read_unit(plan.specs[unit.dataset_index], unit))
        for row, slot in enumerate(columns[SLOT].tolist()):
            found[slot] = {name: values[row] for name, values in columns.items()}
    return found


def test_training_is_augmented_independently_of_the_number_of_workers_and_evaluation_is_not(
    dataset_v3: Path, small_base: Path
) -> None:
    config = RunConfig(
        dataset=DatasetConfig(root=(str(dataset_v3),)),
        policy=PolicyConfig(path=str(small_base), train="full"),
        batch_size=8,
    )
    enabled = replace(config.dataset, image_transforms=ImageTransformsConfig(enable=True))
    setups = make_setup(config), make_setup(replace(config, dataset=enabled))
    plain, augmented = (trained_rows(setup, Share(0, 1)) for setup in setups)
    two_workers = trained_rows(setups[1], Share(0, 2)) | trained_rows(setups[1], Share(1, 2))
    assert plain.keys() == augmented.keys() == two_workers.keys()
    cameras = [target for _, target in setups[0].binding.cameras]
    for slot, row in augmented.items():
        for name, values in row.items():
            np.testing.assert_array_equal(values, two_workers[slot][name])
            assert np.array_equal(values, plain[slot][name]) == (name not in cameras), name
    assert [type(one) for one in setups[1].eval_transforms(0)] == [type(one) for one in setups[0].eval_transforms(0)]
