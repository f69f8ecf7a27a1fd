"""A small tabletop world: a tray of coloured pads, one gripper, one sentence that names the pad to reach.

`make_episode` is a pure function of its arguments. The tray lies somewhere else in every episode; its four pads keep
their places on it. The expert steers straight at the named pad with a velocity in proportion to what is left of the way,
so its actions need the picture (where is the tray?) and the sentence (which pad?). The state holds the gripper alone and
says nothing of the target.

Every camera leaves the top-left square of side height/4 in one flat colour: a frame's id can be drawn there.

Legend: T frames, S state, A action, N pads, P points; table coordinates are x to the right and y up, -1 to 1.
"""

import itertools
from dataclasses import dataclass

import cv2
import numpy as np

CAMERAS = ("top", "wrist", "side")
STATE_NAMES = ("gripper_x", "gripper_y", "gripper_open")
ACTION_NAMES = ("velocity_x", "velocity_y", "close")

COLOURS = {"red": (225, 40, 40), "green": (30, 180, 60), "blue": (40, 80, 235), "yellow": (240, 210, 30)}
PLACES = {"red": (-1.0, -1.0), "green": (1.0, -1.0), "blue": (-1.0, 1.0), "yellow": (1.0, 1.0)}
PHRASES = ("move to the {} pad", "go to the {} pad", "reach the {} pad")
TASKS = tuple(phrase.format(colour) for colour, phrase in itertools.product(COLOURS, PHRASES))

PAD_OFFSET = 0.35  # from the tray's centre to a pad's, on each axis
PAD_HALF, TRAY_HALF = 0.2, 0.62
TRAY_REACH = 0.5  # the tray's centre lies within this of the table's, on each axis
GRIPPER_REACH = 0.8
START_GAP = 0.3  # at least this far from the target the gripper starts
TIME_CONSTANTS = 2.0  # the way left at the end is exp(-2) of the way at the start
CLOSE_BEGIN, CLOSE_END = 0.5, 0.15  # the gripper begins to close at this distance and is closed at that one
CORNER_SHARE = 0.25  # of the picture's height; see `cover_corner`

TABLE = {"top": (205, 200, 190), "wrist": (180, 190, 205), "side": (200, 185, 170)}  # as each camera sees it
TRAY, FINGER, CORNER = (110, 100, 95), (20, 20, 24), (70, 72, 80)
WRIST_HALF_VIEW = 1.4  # table units from the picture's centre to its border
TOP_HALF_VIEW = 1.2


@dataclass(frozen=True)
class WorldEpisode:
    task: str
    state_TS: np.ndarray
    """float32, as STATE_NAMES: table units, and 1 for a gripper that is wide open."""
    action_TA: np.ndarray
    """float32, as ACTION_NAMES: table units per second, and 1 for the command to close."""
    tray_2: np.ndarray
    """The tray's centre; it lies still."""

    def render(self, frame_index: int, camera: int, height: int, width: int) -> np.ndarray:
        """The picture that `CAMERAS[camera]` takes of a frame: uint8 (height, width, 3), RGB."""
        x, y, gripper_open = (float(value) for value in self.state_TS[frame_index])
        view_23 = _view(CAMERAS[camera], np.array([x, y]), height, width)
        image_HWC = np.full((height, width, 3), TABLE[CAMERAS[camera]], np.uint8)
        _fill(image_HWC, view_23, _box(self.tray_2, TRAY_HALF, TRAY_HALF), TRAY)
        for colour, pixel in COLOURS.items():
            _fill(image_HWC, view_23, _box(pad_centre(self.tray_2, colour), PAD_HALF, PAD_HALF), pixel)
        for side in (-1.0, 1.0):  # the fingers stand left and right of the gripper's middle and never hide it
            finger_x = x + side * (0.18 + 0.1 * gripper_open)
            _fill(image_HWC, view_23, _box(np.array([finger_x, y]), 0.035, 0.12), FINGER)
        cover_corner(image_HWC)
        return image_HWC


