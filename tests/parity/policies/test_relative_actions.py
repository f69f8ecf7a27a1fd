"""Relative actions of PI0.5 and PI0: samples, statistics, evaluation and export equal LeRobot's."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import check_actions
from hypothesis import given
from hypothesis import strategies as st
from lerobot.configs import PreTrainedConfig
from lerobot.datasets.compute_stats import compute_relative_action_stats
from lerobot.policies.factory import make_pre_post_processors
from lerobot.processor import RelativeActionsProcessorStep
from parity.policies.flow_parity import Knows
from small_run import running, small_config

from vlatune.batch import ACTION, STATE, TASK, TOKEN_MASK, TOKENS
from vlatune.config.flags import parse_flags
from vlatune.config.settings import DatasetConfig, EvalConfig, OptimizerConfig, PolicyConfig, RunConfig
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.data.meta.stats import read_parts
from vlatune.data.transforms import apply_all
from vlatune.evaluate.held_out import read_held_out
from vlatune.evaluate.predictions import in_own_units, predict_all
from vlatune.export.policy_files import make_policy_files
from vlatune.policies.base import Fit
from vlatune.policies.normalisation import relative_dims
from vlatune.policies.pi05.tiny import make_tiny
from vlatune.registry import get_adapter
from vlatune.run_setup import Setup, make_setup

EXCLUDED = ["close"]
HORIZON = 5
PRE, POST = "policy_preprocessor.json", "policy_postprocessor.json"


def edit(file: Path, change: Any) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def turn_on(config: dict[str, Any]) -> None:
    config |= {"use_relative_actions": True, "relative_exclude_joints": EXCLUDED}


@pytest.fixture(scope="module", params=["pi05", "pi0"])
def base(request, dataset_v3, tmp_path_factory) -> Path:
    """A base whose config enables relative actions, but not its processors."""
    meta = load_meta(str(dataset_v3))
    state, action = (meta.features[key].shape[0] for key in (STATE, ACTION))
    folder = make_tiny(
        request.param,
        tmp_path_factory.mktemp("relative") / "base",
        Fit(tuple(meta.cameras), state, action, horizon=HORIZON, image_size=48, tasks=tuple(meta.tasks), seed=0),
    )
    edit(folder / "config.json", turn_on)
    return folder


def type_of(base: Path) -> str:
    return json.loads((base / "config.json").read_text())["type"]


def setup_for(base: Path, dataset: Path, *, flags: tuple[str, ...] = (), **changes: Any) -> Setup:
    given = DatasetConfig(root=(str(dataset),), eval_split=0.2, **changes)
    policy = parse_flags([f"--policy.type={type_of(base)}", f"--policy.path={base}", *flags], RunConfig).policy
    return make_setup(RunConfig(dataset=given, policy=policy))


def lerobot_stats(dataset: Path) -> dict[str, np.ndarray]:
    """Return LeRobot's statistics over all rows."""
    meta = load_meta(str(dataset))
    columns = {key: np.concatenate(list(read_parts(meta, key))) for key in (STATE, ACTION, "episode_index")}
    columns["episode_index"] = columns["episode_index"][:, 0]
    features = {ACTION: {"shape": meta.features[ACTION].shape, "names": list(meta.features[ACTION].names or ())}}
    return compute_relative_action_stats(columns, features, HORIZON, EXCLUDED)


# Samples


names = st.lists(st.sampled_from(["gripper", "Left_Gripper.pos", "shoulder", "x", ""]), min_size=1, max_size=6)


@given(names, st.lists(st.sampled_from(["gripper", "GRIPPER.POS", "sho", ""]), max_size=3))
def test_the_same_joints_stay_absolute_as_lerobots(action_names, exclude):
    step = RelativeActionsProcessorStep(enabled=True, exclude_joints=exclude, action_names=action_names)
    assert list(relative_dims(action_names, exclude)) == step._build_mask(len(action_names))


def test_samples_are_those_of_lerobots_processors(base, dataset_v3):
    setup = setup_for(base, dataset_v3)
    rows = read_held_out(setup, 12)
    ours = apply_all(setup.eval_transforms(0), rows)
    stats = {key: {name: torch.from_numpy(v) for name, v in of.items()} for key, of in setup.stats.items()}
    joints = {"enabled": True, "exclude_joints": EXCLUDED, "action_names": list(setup.binding.action_names)}
    before, after = make_pre_post_processors(  # as `lerobot-train` makes them
        PreTrainedConfig.from_pretrained(base),
        str(base),
        preprocessor_overrides={"relative_actions_processor": joints, "normalizer_processor": {"stats": stats}},
        postprocessor_overrides={
            "absolute_actions_processor": {"enabled": True},
            "unnormalizer_processor": {"stats": stats},
        },
    )
    theirs = before({key: torch.from_numpy(rows[key]) for key in (STATE, ACTION)} | {TASK: list(rows[TASK])})
    width = setup.binding.action_dim
    for key in (TOKENS, TOKEN_MASK, STATE):
        assert np.array_equal(ours[key], theirs[key].numpy()), key
    assert np.array_equal(ours[ACTION][..., :width], theirs[ACTION].numpy())
    back = in_own_units(setup.eval_transforms(0), ours[ACTION][..., :width], rows[STATE])
    assert np.array_equal(back, after(theirs[ACTION]).numpy())
    np.testing.assert_allclose(back, rows[ACTION], atol=1e-5)


# Statistics


