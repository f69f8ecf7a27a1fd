"""Generate synthetic LeRobot datasets for the demo, the tests and the benchmarks.

`make_dataset` renders the simulated table of `world.py` and draws each frame's id into its corner,
so that tests can check that every row has the right frame. Equal specs give equal files. The
dataset folder is created atomically, once it is complete.

The id consists of six by six black or white cells that fill the top-left square of side H/4, where
H is the image height. Row by row they encode 16 bits of episode index, 12 of frame index and 8 of
checksum. Cells are grey levels read at their centre, so ids survive lossy video (4:2:0 chroma) and
bilinear resizing down to cells of two pixels. Images without an id, including flat black or white
ones, read as None. Letterboxed images need the content's `box`; `resize.letterbox_box` computes
where LeRobot's `resize_with_pad_torch` places it.
"""

import binascii
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from vlatune.config.fields import check_limits, setting
from vlatune.demo.world import ACTION_NAMES, CAMERAS, STATE_NAMES, WorldEpisode, cover_corner, make_episode
from vlatune.demo.writer import ENCODERS, MIN_SIDE, PATHS, DatasetFormat, DatasetWriter
from vlatune.storage.files import atomic_folder, reject_link

GRID = 6
"""Cells per side."""
CORNER_SHARE = 4
"""Ratio of the image height to the side of the square."""
MAX_EPISODES = 1 << 16
MAX_FRAMES = 1 << 12

_NUM_BITS = GRID * GRID
_SHIFTS = np.arange(_NUM_BITS - 1, -1, -1, dtype=np.uint64)
_CHECKERBOARD = 0b101010_010101_101010_010101_101010_010101  # xor-ed into every id, so that no id is flat
_LUMA_WEIGHTS = np.array([0.299, 0.587, 0.114], np.float32)


def draw_frame_id(image_HWC: np.ndarray, episode_index: int, frame_index: int) -> None:
    """Draw the id over the top-left corner of the image, in place."""
    cells = _cell_of_pixel(image_HWC.shape[0])
    packed = (episode_index << 20 | frame_index << 8 | _checksum(episode_index, frame_index)) ^ _CHECKERBOARD
    grid = ((np.uint64(packed) >> _SHIFTS & np.uint64(1)) * 255).astype(np.uint8).reshape(GRID, GRID)
    image_HWC[: len(cells), : len(cells)] = grid[np.ix_(cells, cells)][..., None]


def read_frame_id(image: np.ndarray, *, box: tuple[int, int, int, int] | None = None) -> tuple[int, int] | None:
    """Read the (episode, frame) id of a uint8 image, HWC or CHW; None if there is no intact id.

    `box` is the content's (top, left, height, width) if the image is padded.
    """
    image = np.asarray(image)
    image_HWC = image if image.shape[-1] == 3 else image.transpose(1, 2, 0)
    top, left, height, _ = box or (0, 0, *image_HWC.shape[:2])
    weights_GP = _cell_weights(height)
    side = weights_GP.shape[1]
    luma_PP = image_HWC[top : top + side, left : left + side] @ _LUMA_WEIGHTS
    bits_GG = weights_GP @ luma_PP @ weights_GP.T > 127.5
    packed = int((bits_GG.reshape(-1).astype(np.uint64) << _SHIFTS).sum()) ^ _CHECKERBOARD
    episode_index, frame_index, checksum = packed >> 20, packed >> 8 & 0xFFF, packed & 0xFF
    return (episode_index, frame_index) if checksum == _checksum(episode_index, frame_index) else None


def _checksum(episode_index: int, frame_index: int) -> int:
    """Return eight bits of CRC-16; the initial value makes flat images invalid ids."""
    return binascii.crc_hqx((episode_index << 12 | frame_index).to_bytes(4, "big"), 0xFFFF) & 0xFF


@lru_cache(maxsize=64)
def _cell_of_pixel(height: int) -> np.ndarray:
    """Map each pixel along the square's side to the cell that contains its centre."""
    middles = np.arange(round(height / CORNER_SHARE)) + 0.5
    return np.minimum((middles * GRID * CORNER_SHARE / height).astype(int), GRID - 1)


@lru_cache(maxsize=64)
def _cell_weights(height: int) -> np.ndarray:
    """Return (GRID, pixels) weights that average the inner half of each cell (1+ pixels)."""
    cell = height / (GRID * CORNER_SHARE)
    middles = np.arange(round(height / CORNER_SHARE)) + 0.5
    distance_GP = np.abs(middles[None, :] - (np.arange(GRID)[:, None] + 0.5) * cell)
    reach_G1 = np.maximum(cell / 4, distance_GP.min(axis=1, keepdims=True))
    inner_GP = (distance_GP <= reach_G1 + 1e-6).astype(np.float32)
    return inner_GP / inner_GP.sum(axis=1, keepdims=True)


