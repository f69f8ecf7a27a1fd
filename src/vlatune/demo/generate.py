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

from vlatune.demo.world import ACTION_NAMES, CAMERAS, STATE_NAMES, WorldEpisode, cover_corner, make_episode
from vlatune.demo.writer import ENCODERS, MIN_SIDE, PATHS, DatasetFormat, DatasetWriter
from vlatune.storage.files import atomic_folder, reject_link

GRID = 6
"""Cells per side."""
CORNER_SHARE = 4
"""Ratio of the image height to the side of the square."""
MAX_EPISODES = 1 << 16
MAX_FRAMES = 1 << 12
MIN_HEIGHT = 48
"""Minimum image height in pixels; below it, cells are narrower than two pixels."""

_NUM_BITS = GRID * GRID
_SHIFTS = np.arange(_NUM_BITS - 1, -1, -1, dtype=np.uint64)
_CHECKERBOARD = 0b101010_010101_101010_010101_101010_010101  # xor-ed into every id, so that no id is flat
_LUMA_WEIGHTS = np.array([0.299, 0.587, 0.114], np.float32)


def draw_frame_id(image_HWC: np.ndarray, episode_index: int, frame_index: int) -> None:
    """Draw the id over the top-left corner of the image, in place."""
    height, width = image_HWC.shape[:2]
    if not (0 <= episode_index < MAX_EPISODES and 0 <= frame_index < MAX_FRAMES):
        raise ValueError(
            f"frame id ({episode_index}, {frame_index}): an id holds {MAX_EPISODES} episodes of {MAX_FRAMES} frames"
        )
    if height < MIN_HEIGHT or width * CORNER_SHARE < height:
        raise ValueError(
            f"image of {height}x{width}: a frame id needs a height of {MIN_HEIGHT} or more and a width of height/4 or more"
        )
    cells = _cell_of_pixel(height)
    image_HWC[: len(cells), : len(cells)] = _grid(episode_index, frame_index)[np.ix_(cells, cells)][..., None]


def read_frame_id(image: np.ndarray, *, box: tuple[int, int, int, int] | None = None) -> tuple[int, int] | None:
    """Read the (episode, frame) id of a uint8 image, HWC or CHW; None if there is no intact id.

    `box` is the content's (top, left, height, width) if the image is padded.
    """
    image_HWC = _channels_last(np.asarray(image))
    top, left, height, _ = box or (0, 0, *image_HWC.shape[:2])
    weights_GP = _cell_weights(height)
    side = weights_GP.shape[1]
    luma_PP = image_HWC[top : top + side, left : left + side] @ _LUMA_WEIGHTS
    bits_GG = weights_GP @ luma_PP @ weights_GP.T > 127.5
    return _unpack(int((bits_GG.reshape(-1).astype(np.uint64) << _SHIFTS).sum()))


def _grid(episode_index: int, frame_index: int) -> np.ndarray:
    """Return the grey levels of the cells, (GRID, GRID)."""
    packed = (episode_index << 20 | frame_index << 8 | _checksum(episode_index, frame_index)) ^ _CHECKERBOARD
    bits = np.uint64(packed) >> _SHIFTS & np.uint64(1)
    return (bits * 255).astype(np.uint8).reshape(GRID, GRID)


def _unpack(packed: int) -> tuple[int, int] | None:
    packed ^= _CHECKERBOARD
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


def _channels_last(image: np.ndarray) -> np.ndarray:
    if image.dtype != np.uint8 or image.ndim != 3 or 3 not in (image.shape[0], image.shape[-1]):
        raise ValueError(
            f"image of {image.dtype} {image.shape}: expected uint8, (height, width, 3) or (3, height, width); "
            "LeRobotDataset gives it with return_uint8=True"
        )
    return image if image.shape[-1] == 3 else image.transpose(1, 2, 0)


