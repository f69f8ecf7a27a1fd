"""A simulated table: a tray of coloured pads, a gripper, and a task that names the pad to reach.

`make_episode` is a pure function of its arguments. The tray is placed at random in every episode;
its four pads keep their positions on it. The expert moves straight to the named pad with a velocity
proportional to the remaining distance, so its actions depend on the image (where is the tray?) and
the task (which pad?). The state describes only the gripper.

Every camera paints the top-left square of side height/4 in a flat colour, where the frame id is
drawn.

Legend: T frames, S state, A action, N pads, P points; table coordinates are x to the right and y
up, -1 to 1.
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

PAD_OFFSET = 0.35  # from the tray's centre to a pad's centre, on each axis
PAD_HALF, TRAY_HALF = 0.2, 0.62
TRAY_REACH = 0.5  # maximum distance of the tray's centre from the table's centre, on each axis
GRIPPER_REACH = 0.8
START_GAP = 0.3  # minimum distance of the gripper's start from the target
TIME_CONSTANTS = 2.0  # the distance left at the end is exp(-2) of the initial distance
CLOSE_BEGIN, CLOSE_END = 0.5, 0.15  # distances at which the gripper starts to close and is closed
CORNER_SHARE = 0.25  # fraction of the image height; see `cover_corner`

TABLE = {"top": (205, 200, 190), "wrist": (180, 190, 205), "side": (200, 185, 170)}  # background colour of each camera
TRAY, FINGER, CORNER = (110, 100, 95), (20, 20, 24), (70, 72, 80)
WRIST_HALF_VIEW = 1.4  # table units from the image centre to its border
TOP_HALF_VIEW = 1.2


@dataclass(frozen=True)
class WorldEpisode:
    task: str
    state_TS: np.ndarray
    """float32, ordered as STATE_NAMES, in table units; a fully open gripper is 1."""
    action_TA: np.ndarray
    """float32, ordered as ACTION_NAMES, in table units per second; the command to close is 1."""
    tray_2: np.ndarray
    """Centre of the tray, fixed during the episode."""

    def render(self, frame_index: int, camera: int, height: int, width: int) -> np.ndarray:
        """Render a frame as seen by `CAMERAS[camera]`: uint8 (height, width, 3), RGB."""
        x, y, gripper_open = (float(value) for value in self.state_TS[frame_index])
        view_23 = _view(CAMERAS[camera], np.array([x, y]), height, width)
        image_HWC = np.full((height, width, 3), TABLE[CAMERAS[camera]], np.uint8)
        _fill(image_HWC, view_23, _box(self.tray_2, TRAY_HALF, TRAY_HALF), TRAY)
        for colour, pixel in COLOURS.items():
            _fill(image_HWC, view_23, _box(pad_centre(self.tray_2, colour), PAD_HALF, PAD_HALF), pixel)
        for side in (-1.0, 1.0):  # fingers left and right of the gripper's centre, so that they never hide it
            finger_x = x + side * (0.18 + 0.1 * gripper_open)
            _fill(image_HWC, view_23, _box(np.array([finger_x, y]), 0.035, 0.12), FINGER)
        cover_corner(image_HWC)
        return image_HWC


def make_episode(seed: int, episode_index: int, num_frames: int, fps: int, *, one_task: bool = False) -> WorldEpisode:
    """Make an episode: a tray, a task and an expert trajectory to the named pad.

    Equal arguments give equal episodes on every machine. With `one_task` every episode has the
    first task of TASKS, so that the image alone determines the target.
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
    """Paint the top-left square of side height/4 in a flat colour, in place."""
    side = int(np.ceil(CORNER_SHARE * image_HWC.shape[0]))
    image_HWC[:side, :side] = CORNER


def _place_tray(rng: np.random.Generator) -> np.ndarray:
    """Return a tray centre with no pad's centre in the covered corner of the `top` camera."""
    while True:
        tray_2 = rng.uniform(-TRAY_REACH, TRAY_REACH, 2)
        x, y = pad_centre(tray_2, "blue")  # the pad nearest to the corner
        edge = TOP_HALF_VIEW * (1 - 2 * CORNER_SHARE)
        if x > -edge or y < edge:
            return tray_2


def _place_gripper(rng: np.random.Generator, target_2: np.ndarray) -> np.ndarray:
    while True:
        start_2 = rng.uniform(-GRIPPER_REACH, GRIPPER_REACH, 2)
        if np.linalg.norm(start_2 - target_2) >= START_GAP:
            return start_2


def _drive(start_2: np.ndarray, target_2: np.ndarray, num_frames: int, fps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the expert's states and actions; each action moves the gripper to the next state."""
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
    """Return the affine map (2, 3) from table coordinates to pixels."""
    scale = 0.5 * min(height, width)
    middle_2 = np.array([0.5 * width, 0.5 * height])
    if camera == "top":
        axes_22, centre_2 = np.array([[1.0, 0.0], [0.0, -1.0]]) / TOP_HALF_VIEW, np.zeros(2)
    elif camera == "wrist":
        axes_22, centre_2 = np.array([[1.0, 0.0], [0.0, -1.0]]) / WRIST_HALF_VIEW, gripper_2
    else:  # seen from the table's right side: its left edge is farthest away, and depth is foreshortened
        axes_22, centre_2 = np.array([[0.15, 0.8], [0.55, 0.0]]), np.zeros(2)
    linear_22 = scale * axes_22
    return np.column_stack([linear_22, middle_2 - linear_22 @ centre_2])


def _box(centre_2: np.ndarray, half_width: float, half_height: float) -> np.ndarray:
    signs_P2 = np.array([(-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)])
    return centre_2 + signs_P2 * np.array([half_width, half_height])


def _fill(image_HWC: np.ndarray, view_23: np.ndarray, points_P2: np.ndarray, colour: tuple[int, int, int]) -> None:
    """Draw a convex polygon given in table coordinates, antialiased to 1/16 pixel."""
    pixels_P2 = points_P2 @ view_23[:, :2].T + view_23[:, 2] - 0.5  # cv2 coordinates refer to pixel centres
    fixed_P2 = np.round(pixels_P2 * 16).astype(np.int32)
    cv2.fillConvexPoly(image_HWC, fixed_P2, colour, lineType=cv2.LINE_AA, shift=4)
