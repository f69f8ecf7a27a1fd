"""Data of Diffusion Policy: crops, noise, dropped frames; and invalid folders."""

import json
import shutil
from collections.abc import Callable

import numpy as np
import pytest
from diffusion_parity import read_rows, run_config, setup_of
from lerobot.datasets.sampler import EpisodeAwareSampler
from lerobot.policies.diffusion import DiffusionConfig

from vlatune.batch import ACTION, IMAGE_PREFIX, NOISE, SLOT, TIME
from vlatune.config.flags import parse_flags
from vlatune.config.settings import RunConfig
from vlatune.data.order.sample_order import epoch_order
from vlatune.data.transforms import apply_all
from vlatune.policies.base import Fit, ModuleOptions, NoiseSpec, read_policy
from vlatune.policies.diffusion.diffusion_adapter import (
    DEFAULTS,
    CentreCrop,
    DiffusionAdapter,
    DiffusionNoise,
    RandomCrop,
    new_settings,
)
from vlatune.policies.diffusion.diffusion_module import read_lerobot_config
from vlatune.registry import get_policy_info
from vlatune.run_setup import make_setup

TOP = "observation.images.top"


@pytest.fixture(scope="module")
def setup(dataset_v3, grouped):
    return setup_of(dataset_v3, grouped)


def images(rows: int = 6, observations: int = 2, side: int = 10) -> dict[str, np.ndarray]:
    """Return images whose pixels are their positions; all images of a sample are equal."""
    places = np.arange(side * side, dtype=np.uint8).reshape(side, side)
    shape = (rows, observations, 3, side, side)
    return {name: np.broadcast_to(places, shape).copy() for name in ("a", "b")} | {SLOT: np.arange(rows) + 40}


# Crops


def test_a_crop_depends_only_on_sample_camera_and_seed():
    columns = images()
    crop = RandomCrop(("a", "b"), (7, 8), seed=5)
    whole = crop(columns)
    assert whole["a"].shape == (6, 2, 3, 7, 8)
    assert np.array_equal(whole["a"][:, 0], whole["a"][:, 1])
    assert not np.array_equal(whole["a"], whole["b"])
    for row in range(6):
        alone = crop({key: value[row : row + 1] for key, value in columns.items()})
        assert np.array_equal(alone["a"][0], whole["a"][row])
    shared = RandomCrop(("a", "b"), (7, 8), seed=5, same_for_all=True)(columns)
    assert np.array_equal(shared["a"], shared["b"])
    assert not np.array_equal(RandomCrop(("a", "b"), (7, 8), seed=6)(columns)["a"], whole["a"])


@pytest.mark.parametrize("size_hw", [(7, 8), (8, 7), (10, 10), (5, 6)])
def test_the_centre_crop_equals_torchvisions(size_hw):
    import torch
    from torchvision.transforms import CenterCrop

    columns = images()
    ours = CentreCrop(("a", "b"), size_hw)(columns)["a"]
    assert np.array_equal(ours, CenterCrop(size_hw)(torch.from_numpy(columns["a"])).numpy())


def test_training_crops_at_random_and_evaluation_in_the_centre(setup):
    rows = read_rows(setup)
    trained, evaluated = (apply_all(one, rows) for one in (setup.training_transforms(), setup.eval_transforms(0)))
    assert rows[TOP].shape[1:] == (2, 3, 96, 96)
    assert trained[TOP].shape[1:] == evaluated[TOP].shape[1:] == (2, 3, 64, 72)
    assert np.array_equal(evaluated[TOP], rows[TOP][..., 16:80, 12:84])
    assert not np.array_equal(trained[TOP], evaluated[TOP])


# Noise


