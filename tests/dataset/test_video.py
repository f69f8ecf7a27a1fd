"""Files that stay open between units: never a wrong frame, whatever was read before from the same file."""

import io
import shutil
from collections import OrderedDict
from pathlib import Path

import av
import av.error
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlatune.dataset import video
from vlatune.dataset.frame_id import read_frame_id
from vlatune.dataset.recorded import decoder_options
from vlatune.dataset.synthetic import SyntheticSpec, make_dataset
from vlatune.dataset.video import VideoPlace, decode_into

FRAMES, FPS = 30, 10
PLACE = VideoPlace("films", 0, "top", "file-000.mp4")


@pytest.fixture(scope="module", params=["h264", "hevc", "av1"])
def film(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("films") / request.param
    make_dataset(folder, SyntheticSpec(episodes=1, frames=FRAMES, cameras=1, fps=FPS, codec=request.param))
    return next((folder / "videos").rglob("*.mp4"))


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """Names of files in the order in which they are opened, from a process that has none open."""
    names, real = [], video.av.open
    monkeypatch.setattr(video, "_decoders", OrderedDict())
    monkeypatch.setattr(
        video.av, "open", lambda source, **options: names.append(str(source)) or real(source, **options)
    )
    return names


def frames_of(film: Path, frames: list[int]) -> list[tuple[int, int] | None]:
    out_NCHW = np.zeros((len(frames), 3, 96, 96), np.uint8)
    decode_into(str(film), [frame / FPS for frame in frames], out_NCHW, tolerance_s=1e-4, place=PLACE)
    return [read_frame_id(image) for image in out_NCHW]


@given(units=st.lists(st.lists(st.integers(0, FRAMES - 1), min_size=1, max_size=6).map(sorted), max_size=8))
def test_any_row_of_units_gives_the_right_frames(film, units):
    for frames in units:
        assert frames_of(film, frames) == [(0, frame) for frame in frames]


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
    assert np.allclose(decoded, np.arange(FRAMES) / FPS)


def test_a_unit_after_the_end_of_the_file_seeks_back(film, opened):
    assert frames_of(film, [FRAMES - 1]) == [(0, FRAMES - 1)]
    assert frames_of(film, [0, 1]) == [(0, 0), (0, 1)]
    assert len(opened) == 1


def test_a_file_that_was_replaced_is_opened_anew(film, opened, tmp_path):
    copy = tmp_path / "film.mp4"
    shutil.copy(film, copy)
    frames_of(copy, [3])
    shutil.copy(film, tmp_path / "new.mp4")
    (tmp_path / "new.mp4").replace(copy)
    assert frames_of(copy, [4]) == [(0, 4)]
    assert opened == [str(copy)] * 2


def test_only_so_many_files_stay_open(film, opened, tmp_path):
    copies = [shutil.copy(film, tmp_path / f"{number}.mp4") for number in range(video.OPEN_DECODERS + 1)]
    for copy in [*copies, copies[-1], copies[0]]:
        frames_of(copy, [0])
    assert opened == [str(copy) for copy in [*copies, copies[0]]]
    assert len(video._decoders) == video.OPEN_DECODERS


def test_a_decoder_that_failed_is_not_kept(film, opened):
    out_NCHW = np.zeros((1, 3, 96, 96), np.uint8)
    with pytest.raises(ValueError, match="no frame within"):
        decode_into(str(film), [99.0], out_NCHW, tolerance_s=1e-4, place=PLACE)
    assert frames_of(film, [5]) == [(0, 5)]
    assert len(opened) == 2


def test_a_frame_that_the_decoder_marks_as_damaged_is_refused(tmp_path):
    """Of single bits that are flipped, h264 conceals some and only marks the frame; those after it look whole."""
    make_dataset(tmp_path / "film", SyntheticSpec(episodes=1, frames=16, cameras=1, fps=FPS))
    film = next((tmp_path / "film/videos").rglob("*.mp4"))
    whole, rng, marked = film.read_bytes(), np.random.default_rng(0), 0
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[rng.integers(whole.index(b"mdat") + 4, len(whole))] ^= 1 << int(rng.integers(8))
        if _is_marked(bytes(damaged)):
            marked += 1
            (tmp_path / f"{marked}.mp4").write_bytes(damaged)
            out_NCHW = np.zeros((16, 3, 96, 96), np.uint8)
            with pytest.raises(ValueError, match=r"file-000.mp4: cannot be decoded \(the decoder marks a frame as dam"):
                decode_into(
                    str(tmp_path / f"{marked}.mp4"),
                    [n / FPS for n in range(16)],
                    out_NCHW,
                    tolerance_s=1e-4,
                    place=PLACE,
                )
    assert marked > 0


def _is_marked(film: bytes) -> bool:
    """Whether all packets decode with the reader's options, and a frame is marked."""
    try:
        with av.open(io.BytesIO(film)) as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1
            stream.codec_context.options = decoder_options(stream)
            marks = [frame.is_corrupt for frame in container.decode(stream)]  # all of them: an error goes first
            return any(marks)
    except av.error.FFmpegError:
        return False
