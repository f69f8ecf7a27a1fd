"""A recording of a robot with more joints than most policies take, and the same recording with its columns cut."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vlatune.batch import ACTION, STATE
from vlatune.demo.writer import DatasetFormat, DatasetWriter

DIMS = 34
NAMES = tuple(
    f"{side}_{joint}" for side in ("left", "right") for joint in [*(f"arm_{n}" for n in range(16)), "gripper"]
)
SIDE = 64


def make_wide(
    folder: Path,
    *,
    cut: Mapping[str, Sequence[int]] | None = None,
    names: Any = None,
    version: str = "v3.0",
    lengths: Sequence[int] = (12, 9, 14, 11),
    seed: int = 0,
) -> Path:
    """Write random episodes of 34 dims; `cut` keeps these columns alone, `names` replaces the names in info.json."""
    cut = {key: list((cut or {}).get(key, range(DIMS))) for key in (STATE, ACTION)}
    form = DatasetFormat(
        version=version,
        fps=10,
        vectors={key: tuple(NAMES[dim] for dim in dims) for key, dims in cut.items()},
        video_keys=("observation.images.top",),
        height=SIDE,
        width=SIDE,
        codec="h264",
        episodes_per_file=2,
    )
    folder.mkdir(parents=True)
    with DatasetWriter(folder, form) as writer:
        for episode, length in enumerate(lengths):
            rng = np.random.default_rng([seed, episode])
            scale = 1.0 + np.arange(DIMS)  # every dim has another range, so that a wrong one shows
            rows = {key: (rng.normal(size=(length, DIMS)) * scale).astype(np.float32) for key in (STATE, ACTION)}
            images = [np.full((SIDE, SIDE, 3), 20 * frame % 256, np.uint8) for frame in range(length)]
            vectors = {key: np.ascontiguousarray(rows[key][:, dims]) for key, dims in cut.items()}
            writer.add_episode("do it", vectors, {"observation.images.top": images})
    if names is not None:
        info = json.loads((folder / "meta/info.json").read_text())
        for key in (STATE, ACTION):
            info["features"][key]["names"] = names
        (folder / "meta/info.json").write_text(json.dumps(info))
    return folder
