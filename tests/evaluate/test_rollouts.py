"""Whole episodes: where the policy is asked, what is laid out where, and that two evaluations are one."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlatune import cli
from vlatune.batch import ACTION
from vlatune.config import EvalConfig
from vlatune.dataset.meta.stats import read_episode
from vlatune.evaluate.held_out import read_chosen
from vlatune.evaluate.predictions import predict
from vlatune.evaluate.rollouts import lay_out, mean_over, plan_replans, roll_out
from vlatune.evaluate.subject import open_subject
from vlatune.policies.base import trained_tensors
from vlatune.report.kept_samples import load_rollouts

SMALL = ("--max_samples=4", "--rollouts=2")


@given(
    length=st.integers(1, 40),
    horizon=st.integers(1, 12),
    past=st.integers(0, 3),
    steps=st.integers(1, 12),
)
def test_perfect_chunks_laid_out_are_the_episode(length, horizon, past, steps):
    """Whatever the chunk, the history before it and the number of actions that are made."""
    offsets = tuple(range(-past, horizon))
    replans = plan_replans(offsets, steps)
    asked = np.arange(0, length, replans.every)
    frames = np.clip(asked[:, None] + np.array(offsets), 0, length - 1)
    laid = lay_out(frames[..., None].astype(np.float32), asked, length, replans)
    assert laid[:, 0].tolist() == list(range(length))
    assert replans.every == min(steps, horizon)


def test_actions_at_another_rate_fall_on_every_so_many_frames():
    replans = plan_replans((0, 3, 6, 9), 2)
    assert (replans.positions.tolist(), replans.offsets.tolist(), replans.every) == ([0, 1], [0, 3], 6)
    assert plan_replans((0, 3, 6, 9), 4).every == 12
    assert plan_replans((0, 0, 1, 1), 1).every == 1


def test_means_leave_out_what_is_past_the_end():
    errors = np.array([[1.0, np.nan], [3.0, np.nan]])
    assert mean_over(errors, 0) == [2.0, None]


@pytest.mark.parametrize("name", ["pi05", "diffusion"])
def test_an_episode_is_gone_through_as_a_robot_would(name, run_of):
    """Held against the parts: the recorded episode, and the chunk of every third frame, each asked for by itself."""
    subject = open_subject(run_of(name), EvalConfig())
    setup, options = subject.setup, EvalConfig(rollouts=1, batch_size=2)
    module = setup.adapter.load_module(setup.policy, setup.binding, subject.options, stats=setup.stats).eval()
    next(subject.variants(trained_tensors(module)))
    (one,) = roll_out(setup, module, options)
    meta, position = setup.metas[0], int(setup.held_out.position[0])
    recorded = read_episode(meta, ACTION, position)
    np.testing.assert_array_equal(one.true_LA, recorded)
    now = setup.policy.action_offsets.index(0)
    for frame in range(0, len(recorded), 3):
        alone = predict(setup, module, read_chosen(setup, np.array([frame])), options)
        made = alone.predicted_NTA[0, now : now + 3][: len(recorded) - frame]
        np.testing.assert_allclose(one.predicted_LA[frame : frame + 3], made, rtol=1e-4, atol=1e-6)
    assert one.asked.tolist() == list(range(0, len(recorded), 3))
    assert one.error == pytest.approx(np.abs(one.predicted_LA - recorded).mean(), rel=1e-6)


@pytest.mark.parametrize("name", ["pi05", "act"])
def test_two_evaluations_are_equal_to_the_bit(name, run_of, figures, tmp_path):
    run_dir = Path(shutil.copytree(run_of(name), tmp_path / "run"))
    first, files = figures(run_dir, *SMALL), ("eval.json", "eval_samples.npz", "eval_rollouts.npz", "report.html")
    before = {file: (run_dir / file).read_bytes() for file in files if not file.endswith("npz")}
    arrays = load_rollouts(run_dir)
    assert figures(run_dir, *SMALL) == first
    assert {file: (run_dir / file).read_bytes() for file in before} == before
    for one, again in zip(arrays, load_rollouts(run_dir), strict=True):
        np.testing.assert_array_equal(one.predicted_TA, again.predicted_TA)


def test_figures_text_and_page_have_them_the_worst_first(run_of, figures, tmp_path, capsys):
    run_dir = Path(shutil.copytree(run_of("act"), tmp_path / "run"))
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
    assert f"whole episodes, asking anew every 3 frames (2 episodes, {rolled['num_chunks']} chunks):" in text
    for one in rolled["episodes"]:
        assert f"  {'episode {episode} ({frames} frames)'.format(**one):<38} {one['error']:.4f}" in text
    assert "<h2>Whole episodes</h2>" in page
    worst = rolled["episodes"][0]
    assert f"episode {worst['episode']}: {worst['frames']} frames, error" in page
    shown = load_rollouts(run_dir)
    assert [one.episode_index for one in shown] == [one["episode"] for one in rolled["episodes"]]
    assert all(len(one.images) == 3 * 2 for one in shown)  # three frames, two cameras


def test_none_are_made_where_none_are_asked_for(run_of, figures, tmp_path):
    run_dir = Path(shutil.copytree(run_of("act"), tmp_path / "run"))
    figures(run_dir, *SMALL)
    assert "rollouts" not in figures(run_dir, "--max_samples=4", "--rollouts=0")
    assert "Whole episodes" not in (run_dir / "report.html").read_text()
    assert load_rollouts(run_dir) == []


def test_chunks_longer_than_every_episode_leave_their_ends_open(run_of, figures, tmp_path, dataset_v3):
    """Their last places never belong to an episode: null, not a failure."""
    run_dir = run_of("act")
    setup = open_subject(run_dir, EvalConfig()).setup
    longer = replace(setup.policy, action_offsets=tuple(range(setup.policy.horizon)))
    assert longer.horizon == 4
    from vlatune.dataset.synthetic.generate import SyntheticSpec, make_dataset

    make_dataset(tmp_path / "short", SyntheticSpec(episodes=2, frames=2))
    found = figures(run_dir, f"--dataset.root={tmp_path / 'short'}", *SMALL, f"--output_dir={tmp_path / 'out'}")
    assert [error is None for error in found["per_horizon_error"]] == [False, False, True, True]
    assert [error is None for error in found["rollouts"]["per_horizon_error"]] == [False, False, True, True]
    assert json.loads((tmp_path / "out" / "eval.json").read_text()) == found
