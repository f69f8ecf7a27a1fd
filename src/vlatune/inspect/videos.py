"""What the mp4 files themselves say, held against meta/: size, codec, pixel format, frames per second, length.

Only the headers are read, and whether the last frames are there; no picture is decoded. A file that cannot be opened is a finding, not a failure; a store
that does not answer is a failure, as everywhere.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any

import av.error

from vlatune.dataset.health.video_health import is_cut_off
from vlatune.dataset.meta.dataset_meta import DatasetMeta
from vlatune.dataset.storage.root import Root
from vlatune.dataset.video.recorded import (
    DECODERS,
    camera_fps,
    ffmpeg_said,
    is_out_of_reach,
    is_rate,
    open_container,
)
from vlatune.inspect.problems import Problem, with_examples

THREADS = 8
"""Files that are opened at once: the time goes into waiting for the disk or the store."""


@dataclass(frozen=True)
class VideoFacts:
    file: str
    height: int = 0
    width: int = 0
    codec: str = ""
    pixel_format: str = ""
    fps: float = 0.0
    num_frames: int = 0
    """0 where the container does not tell."""
    error: str = ""
    """Why the file could not be opened; nothing else is known then."""

    @property
    def size(self) -> str:
        return f"{self.height}x{self.width}"


def read_videos(root: Root, files: Sequence[str], *, on_file: Callable[[], None]) -> list[VideoFacts]:
    """The facts of each file, in the order of `files`; `on_file` is called after each."""
    found: list[VideoFacts] = []
    with ThreadPoolExecutor(THREADS) as pool:
        for facts in pool.map(lambda file: read_video(root, file), files):
            found.append(facts)
            on_file()
    return found


def read_video(root: Root, file: str) -> VideoFacts:
    try:
        if root.is_local:
            return _read_header(root.local_path(file), file)
        with root.open(file) as opened:
            return _read_header(opened, file)
    except FileNotFoundError:
        return VideoFacts(file, error="it is missing")
    except ValueError as error:  # refused before FFmpeg has seen it, or damaged by its checksum
        return VideoFacts(file, error=str(error).removeprefix(f"dataset '{root.url}': ").removeprefix(f"{file}: "))
    except av.error.FFmpegError as error:
        if is_out_of_reach(error):
            raise
        return VideoFacts(file, error=" ".join(ffmpeg_said(error).split()))


def _read_header(source: str | IO[bytes], file: str) -> VideoFacts:
    with open_container(source, file) as container:
        if not container.streams.video:
            return VideoFacts(file, error="there is no video stream in it")
        stream = container.streams.video[0]
        context: Any = stream.codec_context
        if context is None or not stream.time_base:
            return VideoFacts(file, error="its video is of a kind that FFmpeg does not decode")
        if context.codec.name not in DECODERS:
            return VideoFacts(file, error=f"its video is '{context.codec.name}', which is not read")
        if is_cut_off(container, stream):
            return VideoFacts(file, error="it is cut off: its last frames are not there")
        return VideoFacts(
            file=file,
            height=context.height,
            width=context.width,
            codec=context.codec.canonical_name,
            pixel_format=context.pix_fmt or "",
            fps=float(stream.average_rate or 0.0),
            num_frames=stream.frames,
        )


def video_problems(
    meta: DatasetMeta, camera: str, videos: Sequence[VideoFacts], needed: Mapping[str, int]
) -> list[Problem]:
    """How the files of one camera differ from what info.json says of them, or lack frames that are `needed`."""
    place = f"camera '{camera}'"
    good = [video for video in videos if not video.error]
    fps = camera_fps(meta, camera)
    timed = [video for video in good if _has_fps(video, fps)]  # at another rate, frames cannot be counted
    return [
        *_unreadable(videos, place),
        *_wrong_size(meta, camera, good, place),
        *_wrong_fps([video for video in good if not _has_fps(video, fps)], fps, place),
        *_wrong_codec(meta, camera, good, place),
        *_too_short(needed, timed, place),
    ]


def _has_fps(video: VideoFacts, fps: float) -> bool:
    return is_rate(video.fps, fps, video.num_frames)


def _unreadable(videos: Sequence[VideoFacts], place: str) -> list[Problem]:
    return with_examples(
        "error",
        [f"{video.file}: {video.error}" for video in videos if video.error],
        place=place,
        found="files that cannot be opened as video",
        expected="mp4 files",
        fix="fetch them anew; a file of some 130 bytes is a Git LFS pointer: run `git lfs pull`",
    )


def _wrong_size(meta: DatasetMeta, camera: str, videos: Sequence[VideoFacts], place: str) -> list[Problem]:
    height_width = meta.features[camera].height_width
    size = "{}x{}".format(*height_width)
    return with_examples(
        "error",
        [f"{video.file}: {video.size}" for video in videos if (video.height, video.width) != height_width],
        place=place,
        found="files with pictures of another size (height x width) than meta/info.json says",
        expected=size,
        fix="correct the feature's shape in meta/info.json, or re-encode the files",
    )


def _wrong_fps(wrong: Sequence[VideoFacts], fps: float, place: str) -> list[Problem]:
    return with_examples(
        "error",
        [f"{video.file}: {video.fps:g} fps" for video in wrong],
        place=place,
        found="files with other frames per second than meta/info.json says",
        expected=f"{fps:g} fps, so that every row has its picture",
        fix="correct fps and the feature's video.fps in meta/info.json if the rows' timestamps agree with the files; else re-encode the files",
    )


def _wrong_codec(meta: DatasetMeta, camera: str, videos: Sequence[VideoFacts], place: str) -> list[Problem]:
    codec = meta.features[camera].declared("codec")
    return with_examples(
        "warning",
        [f"{video.file}: {video.codec}" for video in videos if codec and video.codec != codec],
        place=place,
        found="files with another codec than meta/info.json says",
        expected=str(codec),
        fix="correct the feature's video.codec in meta/info.json; reading does not depend on it",
    )


def _too_short(needed: Mapping[str, int], videos: Sequence[VideoFacts], place: str) -> list[Problem]:
    wrong = [video for video in videos if 0 < video.num_frames < needed[video.file]]
    return with_examples(
        "error",
        [f"{video.file}: {video.num_frames} frames, {needed[video.file]} needed" for video in wrong],
        place=place,
        found="files with fewer frames than the episodes in them have rows",
        expected="a frame for every row",
        fix="fetch or re-encode the files; until then leave the episodes out with --dataset.on_bad_episode=skip",
    )
