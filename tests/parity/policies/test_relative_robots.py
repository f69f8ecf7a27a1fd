"""Several robots that learn relative actions at a rate of their own, against LeRobot: rows, statistics, loss, predictions.

LeRobot knows one robot at a time, so each dataset's rows go through the processors and the policy that its own export has.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.datasets import compute_stats
from lerobot.datasets.compute_stats import compute_relative_action_stats
from lerobot.policies.factory import make_pre_post_processors
from parity.policies.flow_parity import LOSS_RTOL, Knows, lerobot_loss, load_lerobot, make_base
from recording_writer import write_recording

from vlatune.batch import ACTION, IDS, NOISE, SLOT, STATE, TASK, TIME, TOKEN_MASK, TOKENS, Columns
from vlatune.config.flags import parse_flags
from vlatune.config.settings import EvalConfig, RunConfig
from vlatune.data.meta.stats import read_parts
from vlatune.data.transforms import apply_all
from vlatune.evaluate.held_out import by_robot, read_held_out
from vlatune.evaluate.predictions import predict_all
from vlatune.export.policy_files import make_policy_files
from vlatune.policies.base import Fit, ModuleOptions
from vlatune.policies.normalisation import stats_of
from vlatune.run_setup import Setup, make_setup

CAMERAS = ("observation.images.top", "observation.images.wrist")
ROBOTS: dict[str, dict[str, Any]] = {
    "arm": {"action_names": ("gripper", "shoulder", "elbow"), "state_dim": 4, "fps": 20, "cameras": CAMERAS},
    "two_arms": {
        "action_names": ("left_shoulder", "left_elbow", "left_gripper", "right_shoulder", "right_Gripper"),
        "state_dim": 6,
        "fps": 30,
        "seed": 1,
    },
}
MASKS = [[False, True, True], [True, True, False, True, False]]
HORIZON, RATE = 4, 10
STRIDES = [2, 3]
"""Frames from one action of a chunk to the next: 20 and 30 fps at 10 actions a second."""


@dataclass(frozen=True)
class Mixture:
    setup: Setup
    base: Path
    rows: Columns

    def folder(self, number: int, place: Path) -> Path:
        """A LeRobot folder of one of the robots with the base's weights, as an export of the first step would be."""
        part = self.setup.binding.parts[number]
        shutil.copytree(self.base, place)
        own = stats_of(self.setup.stats, self.setup.binding, number)
        for name, data in make_policy_files(self.setup.policy, part, own, dtype=None).items():
            (place / name).write_bytes(data)
        return place

    def own_rows(self, number: int) -> Columns:
        return {name: values[self.rows["dataset_index"] == number] for name, values in self.rows.items()}


@pytest.fixture(scope="module", params=["pi05", "pi0"])
def mixture(request, tmp_path_factory) -> Mixture:
    folder = tmp_path_factory.mktemp("relative_robots")
    roots = [write_recording(folder / name, **robot) for name, robot in ROBOTS.items()]
    base = make_base(folder / "base", request.param, Fit(CAMERAS, 6, 5, HORIZON, 48, ("fold the towel",), 0))
    flags = [
        f"--policy.type={request.param}",
        f"--policy.path={base}",
        "--policy.use_relative_actions=true",
        "--policy.relative_exclude_joints=[gripper]",
        *(f"--dataset.root={root}" for root in roots),
        f"--dataset.action_fps={RATE}",
        "--dataset.eval_split=0.25",
    ]
    setup = make_setup(parse_flags(flags, RunConfig))
    return Mixture(setup, base, read_held_out(setup, 100))


def lerobots_rows(mixture: Mixture, number: int, place: Path) -> tuple[dict[str, Any], Any]:
    """One robot's rows through LeRobot's preprocessor, and its postprocessor."""
    folder, raw, part = mixture.folder(number, place), mixture.own_rows(number), mixture.setup.binding.parts[number]
    tokenizer = {"tokenizer_name": str(Path(mixture.setup.policy.tokenizer_file or "").parent)}
    before, after = make_pre_post_processors(
        PreTrainedConfig.from_pretrained(folder), str(folder), preprocessor_overrides={"tokenizer_processor": tokenizer}
    )
    vectors = {STATE: raw[STATE][..., : part.state_dim], ACTION: raw[ACTION][..., : part.action_dim]}
    return before({key: torch.from_numpy(one) for key, one in vectors.items()} | {TASK: list(raw[TASK])}), after


