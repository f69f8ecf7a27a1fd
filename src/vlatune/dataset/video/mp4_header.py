"""What an mp4 file claims, counted before FFmpeg believes it: a few bytes may tell of millions of frames.

Only boxes are walked, none is decoded:  moov > trak > mdia > minf > stbl > stsz (the frames of a stream)
                                         moof > traf > trun (those of a fragment)
A file that is not made of boxes is left to FFmpeg, which says what is wrong with it.
"""

import struct
from collections.abc import Iterator
from typing import IO

from vlatune.limits import TooMuchError, check_limit

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