@dataclass(frozen=True)
class SyntheticSpec:
    episodes: int = setting(20, minimum=1, maximum=MAX_EPISODES)
    """Number of episodes."""
    frames: int = setting(50, minimum=1)
    """Frames per episode."""
    cameras: int = setting(2, minimum=1, maximum=len(CAMERAS))
    """Number of cameras, 1 to 3: top, wrist, side."""
    height: int = setting(96, minimum=MIN_SIDE)
    """Image height in pixels (even)."""
    width: int = setting(96, minimum=MIN_SIDE)
    """Image width in pixels (even)."""
    fps: int = setting(10, minimum=1)
    """Frames per second."""
    seed: int = setting(0, minimum=0)
    """Random seed; the same seed gives the same dataset."""
    episodes_per_file: int = setting(8, minimum=1)
    """Episodes per mp4 file in v3.0; a data file holds 1.5 times as many."""
    version: str = "v3.0"
    """LeRobot dataset format: v3.0, or v2.1 with one file per episode."""
    codec: str = "h264"
    """Video codec: h264, hevc or av1."""
    vary_length: bool = False
    """Vary episode lengths by up to a fifth of `frames`."""
    noise: float = setting(0.0, minimum=0, maximum=64)
    """Add camera noise of this standard deviation in grey levels; video decodes more slowly."""
    one_task: bool = False
    """Use the same task in every episode, for policies without a prompt."""
    state_noise: float = setting(0.0, minimum=0, maximum=1)
    """Add noise of this standard deviation to the state, so that it does not reveal the target."""


def make_dataset(folder: Path, spec: SyntheticSpec, *, on_episode: Callable[[int], None] | None = None) -> None:
    """Write a dataset to a new or empty folder; call `on_episode` with each episode's index."""
    validate(spec)
    form = DatasetFormat(
        version=spec.version,
        fps=spec.fps,
        vectors={"observation.state": STATE_NAMES, "action": ACTION_NAMES},
        video_keys=tuple(f"observation.images.{camera}" for camera in CAMERAS[: spec.cameras]),
        height=spec.height,
        width=spec.width,
        codec=spec.codec,
        episodes_per_file=spec.episodes_per_file,
    )
    tile_HWC = _noise_tile(spec) if spec.noise else None
    folder = Path(folder).expanduser().absolute()
    reject_link(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"dataset folder '{folder}': exists and is not empty; give another folder or remove this one")
    with atomic_folder(folder) as partial, DatasetWriter(partial, form) as writer:
        for number, length in enumerate(episode_lengths(spec)):
            episode = make_episode(spec.seed, number, length, spec.fps, one_task=spec.one_task)
            vectors = {"observation.state": _recorded_state(episode, number, spec), "action": episode.action_TA}
            videos = {
                key: _render(episode, number, camera, spec, tile_HWC) for camera, key in enumerate(form.video_keys)
            }
            writer.add_episode(episode.task, vectors, videos)
            if on_episode is not None:
                on_episode(number)


def validate(spec: SyntheticSpec) -> None:
    """Reject specs that cannot be generated."""
    check_limits(spec)
    longest = max(episode_lengths(spec))
    for name, is_fine, expectation in (
        ("version", spec.version in PATHS, f"must be one of {', '.join(PATHS)}"),
        ("codec", spec.codec in ENCODERS, f"must be one of {', '.join(ENCODERS)}"),
        ("height", spec.height % 2 == 0, "must be even, as video has one colour for 2x2 pixels"),
        ("width", spec.width % 2 == 0, "must be even, as video has one colour for 2x2 pixels"),
        ("width", spec.width * CORNER_SHARE >= spec.height, f"must be {spec.height}/4 or more: frame ids"),
        ("frames", longest <= MAX_FRAMES, f"the longest has {longest}, must be {MAX_FRAMES} or less: frame ids"),
    ):
        if not is_fine:
            raise ValueError(f"--{name}={getattr(spec, name)}: {expectation}")


def episode_lengths(spec: SyntheticSpec) -> list[int]:
    """Return the number of frames of each episode."""
    if not spec.vary_length:
        return [spec.frames] * spec.episodes
    most = spec.frames // 5
    rng = np.random.default_rng([spec.seed, 0, 1])  # the world's seeds have two numbers: no overlap
    return (spec.frames + rng.integers(-most, most + 1, spec.episodes)).tolist()


def _noise_tile(spec: SyntheticSpec) -> np.ndarray:
    """Return noise of twice the image size, from which frames are cropped to save time."""
    rng = np.random.default_rng([spec.seed, 0, 2])
    return np.round(rng.normal(0.0, spec.noise, (2 * spec.height, 2 * spec.width, 3))).astype(np.int16)


def _add_noise(image_HWC: np.ndarray, tile_HWC: np.ndarray, seed: list[int]) -> None:
    """Add noise in place, except in the corner of the frame id."""
    height, width, _ = image_HWC.shape
    top, left = np.random.default_rng(seed).integers(0, (height, width), endpoint=True)
    noise_HWC = tile_HWC[top : top + height, left : left + width]
    np.clip(image_HWC + noise_HWC, 0, 255, out=image_HWC, casting="unsafe")
    cover_corner(image_HWC)


def _recorded_state(episode: WorldEpisode, number: int, spec: SyntheticSpec) -> np.ndarray:
    """Return the state as recorded, with noise; images show the exact state."""
    if not spec.state_noise:
        return episode.state_TS
    rng = np.random.default_rng([spec.seed, number, 0, 0, 1])  # no other seed has five numbers
    noise_TS = rng.normal(0.0, spec.state_noise, episode.state_TS.shape)
    return (episode.state_TS + noise_TS).astype(np.float32)


def _render(
    episode: WorldEpisode, number: int, camera: int, spec: SyntheticSpec, tile_HWC: np.ndarray | None
) -> Iterator[np.ndarray]:
    for frame_index in range(len(episode.state_TS)):
        image_HWC = episode.render(frame_index, camera, spec.height, spec.width)
        if tile_HWC is not None:
            _add_noise(image_HWC, tile_HWC, [spec.seed, number, camera, frame_index])
        draw_frame_id(image_HWC, number, frame_index)
        yield image_HWC