def test_statistics_are_lerobots_of_relative_actions(base, dataset_v3):
    setup, theirs = setup_for(base, dataset_v3), lerobot_stats(dataset_v3)
    for name, values in setup.stats[ACTION].items():
        spread = theirs["max"] - theirs["min"]
        # LeRobot estimates quantiles from a histogram of 5000 bins, and ours are exact.
        np.testing.assert_allclose(values / spread, theirs[name] / spread, atol=0.02 if name[0] == "q" else 1e-5)
    plain = load_meta(str(dataset_v3)).stats[ACTION]
    assert any(np.abs(values - plain[name]).max() > 0.01 for name, values in setup.stats[ACTION].items())


def test_relative_statistics_of_the_dataset_are_used_if_present(base, dataset_v3, tmp_path):
    computed = setup_for(base, dataset_v3, stats="computed").stats[ACTION]
    rewritten = Path(shutil.copytree(dataset_v3, tmp_path / "data"))
    own = {name: values.tolist() for name, values in lerobot_stats(dataset_v3).items()}
    edit(rewritten / "meta/stats.json", lambda stats: stats.update({ACTION: own}))
    kept = setup_for(base, rewritten).stats[ACTION]
    assert {name: values.tolist() for name, values in kept.items()} == {name: own[name] for name in kept}
    edit(rewritten / "meta/stats.json", lambda stats: stats.pop(ACTION))
    for dataset in (dataset_v3, rewritten):
        found = setup_for(base, dataset).stats[ACTION]
        assert all(np.array_equal(found[name], computed[name]) for name in computed)


# Evaluation and export


def test_errors_are_those_of_absolute_actions(base, dataset_v3):
    setup = setup_for(base, dataset_v3)
    module, rows = Knows(setup.binding.action_dim), read_held_out(setup, 12)
    predicted = predict_all(setup, module, rows, EvalConfig(batch_size=5))["none"]
    assert predicted.error() < 1e-5
    np.testing.assert_allclose(predicted.predicted_NTA, predicted.true_NTA, atol=1e-5)


@pytest.mark.parametrize("has_steps", [True, False], ids=["steps saved", "an older base"])
def test_the_export_gives_the_same_absolute_actions(base, dataset_v3, tmp_path, monkeypatch, has_steps):
    copy = Path(shutil.copytree(base, tmp_path / "base"))
    if not has_steps:
        for file, part in ((PRE, "relative_actions"), (POST, "absolute_actions")):
            edit(
                copy / file,
                lambda c, part=part: c.update(steps=[s for s in c["steps"] if part not in s["registry_name"]]),
            )
    config = small_config(
        dataset_v3,
        copy,
        tmp_path / "run",
        policy=PolicyConfig(path=str(copy), type=type_of(base), train="heads"),
        optimizer=OptimizerConfig(lr=1e-2),
    )
    with running(config) as run:
        run.step()
        run.save()
    folder = tmp_path / "exported"
    monkeypatch.chdir("/")
    check_actions(run, folder)
    exported = PreTrainedConfig.from_pretrained(folder)
    assert (exported.use_relative_actions, exported.relative_exclude_joints) == (True, EXCLUDED)
    assert exported.action_feature_names == list(run.start.setup.binding.action_names)
    assert get_adapter(type_of(base)).read_spec(folder).relative_exclude == tuple(EXCLUDED)


def test_a_flag_turns_relative_actions_on_and_off(base, dataset_v3, tmp_path):
    on = setup_for(base, dataset_v3)
    plain = Path(shutil.copytree(base, tmp_path / "base"))
    edit(plain / "config.json", lambda config: config.update(use_relative_actions=False, relative_exclude_joints=[]))
    flags = ("--policy.use_relative_actions=true", "--policy.relative_exclude_joints=[close]")
    turned_on = setup_for(plain, dataset_v3, flags=flags)
    assert turned_on.policy.relative_exclude == tuple(EXCLUDED)
    assert all(np.array_equal(turned_on.stats[ACTION][name], on.stats[ACTION][name]) for name in on.stats[ACTION])
    assert written(turned_on) == written(on) == (True, EXCLUDED, True, True)
    off = setup_for(base, dataset_v3, flags=("--policy.use_relative_actions=false",))
    assert off.policy.relative_exclude is None
    assert written(off) == (False, EXCLUDED, False, False)
    assert not any(np.array_equal(off.stats[ACTION][name], on.stats[ACTION][name]) for name in on.stats[ACTION])


def written(setup: Setup) -> tuple[Any, ...]:
    """Return the settings of an export: of its config, and whether the steps are enabled."""
    files = make_policy_files(setup.policy, setup.binding, setup.stats, dtype=None)
    config = json.loads(files["config.json"])
    enabled = [
        step["config"]["enabled"]
        for file, part in ((PRE, "relative_actions"), (POST, "absolute_actions"))
        for step in json.loads(files[file])["steps"]
        if part in step["registry_name"]
    ]
    return config["use_relative_actions"], config["relative_exclude_joints"], *enabled


# Invalid folders and data


def test_processors_must_agree_with_the_config(base, tmp_path):
    copy = Path(shutil.copytree(base, tmp_path / "base"))
    edit(copy / "config.json", lambda config: config.update(use_relative_actions=False))

    def enable(content: dict[str, Any]) -> None:
        (step,) = [one for one in content["steps"] if "relative" in one["registry_name"]]
        step["config"]["enabled"] = True

    edit(copy / PRE, enable)
    with pytest.raises(ValueError, match=r"has the step relative_actions_processor enabled"):
        get_adapter(type_of(base)).read_spec(copy)


def test_a_state_with_fewer_dims_than_the_action_is_rejected(base, dataset_v3, tmp_path):
    data = Path(shutil.copytree(dataset_v3, tmp_path / "data"))
    edit(data / "meta/info.json", lambda info: info["features"][STATE].update(shape=[2], names=["x", "y"]))
    with pytest.raises(ValueError, match=r"has 2 dims, fewer than the 3 of 'action'"):
        setup_for(base, data)