@pytest.mark.parametrize("number", [0, 1])
def test_a_robots_rows_are_those_of_lerobots_processors(mixture, number, tmp_path):
    theirs, after = lerobots_rows(mixture, number, tmp_path / "policy")
    part, raw = mixture.setup.binding.parts[number], mixture.own_rows(number)
    ours = apply_all(mixture.setup.eval_transforms(0), raw)
    assert list(part.is_relative) == MASKS[number]
    for key in (TOKENS, TOKEN_MASK):
        assert np.array_equal(ours[key], theirs[key].numpy()), key
    for key, dims in ((STATE, part.state_dim), (ACTION, part.action_dim)):
        assert np.array_equal(ours[key][..., :dims], theirs[key].numpy()), key
        assert not ours[key][..., dims:].any(), f"{key}: dims that the robot lacks are not 0"
    np.testing.assert_allclose(after(theirs[ACTION]).numpy(), raw[ACTION][..., : part.action_dim], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("number", [0, 1])
def test_statistics_are_lerobots_over_the_offsets_that_are_trained(mixture, number):
    """LeRobot counts neighbouring rows: so every second or third row of an episode is given to it as a separate episode."""
    setup, stride = mixture.setup, STRIDES[number]
    meta, part = setup.metas[number], setup.binding.parts[number]
    episode, frame = (np.concatenate(list(read_parts(meta, key)))[:, 0] for key in ("episode_index", "frame_index"))
    order = np.lexsort((frame, frame % stride, episode))
    columns = {key: np.concatenate(list(read_parts(meta, key)))[order] for key in (STATE, ACTION)}
    columns["episode_index"] = (episode * stride + frame % stride)[order]
    starts = compute_stats._get_valid_chunk_starts(columns["episode_index"], HORIZON)
    mask = np.array(MASKS[number], np.float32)
    chunks = compute_stats._compute_relative_chunk_batch(starts, columns[ACTION], columns[STATE], HORIZON, mask)
    features = {ACTION: {"shape": (part.action_dim,), "names": list(part.action_names)}}
    theirs = compute_relative_action_stats(columns, features, HORIZON, ["gripper"])
    found = stats_of(setup.stats, setup.binding, number)[ACTION]
    # LeRobot's quantiles are estimates from a histogram; ours are exact ones of the same values.
    theirs |= {name: np.quantile(chunks, share, axis=0) for name, share in (("q01", 0.01), ("q99", 0.99))}
    for name, values in found.items():
        np.testing.assert_allclose(values, theirs[name], rtol=1e-4, atol=1e-5)


def test_relative_statistics_of_neighbouring_frames_are_not_used_at_another_rate(mixture, tmp_path):
    """A dataset's own relative statistics, as LeRobot writes them, hold for its own frames alone."""
    meta, part = mixture.setup.metas[0], mixture.setup.binding.parts[0]
    root = Path(shutil.copytree(meta.root.url, tmp_path / "arm"))
    columns = {key: np.concatenate(list(read_parts(meta, key))) for key in (STATE, ACTION)}
    columns["episode_index"] = np.concatenate(list(read_parts(meta, "episode_index")))[:, 0]
    features = {ACTION: {"shape": (part.action_dim,), "names": list(part.action_names)}}
    own = compute_relative_action_stats(columns, features, HORIZON, ["gripper"])
    stats = json.loads((root / "meta/stats.json").read_text())
    stats[ACTION] = {name: np.asarray(values).tolist() for name, values in own.items()}
    (root / "meta/stats.json").write_text(json.dumps(stats))
    flags = [
        f"--policy.type={mixture.setup.policy.type}",
        f"--policy.path={mixture.base}",
        "--policy.use_relative_actions=true",
        "--policy.relative_exclude_joints=[gripper]",
        f"--dataset.root={root}",
    ]
    kept = make_setup(parse_flags(flags, RunConfig)).stats[ACTION]
    made = make_setup(parse_flags([*flags, f"--dataset.action_fps={RATE}"], RunConfig)).stats[ACTION]
    wanted = stats_of(mixture.setup.stats, mixture.setup.binding, 0)[ACTION]
    for name in wanted:
        assert kept[name].tolist() == stats[ACTION][name]
        np.testing.assert_array_equal(made[name], wanted[name])


@pytest.mark.parametrize("number", [0, 1])
def test_a_robots_loss_is_lerobots_on_the_same_rows_and_noise(mixture, number, tmp_path):
    setup, raw = mixture.setup, mixture.own_rows(number)
    module: Any = setup.adapter.load_module(setup.policy, setup.binding, ModuleOptions("full", "float32")).train()
    columns = apply_all(setup.eval_transforms(0), mixture.rows)
    batch = {key: torch.from_numpy(values) for key, values in columns.items() if key not in (*IDS, SLOT)}
    mine = torch.from_numpy(mixture.rows["dataset_index"] == number)
    with torch.no_grad():
        ours = module(batch).loss_B[mine].mean()
        theirs, _ = lerobots_rows(mixture, number, tmp_path / "policy")
        cameras = {target: torch.from_numpy(raw[target]) for _, target in setup.binding.parts[number].cameras}
        theirs = {key: theirs[key] for key in (TOKENS, TOKEN_MASK, STATE, ACTION)} | cameras
        theirs |= {key: batch[key][mine] for key in (NOISE, TIME)}
        loss = lerobot_loss(load_lerobot(tmp_path / "policy"), theirs)
    torch.testing.assert_close(ours, loss, rtol=LOSS_RTOL, atol=0)


def test_predictions_become_absolute_by_each_robots_mask(mixture):
    for number, rows in by_robot(mixture.setup, mixture.rows):
        assert number is not None
        made = predict_all(mixture.setup, Knows(), rows, EvalConfig(batch_size=5), dataset=number)["none"]
        assert made.predicted_NTA.shape[-1] == mixture.setup.binding.parts[number].action_dim
        np.testing.assert_allclose(made.predicted_NTA, made.true_NTA, rtol=1e-5, atol=1e-5)
