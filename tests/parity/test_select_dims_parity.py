"""Dims selected of a wide recording give LeRobot's samples and statistics of the same recording with its columns cut."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.datasets.compute_stats import compute_relative_action_stats
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.policies.factory import make_pre_post_processors
from wide_dataset import NAMES, make_wide

from vlatune.batch import ACTION, STATE, TASK, TOKENS
from vlatune.config.flags import parse_flags
from vlatune.config.settings import RunConfig
from vlatune.data.transforms import apply_all
from vlatune.evaluate.held_out import read_held_out
from vlatune.policies.pi05.tiny import make_tiny_pi05
from vlatune.run_setup import make_setup

DIMS = {ACTION: [33, 3, 7, 8, 9], STATE: [33, 3, 7, 8, 9, 20]}
NAMED = {ACTION: ["right_gripper", 3, "7:10"], STATE: ["right_gripper", "left_arm_3", "7:10", 20]}
HORIZON, FPS = 5, 10
CAMERA = "observation.images.top"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("selected")
    make_wide(folder / "wide", names={"motors": list(NAMES)})
    make_wide(folder / "cut", cut=DIMS)
    make_tiny_pi05(
        folder / "base", cameras=(CAMERA,), state_dim=6, action_dim=5, horizon=HORIZON, image_size=48, tasks=("do it",)
    )
    return folder


def setup_of(place, *flags):
    words = [
        f"--dataset.root={place / 'wide'}",
        f"--dataset.select_dims={json.dumps(NAMED)}",
        "--dataset.eval_split=0.3",
    ]
    return make_setup(parse_flags([*words, f"--policy.path={place / 'base'}", *flags], RunConfig))


def lerobot_rows(place):
    delta = {ACTION: [step / FPS for step in range(HORIZON)]}
    return LeRobotDataset("a/cut", root=place / "cut", video_backend="pyav", delta_timestamps=delta)


def test_samples_and_statistics_are_lerobots_of_the_cut_dataset(place):
    setup, theirs = setup_of(place), lerobot_rows(place)
    rows = read_held_out(setup, 12)
    for at, index in enumerate(rows["index"].tolist()):
        item = theirs[index]
        for key in (STATE, ACTION, f"{ACTION}_is_pad"):
            np.testing.assert_array_equal(rows[key][at], item[key].numpy(), err_msg=key)
    stats = {key: {name: torch.as_tensor(v) for name, v in theirs.meta.stats[key].items()} for key in (STATE, ACTION)}
    for key, of in setup.stats.items():
        for name, values in of.items():
            np.testing.assert_array_equal(values, np.asarray(theirs.meta.stats[key][name]), err_msg=f"{key} {name}")
    before, _ = make_pre_post_processors(
        PreTrainedConfig.from_pretrained(place / "base"),
        str(place / "base"),
        preprocessor_overrides={"normalizer_processor": {"stats": stats}},
        postprocessor_overrides={"unnormalizer_processor": {"stats": stats}},
    )
    ours = apply_all(setup.eval_transforms(0), rows)
    made = before({key: torch.from_numpy(rows[key]) for key in (STATE, ACTION)} | {TASK: list(rows[TASK])})
    np.testing.assert_array_equal(ours[TOKENS], made[TOKENS].numpy())
    np.testing.assert_array_equal(ours[ACTION][..., :5], made[ACTION].numpy())


def test_relative_statistics_are_lerobots_of_the_cut_dataset(place, tmp_path):
    """Mean and std are compared, which LeRobot computes exactly; it estimates quantiles."""
    base = Path(shutil.copytree(place / "base", tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    config["normalization_mapping"] |= {"ACTION": "MEAN_STD"}
    (base / "config.json").write_text(json.dumps(config))
    flags = (
        f"--policy.path={base}",
        "--policy.use_relative_actions=true",
        "--policy.relative_exclude_joints=[gripper]",
    )
    ours, theirs = setup_of(place, *flags), lerobot_rows(place)
    columns = theirs.hf_dataset.with_format("numpy")
    arrays = {key: np.stack(columns[key][:]) for key in (STATE, ACTION, "episode_index")}
    features = {ACTION: {"shape": (5,), "names": theirs.meta.features[ACTION]["names"]}}
    stats = compute_relative_action_stats(arrays, features, HORIZON, ["gripper"])
    spread = stats["max"] - stats["min"]
    assert ours.stats[ACTION].keys() == {"mean", "std"}
    for name, values in ours.stats[ACTION].items():
        np.testing.assert_allclose(values / spread, stats[name] / spread, atol=1e-6)
