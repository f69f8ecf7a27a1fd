"""Errors with blanked cameras."""

import numpy as np
from run_copies import copy_run

from vlatune import cli
from vlatune.config.settings import EvalConfig
from vlatune.evaluate.held_out import read_held_out
from vlatune.evaluate.predictions import blanks_of, predict_all
from vlatune.evaluate.subject import open_subject
from vlatune.policies.base import trained_tensors

SMALL = ("--max_samples=4", "--rollouts=0")


def test_each_camera_is_in_the_figures_the_text_and_the_page(run_of, figures, tmp_path, capsys):
    run_dir = copy_run(run_of("pi05"), tmp_path / "run")
    found = figures(run_dir, *SMALL)
    cameras = found["blank_camera_errors"]
    assert list(cameras) == ["observation.images.top", "observation.images.wrist"]
    assert len({found["action_error"], found["blank_images_error"], *cameras.values()}) == 4
    assert cli.main(["eval", str(run_dir), *SMALL]) == cli.OK
    text, page = capsys.readouterr().out, (run_dir / "report.html").read_text()
    for name, error in cameras.items():
        assert f"  {'  with ' + name.split('.')[-1] + ' blank':<38} {error:.4f}" in text
        assert f"the model, {name.split('.')[-1]} blanked" in page


def test_blanking_a_camera_equals_black_images(run_of):
    subject = open_subject(run_of("pi05"), EvalConfig())
    setup, options = subject.setup, EvalConfig(max_samples=2)
    module = setup.adapter.load_module(setup.policy, setup.binding, subject.options, stats=setup.stats).eval()
    subject.load(trained_tensors(module))
    rows = read_held_out(setup, 2)
    found = predict_all(setup, module, rows, options, blanks=blanks_of(setup))
    for name, _ in setup.binding.cameras:
        alone = predict_all(setup, module, rows | {name: np.zeros_like(rows[name])}, options)["none"]
        np.testing.assert_array_equal(found[f"camera:{name}"].predicted_NTA, alone.predicted_NTA)
