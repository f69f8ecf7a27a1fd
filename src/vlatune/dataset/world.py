"""A small tabletop world: coloured blocks, one gripper, one sentence that names the block to reach.

`make_episode` is a pure function of its arguments. The expert drives to the named block at full speed on each axis
and brakes in proportion to what is left of the way, so its actions need the picture (where is the block?) and the sentence (which
block?). The state holds the gripper alone and says nothing of the target. Arrival is near the episode's end, so that
the gripper moves in most frames.

Every camera leaves the top-left square of side height/4 in one flat colour: a frame's id can be drawn there.

Legend: T frames, S state, A action, N blocks, P points; table coordinates are x to the right and y up, -1 to 1.
"""

import itertools
from dataclasses import dataclass

import cv2
import numpy as np

CAMERAS = ("top", "wrist", "side")
STATE_NAMES = ("gripper_x", "gripper_y", "gripper_open")
ACTION_NAMES = ("velocity_x", "velocity_y", "close")

COLOURS = {"red": (235, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 240)}
PHRASES = ("move to the {} block", "go to the {} block", "reach the {} block")
TASKS = tuple(phrase.format(colour) for colour, phrase in itertools.product(COLOURS, PHRASES))

BLOCK_HALF = 0.2
BLOCK_GAP = 0.6  # between centres, on the wider axis; keeps one block a picture patch away from the next
BLOCK_REACH = 0.8  # blocks and the gripper's start lie within this of the centre, on each axis
CORNER_SHARE = 0.25  # of the picture's height; see `cover_corner`
START_GAP = 0.6  # least distance from the gripper's start to its target
TRAVEL = 1.2  # table units on each axis that full speed covers in one episode
BRAKE = 0.35  # the expert slows down on an axis when this is left to go
CLOSE_BEGIN, CLOSE_END = 0.4, 0.15  # the gripper begins to close at this distance and is closed at that one

TABLE, FLOOR, FINGER = (205, 200, 190), (70, 72, 80), (20, 20, 24)
LIGHT = {"top": 1.0, "wrist": 0.6, "side": 0.8}  # each camera has its own exposure, and is known by it
WRIST_HALF_VIEW = 1.2  # table units from the picture's centre to its border


@dataclass(frozen=True)
class WorldEpisode:
    task: str
    state_TS: np.ndarray
    """float32, as STATE_NAMES: table units, and 1 for a gripper that is wide open."""
    action_TA: np.ndarray
    """float32, as ACTION_NAMES: table units per second, and 1 for the command to close."""
    block_N2: np.ndarray
    """Centres of the blocks; they lie still."""
    colours: tuple[str, ...]
    """The blocks' colours, all different."""

    def render(self, frame_index: int, camera: int, height: int, width: int) -> np.ndarray:
        """The picture that `CAMERAS[camera]` takes of a frame: uint8 (height, width, 3), RGB."""
        x, y, gripper_open = (float(value) for value in self.state_TS[frame_index])
        view_23 = _view(CAMERAS[camera], np.array([x, y]), height, width)
        image_HWC = np.full((height, width, 3), FLOOR, np.uint8)
        _fill(image_HWC, view_23, _box(0.0, 0.0, 1.0, 1.0), TABLE)
        for (block_x, block_y), colour in zip(self.block_N2, self.colours, strict=True):
            _fill(image_HWC, view_23, _box(block_x, block_y, BLOCK_HALF, BLOCK_HALF), COLOURS[colour])
        for side in (-1.0, 1.0):  # the fingers stand left and right of what they grip, and never hide its middle
            finger_x = x + side * (0.18 + 0.1 * gripper_open)
            _fill(image_HWC, view_23, _box(finger_x, y, 0.035, 0.12), FINGER)
        image_HWC = cv2.convertScaleAbs(image_HWC, alpha=LIGHT[CAMERAS[camera]])
        cover_corner(image_HWC)
        return image_HWC


def make_episode(seed: int, episode_index: int, num_frames: int, fps: int) -> WorldEpisode:
    """Blocks, a sentence and an expert's way to the named block; the same for the same arguments, on every machine."""
    rng = np.random.default_rng([seed, episode_index])
    block_N2 = _place_blocks(rng)
    colours = tuple(str(name) for name in rng.permutation(list(COLOURS)))
    target = int(rng.integers(len(COLOURS)))
    phrase = PHRASES[int(rng.integers(len(PHRASES)))]
    start_2 = _place_gripper(rng, block_N2[target])
    state_TS, action_TA = _drive(start_2, block_N2[target], num_frames, fps)
    return WorldEpisode(phrase.format(colours[target]), state_TS, action_TA, block_N2, colours)


