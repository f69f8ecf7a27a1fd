"""Blocks read through the frame cache equal blocks read without it, for every camera, window and augmentation."""

import functools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from vlatune.batch import Columns
from vlatune.config.settings import ImageTransformsConfig
from vlatune.data.augmentation import make_augment
from vlatune.data.frames.cache import PART_FRAMES, CacheSettings, open_cache
from vlatune.data.frames.resize import Pad
from vlatune.data.meta.dataset_meta import DatasetMeta, load_meta
from vlatune.data.read_spec import CameraSpec, Unit
from vlatune.data.reader import ReadSpec, make_unit
from vlatune.data.transforms import Transform
from vlatune.demo.generate import SyntheticSpec, make_dataset
from vlatune.feed.ray_blocks import CACHED, READ_S, read_blocks
from vlatune.storage.root import Root

LENGTH = PART_FRAMES + 8
ORDERS = {
    "ascending": [(0, range(LENGTH)), (1, range(LENGTH))],
    "descending": [(1, range(20, LENGTH)), (1, range(20)), (0, range(LENGTH))],
    "with gaps and repeats": [(0, [0, 0, 3, 31, 32, 39]), (1, [5]), (0, range(1, LENGTH)), (1, range(LENGTH))],
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "dataset"
    spec = SyntheticSpec(episodes=2, frames=LENGTH, cameras=2, height=64, width=80, fps=10, episodes_per_file=2)
    make_dataset(folder, spec)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> CacheSettings:
    made = CacheSettings(str(tmp_path / "cache"), 1 << 30, 0, time.time())
    open_cache(made)
    return made


@functools.cache
def loaded(root: Root) -> DatasetMeta:
    return load_meta(root)


def make_spec(root: Root, *, offsets: tuple[int, ...] | None = None, pad: Pad = "centre") -> ReadSpec:
    meta = loaded(root)
    cameras = tuple(CameraSpec(name, "video", 24, 24, offsets, pad=pad) for name in meta.cameras)
    return ReadSpec(root=root, dataset_index=0, tolerance_s=1e-4, cameras=cameras, vectors=(), tasks=meta.tasks)


def read_all(
    spec: ReadSpec, order: Sequence[tuple[int, Sequence[int]]], transforms: Sequence[Transform] = ()
) -> tuple[list[Columns], float]:
    """Return the blocks and the share of cached images; a block is two units."""
    meta = loaded(spec.root)
    units: list[Unit] = []
    for episode, frames in order:
        wanted = np.array(frames)
        units.append(make_unit(meta, spec, episode, wanted, slots=wanted + 100 * len(units)))
    blocks = list(read_blocks((spec,), transforms, [units[n : n + 2] for n in range(0, len(units), 2)]))
    cached = [block.pop(CACHED) for block in blocks]
    for block in blocks:
        del block[READ_S]
    return blocks, float(np.concatenate(cached).mean())


def assert_equal(blocks: list[Columns], others: list[Columns]) -> None:
    for block, other in zip(blocks, others, strict=True):
        assert block.keys() == other.keys()
        for name, values in block.items():
            np.testing.assert_array_equal(values, other[name])


@pytest.mark.parametrize("offsets", [None, (-33, -1, 0)], ids=str)
def test_every_order_and_window_gives_the_same_blocks(dataset: Path, tmp_path: Path, offsets: tuple[int, ...] | None):
    spec = make_spec(Root(str(dataset)), offsets=offsets)
    expected = {name: read_all(spec, order)[0] for name, order in ORDERS.items()}
    for first in ORDERS:
        settings = CacheSettings(str(tmp_path / first), 1 << 30, 0, time.time())
        open_cache(settings)
        cached = replace(spec, cache=settings)
        assert_equal(read_all(cached, ORDERS[first])[0], expected[first])
        for name, order in ORDERS.items():  # all frames are stored now
            blocks, share = read_all(cached, order)
            assert_equal(blocks, expected[name])
            assert share == 1


@pytest.mark.parametrize("preset", ["lerobot", "openpi"])
def test_augmented_blocks_are_the_same_because_transforms_follow_the_cache(
    dataset: Path, cache: CacheSettings, preset: str
):
    spec, order = make_spec(Root(str(dataset))), ORDERS["ascending"]
    names = {camera.column: camera.column for camera in spec.cameras}
    boxes = {(0, name): (0, 0, 24, 24) for name in names}
    augment = make_augment(ImageTransformsConfig(enable=True, preset=preset), 7, names, boxes)
    expected, _ = read_all(spec, order, [augment])
    plain, _ = read_all(spec, order)
    assert any((expected[0][name] != plain[0][name]).any() for name in names)
    for _ in range(2):  # while it fills, and from it
        blocks, share = read_all(replace(spec, cache=cache), order, [augment])
        assert_equal(blocks, expected)
    assert share == 1
    assert_equal(read_all(replace(spec, cache=cache), order)[0], plain)  # stored without augmentation


class UnversionedFileSystem(MemoryFileSystem):
    """Files in memory whose information has a size, but neither a version nor a time."""

    protocol = "unversioned"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("unversioned:/"))

    def info(self, path, **kwargs):
        return {key: value for key, value in super().info(path, **kwargs).items() if key != "created"}


@pytest.mark.parametrize(("scheme", "expected"), [("memory", 1.0), ("unversioned", 0.0)])
def test_remote_files_are_cached_if_a_change_can_be_recognised(
    dataset: Path, cache: CacheSettings, scheme: str, expected: float
):
    fsspec.register_implementation("unversioned", UnversionedFileSystem, clobber=True)
    fsspec.filesystem(scheme).put(str(dataset), "/cached_reading", recursive=True)
    spec, order = make_spec(Root(f"{scheme}://cached_reading")), [(0, range(4))]
    read_all(replace(spec, cache=cache), order)
    blocks, share = read_all(replace(spec, cache=cache), order)
    assert share == expected
    assert_equal(blocks, read_all(spec, order)[0])
