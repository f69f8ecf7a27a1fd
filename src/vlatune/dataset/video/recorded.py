"""What info.json says of a camera's pictures, held against the pictures themselves, and what an mp4 file claims.

A file of another size is refused even where it would be resized: how a picture is padded, and which part of it a pixel
of the policy's input shows, follow from its size, so a camera whose files differ would show the robot's world from two
places; LeRobot makes the policy's input from the size in info.json, too. A file of another rate is refused because at
twice or half the rate many rows would find a frame at their time, and a wrong one.

A few bytes may tell of millions of frames, so frames are counted before FFmpeg believes the file. Only boxes are walked,
none is decoded:  moov > trak > mdia > minf > stbl > stsz (the frames of a stream)
                  moof > traf > trun (those of a fragment)
A file that is not made of boxes is left to FFmpeg, which says what is wrong with it.
"""

import errno
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import av

from vlatune.dataset.meta.dataset_meta import DatasetMeta
from vlatune.dataset.meta.meta_info import MAX_FPS, MIN_FPS
from vlatune.files import open_file
from vlatune.limits import TooMuchError, check_limit, limit

INSIDE = {b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf"}
INSIDE |= {b"edts", b"mvex", b"tref", b"udta", b"wave", b"dinf", b"sinf"}
"""Boxes that FFmpeg looks into; a box that claims more than its place has ends there, as with FFmpeg."""
PACKED = b"cmov"
"""A header that is itself compressed; nobody has written one since QuickTime 3."""
COUNTS = {b"stsz": 8, b"stz2": 8, b"trun": 4}
"""Boxes that tell a number of frames, and where in them."""
MAX_BOXES = 100_000


def check_mp4(file: IO[bytes], place: object) -> None:
    """Refuse more streams or frames than the caps, or than the file has bytes; ends at the file's begin."""
    size = file.seek(0, 2)
    streams = frames = 0
    for kind, content in _headers(file, size, place):
        for name, body in _boxes(kind, content, place):
            if name == PACKED:
                raise TooMuchError(f"{place}: its header is compressed, which is not read; re-encode it")
            streams += name == b"trak"
            frames += _count(name, body)
    file.seek(0)
    check_limit("video_streams", streams, f"{place}: its header tells of streams:")
    check_limit("video_frames", frames, f"{place}: its header tells of frames:")
    if frames > size:
        raise TooMuchError(
            f"{place}: its header tells of {frames:,} frames, and all of it has {size:,} bytes; fetch or re-encode it"
        )


def _headers(file: IO[bytes], size: int, place: object) -> Iterator[tuple[bytes, memoryview]]:
    """The boxes at the top that hold other boxes; what lies between them is passed over."""
    at = 0
    for _ in range(MAX_BOXES):
        file.seek(at)
        head = file.read(16)
        if len(head) < 8:
            return
        length, kind, begin = _head(head, size - at)
        length = min(length, size - at)
        if length < begin:
            return
        if kind in INSIDE:
            check_limit("video_header_bytes", length, f"{place}: its header has bytes:")
            file.seek(at + begin)
            yield kind, memoryview(file.read(length - begin))
        at += length


def _boxes(kind: bytes, content: memoryview, place: object) -> Iterator[tuple[bytes, memoryview]]:
    """A box and all that is in it."""
    waiting, boxes = [(kind, content)], 0
    while waiting:
        kind, content = waiting.pop()
        yield kind, content
        at = 0
        while kind in INSIDE and len(content) - at >= 8:
            length, name, begin = _head(bytes(content[at : at + 16]), len(content) - at)
            length = min(length, len(content) - at)
            if length < begin:
                break
            waiting.append((name, content[at + begin : at + length]))
            at += length
            boxes += 1
            if boxes > MAX_BOXES:
                raise TooMuchError(f"{place}: its header has more than {MAX_BOXES:,} parts; fetch or re-encode it")


def _head(head: bytes, rest: int) -> tuple[int, bytes, int]:
    """(length, name, bytes of the head) of a box; a length of 0 goes to the end, one of 1 is written after the name."""
    length, kind = struct.unpack(">I4s", head[:8])
    if length == 1 and len(head) == 16:
        return struct.unpack(">Q", head[8:])[0], kind, 16
    return length or rest, kind, 8


def _count(name: bytes, body: memoryview) -> int:
    at = COUNTS.get(name)
    return 0 if at is None or len(body) < at + 4 else int.from_bytes(body[at : at + 4], "big")


RATE_SHARE = 0.01
"""Containers round the rate, and 29.97 is taken for 30: whether frames are at their rows' times is checked for each."""
RATE_FRAMES = 1.5
"""Frames by which the length of a short file may be off: some writers do not count the last frame's duration."""

CONTAINER = "mp4"
"""The only one, local or remote: FFmpeg would also read playlists and SDP, which open files and ports of their own."""
DECODERS = ("h264", "hevc", "libdav1d", "libaom-av1", "av1", "vp9", "libvpx-vp9", "mpeg4")
"""What LeRobot records, and what people convert from."""
DECODER_OPTIONS = {
    "libdav1d": {"strict": "1"},
}
"""Without it dav1d shows damaged pictures: of 150 damaged files 47 gave wrong frames and no error, with it none did."""
DEFAULT_OPTIONS = {"err_detect": "crccheck+explode"}
"""h264 would conceal damage with a neighbour. hevc does so all the same, but for streams with checksums (MD5)."""


@dataclass(frozen=True)
class Recorded:
    """A camera, as info.json has it."""

    height: int
    width: int
    fps: float | None = None
    """Of its mp4 files; None for pictures in parquet."""


def open_container(source: str | IO[bytes], place: object) -> Any:
    """A video file, by path or as a file object: one kind of container, a few decoders, and no other file or address."""
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
    most_s = float(limit("decode_s"))  # for opening, and for each read: a file system that does not answer
    return av.open(source, format=CONTAINER, options=options, metadata_errors="ignore", timeout=most_s or None)


def recorded_camera(meta: DatasetMeta, camera: str) -> Recorded:
    feature = meta.features[camera]
    return Recorded(*feature.height_width, fps=camera_fps(meta, camera) if feature.dtype == "video" else None)


def camera_fps(meta: DatasetMeta, camera: str) -> float:
    """The camera's own rate where info.json has one, else the dataset's."""
    declared = meta.features[camera].declared("fps")
    is_rate = isinstance(declared, int | float) and not isinstance(declared, bool) and MIN_FPS <= declared <= MAX_FPS
    return float(declared) if is_rate else meta.fps


def check_size(height: int, width: int, recorded: Recorded, place: object) -> None:
    if (height, width) != (recorded.height, recorded.width):
        raise ValueError(
            f"{place}: its pictures are {height}x{width} (height x width), meta/info.json says {recorded.height}x{recorded.width}; "
            f"correct the camera's shape in meta/info.json if all of its files are {height}x{width}, else re-encode the file"
        )


def video_stream(container: Any, place: object, recorded: Recorded | None) -> Any:
    """The video stream of an open file, checked; what cannot be decoded is refused by name."""
    streams = container.streams.video
    if not streams:
        raise ValueError(f"{place}: there is no video stream in it; fetch or re-encode it")
    if streams[0].codec_context is None or not streams[0].time_base:
        raise ValueError(
            f"{place}: its video is of a kind that FFmpeg does not decode; re-encode it as h264, hevc or av1"
        )
    name = streams[0].codec_context.codec.name
    if name not in DECODERS:
        raise ValueError(f"{place}: its video is '{name}', which is not read; re-encode it as h264, hevc or av1")
    pixels = streams[0].codec_context.height * streams[0].codec_context.width
    check_limit("picture_pixels", pixels, f"{place}: its pictures have pixels:")
    if recorded is not None:
        check_stream(streams[0], recorded, place)
    return streams[0]


def no_frame(nearest_s: float | None, wanted_s: float, tolerance_s: float, *, is_last: bool) -> str:
    """What to say when no frame is near enough to a row's time; `is_last` when the file has none after the nearest."""
    nearest = "none was found" if nearest_s is None else f"nearest {nearest_s:.4f} s"
    if is_last and nearest_s is not None:
        nearest += ", the file's last: it has fewer frames than the episode has rows"
    return (
        f"no frame within {tolerance_s:g} s of {wanted_s:.4f} s ({nearest}); fetch or re-encode the file, raise tolerance_s if the "
        f"frame is the right one, or leave bad episodes out with on_bad_episode=skip"
    )


def is_out_of_reach(error: Exception) -> bool:
    """Whether a file is missing or may not be read; FFmpeg's EPERM is neither, but what a failed seek gives."""
    return getattr(error, "errno", None) in (errno.ENOENT, errno.EACCES)


def ffmpeg_said(error: Exception) -> str:
    """What FFmpeg says of a file, without its number and without the name, which the message has already."""
    log = getattr(error, "log", None)
    return f"{getattr(error, 'strerror', None) or error}{f': {log[2].strip()}' if log else ''}"


def check_stream(stream: Any, recorded: Recorded, place: object) -> None:
    """Refuse a video stream whose header differs from what info.json says."""
    check_size(stream.codec_context.height, stream.codec_context.width, recorded, place)
    fps = float(stream.average_rate or 0.0)
    if recorded.fps is not None and not is_rate(fps, recorded.fps, stream.frames):
        raise ValueError(
            f"{place}: it has {fps:g} frames per second, meta/info.json says {recorded.fps:g}; re-encode it at that rate, or correct "
            f"the camera's video.fps in meta/info.json if the rows' timestamps agree with the file"
        )


def is_rate(fps: float, expected: float, num_frames: int) -> bool:
    """Whether a file's rate is the expected one; a file that does not tell its rate is not accused."""
    allowed = RATE_SHARE + (RATE_FRAMES / num_frames if num_frames else 0.0)
    return fps == 0.0 or abs(fps - expected) <= allowed * expected


def decoder_options(stream: Any) -> dict[str, str]:
    """Options that make the stream's decoder refuse damage rather than paint over it."""
    return DEFAULT_OPTIONS | DECODER_OPTIONS.get(stream.codec_context.codec.name, {})
