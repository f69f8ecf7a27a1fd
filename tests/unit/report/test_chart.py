import base64
import re

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlatune.report.chart import (
    MAX_POINTS,
    Line,
    linear_ticks,
    log_ticks,
    loss_chart,
    metric_chart,
    scale_of,
    smooth,
    thin,
)
from vlatune.report.page import MAX_IMAGE_PX, image


@given(low=st.floats(-1e6, 1e6), width=st.floats(1e-3, 1e6), count=st.integers(2, 5))
def test_ticks_are_inside_the_range(low, width, count):
    ticks = linear_ticks(low, low + width, count)
    assert count <= len(ticks) <= 3 * count
    assert low - 1e-6 * width <= ticks[0] < ticks[-1] <= low + 1.000001 * width


def test_log_ticks_are_powers_of_ten_with_steps_between_in_small_ranges():
    assert log_ticks(0.03, 1.2) == pytest.approx([0.05, 0.1, 0.2, 0.5, 1])
    assert log_ticks(1e-4, 10.0) == pytest.approx([1e-4, 1e-3, 1e-2, 0.1, 1, 10])


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=30), st.booleans())
def test_a_scale_contains_all_finite_values(values, from_zero):
    finite = [value for value in values if np.isfinite(value)]
    placed = scale_of(values, from_zero=from_zero).place(finite)
    assert ((placed >= -1e-6) & (placed <= 100 + 1e-6)).all()


def test_thinning_keeps_spikes():
    ys = np.zeros(50_000)
    ys[12_345] = 7.0
    xs_thin, ys_thin = thin(np.arange(50_000.0), ys)
    assert len(xs_thin) <= MAX_POINTS
    assert ys_thin[xs_thin == 12_345.0] == [7.0]
    assert (np.diff(xs_thin) > 0).all()


def test_smoothing_has_no_lag_and_keeps_gaps():
    line = np.linspace(1.0, 0.0, 400)
    assert smooth(line) == pytest.approx(line)
    gap = np.where(np.arange(400) == 200, np.nan, 0.5)
    assert np.isnan(smooth(gap)).tolist() == np.isnan(gap).tolist()
    assert np.nanmax(np.abs(smooth(gap) - 0.5)) < 1e-9


def loss_line(*values):
    return [Line("loss", np.arange(len(values), dtype=np.float64), np.array(values))]


@pytest.mark.parametrize(
    ("values", "is_log"),
    [(np.geomspace(1, 0.01, 20), True), (np.linspace(1, 0.5, 20), False), ([1.0, 0.0, -0.5], False)],
)
def test_a_loss_over_a_large_range_is_drawn_on_a_log_scale(values, is_log):
    assert ("Loss (log scale)" in loss_chart("Loss", loss_line(*values))) == is_log


def test_a_single_point_is_a_dot():
    assert ' dot"' in loss_chart("Loss", loss_line(0.9))
    assert ' dot"' not in loss_chart("Loss", loss_line(0.9, 0.8))


def test_records_without_the_key_are_gaps():
    records = [{"optimizer_step": 1, "lr": 0.5}, {"optimizer_step": 2}, {"optimizer_step": 3, "lr": None}]
    assert "nan" not in metric_chart([*records, {"optimizer_step": 4, "lr": 0.4}], "lr", "Rate")
    assert metric_chart(records, "loss", "Loss") == ""


def decode(img):
    data = base64.b64decode(re.search(r"base64,([^\"]+)", img)[1])
    return cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)


def test_small_images_are_exact_and_large_ones_are_shrunk():
    small, large = (
        np.random.default_rng(0).integers(0, 256, shape, np.uint8) for shape in ((3, 12, 10), (3, 480, 640))
    )
    made = image(small, alt="top")
    assert np.array_equal(decode(made), small.transpose(1, 2, 0))
    assert 'width="10" height="12"' in made
    made = image(large, alt="top")
    assert max(decode(made).shape) == MAX_IMAGE_PX
    assert len(made) < 120_000
