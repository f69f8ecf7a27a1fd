"""Read rows with the read tasks of `read_lerobot`, and the frame ids that their images should show."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from ray.data.block import BlockAccessor

import vlatune
from vlatune.data.frames.resize import letterbox_box
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.demo.generate import read_frame_id
from vlatune.feed.read_lerobot import LeRobotSource

PARTITIONINGS = ("episode", "file_group", "chain", "sequential", "row_block")
TOP, WRIST = "observation.images.top", "observation.images.wrist"
SIZE = (64, 80)
ROW_BYTES = 2 * 3 * 64 * 80


def joined(blocks: Iterable[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    blocks = list(blocks)
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def read_here(*args, **options) -> dict[str, np.ndarray]:
    """Run the same read tasks one after the other in this process."""
    tasks = LeRobotSource(vlatune.plan_read(*args, **options)).get_read_tasks(parallelism=1)
    return joined(BlockAccessor.for_block(block).to_numpy() for task in tasks for block in task())


def ids_of(images: np.ndarray, recorded: tuple[int, int] = (96, 96)) -> list[tuple[int, int] | None]:
    box = letterbox_box(recorded, images.shape[-2:])
    return [read_frame_id(image, box=box) for image in images]


def expected_ids(root: Path, episodes: Iterable[int] | None = None) -> list[tuple[int, int]]:
    lengths = load_meta(str(root)).episodes.length.tolist()
    return [(one, frame) for one in (episodes or range(len(lengths))) for frame in range(lengths[one])]


def check_frames(root: Path, read, partitioning: str, block_rows: int) -> None:
    block_bytes = block_rows * (ROW_BYTES + 600)
    rows = read(root, resize=SIZE, action_horizon=4, partitioning=partitioning, block_bytes=block_bytes)
    expected = expected_ids(root)
    assert rows["index"].tolist() == list(range(len(expected)))
    assert list(zip(rows["episode_index"].tolist(), rows["frame_index"].tolist(), strict=True)) == expected
    for camera in (TOP, WRIST):
        assert ids_of(rows[camera]) == expected