@dataclass(frozen=True)
class SyntheticSpec:
    episodes: int = 20
    """Number of episodes."""
    frames: int = 50
    """Frames per episode."""
    cameras: int = 2
    """Number of cameras, 1 to 3: top, wrist, side."""
    height: int = 96
    """Image height in pixels (even)."""
    width: int = 96
    """Image width in pixels (even)."""
    fps: int = 10
    """Frames per second."""
    seed: int = 0
    """Random seed; the same seed gives the same dataset."""
    episodes_per_file: int = 8
    """Episodes per mp4 file in v3.0; a data file holds 1.5 times as many."""
    version: str = "v3.0"
    """LeRobot dataset format: v3.0, or v2.1 with one file per episode."""
    codec: str = "h264"
    """Video codec: h264, hevc or av1."""
    vary_length: bool = False
    """Vary episode lengths by up to a fifth of `frames`."""
    texture: float = 0.0
    """Add natural texture of this standard deviation (grey levels); video decodes more slowly."""
    noise: float = 0.0
    """Add camera noise of this standard deviation in grey levels; webcams have 1 to 4."""
    one_task: bool = False
    """Use the same task in every episode, for policies without a prompt."""
    state_noise: float = 0.0
    """Add noise of this standard deviation to the state, so that it does not reveal the target."""


def make_dataset(folder: Path, spec: SyntheticSpec, *, on_episode: Callable[[int], None] | None = None) -> None:
    """Write a dataset to a new or empty folder; call `on_episode` with each episode's index."""
    validate(spec)
    form = _dataset_format(spec)
    grain = Grain(spec) if spec.noise or spec.texture else None
    folder = Path(folder).expanduser().absolute()
    reject_link(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"dataset folder '{folder}': exists and is not empty; give another folder or remove this one")
    with atomic_folder(folder) as partial, DatasetWriter(partial, form) as writer:
        for number, length in enumerate(episode_lengths(spec)):
            episode = make_episode(spec.seed, number, length, spec.fps, one_task=spec.one_task)
            vectors = {"observation.state": _recorded_state(episode, number, spec), "action": episode.action_TA}
            videos = {key: _render(episode, number, camera, spec, grain) for camera, key in enumerate(form.video_keys)}
            writer.add_episode(episode.task, vectors, videos)
            if on_episode is not None:
                on_episode(number)


def validate(spec: SyntheticSpec) -> None:
    """Reject specs that cannot be generated."""
    at_least = {"episodes": 1, "frames": 1, "cameras": 1, "height": MIN_SIDE, "width": MIN_SIDE, "fps": 1, "seed": 0}
    for name, least in (at_least | {"episodes_per_file": 1}).items():
        _require(getattr(spec, name) >= least, spec, name, f"must be {least} or more")
    for name, most in {"texture": 64, "noise": 64, "state_noise": 1}.items():
        _require(0 <= getattr(spec, name) <= most, spec, name, f"must be 0 to {most}")
    for name in ("height", "width"):
        _require(getattr(spec, name) % 2 == 0, spec, name, "must be even, as video has one colour for 2x2 pixels")
    for name, choices in {"version": PATHS, "codec": ENCODERS}.items():
        _require(getattr(spec, name) in choices, spec, name, f"must be one of {', '.join(choices)}")
    _require(spec.cameras <= len(CAMERAS), spec, "cameras", f"must be {len(CAMERAS)} or less")
    _require(spec.width * CORNER_SHARE >= spec.height, spec, "width", f"must be {spec.height}/4 or more: frame ids")
    _require(spec.episodes <= MAX_EPISODES, spec, "episodes", f"must be {MAX_EPISODES} or less: frame ids")
    longest = max(episode_lengths(spec))
    _require(
        longest <= MAX_FRAMES, spec, "frames", f"the longest has {longest}, must be {MAX_FRAMES} or less: frame ids"
    )


