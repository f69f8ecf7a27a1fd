"""One mp4 file, read but not decoded: has every row of its episodes a frame?

The header is held against info.json and the packets are walked from end to end, so that a file that was cut off, has
fewer frames than rows, or other times is noticed at the speed of the disk. What only decoding can find stays hidden.
"""

from collections.abc import Callable, Mapping
from typing import IO, Any

import av
import av.error
import numpy as np

from vlatune.dataset.meta.listing import missing_remedy
from vlatune.dataset.storage.root import Root
from vlatune.dataset.video.recorded import (
    Recorded,
    ffmpeg_said,
    is_out_of_reach,
    no_frame,
    open_container,
    video_stream,
)
from vlatune.dataset.video.watchdog import still_alive, within_time


def look_at_video[T](
    root: Root, file: str, recorded: Recorded | None, place: object, look: Callable[[Any, Any], T]
) -> T:
    """What `look` finds in the open file and its video stream, which is as info.json says; a file that cannot be used is a
    ValueError. FFmpeg may hang in it: only what has verified the file's checksum runs on this thread.
    """

    def open_and_look(source: str | IO[bytes]) -> T:
        with open_container(source, place) as container:
            return look(container, video_stream(container, place, recorded))

    try:
        if root.is_local:
            path = root.local_path(file)
            return within_time(lambda: open_and_look(path), place)
        with root.open(file) as opened:
            return within_time(lambda: open_and_look(opened), place)
    except FileNotFoundError as error:
        raise ValueError(f"{place}: the file is missing; {missing_remedy(root, file)}") from error
    except av.error.FFmpegError as error:
        if is_out_of_reach(error):
            raise
        raise ValueError(
            f"{place}: cannot be opened as video ({ffmpeg_said(error)}); it is damaged or cut off: fetch or re-encode it"
        ) from error


def check_ends(root: Root, file: str, recorded: Recorded | None, place: object) -> None:
    """Refuse a file whose header is not as info.json says, or whose end is missing."""
    if look_at_video(root, file, recorded, place, is_cut_off):
        raise ValueError(f"{place}: it is cut off: its last frames are not there; fetch it anew")


def frame_times(root: Root, file: str, recorded: Recorded | None, place: object) -> np.ndarray:
    """The times of all frames whose packets are whole, rising, in seconds."""
    return look_at_video(root, file, recorded, place, _times_of_packets)


def _times_of_packets(container: Any, stream: Any) -> np.ndarray:
    return np.sort(np.array(_whole_packets(container, stream), dtype=np.float64)) * float(stream.time_base)


def is_cut_off(container: Any, stream: Any) -> bool:
    """Whether the last packets that the header tells of are missing: one seek and a few reads, wherever the file is."""
    if not stream.duration:
        return False
    try:
        container.seek((stream.start_time or 0) + stream.duration, stream=stream, backward=True)
        packets = [packet for packet in container.demux(stream) if packet.size]
    except av.error.FFmpegError:
        return True
    return not packets or any(packet.is_corrupt for packet in packets)


def _whole_packets(container: Any, stream: Any) -> list[int]:
    """Times of packets, in ticks; after a broken one, none counts up to the next key frame: they build on each other."""
    ticks: list[int] = []
    is_broken = False
    try:
        for packet in container.demux(stream):
            still_alive()  # a long file of a slow store is read from end to end
            if packet.size == 0 or packet.is_discard:  # the flush at the end, or a frame that is not shown
                continue
            is_broken = packet.is_corrupt or (is_broken and not packet.is_keyframe)
            if not is_broken and packet.pts is not None:
                ticks.append(packet.pts)
    except av.error.FFmpegError:  # the file is cut off here; the frames before are there
        pass
    return ticks


def check_frames(
    times_s: np.ndarray, wanted_s: Mapping[int, np.ndarray], places: Mapping[int, object], *, tolerance_s: float
) -> dict[int, str]:
    """Episode -> why the file does not serve it; `wanted_s` has the times of its rows in the file."""
    bad: dict[int, str] = {}
    for episode, wanted in wanted_s.items():
        nearest = _nearest(times_s, wanted)
        far = np.flatnonzero(~(np.abs(nearest - wanted) <= tolerance_s))
        if len(far):
            at, found = float(wanted[far[0]]), float(nearest[far[0]])
            said = no_frame(
                found if np.isfinite(found) else None, at, tolerance_s, is_last=len(times_s) > 0 and at > times_s[-1]
            )
            bad[episode] = f"{places[episode]}: {said}"
    return bad


def _nearest(times_s: np.ndarray, wanted_s: np.ndarray) -> np.ndarray:
    """For each wanted time the nearest of `times_s`, which rise."""
    if len(times_s) == 0:
        return np.full(len(wanted_s), np.nan)
    after = np.clip(np.searchsorted(times_s, wanted_s), 0, len(times_s) - 1)
    before = np.maximum(after - 1, 0)
    is_before = np.abs(times_s[before] - wanted_s) < np.abs(times_s[after] - wanted_s)
    return np.where(is_before, times_s[before], times_s[after])
