"""The simulated table: reproducible episodes, an expert that reaches the named pad, images that show it."""

import numpy as np
import pytest

from vlatune.demo import world
from vlatune.demo.world import CAMERAS, COLOURS, make_episode

NUM_FRAMES, FPS = 16, 10


def episodes(count: int) -> list[world.WorldEpisode]:
    return [make_episode(3, episode_index, NUM_FRAMES, FPS) for episode_index in range(count)]


def target_of(episode: world.WorldEpisode) -> np.ndarray:
    (named,) = [colour for colour in COLOURS if colour in episode.task]
    return world.pad_centre(episode.tray_2, named)


def test_the_expert_moves_to_the_named_pad():
    arrived = 0
    for episode in episodes(50):
        moved = episode.state_TS[:-1, :2] + episode.action_TA[:-1, :2] / FPS
        np.testing.assert_allclose(moved, episode.state_TS[1:, :2], atol=1e-6)
        distance_T = np.linalg.norm(episode.state_TS[:, :2] - target_of(episode), axis=1)
        assert distance_T[0] >= world.START_GAP
        assert (np.diff(distance_T) < 0).all()
        arrived += distance_T[-1] < world.CLOSE_BEGIN
    assert arrived > 40


@pytest.mark.parametrize("camera", range(len(CAMERAS)))
@pytest.mark.parametrize(("height", "width"), [(64, 64), (97, 131), (480, 640)])
def test_images_change_with_the_frame_except_in_the_corner(camera, height, width):
    side = height // 4
    for episode in episodes(4):
        first, last = (episode.render(frame, camera, height, width) for frame in (0, NUM_FRAMES - 1))
        assert first.shape == (height, width, 3)
        assert not np.array_equal(first, last)
        assert (last[:side, :side] == last[0, 0]).all()
