"""Timestamps of one mp4 -> frames at the policy's size.

Seeks to the key frame before the first wanted time, decodes forward, and converts only frames that are wanted. Takes
the frame nearest to each wanted time, as LeRobot does, and refuses one further away than the tolerance: never a
neighbour in its place. A packet that does not decode is an error. Local files used last stay open: the next unit of
work mostly goes on where this one ended, and then neither opens nor seeks (8 % of reading h264).
"""

import math
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

import av
import av.error
import numpy as np

from vlatune.dataset.video.recorded import (
    Recorded,
    check_size,
    decoder_options,
    ffmpeg_said,
    is_out_of_reach,
    no_frame,
    open_container,
    video_stream,
)
from vlatune.dataset.video.resize import CENTRED, Letterbox
from vlatune.dataset.video.watchdog import within_time
from vlatune.limits import check_limit, limit

EXACT_S = 1e-6
"""A frame this near to the wanted time is the nearest one; no need to decode the next to know."""
SEEK_BACK_S = (0.0, 1.0, 5.0, float("inf"))
GO_ON_S = 0.2
"""A wanted time this little after the last frame is reached by decoding on; further ones by a seek."""
OPEN_DECODERS = 8
"""One per camera of a large robot. A remote file is closed after each unit: only then it tells of failures on the way."""


@dataclass(frozen=True)
class VideoPlace:
    """Which pictures they are: what an error message needs to name the place, what they should be and will be."""

    dataset: str
    episode_index: int
    camera: str
    file: str
    recorded: Recorded | None = None
    """What info.json says of the pictures; not checked when None."""
    letterbox: Letterbox = CENTRED
    """How they get the delivered size."""

    def __str__(self) -> str:
        return f"dataset '{self.dataset}': episode {self.episode_index}, camera '{self.camera}', {self.file}"


class CorruptFrameError(Exception):
    """The decoder marks a frame as damaged."""

    def __str__(self) -> str:
        return "the decoder marks a frame as damaged"


_decoders: OrderedDict[tuple, "Decoder"] = OrderedDict()


def decode_into(
    source: str | IO[bytes], wanted_s: Sequence[float], out_NCHW: np.ndarray, *, tolerance_s: float, place: VideoPlace
) -> None:
    """Fill row n of `out_NCHW` with the frame at `wanted_s[n]`; times must not fall.

    A file that is missing, or may not be read, is for the caller to explain. The time that it takes is looked at between
    packets, and from outside, as FFmpeg may hang in one.
    """

    def decode() -> tuple[tuple, Decoder] | None:
        if not isinstance(source, str):
            with closing(Decoder(source, place)) as decoder:
                decoder.read_into(wanted_s, out_NCHW, tolerance_s, place)
            return None
        key = _file_key(source, place)
        decoder = _decoders.pop(key, None) or Decoder(source, place)
        try:
            decoder.read_into(wanted_s, out_NCHW, tolerance_s, place)
        except BaseException:
            decoder.close()
            raise
        return key, decoder

    try:
        kept = within_time(decode, place)
    except (av.error.FFmpegError, CorruptFrameError) as error:
        if is_out_of_reach(error):
            raise
        raise ValueError(
            f"{place}: cannot be decoded ({ffmpeg_said(error)}); the file is damaged or not a video, fetch or re-encode it"
        ) from error
    if (
        kept is not None
    ):  # here, not in the call: one that was given up may still end, and nobody is to meet its decoder
        _decoders[kept[0]] = kept[1]
        while len(_decoders) > OPEN_DECODERS:
            _decoders.popitem(last=False)[1].close()


def _file_key(source: str, place: VideoPlace) -> tuple:
    """A file that was replaced is opened anew, and so is one of which info.json now says something else."""
    stat = Path(source).stat()
    return (source, stat.st_ino, stat.st_mtime_ns, stat.st_size, place.recorded)


def close_decoders() -> None:
    """Those that this process keeps open for the next read."""
    while _decoders:
        _decoders.popitem()[1].close()