def test_noise_depends_on_the_slot_in_training_and_on_the_frame_in_validation():
    columns = {ACTION: np.zeros((4, 3, 2), np.float32), SLOT: np.array([9, 8, 7, 6])}
    columns |= {"dataset_index": np.zeros(4, np.int64), "index": np.array([1, 1, 2, 2])}
    trained = DiffusionNoise(NoiseSpec(3), 100)(columns)
    assert len({trained[NOISE][row].tobytes() for row in range(4)}) == 4
    again = DiffusionNoise(NoiseSpec(3), 100)({key: value[::-1] for key, value in columns.items()})
    assert np.array_equal(again[NOISE][::-1], trained[NOISE])
    assert np.array_equal(again[TIME][::-1], trained[TIME])
    evaluated = DiffusionNoise(NoiseSpec(3, by_frame=True), 100)(columns)
    assert np.array_equal(evaluated[NOISE][0], evaluated[NOISE][1])
    assert not np.array_equal(evaluated[NOISE][1], evaluated[NOISE][2])


def test_noise_is_standard_and_every_time_step_occurs():
    columns = {ACTION: np.zeros((3000, 4, 2), np.float32), SLOT: np.arange(3000)}
    sampled = DiffusionNoise(NoiseSpec(0), 10)(columns)
    assert abs(sampled[NOISE].mean()) < 0.03
    assert abs(sampled[NOISE].std() - 1) < 0.03
    assert sampled[TIME].dtype == np.int64
    assert np.bincount(sampled[TIME], minlength=10).min() > 200
    assert sampled[TIME].max() == 9


# The frames at the end


@pytest.mark.parametrize("dropped", [0, 2, 7])
def test_the_last_frames_are_left_out_as_lerobots_sampler_does(dropped, dataset_v3, tmp_path, grouped):
    base = changed(grouped, tmp_path / "base", drop_n_last_frames=dropped)
    setup = make_setup(run_config(dataset_v3, base))
    meta, training = setup.metas[0], setup.training
    begins = meta.episodes.from_row
    sampler = EpisodeAwareSampler(
        begins.tolist(),
        (begins + meta.episodes.length).tolist(),
        episode_indices_to_use=training.position.tolist(),
        drop_n_last_frames=dropped,
    )
    ours = [
        int(begins[p]) + frame for p, n in zip(training.position, training.length, strict=True) for frame in range(n)
    ]
    assert ours == sampler.indices
    assert setup.order.num_samples == len(ours)
    assert epoch_order(setup.order, 0).max() < len(ours)
    assert (setup.held_out.length == meta.episodes.length[setup.held_out.position]).all()


def test_episodes_that_are_too_short_are_an_error(dataset_v3, tmp_path, grouped):
    base = changed(grouped, tmp_path / "base", drop_n_last_frames=400)
    with pytest.raises(ValueError, match=r"leaves the last 400 frames of each episode out.*longer episodes"):
        make_setup(run_config(dataset_v3, base))


# Folders


def changed(base, folder, **settings):
    """A copy of the base with other settings in its config.json."""
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


def test_defaults_are_lerobots():
    config = DiffusionConfig()
    for name, value in DEFAULTS.items():
        theirs = getattr(config, name)
        found = {key: mode.value for key, mode in theirs.items()} if isinstance(theirs, dict) else theirs
        assert found == value, name


def test_offsets_are_lerobots(setup):
    config = DiffusionConfig(horizon=8, n_obs_steps=2, down_dims=(16, 32))
    assert setup.policy.observation_offsets == tuple(config.observation_delta_indices)
    assert setup.policy.action_offsets == tuple(config.action_delta_indices)


