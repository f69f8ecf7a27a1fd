"""Decode frames of an mp4 file at given times, resized for the policy.

Seeks to the key frame before the first wanted time, decodes forward, and converts only wanted
frames. As in LeRobot, the nearest frame to each time is used, and an error is raised if it is
beyond the tolerance. Packets that fail to decode are errors. Recent local files stay open, because
the next unit of work usually continues where the last one ended.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import IO, Any

import av
import av.error
import numpy as np

from vlatune.data.frames.recorded import (
    MISSING,
    Recorded,
    check_size,
    decoder_options,
    ffmpeg_message,
    is_out_of_reach,
    no_frame,
    open_container,
    video_stream,
)
from vlatune.data.frames.resize import Pad, resize_into
from vlatune.data.frames.watchdog import within_time
from vlatune.data.read_spec import CameraSpec, Unit, frame_place
from vlatune.storage.limits import check_limit, limit
from vlatune.storage.root import Root

EXACT_S = 1e-6
"""A frame this close to the wanted time is the nearest; the next one need not be decoded."""
SEEK_BACK_S = (0.0, 1.0, 5.0, float("inf"))
CONTINUE_S = 0.2
"""Decode forward to a wanted time within this distance of the last frame; seek otherwise."""
OPEN_DECODERS = 8
"""Open local files, one per camera. Remote files are closed after each unit to raise failures."""
END = (None, np.inf)
"""Marks the end of a file, instead of a frame and its time."""


@dataclass(frozen=True)
class VideoFrames:
    """Frames of one camera's mp4 files."""

    root: Root
    camera: CameraSpec
    tolerance_s: float

    def read_into(self, unit: Unit, frames: np.ndarray, times_s: np.ndarray, out: np.ndarray) -> int:
        camera = self.camera
        file, from_s = next((file, from_s) for name, file, from_s in unit.videos if name == camera.name)
        recorded = camera.recorded and replace(camera.recorded, num_frames=unit.num_video_frames)
        place, wanted_s = frame_place(self.root, unit.episode_index, camera.name, file), (from_s + times_s).tolist()
        how = {"tolerance_s": self.tolerance_s, "recorded": recorded, "pad": camera.pad}
        try:
            with self.root.open_for_ffmpeg(file) as source:
                decode_into(source, wanted_s, out, place, **how)
        except FileNotFoundError as error:
            raise ValueError(f"{place}: {MISSING}") from error
        return 0


class CorruptFrameError(Exception):
    """The decoder marks a frame as damaged."""


_decoders: OrderedDict[tuple, "Decoder"] = OrderedDict()


def decode_into(
    source: str | IO[bytes],
    wanted_s: Sequence[float],
    out_NCHW: np.ndarray,
    place: str,
    *,
    tolerance_s: float,
    recorded: Recorded | None = None,
    pad: Pad = "centre",
) -> None:
    """Fill row n of `out_NCHW` with the frame at `wanted_s[n]`; times must not descend.

    Errors start with `place`; errors of missing or inaccessible files are left to the caller. Time is
    limited between packets and by the watchdog, because FFmpeg may hang within one.
    """

    def decode() -> tuple[tuple, Decoder] | None:
        if not isinstance(source, str):
            with closing(Decoder(source, recorded, place)) as decoder:
                decoder.read_into(wanted_s, out_NCHW, tolerance_s, pad, place)
            return None
        stat = Path(source).stat()  # the key changes with the file or its properties in info.json
        key = (source, stat.st_ino, stat.st_mtime_ns, stat.st_size, recorded)
        decoder = _decoders.pop(key, None) or Decoder(source, recorded, place)
        try:
            decoder.read_into(wanted_s, out_NCHW, tolerance_s, pad, place)
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
            f"{place}: cannot be decoded ({ffmpeg_message(error)}); the file is damaged or not a video, fetch or re-encode it"
        ) from error
    if kept is not None:  # not inside the call: an abandoned call must not share its decoder
        _decoders[kept[0]] = kept[1]
        while len(_decoders) > OPEN_DECODERS:
            _decoders.popitem(last=False)[1].close()


