"""Frames into an mp4 file, one at a time, as LeRobot records them: 4:2:0 colour, a keyframe every second frame.

The same frames give the same bytes: encoders run on one thread and without a clock. Nothing is printed. A writer
holds a few frames, however long the film is.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import cast

import av
import numpy as np
from av.video.frame import PictureType
from av.video.stream import VideoStream

PIX_FMT = "yuv420p"
GOP = 2
"""Frames from one keyframe to the next; LeRobot's default, so that a random frame is cheap to reach."""
MIN_SIDE = 64
"""Pixels; libx265 corrupts the heap on smaller pictures (seen at 48x48)."""


@dataclass(frozen=True)
class Encoder:
    library: str
    """The encoder's name in FFmpeg."""
    preset: str
    crf: int
    alone: dict[str, str]
    """Options that keep it to one thread, quiet, and able to begin a new group of pictures on request."""


# Chosen so that frame ids survive. av1 has LeRobot's own preset and quality; without `pred-struct=1` it drops a change of
# a flat cell now and then (2 of 3,600 frames of the small world, 45 of 960 when every frame is a new picture). h264 gave
# different files for the same frames now and then; its macroblock tree is the suspect, and off.
ENCODERS = {
    "h264": Encoder("libx264", "veryfast", 23, {"threads": "1", "forced-idr": "1", "x264-params": "log=-1:mbtree=0"}),
    "hevc": Encoder(
        "libx265", "ultrafast", 26, {"forced-idr": "1", "x265-params": "pools=none:frame-threads=1:log-level=none"}
    ),
    "av1": Encoder("libsvtav1", "12", 30, {"svtav1-params": "lp=1:scm=0:pred-struct=1"}),
}


class VideoWriter:
    """One mp4 file that is being written; frame n is shown at n/fps seconds."""

    def __init__(self, path: Path, encoder: Encoder, *, fps: int, height: int, width: int) -> None:
        os.environ.setdefault("SVT_LOG", "1")  # libsvtav1 reads it on its first use: errors only
        options = {"g": str(GOP), "crf": str(encoder.crf), "preset": encoder.preset, **encoder.alone}
        self._container = av.open(str(path), "w", options={"movflags": "faststart"})
        self._stream = cast(VideoStream, self._container.add_stream(encoder.library, rate=fps, options=options))
        self._stream.height, self._stream.width, self._stream.pix_fmt = height, width, PIX_FMT
        self._time_base = Fraction(1, fps)
        self._num_frames = 0

    def write(self, image_HWC: np.ndarray, *, keyframe: bool) -> None:
        """Append an RGB picture; `keyframe` makes it one that decoding can begin at."""
        frame = av.VideoFrame.from_ndarray(image_HWC, format="rgb24")
        frame.pts, frame.time_base = self._num_frames, self._time_base
        if keyframe:
            frame.pict_type = PictureType.I
        self._num_frames += 1
        with own_schedule():
            self._container.mux(self._stream.encode(frame))

    def close(self) -> None:
        self._container.mux(self._stream.encode())
        self._container.close()


@contextmanager
def own_schedule() -> Iterator[None]:
    """libsvtav1, where root runs it, makes the calling thread a real-time one, and with it every process that is started
    later: a whole Ray cluster would take its cores from all others.
    """
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        if os.sched_getscheduler(0) != policy:
            os.sched_setscheduler(0, policy, priority)
