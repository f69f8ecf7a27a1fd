"""Check that an mp4 file has a frame for every row of its episodes, without decoding.

The header is compared with info.json, and all packets are read, which detects truncated files,
missing frames and wrong times at disk speed. Errors that only show when decoding are not found.
"""

from collections.abc import Callable
from typing import IO, Any

import av
import av.error
import numpy as np

from vlatune.data.frames.recorded import (
    MISSING,
    Recorded,
    ffmpeg_message,
    is_out_of_reach,
    no_frame,
    open_container,
    video_stream,
)
from vlatune.data.frames.watchdog import still_alive, within_time
from vlatune.storage.root import Root

ALIVE_PACKETS = 100


def inspect_video[T](
    root: Root, file: str, recorded: Recorded | None, place: object, inspect: Callable[[Any, Any], T]
) -> T:
    """Return what `inspect` finds in a file that matches info.json; ValueError if it is unusable.

    FFmpeg may hang, so only the checksum verification runs on this thread.
    """

    def open_and_inspect(source: str | IO[bytes]) -> T:
        with open_container(source, place) as container:
            return inspect(container, video_stream(container, place, recorded))

    try:
        with root.open_for_ffmpeg(file) as source:
            return within_time(lambda: open_and_inspect(source), place)
    except FileNotFoundError as error:
        raise ValueError(f"{place}: {MISSING}") from error
    except av.error.FFmpegError as error:
        if is_out_of_reach(error):
            raise
        raise ValueError(
            f"{place}: cannot be opened as video ({ffmpeg_message(error)}); it is damaged or cut off: fetch or re-encode it"
        ) from error


def check_ends(root: Root, file: str, recorded: Recorded | None, place: object) -> None:
    """Reject a file whose header differs from info.json, or that is truncated."""
    if inspect_video(root, file, recorded, place, is_cut_off):
        raise ValueError(f"{place}: it is truncated: its last frames are missing; fetch it again")


def frame_times(root: Root, file: str, recorded: Recorded | None, place: object) -> np.ndarray:
    """Return the times of all frames with intact packets, ascending, in seconds."""
    return inspect_video(root, file, recorded, place, _packet_times)


def is_cut_off(container: Any, stream: Any) -> bool:
    """True if the last packets stated by the header are missing; needs one seek and few reads."""
    if not stream.duration:
        return False
    try:
        container.seek((stream.start_time or 0) + stream.duration, stream=stream, backward=True)
        packets = [packet for packet in container.demux(stream) if packet.size]
    except av.error.FFmpegError:
        return True
    return not packets or any(packet.is_corrupt for packet in packets)


def _packet_times(container: Any, stream: Any) -> np.ndarray:
    """Return the times of intact packets; after a corrupt packet, skip to the next key frame."""
    ticks: list[int] = []
    is_broken = False
    try:
        for packet in container.demux(stream):
            if len(ticks) % ALIVE_PACKETS == 0:
                still_alive()  # a large remote file may take long to read
            if packet.size == 0 or packet.is_discard:  # the final flush, or a frame that is not shown
                continue
            is_broken = packet.is_corrupt or (is_broken and not packet.is_keyframe)
            if not is_broken and packet.pts is not None:
                ticks.append(packet.pts)
    except av.error.FFmpegError:  # the file is truncated; earlier frames are intact
        pass
    return np.sort(np.array(ticks, dtype=np.float64)) * float(stream.time_base)


def why_no_frame(times_s: np.ndarray, wanted_s: np.ndarray, tolerance_s: float) -> str:
    """Return why a file lacks a frame at one of the rows' times; empty if it has all of them."""
    near_s = nearest(times_s, wanted_s)
    far = np.flatnonzero(~(np.abs(near_s - wanted_s) <= tolerance_s))
    if len(far) == 0:
        return ""
    at, found = float(wanted_s[far[0]]), float(near_s[far[0]])
    is_last = len(times_s) > 0 and at > times_s[-1]
    return no_frame(found if np.isfinite(found) else None, at, tolerance_s, is_last=is_last)


def nearest(times_s: np.ndarray, wanted_s: np.ndarray) -> np.ndarray:
    """Return the nearest of the ascending `times_s` for each wanted time."""
    if len(times_s) == 0:
        return np.full(len(wanted_s), np.nan)
    after = np.clip(np.searchsorted(times_s, wanted_s), 0, len(times_s) - 1)
    before = np.maximum(after - 1, 0)
    is_before = np.abs(times_s[before] - wanted_s) < np.abs(times_s[after] - wanted_s)
    return np.where(is_before, times_s[before], times_s[after])
