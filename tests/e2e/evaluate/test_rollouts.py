"""Rollouts of complete episodes: when the policy replans, and which action belongs to which frame."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_copies import copy_run

from vlatune import cli
from vlatune.batch import ACTION
from vlatune.config.settings import EvalConfig
from vlatune.data.meta.stats import read_episode
from vlatune.demo.generate import SyntheticSpec, make_dataset
from vlatune.evaluate.held_out import read_chosen
from vlatune.evaluate.predictions import predict_all
from vlatune.evaluate.rollouts import lay_out, plan_replans, roll_out
from vlatune.evaluate.subject import open_subject
from vlatune.policies.base import trained_tensors
from vlatune.run.kept_samples import ROLLOUTS_FILE, EvalSample, load_samples

SMALL = ("--max_samples=4", "--rollouts=2")


@given(
    length=st.integers(1, 40),
    horizon=st.integers(1, 12),
    past=st.integers(0, 3),
    steps=st.integers(1, 12),
)
def test_perfect_chunks_reproduce_the_episode(length, horizon, past, steps):
    offsets = tuple(range(-past, horizon))
    replans = plan_replans(offsets, steps)
    replan_frames = np.arange(0, length, replans.every)
    frames = np.clip(replan_frames[:, None] + np.array(offsets), 0, length - 1)
    laid = lay_out(frames[..., None].astype(np.float32), replan_frames, length, replans)
    assert laid[:, 0].tolist() == list(range(length))
    assert replans.every == min(steps, horizon)


def test_actions_at_another_rate_belong_to_every_third_frame():
    replans = plan_replans((0, 3, 6, 9), 2)
    assert (replans.positions.tolist(), replans.offsets.tolist(), replans.every) == ([0, 1], [0, 3], 6)
    assert plan_replans((0, 3, 6, 9), 4).every == 12
    assert plan_replans((0, 0, 1, 1), 1).every == 1


@pytest.mark.parametrize("name", ["pi05", "diffusion"])
def test_a_rollout_equals_separate_predictions_of_every_third_frame(name, run_of):
    subject = open_subject(run_of(name), EvalConfig())
    setup, options = subject.setup, EvalConfig(rollouts=1, batch_size=2)
    module = setup.adapter.load_module(setup.policy, setup.binding, subject.options, stats=setup.stats).eval()
    subject.load(trained_tensors(module))
    (one,) = roll_out(setup, module, options)
    meta, position = setup.metas[0], int(setup.held_out.position[0])
    recorded = read_episode(meta, ACTION, position)
    np.testing.assert_array_equal(one.true_LA, recorded)
    now = setup.policy.action_offsets.index(0)
    for frame in range(0, len(recorded), 3):
        alone = predict_all(setup, module, read_chosen(setup, np.array([frame])), options)["none"]
        made = alone.predicted_NTA[0, now : now + 3][: len(recorded) - frame]
        np.testing.assert_allclose(one.predicted_LA[frame : frame + 3], made, rtol=1e-4, atol=1e-6)
    assert one.replan_frames.tolist() == list(range(0, len(recorded), 3))
    assert one.error == pytest.approx(np.abs(one.predicted_LA - recorded).mean(), rel=1e-6)


def test_rollouts_are_in_figures_text_and_page_worst_first(run_of, figures, tmp_path, capsys):
    run_dir = copy_run(run_of("act"), tmp_path / "run")
    found = figures(run_dir, *SMALL)
    rolled, setup = found["rollouts"], open_subject(run_dir, EvalConfig()).setup
    assert [one["episode"] for one in rolled["episodes"]] != []
    assert sorted(one["frames"] for one in rolled["episodes"]) == sorted(setup.held_out.length.tolist())
    errors = [one["error"] for one in rolled["episodes"]]
    assert errors == sorted(errors, reverse=True)
    frames = [one["frames"] for one in rolled["episodes"]]
    assert rolled["error"] == pytest.approx(np.average(errors, weights=frames))
    assert rolled["error"] == pytest.approx(np.mean(list(rolled["per_dim_error"].values())))
    assert all(len(one["per_frame_error"]) == one["frames"] for one in rolled["episodes"])
    assert rolled["num_chunks"] == sum(-(-count // 3) for count in frames)
    assert len(rolled["per_horizon_error"]) == setup.policy.horizon
    assert rolled["per_horizon_error"] == pytest.approx(np.mean(list(rolled["per_dim_horizon_error"].values()), axis=0))
    assert cli.main(["eval", str(run_dir), *SMALL]) == cli.OK
    text, page = capsys.readouterr().out, (run_dir / "report.html").read_text()
    assert f"every 3 frames (2 episodes, {rolled['num_chunks']} chunks):" in text
    for one in rolled["episodes"]:
        assert f"  {'episode {episode} ({frames} frames)'.format(**one):<38} {one['error']:.4f}" in text
    assert "<h2>Complete episodes</h2>" in page
    worst = rolled["episodes"][0]
    assert f"episode {worst['episode']}: {worst['frames']} frames, error" in page
    shown = load_samples(run_dir, ROLLOUTS_FILE, EvalSample)
    assert [one.episode_index for one in shown] == [one["episode"] for one in rolled["episodes"]]
    assert all(len(one.images) == 3 * 2 for one in shown)  # three frames, two cameras


def test_rollouts_can_be_disabled(run_of, figures, tmp_path):
    run_dir = copy_run(run_of("act"), tmp_path / "run")
    figures(run_dir, *SMALL)
    assert "rollouts" not in figures(run_dir, "--max_samples=4", "--rollouts=0")
    assert "Complete episodes" not in (run_dir / "report.html").read_text()
    assert load_samples(run_dir, ROLLOUTS_FILE, EvalSample) == []


def test_positions_past_every_episode_have_no_error(run_of, figures, tmp_path, dataset_v3):
    run_dir = run_of("act")
    make_dataset(tmp_path / "short", SyntheticSpec(episodes=2, frames=2))
    found = figures(run_dir, f"--dataset.root={tmp_path / 'short'}", *SMALL, f"--output_dir={tmp_path / 'out'}")
    assert [error is None for error in found["per_horizon_error"]] == [False, False, True, True]
    assert [error is None for error in found["rollouts"]["per_horizon_error"]] == [False, False, True, True]
    assert json.loads((tmp_path / "out" / "eval.json").read_text()) == found
