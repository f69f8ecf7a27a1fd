"""LeRobot datasets out of nothing, for the demo, the tests and the benchmarks.

`make_dataset` films the small world of `world.py` and burns each frame's id into its corner (`frame_id.py`), so that
whoever reads the dataset can be held to the right frame for the right row. The same spec gives the same files. A
dataset appears under its name only when it is complete: an interrupted make leaves the name free.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vlatune.dataset.synthetic.frame_id import CORNER_SHARE, MAX_EPISODES, MAX_FRAMES, draw_frame_id
from vlatune.dataset.synthetic.world import ACTION_NAMES, CAMERAS, STATE_NAMES, WorldEpisode, cover_corner, make_episode
from vlatune.dataset.synthetic.writer import ENCODERS, MIN_SIDE, DatasetFormat, DatasetWriter
from vlatune.dataset.synthetic.writer_meta import LAYOUTS, EpisodePlace
from vlatune.files import whole_folder


@dataclass(frozen=True)
class SyntheticSpec:
    episodes: int = 20
    """Number of episodes."""
    frames: int = 50
    """Frames per episode."""
    cameras: int = 2
    """Number of cameras, 1 to 3: top, wrist, side."""
    height: int = 96
    """Height of the pictures in pixels, even."""
    width: int = 96
    """Width of the pictures in pixels, even."""
    fps: int = 10
    """Frames per second."""
    seed: int = 0
    """Decides what happens in the episodes; the same seed gives the same dataset."""
    episodes_per_file: int = 8
    """Episodes that share an mp4 file in v3.0; a data file holds half as many again."""
    version: str = "v3.0"
    """LeRobot's dataset format: v3.0, or v2.1 with one file per episode."""
    codec: str = "h264"
    """Video codec: h264, hevc or av1."""
    vary_length: bool = False
    """Let the lengths of episodes vary by up to a fifth of `frames`."""
    texture: float = 0.0
    """Texture of the scene, in grey levels (standard deviation), as coarse and as fine as in nature. Without it video decodes several times faster than a recording."""
    noise: float = 0.0
    """Noise of the camera, in grey levels (standard deviation); a webcam has 1 to 4."""
    one_task: bool = False
    """Every episode has the same sentence, so that the pictures alone say what to do: for policies without a prompt."""


def make_dataset(folder: Path, spec: SyntheticSpec, *, on_episode: Callable[[int], None] | None = None) -> None:
    """Write a dataset to a new or empty folder; `on_episode` gets the index of each episode once it is written."""
    validate(spec)
    form = _dataset_format(spec)
    grain = Grain(spec) if spec.noise or spec.texture else None
    folder = Path(folder).expanduser().resolve()
    _require_empty(folder)
    with whole_folder(folder) as aside, DatasetWriter(aside, form) as writer:
        for place in LAYOUTS[spec.version].plan(episode_lengths(spec), spec.episodes_per_file):
            episode = make_episode(spec.seed, place.episode_index, place.length, spec.fps, one_task=spec.one_task)
            vectors = {"observation.state": episode.state_TS, "action": episode.action_TA}
            films = {key: _film(episode, place, camera, spec, grain) for camera, key in enumerate(form.video_keys)}
            writer.add_episode(place, episode.task, vectors, films)
            if on_episode is not None:
                on_episode(place.episode_index)
        writer.finish()


