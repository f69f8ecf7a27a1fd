"""What Diffusion Policy asks of the data: crops, draws, the frames that are left out; and the folders that it refuses."""

import json
import shutil
from collections.abc import Callable

import numpy as np
import pytest
from diffusion_parity import read_rows, run_config, setup_of
from lerobot.datasets.sampler import EpisodeAwareSampler
from lerobot.policies.diffusion import DiffusionConfig
from safetensors.numpy import load_file, save_file

from vlatune.batch import ACTION, IMAGE_PREFIX, NOISE, SLOT, TIME
from vlatune.config import RunConfig
from vlatune.dataset.order.sample_order import epoch_order
from vlatune.dataset.reader import read_units
from vlatune.flags import parse_flags
from vlatune.pipeline.plan import Share, make_units, plan_steps
from vlatune.pipeline.transforms import apply_all
from vlatune.policies.base import Fit, ModuleOptions, read_policy
from vlatune.policies.diffusion.diffusion_adapter import (
    CentreCrop,
    DiffusionAdapter,
    DrawDiffusion,
    RandomCrop,
    new_settings,
    with_defaults,
)
from vlatune.policies.diffusion.diffusion_module import read_lerobot_config
from vlatune.policies.registry import get_policy
from vlatune.run_setup import make_setup

TOP = "observation.images.top"


@pytest.fixture(scope="module")
def setup(dataset_v3, grouped):
    return setup_of(dataset_v3, grouped)


def pictures(rows: int = 6, observations: int = 2, side: int = 10) -> dict[str, np.ndarray]:
    """Every pixel tells its place, every picture of a sample is the same."""
    places = np.arange(side * side, dtype=np.uint8).reshape(side, side)
    shape = (rows, observations, 3, side, side)
    return {name: np.broadcast_to(places, shape).copy() for name in ("a", "b")} | {SLOT: np.arange(rows) + 40}


# Crops


def test_a_crop_is_one_place_per_sample_and_camera_whatever_else_is_in_the_block():
    columns = pictures()
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


def test_every_place_is_as_likely():
    columns = pictures(rows=2000, observations=1)
    corners = RandomCrop(("a",), (8, 9), seed=0)(columns)["a"][:, 0, 0, 0, 0]
    found, counts = np.unique(corners, return_counts=True)
    assert found.tolist() == [0, 1, 10, 11, 20, 21]  # 3 rows, 2 columns
    assert counts.min() > 0.8 * 2000 / 6


@pytest.mark.parametrize("size_hw", [(7, 8), (8, 7), (10, 10), (5, 6)])
def test_the_middle_is_torchvisions(size_hw):
    import torch
    from torchvision.transforms import CenterCrop

    columns = pictures()
    ours = CentreCrop(("a", "b"), size_hw)(columns)["a"]
    assert np.array_equal(ours, CenterCrop(size_hw)(torch.from_numpy(columns["a"])).numpy())


def test_training_crops_at_random_and_evaluation_in_the_middle(setup):
    rows = read_rows(setup)
    trained, evaluated = (apply_all(one, rows) for one in (setup.training_transforms(), setup.eval_transforms(0)))
    assert rows[TOP].shape[1:] == (2, 3, 96, 96)
    assert trained[TOP].shape[1:] == evaluated[TOP].shape[1:] == (2, 3, 64, 72)
    assert np.array_equal(evaluated[TOP], rows[TOP][..., 16:80, 12:84])
    assert not np.array_equal(trained[TOP], evaluated[TOP])


# Draws


def test_draws_belong_to_the_place_in_training_and_to_the_frame_in_validation():
    columns = {ACTION: np.zeros((4, 3, 2), np.float32), SLOT: np.array([9, 8, 7, 6])}
    columns |= {"dataset_index": np.zeros(4, np.int64), "index": np.array([1, 1, 2, 2])}
    trained = DrawDiffusion(3, 100)(columns)
    assert len({trained[NOISE][row].tobytes() for row in range(4)}) == 4
    again = DrawDiffusion(3, 100)({key: value[::-1] for key, value in columns.items()})
    assert np.array_equal(again[NOISE][::-1], trained[NOISE])
    assert np.array_equal(again[TIME][::-1], trained[TIME])
    evaluated = DrawDiffusion(3, 100, by_frame=True)(columns)
    assert np.array_equal(evaluated[NOISE][0], evaluated[NOISE][1])
    assert not np.array_equal(evaluated[NOISE][1], evaluated[NOISE][2])