def make_episode(seed: int, episode_index: int, num_frames: int, fps: int, *, one_task: bool = False) -> WorldEpisode:
    """A tray, a sentence and an expert's way to the named pad; the same for the same arguments, on every machine.

    With `one_task` it is the first sentence of TASKS in every episode, so that the picture alone decides.
    """
    rng = np.random.default_rng([seed, episode_index])
    tray_2 = _place_tray(rng)
    colour = tuple(COLOURS)[int(rng.integers(len(COLOURS)))]
    phrase = PHRASES[int(rng.integers(len(PHRASES)))]
    if one_task:
        colour, phrase = next(iter(COLOURS)), PHRASES[0]
    target_2 = pad_centre(tray_2, colour)
    state_TS, action_TA = _drive(_place_gripper(rng, target_2), target_2, num_frames, fps)
    return WorldEpisode(phrase.format(colour), state_TS, action_TA, tray_2)


def pad_centre(tray_2: np.ndarray, colour: str) -> np.ndarray:
    return tray_2 + PAD_OFFSET * np.array(PLACES[colour])


def cover_corner(image_HWC: np.ndarray) -> None:
    """Paint the top-left square of side height/4 flat, in place: nothing that matters is ever seen there."""
    side = int(np.ceil(CORNER_SHARE * image_HWC.shape[0]))
    image_HWC[:side, :side] = CORNER


def _place_tray(rng: np.random.Generator) -> np.ndarray:
    """A centre such that no pad's lies in the corner that `top` must not show."""
    while True:
        tray_2 = rng.uniform(-TRAY_REACH, TRAY_REACH, 2)
        x, y = pad_centre(tray_2, "blue")  # the pad nearest to the corner
        edge = TOP_HALF_VIEW * (1 - 2 * CORNER_SHARE)
        if x > -edge or y < edge:
            return tray_2


def _place_gripper(rng: np.random.Generator, target_2: np.ndarray) -> np.ndarray:
    """A start anywhere on the table, but not at the target already."""
    while True:
        start_2 = rng.uniform(-GRIPPER_REACH, GRIPPER_REACH, 2)
        if np.linalg.norm(start_2 - target_2) >= START_GAP:
            return start_2


def _drive(start_2: np.ndarray, target_2: np.ndarray, num_frames: int, fps: int) -> tuple[np.ndarray, np.ndarray]:
    """States and actions of the expert; the action of a frame moves the gripper to the next frame's state."""
    gain = TIME_CONSTANTS * fps / num_frames  # per second
    state_TS = np.empty((num_frames, len(STATE_NAMES)), np.float32)
    action_TA = np.empty((num_frames, len(ACTION_NAMES)), np.float32)
    position_2, gripper_open = start_2, 1.0
    for frame_index in range(num_frames):
        way_2 = target_2 - position_2
        velocity_2 = gain * way_2
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
        axes_22, centre_2 = np.array([[1.0, 0.0], [0.0, -1.0]]) / TOP_HALF_VIEW, np.zeros(2)
    elif camera == "wrist":
        axes_22, centre_2 = np.array([[1.0, 0.0], [0.0, -1.0]]) / WRIST_HALF_VIEW, gripper_2
    else:  # from the table's right side: its far edge is the left one, and depth looks shorter
        axes_22, centre_2 = np.array([[0.15, 0.8], [0.55, 0.0]]), np.zeros(2)
    linear_22 = scale * axes_22
    return np.column_stack([linear_22, middle_2 - linear_22 @ centre_2])


def _box(centre_2: np.ndarray, half_width: float, half_height: float) -> np.ndarray:
    """The four corners (P, 2) of an upright box."""
    signs_P2 = np.array([(-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)])
    return centre_2 + signs_P2 * np.array([half_width, half_height])


def _fill(image_HWC: np.ndarray, view_23: np.ndarray, points_P2: np.ndarray, colour: tuple[int, int, int]) -> None:
    """Draw a convex polygon given in table coordinates, smooth to 1/16 pixel."""
    pixels_P2 = points_P2 @ view_23[:, :2].T + view_23[:, 2] - 0.5  # cv2 counts from the middle of a pixel
    fixed_P2 = np.round(pixels_P2 * 16).astype(np.int32)
    cv2.fillConvexPoly(image_HWC, fixed_P2, colour, lineType=cv2.LINE_AA, shift=4)