def episode_lengths(spec: SyntheticSpec) -> list[int]:
    """Return the number of frames of each episode."""
    if not spec.vary_length:
        return [spec.frames] * spec.episodes
    most = spec.frames // 5
    rng = np.random.default_rng([spec.seed, 0, 1])  # the world's seeds have two numbers: no overlap
    return (spec.frames + rng.integers(-most, most + 1, spec.episodes)).tolist()


def _dataset_format(spec: SyntheticSpec) -> DatasetFormat:
    return DatasetFormat(
        version=spec.version,
        fps=spec.fps,
        vectors={"observation.state": STATE_NAMES, "action": ACTION_NAMES},
        video_keys=tuple(f"observation.images.{camera}" for camera in CAMERAS[: spec.cameras]),
        height=spec.height,
        width=spec.width,
        codec=spec.codec,
        episodes_per_file=spec.episodes_per_file,
    )


class Grain:
    """Adds static texture and per-frame noise, cropped from large tiles to save time."""

    def __init__(self, spec: SyntheticSpec) -> None:
        self._seed = spec.seed
        rng = np.random.default_rng([spec.seed, 0, 2])
        tile_hw = (2 * spec.height, 2 * spec.width)
        self._texture_HW1 = np.round(spec.texture * _natural(rng, tile_hw))[..., None].astype(np.int16)
        self._noise_HWC = np.round(rng.normal(0.0, spec.noise, (*tile_hw, 3))).astype(np.int16)

    def add(self, image_HWC: np.ndarray, *, episode_index: int, camera: int, frame_index: int) -> None:
        """Add texture and noise in place, except in the corner of the frame id."""
        scene, shot = [self._seed, episode_index, camera], [self._seed, episode_index, camera, frame_index]
        texture_HW1, noise_HWC = _cut(self._texture_HW1, image_HWC, scene), _cut(self._noise_HWC, image_HWC, shot)
        np.clip(image_HWC + texture_HW1 + noise_HWC, 0, 255, out=image_HWC, casting="unsafe")
        cover_corner(image_HWC)


def _natural(rng: np.random.Generator, size_hw: tuple[int, int]) -> np.ndarray:
    """Return noise with a 1/frequency amplitude, as in natural images; standard deviation 1."""
    height, width = size_hw
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    waves = (rng.normal(size=frequency.shape) + 1j * rng.normal(size=frequency.shape)) / frequency
    image = np.fft.irfft2(waves, s=size_hw)
    return image / image.std()


def _cut(tile_HWC: np.ndarray, image_HWC: np.ndarray, seed: list[int]) -> np.ndarray:
    height, width, _ = image_HWC.shape
    top, left = np.random.default_rng(seed).integers(0, (height, width), endpoint=True)
    return tile_HWC[top : top + height, left : left + width]


def _recorded_state(episode: WorldEpisode, number: int, spec: SyntheticSpec) -> np.ndarray:
    """Return the state as recorded, with noise; images show the exact state."""
    if not spec.state_noise:
        return episode.state_TS
    rng = np.random.default_rng([spec.seed, number, 0, 0, 1])  # no other seed has five numbers
    noise_TS = rng.normal(0.0, spec.state_noise, episode.state_TS.shape)
    return (episode.state_TS + noise_TS).astype(np.float32)


def _render(
    episode: WorldEpisode, number: int, camera: int, spec: SyntheticSpec, grain: Grain | None
) -> Iterator[np.ndarray]:
    for frame_index in range(len(episode.state_TS)):
        image_HWC = episode.render(frame_index, camera, spec.height, spec.width)
        if grain is not None:
            grain.add(image_HWC, episode_index=number, camera=camera, frame_index=frame_index)
        draw_frame_id(image_HWC, number, frame_index)
        yield image_HWC


def _require(condition: bool, spec: SyntheticSpec, name: str, expectation: str) -> None:
    if not condition:
        raise ValueError(f"--{name}={getattr(spec, name)}: {expectation}")
