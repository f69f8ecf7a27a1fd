"""Timestamps of one mp4 -> frames at the policy's size.

Opens the file once, seeks to the key frame before the first wanted time, decodes forward, and converts
only frames that are wanted. Takes the frame nearest to each wanted time, as LeRobot does, and refuses one
further away than the tolerance: never a neighbour in its place. A packet that does not decode is an error.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import av
import av.error
import numpy as np

from vlatune.dataset.resize import letterbox_into

EXACT_S = 1e-6
"""A frame this near to the wanted time is the nearest one; no need to decode the next to know."""
SEEK_BACK_S = (0.0, 1.0, 5.0, float("inf"))


@dataclass(frozen=True)
class VideoPlace:
    """What an error message needs to name the place."""

    dataset: str
    episode_index: int
    camera: str
    file: str

    def __str__(self) -> str:
        return f"dataset '{self.dataset}': episode {self.episode_index}, camera '{self.camera}', {self.file}"


def decode_into(
    source: str | IO[bytes], wanted_s: Sequence[float], out_NCHW: np.ndarray, *, tolerance_s: float, place: VideoPlace
) -> None:
    """Fill row n of `out_NCHW` (zeroed) with the frame at `wanted_s[n]`; times must not fall."""
    try:
        with av.open(source, metadata_errors="ignore") as container:
            _decode(container, wanted_s, out_NCHW, tolerance_s, place)
    except FileNotFoundError as error:
        raise ValueError(f"{place}: the file is missing; fetch or re-encode it") from error
    except av.error.FFmpegError as error:
        raise ValueError(
            f"{place}: cannot be decoded ({error}); the file is damaged or not a video, fetch or re-encode it"
        ) from error


def _decode(
    container: Any, wanted_s: Sequence[float], out_NCHW: np.ndarray, tolerance_s: float, place: VideoPlace
) -> None:
    if not container.streams.video:
        raise ValueError(f"{place}: there is no video stream in it; re-encode it")
    stream = container.streams.video[0]
    stream.codec_context.thread_count = 1  # one core per read task; frame threads would only add latency
    stream.codec_context.options = {"err_detect": "explode"}  # h264 would otherwise conceal damage with a neighbour
    frames = _frames_from(container, stream, wanted_s[0])
    row, before, before_s = 0, None, -np.inf
    for frame, frame_s in frames:
        while row < len(wanted_s) and frame_s >= wanted_s[row] - EXACT_S:
            nearer, nearer_s = (frame, frame_s)
            if before is not None and wanted_s[row] - before_s < frame_s - wanted_s[row]:
                nearer, nearer_s = before, before_s
            _take(nearer, nearer_s, wanted_s[row], out_NCHW[row], tolerance_s, place)
            row += 1
        if row == len(wanted_s):
            return
        before, before_s = frame, frame_s
    while row < len(wanted_s):  # the file ended: the last frame may still be near enough
        _take(before, before_s, wanted_s[row], out_NCHW[row], tolerance_s, place)
        row += 1


def _frames_from(container: Any, stream: Any, first_s: float) -> Iterator[tuple[Any, float]]:
    """Frames with their times, from one at or before `first_s` on.

    A seek goes by decode times, so with B-frames or open groups it may land after the wanted time: then from further
    back, at last from the start.
    """
    for back_s in SEEK_BACK_S:
        target_s = max(0.0, first_s - back_s)
        container.seek(max(0, round(target_s / stream.time_base) - 1), stream=stream, backward=True)
        frames = _timed(container, stream)
        first = next(frames, None)
        if first is not None and (first[1] <= first_s + EXACT_S or target_s == 0.0):
            yield first
            yield from frames
            return


def _timed(container: Any, stream: Any) -> Iterator[tuple[Any, float]]:
    time_base = stream.time_base
    for frame in container.decode(stream):
        if frame.pts is not None:
            yield frame, float(frame.pts * time_base)


def _take(
    frame: Any, frame_s: float, wanted_s: float, out_CHW: np.ndarray, tolerance_s: float, place: VideoPlace
) -> None:
    if frame is None or abs(frame_s - wanted_s) > tolerance_s:
        nearest = "none was found" if frame is None else f"nearest {frame_s:.4f} s"
        raise ValueError(
            f"{place}: no frame within {tolerance_s:g} s of {wanted_s:.4f} s ({nearest}); "
            f"re-encode it or raise --dataset.tolerance_s"
        )
    letterbox_into(frame.to_ndarray(format="rgb24"), out_CHW)