def validate(spec: SyntheticSpec) -> None:
    """Refuse what cannot be made."""
    at_least = {"episodes": 1, "frames": 1, "cameras": 1, "height": MIN_SIDE, "width": MIN_SIDE, "fps": 1, "seed": 0}
    for name, least in (at_least | {"episodes_per_file": 1}).items():
        _require(getattr(spec, name) >= least, spec, name, f"must be {least} or more")
    for name in ("texture", "noise"):
        _require(0 <= getattr(spec, name) <= 64, spec, name, "must be 0 to 64")
    for name in ("height", "width"):
        _require(getattr(spec, name) % 2 == 0, spec, name, "must be even, as video has one colour for 2x2 pixels")
    for name, choices in {"version": LAYOUTS, "codec": ENCODERS}.items():
        _require(getattr(spec, name) in choices, spec, name, f"must be one of {', '.join(choices)}")
    _require(spec.cameras <= len(CAMERAS), spec, "cameras", f"must be {len(CAMERAS)} or less")
    _require(spec.width * CORNER_SHARE >= spec.height, spec, "width", f"must be {spec.height}/4 or more: frame ids")
    _require(spec.episodes <= MAX_EPISODES, spec, "episodes", f"must be {MAX_EPISODES} or less: frame ids")
    longest = max(episode_lengths(spec))
    _require(
        longest <= MAX_FRAMES, spec, "frames", f"the longest has {longest}, must be {MAX_FRAMES} or less: frame ids"
    )


def episode_lengths(spec: SyntheticSpec) -> list[int]:
    """Frames of each episode."""
    if not spec.vary_length:
        return [spec.frames] * spec.episodes
    most = spec.frames // 5
    rng = np.random.default_rng([spec.seed, 0, 1])  # the world's episodes are drawn from two numbers: no overlap
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
    )


class Grain:
    """What a real picture has and the small world lacks: texture that lies still, and noise that does not.

    Both are cuts of one large tile each, elsewhere for every picture: drawing them anew would take longer than encoding.
    """

    def __init__(self, spec: SyntheticSpec) -> None:
        self._seed = spec.seed
        rng = np.random.default_rng([spec.seed, 0, 2])
        tile_hw = (2 * spec.height, 2 * spec.width)
        self._texture_HW1 = np.round(spec.texture * _natural(rng, tile_hw))[..., None].astype(np.int16)
        self._noise_HWC = np.round(rng.normal(0.0, spec.noise, (*tile_hw, 3))).astype(np.int16)

    def add(self, image_HWC: np.ndarray, *, episode_index: int, camera: int, frame_index: int) -> None:
        """In place, but not where the frame's id will be."""
        scene, shot = [self._seed, episode_index, camera], [self._seed, episode_index, camera, frame_index]
        texture_HW1, noise_HWC = _cut(self._texture_HW1, image_HWC, scene), _cut(self._noise_HWC, image_HWC, shot)
        np.clip(image_HWC + texture_HW1 + noise_HWC, 0, 255, out=image_HWC, casting="unsafe")
        cover_corner(image_HWC)


def _natural(rng: np.random.Generator, size_hw: tuple[int, int]) -> np.ndarray:
    """Noise whose amplitude falls with 1/frequency, as in pictures of nature; standard deviation 1."""
    height, width = size_hw
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    waves = (rng.normal(size=frequency.shape) + 1j * rng.normal(size=frequency.shape)) / frequency
    picture = np.fft.irfft2(waves, s=size_hw)
    return picture / picture.std()


def _cut(tile_HWC: np.ndarray, image_HWC: np.ndarray, seed: list[int]) -> np.ndarray:
    height, width, _ = image_HWC.shape
    top, left = np.random.default_rng(seed).integers(0, (height, width), endpoint=True)
    return tile_HWC[top : top + height, left : left + width]


def _film(
    episode: WorldEpisode, place: EpisodePlace, camera: int, spec: SyntheticSpec, grain: Grain | None
) -> Iterator[np.ndarray]:
    """The pictures of one camera, each with its id."""
    for frame_index in range(place.length):
        image_HWC = episode.render(frame_index, camera, spec.height, spec.width)
        if grain is not None:
            grain.add(image_HWC, episode_index=place.episode_index, camera=camera, frame_index=frame_index)
        draw_frame_id(image_HWC, place.episode_index, frame_index)
        yield image_HWC


def _require_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"dataset folder '{folder}': exists and is not empty; give another folder or remove this one")


def _require(condition: bool, spec: SyntheticSpec, name: str, expectation: str) -> None:
    if not condition:
        raise ValueError(f"--{name}={getattr(spec, name)}: {expectation}")
