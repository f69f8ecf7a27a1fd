"""Files that stay open between units give the right frames, regardless of earlier reads of the same file."""

import io
import shutil
from collections import OrderedDict
from fractions import Fraction
from pathlib import Path

import av
import av.error
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlatune.data.frames import decoder as video
from vlatune.data.frames.decoder import decode_into
from vlatune.data.frames.recorded import decoder_options
from vlatune.demo.generate import SyntheticSpec, make_dataset, read_frame_id

FRAMES, FPS = 30, 10
PLACE = "dataset 'films': episode 0, camera 'top', file-000.mp4"


OTHERS = {
    "all key frames": {"g": "1"},
    "long groups": {"g": "250", "bf": "0"},
    "frames out of order": {"g": "8", "bf": "3"},
    "open groups": {"g": "8", "bf": "3", "x264-params": "open-gop=1:scenecut=0:b-adapt=0"},
}
"""Encoder options of common H.264 files."""


@pytest.fixture(scope="module", params=["h264", "hevc", "av1", *OTHERS])
def film(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("films") / "film"
    codec = "h264" if request.param in OTHERS else request.param
    make_dataset(folder, SyntheticSpec(episodes=1, frames=FRAMES, cameras=1, fps=FPS, codec=codec))
    film = next((folder / "videos").rglob("*.mp4"))
    return (
        encode_again(film, folder / f"{request.param}.mp4", OTHERS[request.param]) if request.param in OTHERS else film
    )


def encode_again(film: Path, other: Path, options: dict[str, str]) -> Path:
    with av.open(str(film)) as source, av.open(str(other), "w") as target:
        stream = target.add_stream("libx264", rate=FPS, options=options | {"crf": "10"})
        stream.height, stream.width = source.streams.video[0].height, source.streams.video[0].width
        stream.pix_fmt = "yuv420p"
        for number, frame in enumerate(source.decode(video=0)):
            still = frame.reformat(format="yuv420p")
            still.pts, still.time_base, still.pict_type = number, Fraction(1, FPS), 0
            target.mux(stream.encode(still))
        target.mux(stream.encode(None))
    return other


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """Return the names of files in the order in which they are opened; none is open at the start."""
    names, real = [], video.av.open
    monkeypatch.setattr(video, "_decoders", OrderedDict())
    monkeypatch.setattr(
        video.av, "open", lambda source, **options: names.append(str(source)) or real(source, **options)
    )
    return names


def frames_of(film: Path, frames: list[int]) -> list[tuple[int, int] | None]:
    out_NCHW = np.zeros((len(frames), 3, 96, 96), np.uint8)
    decode_into(str(film), [frame / FPS for frame in frames], out_NCHW, PLACE, tolerance_s=1e-4)
    return [read_frame_id(image) for image in out_NCHW]


@given(units=st.lists(st.lists(st.integers(0, FRAMES - 1), min_size=1, max_size=6).map(sorted), max_size=8))
def test_any_sequence_of_units_gives_the_right_frames(film, units):
    for frames in units:
        assert frames_of(film, frames) == [(0, frame) for frame in frames]


def test_a_key_frame_after_the_last_one_wanted_is_not_decoded(tmp_path):
    """A key frame is expensive, and h264 would decode it only to return the previous frame."""
    make_dataset(tmp_path / "film", SyntheticSpec(episodes=1, frames=16, cameras=1, fps=FPS))
    film = next((tmp_path / "film/videos").rglob("*.mp4"))
    with av.open(str(film)) as container:
        packet = next(packet for packet in container.demux(video=0) if packet.pts * packet.time_base * FPS == 8)
        assert packet.is_keyframe
        at, size = packet.pos, packet.size
    damaged = bytearray(film.read_bytes())
    damaged[at + size // 2 : at + size] = bytes(size - size // 2)  # its header stays: it is still known as a key frame
    film.write_bytes(damaged)
    assert frames_of(film, list(range(8))) == [(0, frame) for frame in range(8)]
    assert frames_of(film, [10, 11]) == [(0, 10), (0, 11)]
    for frames in ([8], [9], list(range(9)), [7, 8]):
        with pytest.raises(ValueError, match=r"file-000.mp4: (cannot be decoded|no frame)"):
            frames_of(film, frames)


def test_neighbouring_units_open_once_and_decode_each_frame_once(film, opened, monkeypatch):
    decoded = []
    real = video.Decoder._decoded

    def count(self):
        for found in real(self):
            decoded.append(found[1])
            yield found

    monkeypatch.setattr(video.Decoder, "_decoded", count)
    for begin in range(0, FRAMES, 10):
        assert frames_of(film, list(range(begin, begin + 10))) == [(0, frame) for frame in range(begin, begin + 10)]
    assert opened == [str(film)]
    if film.stem == "open groups":  # a seek to the next group must begin in the one before
        assert len(decoded) < 1.5 * FRAMES
    else:
        assert np.allclose(decoded, np.arange(FRAMES) / FPS)


def test_a_file_that_was_replaced_is_opened_again(film, opened, tmp_path):
    copy = tmp_path / "film.mp4"
    shutil.copy(film, copy)
    frames_of(copy, [3])
    shutil.copy(film, tmp_path / "new.mp4")
    (tmp_path / "new.mp4").replace(copy)
    assert frames_of(copy, [4]) == [(0, 4)]
    assert opened == [str(copy)] * 2


def test_a_decoder_that_failed_is_not_kept(film, opened):
    out_NCHW = np.zeros((1, 3, 96, 96), np.uint8)
    with pytest.raises(ValueError, match="no frame within"):
        decode_into(str(film), [99.0], out_NCHW, PLACE, tolerance_s=1e-4)
    assert frames_of(film, [5]) == [(0, 5)]
    assert len(opened) == 2


def test_a_frame_that_the_decoder_marks_as_damaged_is_rejected(tmp_path):
    """h264 conceals some flipped bits and only marks the frame; later frames are not marked."""
    make_dataset(tmp_path / "film", SyntheticSpec(episodes=1, frames=16, cameras=1, fps=FPS))
    film = next((tmp_path / "film/videos").rglob("*.mp4"))
    content, rng, marked = film.read_bytes(), np.random.default_rng(0), 0
    for _ in range(300):
        damaged = bytearray(content)
        damaged[rng.integers(content.index(b"mdat") + 4, len(content))] ^= 1 << int(rng.integers(8))
        if _is_marked(bytes(damaged)):
            marked += 1
            (tmp_path / f"{marked}.mp4").write_bytes(damaged)
            out_NCHW = np.zeros((16, 3, 96, 96), np.uint8)
            with pytest.raises(ValueError, match=r"file-000.mp4: cannot be decoded \(the decoder marks a frame as dam"):
                decode_into(
                    str(tmp_path / f"{marked}.mp4"), [n / FPS for n in range(16)], out_NCHW, PLACE, tolerance_s=1e-4
                )
    assert marked > 0


def _is_marked(film: bytes) -> bool:
    """True if all packets decode with the reader's options and a frame is marked."""
    try:
        with av.open(io.BytesIO(film)) as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1
            stream.codec_context.options = decoder_options(stream)
            marks = [frame.is_corrupt for frame in container.decode(stream)]  # all of them: an error goes first
            return any(marks)
    except av.error.FFmpegError:
        return False
