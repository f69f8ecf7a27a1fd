"""Validate images and mp4 files against info.json, and limit what an mp4 file claims.

Files of another size are rejected even though they could be resized: padding and field of view
depend on the size, and LeRobot derives the policy's input from the size in info.json. Files of
another rate are rejected because, at twice or half the rate, many rows would find a wrong frame at
their time.

A few bytes can claim millions of frames, so frames are counted before FFmpeg parses the file, by
walking the boxes without decoding:

    moov > trak > mdia > minf > stbl > stsz (frames of a stream)
    moof > traf > trun (frames of a fragment)

Files without boxes are left to FFmpeg, which reports the error.
"""

import errno
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import av

from vlatune.data.meta.dataset_meta import DatasetMeta
from vlatune.data.meta.meta_info import LEAVE_OUT, MAX_FPS, MIN_FPS
from vlatune.storage.files import open_file
from vlatune.storage.limits import TooMuchError, check_limit, limit

MISSING = f"the file is missing; fetch it, or {LEAVE_OUT}"
INSIDE = {b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf"}
INSIDE |= {b"edts", b"mvex", b"tref", b"udta", b"wave", b"dinf", b"sinf"}
"""Boxes that FFmpeg descends into; oversized boxes end with their parent, as in FFmpeg."""
PACKED = b"cmov"
"""A compressed header, obsolete since QuickTime 3."""
COUNTS = {b"stsz": 8, b"stz2": 8, b"trun": 4}
"""Boxes that state a number of frames, with its offset."""
MAX_BOXES = 1_000_000


def check_mp4(file: IO[bytes], place: object) -> None:
    """Reject more streams or frames than the limits or the file size allow; rewind the file."""
    size = file.seek(0, 2)
    streams = frames = 0
    for number, (name, begin, end) in enumerate(_boxes(file, size)):
        if name == PACKED:
            raise TooMuchError(f"{place}: its header is compressed, which is not read; re-encode it")
        if number == MAX_BOXES:
            raise TooMuchError(f"{place}: it has more than {MAX_BOXES:,} boxes; fetch or re-encode it")
        if name in INSIDE:
            check_limit("video_header_bytes", end - begin, f"{place}: its header has bytes:")
        if name in COUNTS and end - begin >= COUNTS[name] + 4:
            file.seek(begin + COUNTS[name])
            frames += int.from_bytes(file.read(4), "big")
        streams += name == b"trak"
    file.seek(0)
    check_limit("video_streams", streams, f"{place}: its header states streams:")
    check_limit("video_frames", frames, f"{place}: its header states frames:")
    if frames > size:
        raise TooMuchError(
            f"{place}: its header states {frames:,} frames, but the file has {size:,} bytes; fetch or re-encode it"
        )


def _boxes(file: IO[bytes], size: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, begin and end of the content of every box; length 0: to the end, 1: 64-bit length."""
    waiting = [(0, size)]
    while waiting:
        at, end = waiting.pop()
        while end - at >= 8:
            file.seek(at)
            head = file.read(16)
            if len(head) < 8:
                break
            (length, name), begin = struct.unpack(">I4s", head[:8]), 8
            if length == 1 and end - at >= 16:
                (length,), begin = struct.unpack(">Q", head[8:]), 16
            length = min(length or end - at, end - at)
            if length < begin:
                break
            yield name, at + begin, at + length
            if name in INSIDE:
                waiting.append((at + begin, at + length))
            at += length


RATE_SHARE = 0.01
"""Relative tolerance, because containers round rates; each row's frame is checked separately."""
RATE_FRAMES = 1.5
"""Tolerance for short files in frames; some writers omit the last frame's duration."""

CONTAINER = "mp4"
"""The only allowed container: FFmpeg's playlists and SDP could open other files and ports."""
DECODERS = ("h264", "hevc", "libdav1d", "libaom-av1", "av1", "vp9", "libvpx-vp9", "mpeg4")
"""Codecs that LeRobot records and common sources of conversions."""
DECODER_OPTIONS = {"err_detect": "crccheck+explode"}
"""Keeps h264 from concealing damage; hevc detects it only in streams with checksums (MD5)."""
DAV1D_OPTIONS = {"strict": "1"}
"""Makes dav1d report damage instead of returning wrong frames."""


@dataclass(frozen=True)
class Recorded:
    """Properties of a camera in info.json."""

    height: int
    width: int
    fps: float | None = None
    """Rate of its mp4 files; None for images in parquet."""
    num_frames: int | None = None
    """Required number of frames of the mp4 file; not checked when None."""


def open_container(source: str | IO[bytes], place: object) -> Any:
    """Open a video file with allowed containers and decoders, without access to other files."""
    if isinstance(source, str):
        with open_file(Path(source).parent, Path(source).name) as file:
            check_mp4(file, place)
    else:
        check_mp4(source, place)
    options = {
        "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2",
        "codec_whitelist": ",".join(DECODERS),
        "protocol_whitelist": "file" if isinstance(source, str) else "none",
    }
    most_s = float(limit("decode_s"))  # for opening and for each read, if the file system hangs
    return av.open(source, format=CONTAINER, options=options, metadata_errors="ignore", timeout=most_s or None)


def camera_fps(meta: DatasetMeta, camera: str) -> float:
    """Return the camera's own rate in info.json, else the dataset's."""
    declared = meta.features[camera].declared("fps")
    is_rate = isinstance(declared, int | float) and not isinstance(declared, bool) and MIN_FPS <= declared <= MAX_FPS
    return float(declared) if is_rate else meta.fps


def check_size(height: int, width: int, recorded: Recorded, place: object) -> None:
    if (height, width) != (recorded.height, recorded.width):
        raise ValueError(
            f"{place}: its images are {height}x{width} (height x width), meta/info.json has {recorded.height}x{recorded.width}; "
            f"correct the camera's shape in meta/info.json if all of its files are {height}x{width}, else re-encode the file"
        )


def video_stream(container: Any, place: object, recorded: Recorded | None) -> Any:
    """Return the video stream of an open file; reject unsupported codecs and headers that differ from info.json."""
    streams = container.streams.video
    if not streams:
        raise ValueError(f"{place}: there is no video stream in it; fetch or re-encode it")
    stream = streams[0]
    if stream.codec_context is None or not stream.time_base:
        raise ValueError(
            f"{place}: its video is of a kind that FFmpeg does not decode; re-encode it as h264, hevc or av1"
        )
    name = stream.codec_context.codec.name
    if name not in DECODERS:
        raise ValueError(f"{place}: its video is '{name}', which is not read; re-encode it as h264, hevc or av1")
    pixels = stream.codec_context.height * stream.codec_context.width
    check_limit("image_pixels", pixels, f"{place}: its images have pixels:")
    if recorded is not None:
        check_size(stream.codec_context.height, stream.codec_context.width, recorded, place)
        fps = float(stream.average_rate or 0.0)
        if recorded.fps is not None and not is_rate(fps, recorded.fps, stream.frames):
            raise ValueError(
                f"{place}: it has {fps:g} frames per second, meta/info.json has {recorded.fps:g}; re-encode it at that rate, or correct "
                f"the camera's video.fps in meta/info.json if the rows' timestamps agree with the file"
            )
        if recorded.num_frames is not None and stream.frames not in (0, recorded.num_frames):
            raise ValueError(
                f"{place}: it has {stream.frames} frames, the episode {recorded.num_frames} rows with other timestamps than the "
                f"frames, so neither time nor number identifies a row's frame; record the episode again, or leave it out with "
                f"--dataset.on_bad_episode=skip"
            )
    return stream


def no_frame(nearest_s: float | None, wanted_s: float, tolerance_s: float, *, is_last: bool) -> str:
    """Return the message for a row without a frame; `is_last`: the nearest is the last frame."""
    nearest = "none was found" if nearest_s is None else f"nearest {nearest_s:.4f} s"
    if is_last and nearest_s is not None:
        nearest += ", the file's last: it has fewer frames than the episode has rows"
    return (
        f"no frame within {tolerance_s:g} s of {wanted_s:.4f} s ({nearest}); fetch or re-encode the file, raise "
        f"--dataset.tolerance_s if the frame is the right one, or {LEAVE_OUT}"
    )


def is_out_of_reach(error: Exception) -> bool:
    """True if the file is missing or unreadable; FFmpeg's EPERM means a failed seek instead."""
    return getattr(error, "errno", None) in (errno.ENOENT, errno.EACCES)


def ffmpeg_message(error: Exception) -> str:
    """Return FFmpeg's message without error number and file name."""
    log = getattr(error, "log", None)
    return f"{getattr(error, 'strerror', None) or error}{f': {log[2].strip()}' if log else ''}"


def is_rate(fps: float, expected: float, num_frames: int) -> bool:
    """True if a file's rate is the expected one or is not stated."""
    allowed = RATE_SHARE + (RATE_FRAMES / num_frames if num_frames else 0.0)
    return fps == 0.0 or abs(fps - expected) <= allowed * expected


def decoder_options(stream: Any) -> dict[str, str]:
    """Return options that make the decoder report damage instead of concealing it."""
    is_dav1d = stream.codec_context.codec.name == "libdav1d"
    return DECODER_OPTIONS | (DAV1D_OPTIONS if is_dav1d else {})
