"""Write small recordings of robots with any names, dims, cameras and rates."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from vlatune.batch import ACTION, STATE
from vlatune.demo.writer import DatasetFormat, DatasetWriter

TOP = "observation.images.top"


def write_recording(
    folder: Path,
    action_names: Sequence[str] = ("x", "y", "z"),
    *,
    state_dim: int | None = None,
    state: str = STATE,
    action: str = ACTION,
    cameras: Sequence[str] = (TOP,),
    lengths: Sequence[int] = (14, 12, 13, 11),
    task: str = "fold the towel",
    colour: tuple[int, int, int] = (40, 90, 140),
    version: str = "v3.0",
    fps: int = 10,
    side: int = 64,
    codec: str = "h264",
    episodes_per_file: int = 2,
    seed: int = 0,
) -> Path:
    """Write a dataset whose actions are near its state, as a follower arm's; every dim has its own scale."""
    dims = len(action_names) if state_dim is None else state_dim
    vectors = {state: tuple(f"joint_{number}" for number in range(dims)), action: tuple(action_names)}
    form = DatasetFormat(version, fps, vectors, tuple(cameras), side, side, codec, episodes_per_file)
    rng, scale = np.random.default_rng(seed), np.arange(1, dims + 1)
    folder.mkdir(parents=True)
    with DatasetWriter(folder, form) as writer:
        for length in lengths:
            state_TS = (np.cumsum(rng.normal(size=(length, dims)), axis=0) * scale + 10 * scale).astype(np.float32)
            noise_TA = rng.normal(size=(length, len(action_names)))
            action_TA = (state_TS[:, : len(action_names)] + noise_TA).astype(np.float32)
            videos = {camera: _film(colour, length, side) for camera in cameras}
            writer.add_episode(task, {state: state_TS, action: action_TA}, videos)
    return folder


def _film(colour: tuple[int, int, int], length: int, side: int) -> Iterator[np.ndarray]:
    """Yield images of one colour with a white bar that grows with the frame."""
    for frame in range(length):
        image = np.full((side, side, 3), colour, np.uint8)
        image[:4, : 2 * frame + 2] = 255
        yield image