class Decoder:
    """An open file and its decoding position."""

    def __init__(self, source: str | IO[bytes], recorded: Recorded | None, place: str) -> None:
        self._container: Any = open_container(source, place)
        try:
            self._stream = video_stream(self._container, place, recorded)
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
        self._recorded, self._place, self._begun_s = recorded, place, time.monotonic()

    def close(self) -> None:
        self._now, self._rest = None, iter(())
        self._container.close()

    def read_into(
        self, wanted_s: Sequence[float], out_NCHW: np.ndarray, tolerance_s: float, pad: Pad, place: str
    ) -> None:
        self._place, self._begun_s = place, time.monotonic()
        frames, before, before_s = self._frames_between(wanted_s[0], wanted_s[-1]), None, -np.inf
        frame, frame_s = next(frames, END)
        for row, want_s in enumerate(wanted_s):
            while frame is not None and frame_s < want_s - EXACT_S:
                before, before_s = frame, frame_s
                frame, frame_s = next(frames, END)
            near, near_s = (before, before_s) if want_s - before_s < frame_s - want_s else (frame, frame_s)
            if near is None or not abs(near_s - want_s) <= tolerance_s:
                found_s = None if near is None else near_s
                raise ValueError(f"{place}: {no_frame(found_s, want_s, tolerance_s, is_last=frame is None)}")
            if self._recorded is not None:  # the size may change within a file
                check_size(near.height, near.width, self._recorded, place)
            resize_into(near.to_ndarray(format="rgb24"), out_NCHW[row], pad=pad)

    def _frames_between(self, first_s: float, last_s: float) -> Iterator[tuple[Any, float]]:
        """Yield (frame, time) from at or before `first_s` to at or after `last_s`, if possible."""
        self._last_s = last_s
        if self._now is not None and not self._drained and 0.0 <= first_s + EXACT_S - self._now[1] <= CONTINUE_S:
            yield self._now
        else:
            self._rest = self._seek(first_s)
        yield from self._continue()
        if self._drained:  # draining did not return the wanted frame: decode past it
            self._last_s, self._rest = np.inf, self._seek(first_s)
            yield from self._continue()
        self._now = None  # end of file: the next read must seek

    def _continue(self) -> Iterator[tuple[Any, float]]:
        for now in self._rest:
            self._now = now
            yield now

    def _seek(self, first_s: float) -> Iterator[tuple[Any, float]]:
        """Seek to a frame at or before `first_s` and return the frames from there.

        Seeks use decode times: with B-frames they may land after the wanted time, and with open
        GOPs on a key frame whose neighbours need the previous GOP. Then retry from further back,
        finally from the start. A first frame within half a tick after the wanted time is the
        nearest one.
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
        """Yield decoded frames with their times.

        H.264 decoders delay frames. If all wanted packets are in and the next is an expensive key
        frame, the decoder is drained instead, after which only a seek can follow.
        """
        fed_s, most_s = -np.inf, limit("decode_s")
        for packet in self._container.demux(self._stream):
            if (spent_s := time.monotonic() - self._begun_s) > most_s:
                check_limit("decode_s", math.ceil(spent_s), f"{self._place}: decoding took seconds:")
            if packet.is_keyframe and fed_s >= self._last_s - EXACT_S:
                self._drained = True
                yield from self._timed(self._stream.codec_context.decode(None))
                return
            if packet.pts is not None:
                fed_s = max(fed_s, packet.pts * self._tick_s)
            yield from self._timed(packet.decode())

    def _timed(self, frames: Sequence[Any]) -> Iterator[tuple[Any, float]]:
        for frame in frames:
            if frame.is_corrupt:  # h264 marks only some concealed frames, and no dependent ones
                raise CorruptFrameError("the decoder marks a frame as damaged")
            if frame.pts is not None:
                yield frame, frame.pts * self._tick_s