def cover_corner(image_HWC: np.ndarray) -> None:
    """Paint the top-left square of side height/4 flat, in place: nothing that matters is ever seen there."""
    side = int(np.ceil(CORNER_SHARE * image_HWC.shape[0]))
    image_HWC[:side, :side] = FLOOR


def _place_blocks(rng: np.random.Generator) -> np.ndarray:
    """Centres that keep their distance from each other and stay out of the corner that `top` must not show."""
    centres: list[np.ndarray] = []
    while len(centres) < len(COLOURS):
        centre_2 = rng.uniform(-BLOCK_REACH, BLOCK_REACH, 2)
        in_corner = centre_2[0] < 2 * CORNER_SHARE - 1 + BLOCK_HALF and centre_2[1] > 1 - 2 * CORNER_SHARE - BLOCK_HALF
        crowded = any(np.abs(centre_2 - other_2).max() < BLOCK_GAP for other_2 in centres)
        if not in_corner and not crowded:
            centres.append(centre_2)
    return np.stack(centres)


def _place_gripper(rng: np.random.Generator, target_2: np.ndarray) -> np.ndarray:
    """A start anywhere on the table, but not at the target already."""
    while True:
        start_2 = rng.uniform(-BLOCK_REACH, BLOCK_REACH, 2)
        if np.linalg.norm(start_2 - target_2) >= START_GAP:
            return start_2


def _drive(start_2: np.ndarray, target_2: np.ndarray, num_frames: int, fps: int) -> tuple[np.ndarray, np.ndarray]:
    """States and actions of the expert; the action of a frame moves the gripper to the next frame's state."""
    full_speed = TRAVEL * fps / num_frames  # table units per second
    state_TS = np.empty((num_frames, len(STATE_NAMES)), np.float32)
    action_TA = np.empty((num_frames, len(ACTION_NAMES)), np.float32)
    position_2, gripper_open = start_2, 1.0
    for frame_index in range(num_frames):
        way_2 = target_2 - position_2
        velocity_2 = full_speed * np.clip(way_2 / BRAKE, -1.0, 1.0)
        close = float(np.clip((CLOSE_BEGIN - np.linalg.norm(way_2)) / (CLOSE_BEGIN - CLOSE_END), 0.0, 1.0))
        state_TS[frame_index] = (*position_2, gripper_open)
        action_TA[frame_index] = (*velocity_2, close)
        position_2, gripper_open = position_2 + velocity_2 / fps, 1.0 - close
    return state_TS, action_TA


def _view(camera: str, gripper_2: np.ndarray, height: int, width: int) -> np.ndarray:
    """The affine map (2, 3) from table coordinates to pixels."""
    scale = 0.5 * min(height, width)
    middle_2 = np.array([0.5 * width, 0.5 * height])
    if camera == "top":
        axes_22, centre_2 = np.array([[1.0, 0.0], [0.0, -1.0]]), np.zeros(2)
    elif camera == "wrist":
        axes_22, centre_2 = np.array([[1.0, 0.0], [0.0, -1.0]]) / WRIST_HALF_VIEW, gripper_2
    else:  # from the table's right side: its far edge is the left one, and depth looks shorter
        axes_22, centre_2 = np.array([[0.15, 0.8], [0.55, 0.0]]), np.zeros(2)
    linear_22 = scale * axes_22
    return np.column_stack([linear_22, middle_2 - linear_22 @ centre_2])


def _box(x: float, y: float, half_width: float, half_height: float) -> np.ndarray:
    """The four corners (P, 2) of an upright box."""
    signs_P2 = np.array([(-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)])
    return np.array([x, y]) + signs_P2 * np.array([half_width, half_height])


def _fill(image_HWC: np.ndarray, view_23: np.ndarray, points_P2: np.ndarray, colour: tuple[int, int, int]) -> None:
    """Draw a convex polygon given in table coordinates, smooth to 1/16 pixel."""
    pixels_P2 = points_P2 @ view_23[:, :2].T + view_23[:, 2] - 0.5  # cv2 counts from the middle of a pixel
    fixed_P2 = np.round(pixels_P2 * 16).astype(np.int32)
    cv2.fillConvexPoly(image_HWC, fixed_P2, colour, lineType=cv2.LINE_AA, shift=4)