class Decoder:
    """An open file and the frame at which its decoding stands."""

    def __init__(self, source: str | IO[bytes], place: VideoPlace) -> None:
        self._container: Any = open_container(source, place)
        try:
            self._stream = video_stream(self._container, place, place.recorded)
        except ValueError:
            self._container.close()
            raise
        codec = self._stream.codec_context
        codec.thread_count = 1  # one core per read task; frame threads would only add latency
        codec.options = decoder_options(self._stream)
        self._tick_s = float(self._stream.time_base)
        self._now: tuple[Any, float] | None = None
        self._rest: Iterator[tuple[Any, float]] = iter(())
        self._last_s, self._drained = np.inf, False
        self._place, self._begun_s = place, time.monotonic()

    def close(self) -> None:
        self._now, self._rest = None, iter(())
        self._container.close()

    def read_into(self, wanted_s: Sequence[float], out_NCHW: np.ndarray, tolerance_s: float, place: VideoPlace) -> None:
        self._place, self._begun_s = place, time.monotonic()
        row, before, before_s = 0, None, -np.inf
        for frame, frame_s in self._frames_between(wanted_s[0], wanted_s[-1]):
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
            _take(before, before_s, wanted_s[row], out_NCHW[row], tolerance_s, place, is_last=True)
            row += 1

    def _frames_between(self, first_s: float, last_s: float) -> Iterator[tuple[Any, float]]:
        """Frames with their times, from one at or before `first_s` to one at or after `last_s`, if there is one."""
        self._last_s = last_s
        if self._now is not None and not self._drained and 0.0 <= first_s + EXACT_S - self._now[1] <= GO_ON_S:
            yield self._now
        else:
            self._rest = self._seek(first_s)
        yield from self._go_on()
        if self._drained:  # the last one went into the decoder and did not come out: from further on, then
            self._last_s, self._rest = np.inf, self._seek(first_s)
            yield from self._go_on()
        self._now = None  # the end: whoever comes next must seek

    def _go_on(self) -> Iterator[tuple[Any, float]]:
        for now in self._rest:
            self._now = now
            yield now

    def _seek(self, first_s: float) -> Iterator[tuple[Any, float]]:
        """A seek goes by decode times, so with B-frames it may land after the wanted time, and with open groups on a key
        frame whose neighbours need the group before: then from further back, at last from the start.

        A first frame within half a tick after the wanted time is the nearest one: the frame before it is a tick away.
        """
        self._now = None
        for back_s in SEEK_BACK_S:
            self._drained = False
            target_s = max(0.0, first_s - back_s)
            self._container.seek(max(0, round(target_s / self._tick_s)), stream=self._stream, backward=True)
            frames = self._decoded()
            try:
                first = next(frames, None)
            except av.error.InvalidDataError:
                if target_s == 0.0:
                    raise
                continue
            if first is not None and (first[1] <= first_s + self._tick_s / 2 + EXACT_S or target_s == 0.0):
                return chain([first], frames)
        return iter(())

    def _decoded(self) -> Iterator[tuple[Any, float]]:
        """Decoders of H.264 hold frames back and give them for later packets. When all that is wanted is in, and the next
        packet is a key frame, the dearest of all, they are asked for the rest instead; it can only be followed by a seek.
        """
        fed_s, most_s = -np.inf, limit("decode_s")
        for packet in self._container.demux(self._stream):
            if time.monotonic() - self._begun_s > most_s:
                check_limit(
                    "decode_s", math.ceil(time.monotonic() - self._begun_s), f"{self._place}: decoding took seconds:"
                )
            if packet.is_keyframe and fed_s >= self._last_s - EXACT_S:
                self._drained = True
                yield from self._timed(self._stream.codec_context.decode(None))
                return
            if packet.pts is not None:
                fed_s = max(fed_s, packet.pts * self._tick_s)
            yield from self._timed(packet.decode())

    def _timed(self, frames: Sequence[Any]) -> Iterator[tuple[Any, float]]:
        for frame in frames:
            if frame.is_corrupt:  # h264 marks some of what it conceals, and none of the frames that build on it
                raise CorruptFrameError
            if frame.pts is not None:
                yield frame, frame.pts * self._tick_s


def _take(
    frame: Any,
    frame_s: float,
    wanted_s: float,
    out_CHW: np.ndarray,
    tolerance_s: float,
    place: VideoPlace,
    *,
    is_last: bool = False,
) -> None:
    if frame is None or not abs(frame_s - wanted_s) <= tolerance_s:
        raise ValueError(
            f"{place}: {no_frame(None if frame is None else frame_s, wanted_s, tolerance_s, is_last=is_last)}"
        )
    if place.recorded is not None:  # the size may change inside a file
        check_size(frame.height, frame.width, place.recorded, place)
    place.letterbox.into(frame.to_ndarray(format="rgb24"), out_CHW)
