"""Metadata of a LeRobot dataset, v3.0 or v2.1, as one frozen `DatasetMeta`.

`meta/` is read once, on the driver. Episodes are stored as numpy columns, so that many of them fit
in a few MB. File names are built from fixed fields of the templates in info.json, never with
`str.format`. Errors that are visible without opening data or video files are rejected here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from vlatune.data.meta import meta_v21, meta_v30
from vlatune.data.meta.episodes import Episodes, check_episodes
from vlatune.data.meta.meta_info import SUPPORTED, Feature, Info, read_info
from vlatune.storage.root import Root

__all__ = ["SUPPORTED", "DatasetMeta", "Feature", "check_complete", "fill_template", "load_meta"]


@dataclass(frozen=True, kw_only=True)
class DatasetMeta(Info):
    root: Root
    tasks: tuple[str, ...]
    episodes: Episodes
    stats: Mapping[str, Mapping[str, np.ndarray]]
    """Maps features to min, max, mean, std, q01, ... as flat float64 arrays; empty if missing."""
    left_out: frozenset[int] = frozenset()
    """Positions of unreadable episodes; statistics are computed without them."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Maps own feature names to delivered names where they differ; other fields use own names."""

    @property
    def cameras(self) -> tuple[str, ...]:
        return tuple(name for name, feature in self.features.items() if feature.is_camera)

    @property
    def num_frames(self) -> int:
        return int(self.episodes.length.sum())

    @property
    def has_own_videos(self) -> bool:
        """True if every episode has its own mp4 files."""
        return "{episode_" in self.templates["video_path"]

    def own(self, name: str) -> str:
        """Return the dataset's own name of the feature that is delivered as `name`."""
        return next((own for own, other in self.names.items() if other == name), name)

    def data_path(self, position: int) -> str:
        """Return the parquet file of the episode at `position` of the table."""
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
    """Read `meta/` of the dataset at a folder or URL; messages refer to the input as `argument`."""
    root = Root(root) if isinstance(root, str) else root
    info = read_info(root, argument=argument)
    layout = meta_v30 if info.version == "v3.0" else meta_v21
    video_keys = [name for name, feature in info.features.items() if feature.dtype == "video"]
    tasks = layout.read_tasks(root)
    episodes = layout.read_episodes(root, video_keys, tasks)
    check_episodes(root, episodes)
    meta = DatasetMeta(**vars(info), root=root, tasks=tasks, episodes=episodes, stats=layout.read_stats(root))
    try:  # reject templates that cannot be filled or that leave the folder, before opening files
        names = [meta.data_path(0), *(meta.video_path(0, key) for key in video_keys)]
    except ValueError as error:
        raise ValueError(f"dataset '{meta.root.url}': {error}; correct it, or remove it for LeRobot's own") from error
    for name in names:
        meta.root.join(name)
    return meta


def check_complete(meta: DatasetMeta) -> None:
    """Reject a dataset with fewer episodes than info.json states: a part of meta/ is missing."""
    if meta.total_episodes is not None and meta.total_episodes > len(meta.episodes):
        raise ValueError(
            f"dataset '{meta.root.url}': meta/info.json has total_episodes {meta.total_episodes}, but meta/ lists only "
            f"{len(meta.episodes)}; fetch meta/ again, or set total_episodes to {len(meta.episodes)} if nothing is missing"
        )


def fill_template(template: str, numbers: Mapping[str, int], texts: Mapping[str, str]) -> str:
    """Fill known fields into a path template from info.json.

    Only `{name}` and `{name:0Nd}` are supported: `str.format` would let an untrusted template
    access attributes of objects.
    """

    def replace(match: re.Match[str]) -> str:
        name, width = match.group(1), match.group(2)
        if name in texts and width is None:
            return texts[name]
        if name in numbers:
            return str(numbers[name]).zfill(int(width or 0))
        raise ValueError(f"meta/info.json: the path template '{template}' has the unknown field '{{{name}}}'")

    filled = re.sub(r"\{(\w+)(?::0(\d{1,2})d)?\}", replace, template)
    if "{" in filled or "}" in filled:
        raise ValueError(f"meta/info.json: cannot read the path template '{template}'")
    return filled
