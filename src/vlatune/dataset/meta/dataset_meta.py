"""What a LeRobot dataset says of itself, v3.0 or v2.1, as one frozen `DatasetMeta`.

Reads `meta/` once, on the driver. Episodes are kept as columns (numpy), so that 10^5 of them are a few
MB. File names come from fixed fields of the templates in info.json, never from `str.format`. Everything
wrong that can be seen without opening data or video files is refused here, with file, value and remedy.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from vlatune.dataset.meta import meta_v21, meta_v30
from vlatune.dataset.meta.episodes import Episodes, check_episodes
from vlatune.dataset.meta.meta_info import SUPPORTED, Feature, read_info
from vlatune.dataset.storage.checksums import ask_sums
from vlatune.dataset.storage.root import Root

__all__ = ["SUPPORTED", "DatasetMeta", "Feature", "check_complete", "fill_template", "load_meta"]


@dataclass(frozen=True)
class DatasetMeta:
    root: Root
    version: str
    fps: float
    features: Mapping[str, Feature]
    tasks: tuple[str, ...]
    episodes: Episodes
    stats: Mapping[str, Mapping[str, np.ndarray]]
    """Feature -> min, max, mean, std, q01, ... as flat float64 arrays; empty where the dataset has none."""
    templates: Mapping[str, str]
    chunks_size: int
    total_episodes: int | None = None
    """What info.json promises; None where it does not."""
    left_out: frozenset[int] = frozenset()
    """Positions of episodes that cannot be read; statistics are computed without them."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Own name of a feature -> the one it goes by (features.py), where they differ. All else here has own names."""

    @property
    def cameras(self) -> tuple[str, ...]:
        return tuple(name for name, feature in self.features.items() if feature.is_camera)

    @property
    def num_frames(self) -> int:
        return int(self.episodes.length.sum())

    def own(self, name: str) -> str:
        """The dataset's own name of the feature that goes by `name`."""
        return next((own for own, other in self.names.items() if other == name), name)

    def data_path(self, position: int) -> str:
        """Name of the parquet file of the episode at `position` of the table."""
        return self._fill("data_path", position, self.episodes.data_chunk, self.episodes.data_file)

    def video_path(self, position: int, camera: str) -> str:
        span = self.episodes.videos[camera]
        return self._fill("video_path", position, span.chunk, span.file, video_key=camera)

    def _fill(self, which: str, position: int, chunk: np.ndarray, file: np.ndarray, **texts: str) -> str:
        episode = int(self.episodes.index[position])
        numbers = {"chunk_index": int(chunk[position]), "file_index": int(file[position])}
        numbers |= {"episode_index": episode, "episode_chunk": episode // self.chunks_size}
        return fill_template(self.templates[which], numbers, texts)


def load_meta(root: str | Root, *, argument: str = "the path") -> DatasetMeta:
    """Read `meta/` of the dataset at a folder or URL; messages call what the user gave by the name in `argument`."""
    root = Root(root) if isinstance(root, str) else root
    if root.has_checksums and not root.is_local:
        root = replace(root, sums_version=ask_sums(root))
    info = read_info(root, argument=argument)
    layout = meta_v30 if info.version == "v3.0" else meta_v21
    video_keys = [name for name, feature in info.features.items() if feature.dtype == "video"]
    tasks = layout.read_tasks(root)
    episodes = layout.read_episodes(root, video_keys, tasks)
    check_episodes(root, episodes)
    meta = DatasetMeta(
        root=root,
        version=info.version,
        fps=info.fps,
        features=info.features,
        tasks=tasks,
        episodes=episodes,
        stats=layout.read_stats(root),
        templates=info.templates,
        chunks_size=info.chunks_size,
        total_episodes=info.total_episodes,
    )
    _check_templates(meta, video_keys)
    return meta


def _check_templates(meta: DatasetMeta, video_keys: list[str]) -> None:
    """Names that leave the folder, or that cannot be filled, are refused before anything is opened."""
    try:
        names = [meta.data_path(0), *(meta.video_path(0, key) for key in video_keys)]
    except ValueError as error:
        raise ValueError(f"dataset '{meta.root.url}': {error}; correct it, or remove it for LeRobot's own") from error
    for name in names:
        meta.root.join(name)


def check_complete(meta: DatasetMeta) -> None:
    """Refuse to read fewer episodes than info.json promises: a part of meta/ is missing, and nobody would notice."""
    if meta.total_episodes is not None and meta.total_episodes > len(meta.episodes):
        raise ValueError(
            f"dataset '{meta.root.url}': meta/info.json says total_episodes {meta.total_episodes}, but meta/ lists only "
            f"{len(meta.episodes)}; fetch meta/ anew, or set total_episodes to {len(meta.episodes)} if nothing is missing"
        )


def fill_template(template: str, numbers: Mapping[str, int], texts: Mapping[str, str]) -> str:
    """Put known fields into a path template from info.json.

    Only `{name}` and `{name:0Nd}` are understood: `str.format` on a template from a dataset would let it
    reach into our objects.
    """

    def replace(match: re.Match[str]) -> str:
        name, width = match.group(1), match.group(2)
        if name in texts and width is None:
            return texts[name]
        if name in numbers:
            return str(numbers[name]).zfill(int(width or 0))
        raise ValueError(f"meta/info.json: the path template '{template}' asks for '{{{name}}}', which is not known")

    filled = re.sub(r"\{(\w+)(?::0(\d{1,2})d)?\}", replace, template)
    if "{" in filled or "}" in filled:
        raise ValueError(f"meta/info.json: cannot read the path template '{template}'")
    return filled
