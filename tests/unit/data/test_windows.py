"""Windows of frames: clamped to the episode, marked where they were clamped, on the frame grid."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlatune.data.reader import offsets_from_timestamps, window_frames


@given(st.data())
def test_a_frame_of_the_episode_is_itself_and_another_is_the_nearest_and_padded(data):
    length = data.draw(st.integers(1, 30))
    rows = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=5))
    offsets = data.draw(st.lists(st.integers(-40, 40), min_size=1, max_size=8))
    frames, is_pad = window_frames(np.array(rows), offsets, length)
    assert frames.shape == is_pad.shape == (len(rows), len(offsets))
    for n, row in enumerate(rows):
        for t, offset in enumerate(offsets):
            nearest = min(range(length), key=lambda frame, wanted=row + offset: abs(frame - wanted))
            assert frames[n, t] == nearest
            assert is_pad[n, t] == (nearest != row + offset)


@given(st.lists(st.integers(-100, 100), max_size=20), st.sampled_from([5, 10, 15, 20, 24, 30, 50, 60]))
def test_seconds_on_the_grid_become_frames(offsets, fps):
    assert offsets_from_timestamps([offset / fps for offset in offsets], fps, 1e-4, "action") == tuple(offsets)


def test_seconds_off_the_grid_are_rejected_by_name():
    with pytest.raises(ValueError, match=r"delta_timestamps\['action'\]: 0.15 s .*1/10 s \(nearest 0.200000 s\); use"):
        offsets_from_timestamps([0.0, 0.1, 0.15], 10, 1e-4, "action")
    assert offsets_from_timestamps([0.15], 10, 0.06, "action") == (2,)
