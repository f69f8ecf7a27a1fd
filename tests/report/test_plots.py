import base64
import re

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlatune.report import plots
from vlatune.report.chart import MAX_POINTS, Scale, linear_ticks, log_ticks, scale_of, thin
from vlatune.report.kept_samples import EvalSample


@given(low=st.floats(-1e6, 1e6), width=st.floats(1e-3, 1e6), count=st.integers(2, 5))
def test_ticks_are_inside_enough_and_few(low, width, count):
    ticks = linear_ticks(low, low + width, count)
    assert count <= len(ticks) <= 3 * count
    assert low - 1e-6 * width <= ticks[0] < ticks[-1] <= low + 1.000001 * width


def test_steps_get_whole_numbers_only():
    assert linear_ticks(1, 3, 4, whole=True) == [1, 2, 3]
    assert linear_ticks(9, 11, 4, whole=True) == [9, 10, 11]
    assert linear_ticks(0, 3000, 4, whole=True) == [0, 1000, 2000, 3000]


def test_log_ticks_are_powers_of_ten_and_between_when_few():
    assert log_ticks(0.03, 1.2) == pytest.approx([0.05, 0.1, 0.2, 0.5, 1])
    assert log_ticks(1e-4, 10.0) == pytest.approx([1e-4, 1e-3, 1e-2, 0.1, 1, 10])


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=30), st.booleans())
def test_a_scale_holds_all_finite_values(values, from_zero):
    finite = [value for value in values if np.isfinite(value)]
    placed = scale_of(values, from_zero=from_zero).place(finite)
    assert ((placed >= -1e-6) & (placed <= 100 + 1e-6)).all()


def test_a_log_scale_places_by_ratio():
    assert Scale(0.01, 1.0, log=True).place([0.01, 0.1, 1.0]) == pytest.approx([0, 50, 100])


def test_thinning_keeps_spikes():
    ys = np.zeros(50_000)
    ys[12_345] = 7.0
    xs_thin, ys_thin = thin(np.arange(50_000.0), ys)
    assert len(xs_thin) <= MAX_POINTS
    assert ys_thin[xs_thin == 12_345.0] == [7.0]
    assert (np.diff(xs_thin) > 0).all()


def test_smoothing_follows_a_line_without_lag_and_leaves_gaps():
    line = np.linspace(1.0, 0.0, 400)
    assert plots.smooth(line) == pytest.approx(line)
    gap = np.where(np.arange(400) == 200, np.nan, 0.5)
    assert np.isnan(plots.smooth(gap)).tolist() == np.isnan(gap).tolist()
    assert np.nanmax(np.abs(plots.smooth(gap) - 0.5)) < 1e-9


def losses(values):
    return [{"optimizer_step": step, "loss": loss} for step, loss in enumerate(values, start=1)]


def test_a_loss_that_falls_far_is_drawn_on_a_log_scale():
    assert "Loss (log scale)" in plots.loss_chart(losses(np.geomspace(1, 0.01, 20).tolist()))
    assert "log scale" not in plots.loss_chart(losses(np.linspace(1, 0.5, 20).tolist()))
    assert "log scale" not in plots.loss_chart(losses([1.0, 0.0, -0.5]))


def test_one_point_is_a_dot():
    assert ' dot"' in plots.loss_chart(losses([0.9]))
    assert ' dot"' not in plots.loss_chart(losses([0.9, 0.8]))


def test_records_without_the_key_are_gaps():
    metrics = [{"optimizer_step": 1, "loss": 0.5}, {"optimizer_step": 2}, {"optimizer_step": 3, "loss": None}]
    assert plots.has(metrics, "loss")
    assert not plots.has(metrics, "lr")
    assert "nan" not in plots.loss_chart([*metrics, {"optimizer_step": 4, "loss": 0.4}])


def test_the_stages_beside_the_loop_are_drawn_against_computing():
    drawn = plots.stage_bars({"decode": 120.0, "transport": 3.0, "collate": 1.5, "copy": 0.25, "compute": 60.0})
    for words in ("decoding, all readers", "2 min 00 s", "copying to the device", "250 ms", "computing, in the loop"):
        assert words in drawn
    assert "width:100.00%" in drawn
    assert "width:50.00%" in drawn


def test_the_time_bar_shows_what_the_parts_leave_over():
    parts = {"start": 10.0, "wait": 5.0, "compute": 80.0, "checkpoint": 5.0}
    assert "other" not in plots.time_bar({**parts, "total": 100.0})
    assert "other 50 %" in plots.time_bar({**parts, "total": 200.0})


def test_the_time_bar_shows_who_kept_the_step_from_computing():
    parts = {"start": 10.0, "wait": 5.0, "compute": 40.0, "kept_own": 25.0, "kept_others": 15.0, "checkpoint": 5.0}
    bar = plots.time_bar({**parts, "total": 100.0})
    assert "kept from computing by other threads of the process 25 %" in bar
    assert "kept from computing by readers or other load on its cores 15 %" in bar
    assert "kept" not in plots.time_bar({"start": 10.0, "compute": 90.0, "total": 100.0})  # not measured


def test_the_longest_bar_fills_its_track():
    made = plots.eval_bars({"action_error": 0.1, "mean_action_error": 0.4, "blank_images_error": None})
    assert re.findall(r"width:([\d.]+)%", made) == ["25.00", "100.00"]


def decode(img):
    data = base64.b64decode(re.search(r"base64,([^\"]+)", img)[1])
    return cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)


def test_a_small_picture_is_stored_exactly_in_either_layout():
    image_HWC = np.random.default_rng(0).integers(0, 256, (12, 10, 3), dtype=np.uint8)
    for image in (image_HWC, image_HWC.transpose(2, 0, 1)):
        made = plots.picture(image, alt="top")
        assert np.array_equal(decode(made), image_HWC)
        assert 'width="10" height="12"' in made


def test_a_large_picture_is_kept_small():
    noise = np.random.default_rng(0).integers(0, 256, (3, 480, 640), dtype=np.uint8)
    made = plots.picture(noise, alt="top")
    assert max(decode(made).shape) == plots.MAX_PICTURE_PX
    assert len(made) < 120_000


@pytest.mark.parametrize("image", [np.zeros((3, 4, 4)), np.zeros((4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8)])
def test_what_is_no_picture_is_refused(image):
    with pytest.raises(ValueError, match="must be uint8"):
        plots.picture(image, alt="top")


def sample(true_TA, predicted_TA, valid_T):
    return EvalSample(0, 0, "task", {}, np.asarray(true_TA), np.asarray(predicted_TA), np.asarray(valid_T))


def test_scales_ignore_padding_and_are_shared_by_all_samples():
    first = sample([[0.0], [99.0]], [[0.5], [99.0]], [True, False])
    second = sample([[2.0], [1.0]], [[-2.0], [1.0]], [True, True])
    (scale,) = plots.dim_scales([first, second])
    assert -2.5 < scale.low < -2.0
    assert 2.0 < scale.high < 2.5


def test_the_padded_part_of_a_chunk_is_shaded_and_not_drawn():
    padded = sample(np.zeros((5, 1)), np.ones((5, 1)), [True, True, False, False, False])
    made = plots.action_charts(padded, plots.dim_scales([padded]), ["grip"])
    assert '<rect x="25.00" y="0" width="75.00" height="100" class="shade">' in made
    assert re.search(r'd="M0\.000 [\d.]+L25\.000 [\d.]+" class="truth"', made)
    whole = sample(np.zeros((5, 1)), np.ones((5, 1)), [True] * 5)
    assert "shade" not in plots.action_charts(whole, plots.dim_scales([whole]), ["grip"])
