"""What the mp4 files themselves say, held against meta/: size, codec, pixel format, frames per second, length.

Only the headers are read, and whether the last frames are there; no picture is decoded. A file that cannot be opened is a finding, not a failure; a store
that does not answer is a failure, as everywhere.

Where meta/episodes places the episodes in the mp4 files (`span_problems`): in order, one after the other, as long as they are.

    file-000.mp4   |--- episode 0 ---|--- episode 1 ---|   from_timestamp of 1 = to_timestamp of 0
                   0.0               1.2               2.1

Pure, over the columns of `Episodes`. Times are compared to half a frame. v2.1 has no such times.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

import av.error
import numpy as np

from vlatune.dataset.health.video_health import is_cut_off
from vlatune.dataset.meta.dataset_meta import DatasetMeta
from vlatune.dataset.meta.episodes import Episodes, VideoSpan
from vlatune.dataset.storage.root import Root
from vlatune.dataset.video.recorded import (
    DECODERS,
    camera_fps,
    ffmpeg_said,
    is_out_of_reach,
    is_rate,
    open_container,
)
from vlatune.dataset.video.watchdog import within_time
from vlatune.inspect.problems import MAX_EXAMPLES, Problem, with_examples

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
    begin_s: float = 0.0
    """Of its first frame, as far as the header tells."""
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
            path = root.local_path(file)
            return within_time(lambda: _read_header(path, file), file)
        with root.open(file) as opened:
            return within_time(lambda: _read_header(opened, file), file)
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
            begin_s=float((stream.start_time or 0) * stream.time_base),
        )


class Needed(NamedTuple):
    """What the rows of the episodes in an mp4 file ask of it."""

    frames: int
    """Up to the last row."""
    begin_s: float
    """The time of the first."""


def video_problems(
    meta: DatasetMeta, camera: str, videos: Sequence[VideoFacts], needed: Mapping[str, Needed]
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
        *_too_late(needed, timed, fps, place),
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


def _too_short(needed: Mapping[str, Needed], videos: Sequence[VideoFacts], place: str) -> list[Problem]:
    wrong = [video for video in videos if 0 < video.num_frames < needed[video.file].frames]
    return with_examples(
        "error",
        [f"{video.file}: {video.num_frames} frames, {needed[video.file].frames} needed" for video in wrong],
        place=place,
        found="files with fewer frames than the episodes in them have rows",
        expected="a frame for every row",
        fix="fetch or re-encode the files; until then leave the episodes out with --dataset.on_bad_episode=skip",
    )


def _too_late(needed: Mapping[str, Needed], videos: Sequence[VideoFacts], fps: float, place: str) -> list[Problem]:
    """Frames would be those of other rows: an edit list was lost, or files were cut."""
    wrong = [video for video in videos if video.begin_s > needed[video.file].begin_s + 0.5 / fps]
    return with_examples(
        "error",
        [f"{video.file}: {video.begin_s:.4f} s, not {needed[video.file].begin_s:.4f} s" for video in wrong],
        place=place,
        found="files whose first frame is later than the first row of the episodes in them",
        expected="a frame at the time of every row; as it is, each shows what was seen before",
        fix="fetch or re-encode the files; until then leave the episodes out with --dataset.on_bad_episode=skip",
    )


SPANS_FIX = "convert or record the dataset anew: as it is, pictures of another episode would be shown"


def span_problems(meta: DatasetMeta) -> list[Problem]:
    problems: list[Problem] = []
    for camera, span in meta.episodes.videos.items():
        if not np.isposinf(span.to_s).all():
            place = f"meta/episodes, camera '{camera}'"
            problems += _order_problems(meta.episodes, span, place)
            problems += _overlap_problems(meta.episodes, span, place, half_frame_s=0.5 / meta.fps)
            problems += _length_problems(meta.episodes, span, place, fps=meta.fps)
    return problems


def _order_problems(episodes: Episodes, span: VideoSpan, place: str) -> list[Problem]:
    before, after = _neighbours(span, np.lexsort((episodes.index, span.file, span.chunk)))
    wrong = ~(span.from_s[after] > span.from_s[before])  # NaN is wrong too
    return with_examples(
        "warning",
        _pairs(episodes, before[wrong], after[wrong], other_s=span.from_s, verb="begins", span=span),
        count=int(wrong.sum()),
        place=place,
        found="from_timestamp does not rise from an episode to the next one in the same file",
        expected="episodes of a file in the order of their index",
        fix="nothing if the pictures are right: the order alone does no harm; else convert the dataset anew",
    )


def _overlap_problems(episodes: Episodes, span: VideoSpan, place: str, *, half_frame_s: float) -> list[Problem]:
    before, after = _neighbours(span, np.lexsort((span.from_s, span.file, span.chunk)))
    wrong = span.from_s[after] < span.to_s[before] - half_frame_s
    return with_examples(
        "error",
        _pairs(episodes, before[wrong], after[wrong], other_s=span.to_s, verb="ends", span=span),
        count=int(wrong.sum()),
        place=place,
        found="episodes overlap inside a file",
        expected="from_timestamp at or after the to_timestamp of the episode before it",
        fix=SPANS_FIX,
    )


def _length_problems(episodes: Episodes, span: VideoSpan, place: str, *, fps: float) -> list[Problem]:
    surplus = (span.to_s - span.from_s) * fps - episodes.length
    is_wrong = ~(np.abs(surplus) <= 0.5) | (span.from_s < 0)
    is_last_frame = is_wrong & (np.abs(surplus + 1) <= 0.5) & (span.from_s >= 0) & ~_runs_into_next(episodes, span, fps)
    rest = np.flatnonzero(is_wrong & ~is_last_frame)
    is_longer = bool(np.all(surplus[rest] > 0) and np.all(span.from_s[rest] >= 0))
    return [
        *with_examples(
            "warning",
            _spans(episodes, span, np.flatnonzero(is_last_frame)),
            count=int(is_last_frame.sum()),
            place=place,
            found="to_timestamp is the time of the last frame, (length - 1) / fps, not of its end",
            expected=f"length / {fps:g} fps seconds after from_timestamp, LeRobot's convention",
            fix="nothing: a frame's time is from_timestamp and that of its row, so every row has its own picture",
        ),
        *with_examples(
            "warning" if is_longer else "error",
            _spans(episodes, span, rest),
            count=len(rest),
            place=place,
            found="the time from from_timestamp to to_timestamp is not that of the episode's frames",
            expected=f"length / {fps:g} fps seconds, beginning at 0 s or later",
            fix="look at the ends of these episodes; the pictures after the last row are not used"
            if is_longer
            else SPANS_FIX,
        ),
    ]


def _runs_into_next(episodes: Episodes, span: VideoSpan, fps: float) -> np.ndarray:
    """Whether an episode's frames go on past the beginning of the next one in its file: they would be that one's."""
    before, after = _neighbours(span, np.lexsort((span.from_s, span.file, span.chunk)))
    runs = np.zeros(len(episodes), dtype=bool)
    runs[before] = span.from_s[after] < span.from_s[before] + (episodes.length[before] - 0.5) / fps
    return runs


def _spans(episodes: Episodes, span: VideoSpan, which: np.ndarray) -> list[str]:
    return [
        f"episode {episodes.index[one]}: {span.from_s[one]:.4f} s to {span.to_s[one]:.4f} s for {episodes.length[one]} frames"
        for one in which[:MAX_EXAMPLES]
    ]


def _pairs(
    episodes: Episodes, before: np.ndarray, after: np.ndarray, *, other_s: np.ndarray, verb: str, span: VideoSpan
) -> list[str]:
    return [
        f"episode {episodes.index[second]} begins at {span.from_s[second]:.4f} s, "
        f"episode {episodes.index[first]} {verb} at {other_s[first]:.4f} s"
        for first, second in zip(before[:MAX_EXAMPLES], after[:MAX_EXAMPLES], strict=True)
    ]


def _neighbours(span: VideoSpan, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the episodes that follow each other in one file, and of those that they follow."""
    before, after = order[:-1], order[1:]
    same = (span.chunk[before] == span.chunk[after]) & (span.file[before] == span.file[after])
    return before[same], after[same]
