"""A frame id can be read after encoding, resizing, letterboxing and transposing the image."""

from dataclasses import replace
from pathlib import Path

import av
import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlatune.data.frames.resize import letterbox_box
from vlatune.demo.generate import MAX_EPISODES, MAX_FRAMES, draw_frame_id, read_frame_id
from vlatune.demo.writer import ENCODERS, Encoder, VideoWriter

# Ids with few, many and alternating bits set, and neighbours, which an encoder is most likely to blend.
IDS = [(0, 0), (0, 1), (0, 2), (1, 0), (2, 3), (255, 255), (256, 256), (21845, 1365), (43690, 2730), (65535, 4095)]


def busy_image(height: int, width: int, seed: int) -> np.ndarray:
    """Saturated colours and edges, so that chroma and luma bleed into the corner."""
    blocks = np.random.default_rng(seed).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    return cv2.resize(blocks, (width, height), interpolation=cv2.INTER_NEAREST)


def images_with_ids(height: int, width: int) -> list[np.ndarray]:
    images = [busy_image(height, width, seed=number) for number in range(len(IDS))]
    for image, frame_id in zip(images, IDS, strict=True):
        draw_frame_id(image, *frame_id)
    return images


def letterboxed(image: np.ndarray, height: int, width: int) -> np.ndarray:
    top, left, content_height, content_width = letterbox_box(image.shape[:2], (height, width))
    out = np.zeros((height, width, 3), np.uint8)
    resized = cv2.resize(image, (content_width, content_height), interpolation=cv2.INTER_LINEAR)
    out[top : top + content_height, left : left + content_width] = resized
    return out


def encoded_and_decoded(images: list[np.ndarray], encoder: Encoder, path: Path) -> list[np.ndarray]:
    height, width = images[0].shape[:2]
    writer = VideoWriter(path, encoder, fps=10, height=height, width=width)
    for image in images:
        writer.write(image, keyframe=False)
    writer.close()
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


@given(st.integers(0, MAX_EPISODES - 1), st.integers(0, MAX_FRAMES - 1), st.integers(48, 500), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_ids_are_read_at_every_size(episode_index: int, frame_index: int, height: int, aspect: int) -> None:
    image = np.full((height, height * aspect // 2, 3), 128, np.uint8)
    draw_frame_id(image, episode_index, frame_index)
    assert read_frame_id(image) == (episode_index, frame_index)
    assert read_frame_id(image.transpose(2, 0, 1)) == (episode_index, frame_index)


@pytest.mark.parametrize("codec", ENCODERS)
@pytest.mark.parametrize(
    ("recorded", "shown"),
    [((64, 64), None), ((96, 96), (48, 48)), ((96, 96), (224, 224)), ((480, 640), (224, 224)), ((120, 160), None)],
    ids=str,
)
def test_ids_survive_video_and_resizing(
    recorded: tuple[int, int], shown: tuple[int, int] | None, codec: str, tmp_path: Path
) -> None:
    encoder = replace(ENCODERS[codec], crf=30)
    decoded = encoded_and_decoded(images_with_ids(*recorded), encoder, tmp_path / "ids.mp4")
    if shown is None:
        assert [read_frame_id(image) for image in decoded] == IDS
    else:
        box = letterbox_box(recorded, shown)
        assert [read_frame_id(letterboxed(image, *shown), box=box) for image in decoded] == IDS


def test_a_wrong_cell_invalidates_the_id() -> None:
    image = np.zeros((96, 96, 3), np.uint8)
    draw_frame_id(image, 1234, 567)
    for row in range(0, 24, 4):
        for column in range(0, 24, 4):
            damaged = image.copy()
            damaged[row : row + 4, column : column + 4] ^= 255
            assert read_frame_id(damaged) is None
