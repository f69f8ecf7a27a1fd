"""Augmented pictures: each kind against torchvision's or LeRobot's own, draws against LeRobot's, and their purity."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from lerobot.transforms import transforms as lerobot
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as vision

from vlatune.batch import SLOT, Columns
from vlatune.config import DatasetConfig, ImageTransformConfig, ImageTransformsConfig, PolicyConfig, RunConfig, to_json
from vlatune.config_checks import validate as validate_config
from vlatune.dataset.order.sample_order import epoch_order
from vlatune.dataset.reader import read_unit
from vlatune.dataset.video.resize import letterbox_into
from vlatune.flags import config_from_dict, parse_flags
from vlatune.pipeline import picture_kinds as ours
from vlatune.pipeline.augmentation import make_augment, make_subset
from vlatune.pipeline.picture_kinds import make_kind
from vlatune.pipeline.plan import Share, make_units, plan_pieces
from vlatune.pipeline.transforms import apply_all
from vlatune.random_streams import Stream, make_generator
from vlatune.run_setup import Setup, make_setup
from vlatune.train.driver.resume_rules import config_changes

CAMERAS = {"observation.images.top": "observation.images.base_0_rgb", "wrist": "observation.images.left_wrist_0_rgb"}
HISTORY = 2
BOXES = {(0, column): (0, 0, 24, 32) for column in CAMERAS}


def picture(kind: str, hw: tuple[int, int] = (60, 80)) -> np.ndarray:
    """(H, W, 3): noise has every colour next to every other; smooth is what cameras see."""
    rng = np.random.default_rng(7)
    if kind == "noise":
        return rng.integers(0, 256, (*hw, 3), dtype=np.uint8)
    small = rng.integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return cv2.resize(small, hw[::-1], interpolation=cv2.INTER_CUBIC)


def chw(image_HWC: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(image_HWC).permute(2, 0, 1)


def levels_apart(made_HWC: np.ndarray, wanted_CHW: torch.Tensor) -> np.ndarray:
    assert made_HWC.dtype == np.uint8
    return np.abs(made_HWC.astype(int) - wanted_CHW.permute(1, 2, 0).numpy().astype(int))


@pytest.mark.parametrize("kind", ["noise", "smooth"])
@pytest.mark.parametrize(
    ("name", "factors", "most"),
    [
        ("brightness", (0.0, 0.8, 1.0, 1.2, 2.5), 1),
        ("contrast", (0.0, 0.6, 1.0, 1.4, 2.5), 1),
        ("saturation", (0.0, 0.5, 1.0, 1.5, 3.0), 2),
        ("hue", (-0.5, -0.37, -0.2, -0.05, 0.0, 0.013, 0.05, 0.17, 0.25, 0.4, 0.5), 1),
    ],
)
def test_colours_are_adjusted_as_torchvision_does(name: str, factors: tuple[float, ...], most: int, kind: str) -> None:
    image = picture(kind)
    for factor in factors:
        wanted = getattr(vision, f"adjust_{name}")(chw(image), factor)
        apart = levels_apart(ours.ADJUST[name](image.copy(), factor), wanted)
        assert apart.max() <= most, f"{name} {factor}: {apart.max()} levels"
        assert apart.mean() <= 0.5, f"{name} {factor}: {apart.mean()} levels in the mean"


def test_grays_stay_what_they_are() -> None:
    """A rounding that took whole numbers down would darken every picture a little."""
    image = np.repeat(np.arange(256, dtype=np.uint8)[:, None, None], 3, axis=2).repeat(4, axis=1)
    for name, neutral in {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0}.items():
        np.testing.assert_array_equal(ours.ADJUST[name](image.copy(), neutral), image, err_msg=name)
    np.testing.assert_array_equal(ours.SharpnessJitter().apply(image.copy(), 1.0), image)


@pytest.mark.parametrize("kind", ["noise", "smooth"])
def test_sharpness_is_adjusted_as_torchvision_does(kind: str) -> None:
    image = picture(kind)
    for factor in (0.0, 0.5, 1.5, 3.0):
        apart = levels_apart(
            ours.SharpnessJitter().apply(image.copy(), factor), vision.adjust_sharpness(chw(image), factor)
        )
        assert apart.max() <= 2


AFFINES = [(5.0, (0, 0), 1.0, (0.0, 0.0)), (-4.2, (3, -2), 1.0, (0.0, 0.0)), (12.0, (1, 4), 1.3, (4.0, -7.0))]


@pytest.mark.parametrize("drawn", AFFINES)
def test_affine_maps_are_torchvisions(drawn: tuple[Any, ...]) -> None:
    angle, moved, scale, shear = drawn
    noise, smooth = picture("noise"), picture("smooth")
    wanted = vision.affine(chw(noise), angle, list(moved), scale, list(shear))
    made = ours.RandomAffine((0, 0)).apply(noise, *drawn)
    other = (levels_apart(made, wanted) > 0).any(axis=2).mean()
    assert other <= 0.02, f"{other:.1%} of the pixels come from another place"  # those between two pixels
    wanted = vision.affine(chw(smooth), angle, list(moved), scale, list(shear), InterpolationMode.BILINEAR)
    apart = levels_apart(ours.RandomAffine((0, 0), linear=True).apply(smooth, *drawn), wanted)
    assert np.quantile(apart, 0.99) <= 2
    assert apart.mean() <= 0.6


def test_openpis_crop_and_turn_is_one_affine_map() -> None:
    image, top, left, angle = picture("smooth", (80, 80)), 3, 1, 4.0
    made = ours.CropAndRotate().apply(image, top, left, angle)
    side = 76 / 80
    moved = [-(left + 38 - 40) / side, -(top + 38 - 40) / side]
    turned = [
        moved[0] * np.cos(np.radians(angle)) - moved[1] * np.sin(np.radians(angle)),
        moved[0] * np.sin(np.radians(angle)) + moved[1] * np.cos(np.radians(angle)),
    ]
    wanted = vision.affine(chw(image), angle, turned, 1 / side, [0.0, 0.0], InterpolationMode.BILINEAR)
    assert np.quantile(levels_apart(made, wanted)[2:-2, 2:-2], 0.99) <= 2
    cropped = vision.resized_crop(chw(image), top, left, 76, 76, [80, 80], antialias=False)
    in_two = vision.rotate(cropped, -angle, InterpolationMode.BILINEAR)  # counter-clockwise, the others clockwise
    apart = levels_apart(made, in_two)[8:-8, 8:-8]
    assert apart.mean() <= 1.0
    assert apart.max() <= 8


LEROBOTS = {
    "GammaCorrection": ((0.6,), {"gamma": 0.6}, 1),
    "MotionBlur": ((7, 30.0), {"kernel_size": 7, "angle": 30.0}, 1),
    "JPEGCompression": ((40,), {"quality": 40}, 6),
    "RandomShadow": (
        (0.4, 0.3, 0.5, -1.0),
        {"opacity": 0.4, "start": 0.3, "width": 0.5, "direction": -1.0},
        1,
    ),
    "CoarseDropout": (
        (np.array([[0.1, 0.2], [0.3, 0.05]]), np.array([[0.0, 1.0], [0.4, 0.6]])),
        {"sizes": [[0.1, 0.2], [0.3, 0.05]], "positions": [[0.0, 1.0], [0.4, 0.6]]},
        1,
    ),
    "GaussianPatchBrightness": (
        (np.array([[0.2, 0.7], [0.5, 0.5]]), np.array([0.1, 0.2]), np.array([0.5, 1.5])),
        {"centers": [[0.2, 0.7], [0.5, 0.5]], "sigmas": [0.1, 0.2], "factors": [0.5, 1.5]},
        1,
    ),
}


@pytest.mark.parametrize("name", LEROBOTS)
def test_lerobots_own_kinds_do_what_lerobots_do(name: str) -> None:
    drawn, params, most = LEROBOTS[name]
    image = picture("smooth", (64, 80))
    theirs = getattr(lerobot, name)()
    wanted = theirs.transform(chw(image).float() / 255, params)
    made = make_kind("it", ImageTransformConfig(type=name)).apply(image.copy(), *drawn)
    assert levels_apart(made, (wanted * 255).round()).max() <= most


def test_noise_has_the_spread_that_was_drawn() -> None:
    image = np.full((60, 80, 3), 128, np.uint8)
    std, noise = ours.GaussianNoise((9.0, 9.0)).draw(np.random.default_rng(0), (60, 80))
    made = ours.GaussianNoise().apply(image, std, noise).astype(float)
    assert made.std() == pytest.approx(9.0, rel=0.03)
    assert made.mean() == pytest.approx(128, abs=0.4)


def test_the_defaults_are_lerobots() -> None:
    mine, theirs = to_json_values(ImageTransformsConfig()), to_json_values(lerobot.ImageTransformsConfig())
    assert mine.pop("preset") == "lerobot"
    assert mine == theirs
    assert list(mine["tfs"]) == list(theirs["tfs"])


@pytest.mark.parametrize(
    "name", [name for name in ours.KINDS if name not in ("Identity", "ColorJitter", "RandomAffine")]
)
def test_a_kinds_own_defaults_are_lerobots(name: str) -> None:
    mine: Any = make_kind("it", ImageTransformConfig(type=name))
    theirs = getattr(lerobot, name)(**({"sharpness": (0.5, 1.5)} if name == "SharpnessJitter" else {}))
    for setting in dataclasses.fields(mine):
        assert getattr(mine, setting.name) == getattr(theirs, setting.name), setting.name


def to_json_values(config: Any) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(config)))


def test_kinds_are_drawn_as_lerobot_draws_them() -> None:
    """Which, how many, in which order: weighted, without replacement."""
    weights, rounds = [1.0, 2.0, 4.0, 0.5], 4000
    tfs = {str(n): ImageTransformConfig(weight, "Identity") for n, weight in enumerate([*weights, 0.0])}
    for random_order in (False, True):
        config = ImageTransformsConfig(enable=True, max_num_transforms=2, random_order=random_order, tfs=tfs)
        subset = make_subset(config)
        assert len(subset.kinds) == 4  # the one of weight 0 is never drawn
        rng = np.random.default_rng(0)
        mine = np.array([subset.choose(rng) for _ in range(rounds)])
        theirs = np.array(_lerobots_choices(weights, rounds, random_order=random_order))
        assert mine.shape == theirs.shape == (rounds, 2)
        for place in range(2):  # at either place of the sequence, the same shares
            shares = [np.bincount(one[:, place], minlength=4) / rounds for one in (mine, theirs)]
            np.testing.assert_allclose(shares[0], shares[1], atol=0.035)


def _lerobots_choices(weights: list[float], rounds: int, *, random_order: bool) -> list[list[int]]:
    torch.manual_seed(0)
    seen: list[int] = []
    kinds = [lambda image, n=n: seen.append(n) or image for n in range(len(weights))]
    apply = lerobot.RandomSubsetApply(kinds, weights, 2, random_order)
    for _ in range(rounds):
        apply(torch.zeros(3, 2, 2))
    return np.array(seen).reshape(rounds, 2).tolist()


def test_more_than_there_are_cannot_be_drawn() -> None:
    assert make_subset(ImageTransformsConfig(max_num_transforms=99)).count == 6


def test_draws_fill_their_ranges_evenly() -> None:
    rng = np.random.default_rng(1)
    jitter = make_kind("it", ImageTransformConfig(type="ColorJitter", kwargs={"contrast": (0.25,), "hue": (0.1,)}))
    drawn = [dict(jitter.draw(rng, (60, 80))[0]) for _ in range(2000)]
    for name, low, high in (("contrast", 0.75, 1.25), ("hue", -0.1, 0.1)):
        values = np.array([one[name] for one in drawn])
        assert low <= values.min()
        assert values.max() <= high
        np.testing.assert_allclose(np.quantile(values, [0.25, 0.75]), np.quantile([low, high], [0.25, 0.75]), atol=0.02)
    affine = make_kind(
        "it", ImageTransformConfig(type="RandomAffine", kwargs={"degrees": (5.0,), "translate": (0.1, 0.05)})
    )
    angles, moves, scales, shears = zip(*(affine.draw(rng, (60, 80)) for _ in range(2000)), strict=True)
    assert -5 <= min(angles) < -4.9
    assert 4.9 < max(angles) <= 5
    assert {abs(right) for right, _ in moves} == set(range(9))
    assert {abs(down) for _, down in moves} == set(range(4))
    assert set(scales) == {1.0}
    assert set(shears) == {(0.0, 0.0)}


@pytest.mark.parametrize("numbers", [(0, 0, 0), (5, 7, 2**32 - 1), (2**32, 1, 0), (2**63 + 9, 3, 4)])
def test_draws_are_numpys_for_the_seed(numbers: tuple[int, ...]) -> None:
    """The faster ways to a generator and to a number give what the plain ones do: a run that goes on draws on."""
    plain = np.random.Generator(np.random.Philox(np.random.SeedSequence([int(Stream.PICTURES), *numbers])))
    rng = make_generator(Stream.PICTURES, *numbers)
    affine = ours.RandomAffine((-5.0, 5.0), scale=(0.7, 1.9), shear=(-3.0, 2.0))
    for _ in range(100):
        angle, _, scale, shear = affine.draw(rng, (60, 80))
        spans = (affine.degrees, (0.0, 0.0), (0.0, 0.0), affine.scale, affine.shear)
        wanted = [plain.uniform(low, high) for low, high in spans]
        assert (angle, scale, shear[0]) == (wanted[0], wanted[3], wanted[4])


def rows(slots: list[int]) -> Columns:
    shape = (len(slots), HISTORY, 3, 24, 32)
    image = np.broadcast_to(np.moveaxis(picture("smooth", (24, 32)), 2, 0), shape)
    return {
        SLOT: np.array(slots),
        "dataset_index": np.zeros(len(slots), np.int64),
        "observation.images.top": image.copy(),
        "wrist": image[:, 0].copy(),
    }


@pytest.mark.parametrize("preset", ["lerobot", "openpi"])
def test_what_is_drawn_depends_on_seed_place_and_camera_alone(preset: Any) -> None:
    config = ImageTransformsConfig(enable=True, preset=preset)
    whole = make_augment(config, 5, CAMERAS, BOXES)(rows([3, 9, 4]))
    again = make_augment(config, 5, CAMERAS, BOXES)(rows([4]))
    other = make_augment(config, 6, CAMERAS, BOXES)(rows([4]))
    for column in CAMERAS:
        np.testing.assert_array_equal(whole[column][2], again[column][0])
        assert not np.array_equal(again[column], other[column])
        assert len(np.unique(whole[column].reshape(3, -1), axis=0)) == 3
    top = whole["observation.images.top"]
    np.testing.assert_array_equal(top[:, 0], top[:, 1])  # a sample's frames are treated alike
    assert not np.array_equal(top[:, 0], whole["wrist"])


def test_openpi_leaves_a_wrist_cameras_geometry_alone() -> None:
    """Colours change; places do not: a picture of two halves keeps its edge where it was."""
    columns = rows([0, 1, 2, 3])
    halves = np.zeros((4, 3, 24, 32), np.uint8)
    halves[..., 16:] = 200
    columns["wrist"], columns["observation.images.top"] = halves.copy(), halves[:, None].copy()
    made = make_augment(ImageTransformsConfig(enable=True, preset="openpi"), 0, CAMERAS, BOXES)(columns)
    assert all(
        len(np.unique(one[..., half].reshape(3, -1), axis=1).T) == 1
        for one in made["wrist"]
        for half in (slice(16), slice(16, None))
    )
    assert all(len(np.unique(one[0, 0])) > 2 for one in made["observation.images.top"])


def test_a_letterbox_stays_black() -> None:
    columns = rows([0, 1, 2, 3])
    out = np.full((4, 3, 32, 32), 9, np.uint8)
    for one in out:
        letterbox_into(picture("smooth", (24, 32)) // 2 + 100, one)
    columns["wrist"] = out
    tfs = {"contrast": ImageTransformConfig(type="ColorJitter", kwargs={"contrast": (0.1, 0.2)})}
    config = ImageTransformsConfig(enable=True, tfs=tfs)
    made = make_augment(config, 0, {"wrist": "w"}, {(0, "wrist"): (4, 0, 24, 32)})(columns)["wrist"]
    assert not made[:, :, :4].any()
    assert not made[:, :, 28:].any()
    assert made[:, :, 4:28].std(axis=(1, 2, 3)).max() < 10 < made[:, :, 4:28].min()


@pytest.mark.parametrize(
    ("tfs", "message"),
    [
        (
            "{a: {type: ColourJitter}}",
            "'a' has the type 'ColourJitter', which is not among those that run on uint8 in a read task; did you mean ColorJitter?",
        ),
        ("{a: {type: PlanckianJitter}}", "'a' has the type 'PlanckianJitter'"),
        (
            "{a: {type: ColorJitter, kwargs: {huee: 0.1}}}",
            "'a' (ColorJitter): there is no setting 'huee'; did you mean hue?",
        ),
        (
            "{a: {type: ColorJitter, kwargs: {hue: 0.9}}}",
            "'a' (ColorJitter): hue=[0.9]: must be a number, or two that rise, between -0.5 and 0.5",
        ),
        (
            "{a: {type: ColorJitter, kwargs: {contrast: [2, 1]}}}",
            "contrast=[2, 1]: must be a number, or two that rise, 0 or more",
        ),
        ("{a: {type: ColorJitter, kwargs: {contrast: [1, 2, 3]}}}", "contrast=[1, 2, 3]: must be"),
        ("{a: {type: RandomAffine}}", "RandomAffine needs its 'degrees'"),
        ("{a: {type: RandomAffine, kwargs: {degrees: 5, translate: [2, 0]}}}", "translate=[2, 0]: must be two shares"),
        (
            "{a: {type: RandomAffine, kwargs: {degrees: 5, interpolation: 1}}}",
            "interpolation=[1]: must be 0 (nearest) or 2 (linear)",
        ),
        ("{a: {type: MotionBlur, kwargs: {kernel_size: 4}}}", "kernel_size=[4]: must be an odd number"),
    ],
)
def test_a_kind_that_cannot_be_made_is_named(tfs: str, message: str) -> None:
    config = parse_flags([f"--dataset.image_transforms.tfs={tfs}"], RunConfig).dataset.image_transforms
    with pytest.raises(ValueError, match="image_transforms") as caught:
        make_subset(config)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset.image_transforms.tfs={a: {weigth: 1}}"], "unknown name weigth; did you mean weight?"),
        (["--dataset.image_transforms.tfs={a: 1}"], "expected a mapping with the names weight, type, kwargs"),
        (["--dataset.image_transforms.tfs={a: {weight: -1}}"], "the weight of 'a' is -1.0; must be 0 or more"),
        (
            ["--dataset.image_transforms.enable", "--dataset.image_transforms.tfs={}"],
            "there is none with a weight above 0",
        ),
        (["--dataset.image_transforms.max_num_transforms=0"], "max_num_transforms=0: must be 1 or more"),
        (
            ["--dataset.image_transforms.preset=openpi", "--dataset.image_transforms.random_order=true"],
            "random_order would be given in vain",
        ),
        (["--dataset.image_transforms.preset=pi"], "expected one of lerobot, openpi"),
    ],
)
def test_flags_that_cannot_work_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match="image_transforms") as caught:
        validate_config(parse_flags(["--dataset.root=x", "--recipe=tiny", *flags], RunConfig))
    assert message in str(caught.value)


def test_settings_come_back_out_of_config_json_and_may_not_change_on_resume() -> None:
    flags = ['--dataset.image_transforms.tfs={"hue": {"kwargs": {"hue": 0.1}, "type": "ColorJitter"}}']
    config = parse_flags(["--dataset.image_transforms.enable", *flags], RunConfig)
    stored = to_json(config)
    assert config_from_dict(RunConfig, stored, "config.json") == config
    assert not list(config_changes(config, stored, "checkpoint"))
    plain = parse_flags(["--dataset.image_transforms.enable"], RunConfig)
    changes = list(config_changes(plain, stored, "checkpoint"))
    assert {change.group for change in changes} == {"config"}
    assert any("tfs.hue.kwargs.hue was [0.1], now [-0.05, 0.05]" in change.text for change in changes)
    older = to_json(plain)
    del older["dataset"]["image_transforms"]  # a run of a version that had none: off
    assert [change.text for change in config_changes(plain, older, "checkpoint")] == [
        "--dataset.image_transforms.enable was False, now True"
    ]


@pytest.fixture(scope="module")
def setups(dataset_v3: Path, small_base: Path) -> tuple[Setup, Setup]:
    """A run without augmentation, and with it."""
    config = RunConfig(
        dataset=DatasetConfig(root=(str(dataset_v3),)),
        policy=PolicyConfig(path=str(small_base), train="full"),
        batch_size=8,
    )
    enabled = replace(config.dataset, image_transforms=ImageTransformsConfig(enable=True))
    return make_setup(config), make_setup(replace(config, dataset=enabled))


def trained_rows(setup: Setup, share: Share) -> dict[int, dict[str, np.ndarray]]:
    """Place in the run's order -> what a worker gets for it, of the first steps."""
    plan, found = setup.data_plan, {}
    pieces = plan_pieces(plan.order, epoch_order(plan.order, 0), share, begin_batch=0, end_batch=2)
    for unit in make_units(plan, share, pieces):
        columns = apply_all(plan.transforms, read_unit(plan.specs[unit.dataset_index], unit))
        for row, slot in enumerate(columns[SLOT].tolist()):
            found[slot] = {name: values[row] for name, values in columns.items()}
    return found


def test_training_is_augmented_whatever_the_number_of_workers_and_evaluation_is_not(
    setups: tuple[Setup, Setup],
) -> None:
    plain, augmented = (trained_rows(setup, Share(0, 1)) for setup in setups)
    in_two = trained_rows(setups[1], Share(0, 2)) | trained_rows(setups[1], Share(1, 2))
    assert plain.keys() == augmented.keys() == in_two.keys()
    cameras = [target for _, target in setups[0].binding.cameras]
    for slot, row in augmented.items():
        for name, values in row.items():
            np.testing.assert_array_equal(values, in_two[slot][name])
            if name not in cameras:
                np.testing.assert_array_equal(values, plain[slot][name])
    changed = [
        not np.array_equal(row[camera], plain[slot][camera]) for slot, row in augmented.items() for camera in cameras
    ]
    assert all(changed)
    assert [type(one) for one in setups[1].eval_transforms(0)] == [type(one) for one in setups[0].eval_transforms(0)]
    assert setups[1].training_specs() == setups[1].specs
