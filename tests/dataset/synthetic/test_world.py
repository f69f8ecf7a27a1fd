"""The tabletop world: same arguments, same episode; the expert does what it says; pictures keep their promises."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from vlatune.dataset.synthetic import world
from vlatune.dataset.synthetic.world import CAMERAS, COLOURS, TASKS, make_episode

NUM_FRAMES, FPS = 16, 10


def episodes(count: int) -> list[world.WorldEpisode]:
    return [make_episode(3, episode_index, NUM_FRAMES, FPS) for episode_index in range(count)]


def target_of(episode: world.WorldEpisode) -> np.ndarray:
    named = [colour for colour in COLOURS if colour in episode.task]
    assert len(named) == 1
    return world.pad_centre(episode.tray_2, named[0])


def test_same_arguments_give_the_same_episode():
    first, second = make_episode(5, 7, NUM_FRAMES, FPS), make_episode(5, 7, NUM_FRAMES, FPS)
    assert first.task == second.task
    np.testing.assert_array_equal(first.state_TS, second.state_TS)
    np.testing.assert_array_equal(first.action_TA, second.action_TA)
    np.testing.assert_array_equal(first.render(3, 1, 96, 96), second.render(3, 1, 96, 96))


@pytest.mark.parametrize("other", [(5, 8), (6, 7)])
def test_another_seed_or_index_gives_another_episode(other):
    assert not np.array_equal(
        make_episode(5, 7, NUM_FRAMES, FPS).state_TS, make_episode(*other, NUM_FRAMES, FPS).state_TS
    )


def test_shapes_dtypes_and_tasks():
    for episode in episodes(20):
        assert episode.state_TS.shape == (NUM_FRAMES, len(world.STATE_NAMES))
        assert episode.action_TA.shape == (NUM_FRAMES, len(world.ACTION_NAMES))
        assert episode.state_TS.dtype == episode.action_TA.dtype == np.float32
        assert episode.task in TASKS
    assert {episode.task for episode in episodes(200)} == set(TASKS)


def test_an_action_moves_the_gripper_to_the_next_state():
    for episode in episodes(10):
        moved = episode.state_TS[:-1, :2] + episode.action_TA[:-1, :2] / FPS
        np.testing.assert_allclose(moved, episode.state_TS[1:, :2], atol=1e-6)


def test_the_expert_drives_to_the_named_pad_and_nowhere_else():
    arrived = 0
    for episode in episodes(50):
        distance_T = np.linalg.norm(episode.state_TS[:, :2] - target_of(episode), axis=1)
        assert distance_T[0] >= world.START_GAP
        assert (np.diff(distance_T) < 0).all()
        arrived += distance_T[-1] < world.CLOSE_BEGIN
    assert arrived > 40


def test_the_gripper_moves_in_most_frames():
    speed = np.concatenate([np.abs(episode.action_TA[:, :2]).max(axis=1) for episode in episodes(50)])
    assert (speed > 0.1).mean() > 0.8


def test_the_state_does_not_tell_where_the_target_is():
    """Over many episodes the direction of motion is no linear function of the state."""
    state_NS = np.concatenate([episode.state_TS for episode in episodes(400)])
    action_N2 = np.concatenate([episode.action_TA[:, :2] for episode in episodes(400)])
    design = np.column_stack([state_NS, np.ones(len(state_NS))])
    residual = action_N2 - design @ np.linalg.lstsq(design, action_N2, rcond=None)[0]
    assert (residual.var(axis=0) / action_N2.var(axis=0) > 0.4).all()  # the gripper's own place is a part of the way


def test_the_sentence_decides_between_pads_that_lie_apart():
    """The same tray, another colour, another way: the mean of the pads is far from each of them."""
    pads = np.stack([world.pad_centre(np.zeros(2), colour) for colour in COLOURS])
    assert np.abs(pads - pads.mean(axis=0)).min() > world.PAD_HALF
    for one, other in itertools.combinations(pads, 2):
        assert np.abs(one - other).max() > 2 * world.PAD_HALF


def test_the_tray_lies_somewhere_else_in_every_episode():
    trays = np.stack([episode.tray_2 for episode in episodes(100)])
    assert (trays.std(axis=0) > 0.2).all()


@pytest.mark.parametrize("camera", range(len(CAMERAS)))
@pytest.mark.parametrize(("height", "width"), [(64, 64), (96, 96), (97, 131), (480, 640)])
def test_the_corner_stays_flat(camera, height, width):
    side = height // 4
    for episode in episodes(8):
        corner = episode.render(NUM_FRAMES - 1, camera, height, width)[:side, :side]
        assert (corner == corner[0, 0]).all()


@pytest.mark.parametrize("camera", range(len(CAMERAS)))
@pytest.mark.parametrize(("height", "width"), [(64, 64), (480, 640)])
def test_pictures_change_with_the_frame(camera, height, width):
    episode = make_episode(3, 0, NUM_FRAMES, FPS)
    first, last = (episode.render(frame, camera, height, width) for frame in (0, NUM_FRAMES - 1))
    assert first.shape == (height, width, 3)
    assert first.dtype == np.uint8
    assert not np.array_equal(first, last)


def test_top_shows_the_named_pad_in_its_colour_at_its_place():
    for episode in episodes(20):
        image_HWC = episode.render(0, CAMERAS.index("top"), 96, 96).astype(int)
        colour = next(colour for colour in COLOURS if colour in episode.task)
        x, y = target_of(episode) / world.TOP_HALF_VIEW
        row, column = int(48 - 48 * y), int(48 + 48 * x)
        patch = image_HWC[row - 3 : row + 4, column - 3 : column + 4].reshape(-1, 3)
        assert (np.abs(patch - COLOURS[colour]).max(axis=1) <= 2).any(), episode.task


def test_wrist_keeps_the_gripper_in_the_middle():
    camera = CAMERAS.index("wrist")
    near = episodes(1)[0]
    moved_by = np.float32([0.1, 0.05])
    shifted = replace(near, state_TS=near.state_TS + np.float32([*moved_by, 0]), tray_2=near.tray_2 + moved_by)
    seen, moved = (episode.render(0, camera, 96, 96).astype(int) for episode in (near, shifted))
    middle = slice(36, 60)
    assert np.abs(seen - moved)[middle, middle].mean() < 3  # tray and gripper moved together: the same view of them
