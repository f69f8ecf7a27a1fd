"""Which file holds what in a LeRobot dataset of version v3.0 or v2.1 (pure: nothing is read or written here).

v3.0 keeps several episodes in a file; v2.1 is the same with one. In v3.0 the data files are made to begin at other
episodes than the video files, as they do in recorded datasets, so that a reader which mixes them up is found out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

CHUNK_FILES = 1000
"""Files per chunk folder."""


@dataclass(frozen=True)
class EpisodePlace:
    """The files of an episode, counted from 0, and where it begins in them."""

    episode_index: int
    length: int
    dataset_from_index: int
    data_file: int
    video_file: int
    video_from_frame: int

    @property
    def dataset_to_index(self) -> int:
        return self.dataset_from_index + self.length

    @property
    def video_to_frame(self) -> int:
        return self.video_from_frame + self.length


@dataclass(frozen=True)
class Layout:
    data_path: str
    """Name of a data file, as a template for `str.format`."""
    video_path: str
    """Name of a video file, as a template for `str.format`."""
    shares_files: bool
    """Whether a file holds several episodes."""

    def plan(self, lengths: Sequence[int], episodes_per_file: int) -> list[EpisodePlace]:
        """Where episodes of these lengths go."""
        per_video_file = episodes_per_file if self.shares_files else 1
        per_data_file = math.ceil(1.5 * episodes_per_file) if self.shares_files else 1
        return plan_places(lengths, per_data_file=per_data_file, per_video_file=per_video_file)

    def data_file(self, number: int) -> str:
        return _file_name(self.data_path, number)

    def video_file(self, number: int, video_key: str) -> str:
        return _file_name(self.video_path, number, video_key=video_key)


LAYOUTS = {
    "v3.0": Layout(
        data_path="data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        video_path="videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        shares_files=True,
    ),
    "v2.1": Layout(
        data_path="data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        video_path="videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
        shares_files=False,
    ),
}


def plan_places(lengths: Sequence[int], *, per_data_file: int, per_video_file: int) -> list[EpisodePlace]:
    """Fill files with episodes, in order. Example: four episodes of 5 frames, 3 per data file and 2 per video file.

    episode            0  1  2  3
    data_file          0  0  0  1
    video_file         0  0  1  1
    video_from_frame   0  5  0  5
    """
    begins = [0, *accumulate(lengths)]
    places = []
    for episode_index, length in enumerate(lengths):
        video_file = episode_index // per_video_file
        place = EpisodePlace(
            episode_index=episode_index,
            length=length,
            dataset_from_index=begins[episode_index],
            data_file=episode_index // per_data_file,
            video_file=video_file,
            video_from_frame=begins[episode_index] - begins[video_file * per_video_file],
        )
        places.append(place)
    return places


def split_file_number(number: int) -> tuple[int, int]:
    """(chunk_index, file_index) of the file with this number."""
    return divmod(number, CHUNK_FILES)


def _file_name(template: str, number: int, *, video_key: str = "") -> str:
    chunk_index, file_index = split_file_number(number)
    v30 = {"chunk_index": chunk_index, "file_index": file_index}
    v21 = {"episode_chunk": chunk_index, "episode_index": number}
    return template.format(video_key=video_key, **v30, **v21)