def test_noise_is_standard_and_every_step_is_drawn():
    columns = {ACTION: np.zeros((3000, 4, 2), np.float32), SLOT: np.arange(3000)}
    drawn = DrawDiffusion(0, 10)(columns)
    assert abs(drawn[NOISE].mean()) < 0.03
    assert abs(drawn[NOISE].std() - 1) < 0.03
    assert drawn[TIME].dtype == np.int64
    assert np.bincount(drawn[TIME], minlength=10).min() > 200
    assert drawn[TIME].max() == 9


def test_one_and_two_workers_take_the_same_samples_with_the_same_crops_and_draws(dataset_v3, grouped):
    """At plan level: what every worker's read tasks would make, joined by place in the run's order."""
    found = []
    for workers in (1, 2):
        setup = setup_of(dataset_v3, grouped, batch_size=8 // workers, num_workers=workers)
        setup = setup.with_lanes(8)
        plan = setup.data_plan
        rows: dict[int, tuple[bytes, ...]] = {}
        for rank in range(workers):
            share = Share(rank, workers)
            units = make_units(plan, share, plan_steps(plan.order, share, 0, 4))
            columns = apply_all(plan.transforms, read_units(plan.specs, units))
            for number, slot in enumerate(columns[SLOT].tolist()):
                rows[slot] = tuple(columns[key][number].tobytes() for key in ("index", TOP, NOISE, TIME, ACTION))
        found.append(rows)
    assert found[0].keys() == set(range(32))
    assert found[0] == found[1]


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


def test_episodes_that_are_too_short_are_told(dataset_v3, tmp_path, grouped):
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
    for name, value in with_defaults({}).items():
        theirs = getattr(config, name)
        found = {key: mode.value for key, mode in theirs.items()} if isinstance(theirs, dict) else theirs
        assert found == value, name


def test_offsets_are_lerobots(setup):
    config = DiffusionConfig(horizon=8, n_obs_steps=2, down_dims=(16, 32))
    assert setup.policy.observation_offsets == tuple(config.observation_delta_indices)
    assert setup.policy.action_offsets == tuple(config.action_delta_indices)


REFUSED = {
    "vision_backbone": ("resnet_evil", "vision_backbone is 'resnet_evil', expected resnet18"),
    "noise_scheduler_type": ("DPM", "noise_scheduler_type is 'DPM', expected DDPM, DDIM"),
    "horizon": (6, "horizon is 6, expected a multiple of 4"),
    "down_dims": ([16] * 9, "must be 1 to 8 widths"),
    "n_groups": (7, "must be multiples of n_groups=7"),
    "num_inference_steps": (40, "num_inference_steps is 40, more than num_train_timesteps=12"),
    "crop_shape": ([200, 200], r"crop_shape \[200, 200\] does not fit into pictures of 96 x 96"),
    "crop_ratio": (3.0, "crop_ratio is 3.0: must be above 0"),
    "use_separate_rgb_encoder_per_camera": (False, "has 2 picture encoders, config.json asks for 1"),
    "output_features": ({"action": {"type": "ACTION", "shape": [5]}}, "makes actions of 3 dims, config.json says 5"),
    "normalization_mapping": ({"VISUAL": "MIN_MAX"}, "pictures are normalised with MIN_MAX"),
    "kernel_size": (1e12, "kernel_size is .*, expected a number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_cannot_be_built_is_refused_with_its_place(name, grouped, tmp_path):
    value, why = REFUSED[name]
    with pytest.raises(ValueError, match=f"policy '.*': .*{why}"):
        DiffusionAdapter().read_spec(changed(grouped, tmp_path / "base", **{name: value}))


def test_a_crop_of_another_size_than_the_weights_is_refused(grouped, tmp_path):
    with pytest.raises(ValueError, match=r"places in the last map, 32 x 32 pixels have 1"):
        DiffusionAdapter().read_spec(changed(grouped, tmp_path / "base", crop_shape=[32, 32]))


@pytest.mark.parametrize("damage", ["missing", "damaged", "left out"])
def test_weights_that_are_not_there_are_refused(damage, grouped, tmp_path):
    base = changed(grouped, tmp_path / "base")
    file = base / "model.safetensors"
    if damage == "missing":
        file.unlink()
    elif damage == "damaged":
        file.write_bytes(b"\x00" * 100)
    else:
        kept = {key: value for key, value in load_file(file).items() if "final_conv" not in key}
        save_file(kept, file)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        DiffusionAdapter().read_spec(base)


def test_a_tensor_that_does_not_fit_is_named_when_it_is_loaded(dataset_v3, grouped, tmp_path):
    base = changed(grouped, tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    del tensors["diffusion.unet.mid_modules.0.conv1.block.0.weight"]
    save_file(tensors, base / "model.safetensors")
    setup = setup_of(dataset_v3, base)
    with pytest.raises(ValueError, match=r"1 missing \['diffusion\.unet\.mid_modules\.0\.conv1\.block\.0\.weight'\]"):
        setup.adapter.load_module(setup.policy, setup.binding, ModuleOptions(train="full"))


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
        (of_another_size, "is recorded at 96 x 96, the policy '.*' takes pictures of 88 x 96"),
        (of_more_dims, "'observation.state' has 3 dims, the policy was made for 9"),
        (of_another_camera, r"has no camera 'observation.images.elbow'.*--rename_map='\{\"observation.images.wrist\""),
    ],
)
def test_a_dataset_that_the_policy_does_not_fit_is_refused(change: Callable, why, dataset_v3, grouped, tmp_path):
    base = changed(grouped, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    change(config)
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=why):
        setup_of(dataset_v3, base)


# Settings


def fit(**overrides) -> Fit:
    return Fit(("observation.images.top",), 3, 3, 8, 48, (), 0, recorded_hw=((96, 128),), overrides=overrides)


def test_the_recipe_has_lerobots_presets():
    preset, config = DiffusionConfig(), parse_flags(["--policy.type=diffusion"], RunConfig)
    assert config.optimizer.type == "adam"
    assert config.optimizer.lr == preset.optimizer_lr
    assert config.optimizer.betas == tuple(preset.optimizer_betas)
    assert config.optimizer.eps == preset.optimizer_eps
    assert config.optimizer.weight_decay == preset.optimizer_weight_decay
    assert config.optimizer.grad_clip_norm == preset.get_optimizer_preset().grad_clip_norm
    assert config.scheduler.type == preset.get_scheduler_preset().type
    assert config.scheduler.num_warmup_steps == preset.scheduler_warmup_steps
    assert config.policy.train == "full"


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


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"horizon": 12}, "horizon is 12, expected a multiple of 8"),
        ({"crop_shape": (100, 100)}, r"crop_shape \[100, 100\] does not fit into pictures of 96 x 128"),
        ({"horizon": 16, "n_action_steps": 16}, "give --policy.n_action_steps=15 or less"),
        ({"num_inference_steps": 200}, "num_inference_steps is 200, more than num_train_timesteps=100"),
        ({"n_groups": 7}, "must be multiples of n_groups=7"),
    ],
)
def test_settings_that_cannot_be_built_are_refused(overrides, why):
    with pytest.raises(ValueError, match=why):
        new_settings(fit(**overrides), small=False)


def test_a_base_allows_what_its_weights_do(grouped):
    card, adapter = get_policy("diffusion"), DiffusionAdapter()
    spec = read_policy(adapter, grouped, card, {"drop_n_last_frames": 0, "noise_scheduler_type": "DDIM"})
    assert spec.drop_last_frames == 0
    assert spec.overrides["noise_scheduler_type"] == "DDIM"
    assert read_lerobot_config(grouped, spec.overrides).noise_scheduler_type == "DDIM"
    with pytest.raises(ValueError, match=r"--policy.horizon=16: the weights of the base model .* are made for 8"):
        read_policy(adapter, grouped, card, {"horizon": 16})
