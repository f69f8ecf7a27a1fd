"""One camera blanked at a time: only where there are several, in every place that shows what the policy uses."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vlatune import cli
from vlatune.config import EvalConfig
from vlatune.evaluate.held_out import read_held_out
from vlatune.evaluate.predictions import blanks_of, predict, predict_all
from vlatune.evaluate.subject import open_subject
from vlatune.policies.base import trained_tensors
from vlatune.report.verdict import eval_meaning

SMALL = ("--max_samples=4", "--rollouts=0")


def test_each_camera_has_its_figure_its_line_and_its_bar(run_of, figures, tmp_path, capsys):
    run_dir = Path(shutil.copytree(run_of("pi05"), tmp_path / "run"))
    found = figures(run_dir, *SMALL)
    cameras = found["blank_camera_errors"]
    assert list(cameras) == ["observation.images.top", "observation.images.wrist"]
    assert found["variants"][0]["blank_camera_errors"] == cameras
    assert len({found["action_error"], found["blank_images_error"], *cameras.values()}) == 4
    assert cli.main(["eval", str(run_dir), *SMALL]) == cli.OK
    text, page = capsys.readouterr().out, (run_dir / "report.html").read_text()
    for name, error in cameras.items():
        assert f"  {'  with ' + name.split('.')[-1] + ' alone blanked':<38} {error:.4f}" in text
        assert f"the model, {name.split('.')[-1]} alone blanked" in page


def test_a_camera_is_black_and_the_others_stay(run_of):
    subject = open_subject(run_of("pi05"), EvalConfig())
    setup, options = subject.setup, EvalConfig(max_samples=2)
    module = setup.adapter.load_module(setup.policy, setup.binding, subject.options, stats=setup.stats).eval()
    next(subject.variants(trained_tensors(module)))
    rows = read_held_out(setup, 2)
    found = predict_all(setup, module, rows, options, blanks=blanks_of(setup))
    for name, _ in setup.binding.cameras:
        alone = predict(setup, module, rows | {name: np.zeros_like(rows[name])}, options)
        np.testing.assert_array_equal(found[f"camera:{name}"].predicted_NTA, alone.predicted_NTA)


def test_a_single_camera_is_blanked_once(run_of):
    setup = open_subject(run_of("act"), EvalConfig()).setup
    assert blanks_of(setup) == ("none", "images", *(f"camera:{name}" for name, _ in setup.binding.cameras))
    one = replace(setup, binding=replace(setup.binding, cameras=setup.binding.cameras[:1]))
    assert blanks_of(one) == ("none", "images")


@pytest.mark.parametrize(("error", "said"), [(0.105, True), (0.2, False)])
def test_a_camera_that_is_not_needed_is_named(error, said):
    figures = {"action_error": 0.1, "mean_action_error": 1.0, "blank_camera_errors": {"observation.images.side": error}}
    assert ("Without the camera side alone it hardly changes" in eval_meaning(figures)) is said