INVALID = {
    "vision_backbone": ("resnet_evil", "vision_backbone is resnet_evil, expected resnet18"),
    "noise_scheduler_type": ("DPM", "noise_scheduler_type is DPM, expected DDPM, DDIM"),
    "horizon": (6, "horizon is 6, expected a multiple of 4"),
    "down_dims": ([16] * 9, "down_dims has 9 widths, expected 1 to 8"),
    "n_groups": (7, "must be multiples of n_groups=7"),
    "num_inference_steps": (40, "num_inference_steps is 40, more than num_train_timesteps=12"),
    "crop_shape": ([200, 200], r"crop_shape \[200, 200\] is larger than the images \(96 x 96"),
    "crop_ratio": (3.0, "crop_ratio is 3.0: must be above 0"),
    "normalization_mapping": ({"VISUAL": "MIN_MAX"}, "images are normalised by MIN_MAX"),
    "kernel_size": (1e12, "kernel_size is .*, expected a whole number"),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_config_is_rejected(name, grouped, tmp_path):
    value, why = INVALID[name]
    with pytest.raises(ValueError, match=f"policy '.*': .*{why}"):
        DiffusionAdapter().read_spec(changed(grouped, tmp_path / "base", **{name: value}))


@pytest.mark.parametrize(
    "settings",
    [
        {"use_separate_rgb_encoder_per_camera": False},
        {"output_features": {"action": {"type": "ACTION", "shape": [5]}}},
        {"crop_shape": [32, 32]},
    ],
    ids=str,
)
def test_a_config_that_does_not_match_the_weights_is_rejected_by_loading(settings, grouped, tmp_path, setup):
    spec = DiffusionAdapter().read_spec(changed(grouped, tmp_path / "base", **settings))
    with pytest.raises(ValueError, match="the weights do not match the model"):
        DiffusionAdapter().load_module(spec, setup.binding, ModuleOptions(train="full"))


def of_another_size(config):
    for name, feature in config["input_features"].items():
        if name.startswith(IMAGE_PREFIX):
            feature["shape"] = [3, 88, 96]


def of_more_dims(config):
    config["input_features"]["observation.state"]["shape"] = [9]


def of_another_camera(config):
    features = config["input_features"]
    config["input_features"] = {name.replace("wrist", "elbow"): feature for name, feature in features.items()}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (of_another_size, "is recorded at 96 x 96, but the policy '.*' expects 88 x 96"),
        (of_more_dims, "'observation.state' has 3 dims, but the policy expects 9"),
        (of_another_camera, r"has no camera 'observation.images.elbow'.*--rename_map='\{\"observation.images.wrist\""),
    ],
)
def test_a_dataset_that_does_not_fit_the_policy_is_rejected(change: Callable, why, dataset_v3, grouped, tmp_path):
    base = changed(grouped, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    change(config)
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=why):
        setup_of(dataset_v3, base)


# Settings


def fit(**overrides) -> Fit:
    return Fit(("observation.images.top",), 3, 3, 8, 48, (), 0, recorded_hw=((96, 128),), overrides=overrides)


def test_settings_are_flags_by_lerobots_names():
    flags = [
        "--policy.type=diffusion",
        "--policy.crop_shape=[84,72]",
        "--policy.down_dims=[64,128]",
        "--policy.horizon=16",
    ]
    config = parse_flags([*flags, "--policy.n_obs_steps=3"], RunConfig)
    made = new_settings(fit(**config.policy.overrides), small=False)
    assert made["crop_shape"] == (84, 72)
    assert made["down_dims"] == (64, 128)
    assert made["n_action_steps"] == 14  # as many as there are from the newest observation on
    assert made["input_features"]["observation.images.top"]["shape"] == [3, 96, 128]
    assert made["use_group_norm"]


def test_options_that_fit_the_weights_can_be_changed(grouped):
    info, adapter = get_policy_info("diffusion"), DiffusionAdapter()
    spec = read_policy(adapter, grouped, info, {"drop_n_last_frames": 0, "noise_scheduler_type": "DDIM"})
    assert spec.drop_last_frames == 0
    assert spec.overrides["noise_scheduler_type"] == "DDIM"
    assert read_lerobot_config(grouped, spec.overrides).noise_scheduler_type == "DDIM"
    with pytest.raises(ValueError, match=r"--policy.horizon=16: the weights of the base model .* require 8"):
        read_policy(adapter, grouped, info, {"horizon": 16})
