"""A frame id is read back from whatever a picture goes through on its way: codec, resize, letterbox, layout."""

from dataclasses import replace
from pathlib import Path

import av
import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlatune.dataset.synthetic.generate import MAX_EPISODES, MAX_FRAMES, draw_frame_id, read_frame_id
from vlatune.dataset.synthetic.writer import ENCODERS, Encoder, VideoWriter
from vlatune.dataset.video.resize import letterbox_box

# Ids with few, many and alternating bits set, and neighbours, which an encoder is most tempted to blend.
IDS = [(0, 0), (0, 1), (0, 2), (1, 0), (2, 3), (255, 255), (256, 256), (21845, 1365), (43690, 2730), (65535, 4095)]


def busy_picture(height: int, width: int, seed: int) -> np.ndarray:
    """Saturated colours and edges all over: chroma and luma both bleed into the corner."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)
    return cv2.resize(blocks, (width, height), interpolation=cv2.INTER_NEAREST)


def pictures(height: int, width: int) -> list[np.ndarray]:
    images = [busy_picture(height, width, seed=number) for number in range(len(IDS))]
    for image, (episode_index, frame_index) in zip(images, IDS, strict=True):
        draw_frame_id(image, episode_index, frame_index)
    return images


def resized(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Into a letterbox, bilinear, as the readers do it."""
    top, left, content_height, content_width = letterbox_box(image.shape[:2], (height, width))
    out = np.zeros((height, width, 3), np.uint8)
    out[top : top + content_height, left : left + content_width] = cv2.resize(
        image, (content_width, content_height), interpolation=cv2.INTER_LINEAR
    )
    return out


def through_video(images: list[np.ndarray], encoder: Encoder, path: Path) -> list[np.ndarray]:
    """Encoded and decoded again."""
    height, width = images[0].shape[:2]
    writer = VideoWriter(path, encoder, fps=10, height=height, width=width)
    for image in images:
        writer.write(image, keyframe=False)
    writer.close()
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


@given(st.integers(0, MAX_EPISODES - 1), st.integers(0, MAX_FRAMES - 1), st.integers(48, 500), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_every_id_is_read_back_at_every_size(episode_index: int, frame_index: int, height: int, aspect: int) -> None:
    image = np.full((height, height * aspect // 2, 3), 128, np.uint8)
    draw_frame_id(image, episode_index, frame_index)
    assert read_frame_id(image) == (episode_index, frame_index)
    assert read_frame_id(image.transpose(2, 0, 1)) == (episode_index, frame_index)


def test_drawing_touches_the_corner_only() -> None:
    image = busy_picture(96, 128, seed=0)
    before = image.copy()
    draw_frame_id(image, 5, 7)
    outside = np.ones((96, 128), bool)
    outside[:24, :24] = False
    assert np.array_equal(image[outside], before[outside])
    assert set(np.unique(image[~outside])) == {0, 255}


@pytest.mark.parametrize("codec", ENCODERS)
@pytest.mark.parametrize("size", [(64, 64), (64, 96), (96, 96), (120, 160), (480, 640)], ids=str)
def test_ids_survive_lossy_video(size: tuple[int, int], codec: str, tmp_path: Path) -> None:
    for crf in (ENCODERS[codec].crf, 30):
        decoded = through_video(pictures(*size), replace(ENCODERS[codec], crf=crf), tmp_path / "ids.mp4")
        assert [read_frame_id(image) for image in decoded] == IDS


@pytest.mark.parametrize("codec", ENCODERS)
@pytest.mark.parametrize(
    ("recorded", "shown"),
    [
        ((96, 96), (64, 64)),
        ((96, 96), (48, 48)),
        ((96, 96), (224, 224)),
        ((480, 640), (224, 224)),
        ((96, 128), (96, 96)),
    ],
    ids=str,
)
def test_ids_survive_video_and_then_a_bilinear_resize(
    recorded: tuple[int, int], shown: tuple[int, int], codec: str, tmp_path: Path
) -> None:
    decoded = through_video(pictures(*recorded), replace(ENCODERS[codec], crf=30), tmp_path / "ids.mp4")
    box = letterbox_box(recorded, shown)
    assert [read_frame_id(resized(image, *shown), box=box) for image in decoded] == IDS


@pytest.mark.parametrize(
    ("recorded", "shown"),
    [
        ((480, 640), (224, 224)),
        ((640, 480), (224, 224)),
        ((96, 96), (224, 224)),
        ((123, 457), (100, 64)),
        ((64, 64), (64, 64)),
    ],
    ids=str,
)
def test_letterbox_box_is_where_lerobot_puts_the_picture(recorded: tuple[int, int], shown: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    from lerobot.policies.common.vla_utils import resize_with_pad_torch

    white = torch.full((1, 3, *recorded), 255, dtype=torch.uint8)
    filled = resize_with_pad_torch(white, *shown)[0, 0].numpy() == 255
    rows, columns = np.flatnonzero(filled.any(axis=1)), np.flatnonzero(filled.any(axis=0))
    assert letterbox_box(recorded, shown) == (rows[0], columns[0], len(rows), len(columns))


def test_a_letterboxed_id_needs_its_box() -> None:
    image = resized(pictures(480, 640)[-1], 224, 224)
    assert read_frame_id(image) is None
    assert read_frame_id(image, box=(28, 0, 168, 224)) == IDS[-1]


@pytest.mark.parametrize("grey", [0, 127, 255])
def test_a_flat_picture_has_no_id(grey: int) -> None:
    assert read_frame_id(np.full((96, 96, 3), grey, np.uint8)) is None


def test_one_wrong_cell_is_noticed() -> None:
    image = np.zeros((96, 96, 3), np.uint8)
    draw_frame_id(image, 1234, 567)
    for row in range(0, 24, 4):
        for column in range(0, 24, 4):
            damaged = image.copy()
            damaged[row : row + 4, column : column + 4] ^= 255
            assert read_frame_id(damaged) is None


@pytest.mark.parametrize("frame_id", [(-1, 0), (MAX_EPISODES, 0), (0, -1), (0, MAX_FRAMES)])
def test_an_id_that_does_not_fit_is_refused(frame_id: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="an id holds 65536 episodes of 4096 frames"):
        draw_frame_id(np.zeros((96, 96, 3), np.uint8), *frame_id)


@pytest.mark.parametrize("size", [(46, 96), (96, 20)])
def test_a_picture_without_room_for_the_id_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"picture of {size[0]}x{size[1]}"):
        draw_frame_id(np.zeros((*size, 3), np.uint8), 0, 0)


@pytest.mark.parametrize("image", [np.zeros((96, 96, 3), np.float32), np.zeros((96, 96), np.uint8)])
def test_other_arrays_are_refused(image: np.ndarray) -> None:
    with pytest.raises(ValueError, match="return_uint8=True"):
        read_frame_id(image)
