"""The frame cache returns the stored bytes or nothing, and stays within its budget."""

import fcntl
import os
import resource
import shutil
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlatune.data.frames.cache import (
    FOLDER_BYTES,
    HEADER_BYTES,
    PART_FRAMES,
    CachedFrames,
    CacheSettings,
    FrameCache,
    PartSpec,
    open_cache,
    part_identity,
)
from vlatune.data.read_spec import CameraSpec, Unit
from vlatune.storage.root import Root

SHAPE = (3, 32, 40)
FRAME_BYTES = 3 * 32 * 40


def make_part(name: str = "a", num_frames: int = 8) -> PartSpec:
    return PartSpec(part_identity("test", name), num_frames, FRAME_BYTES)


def make_frames(frames: np.ndarray, seed: int = 0) -> np.ndarray:
    return np.stack([np.random.default_rng((seed, int(n))).integers(0, 256, SHAPE, np.uint8) for n in frames])


def read(cache: FrameCache, part: PartSpec, frames: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    out = np.full((len(frames), *SHAPE), 7, np.uint8)
    return cache.read(part, frames, frames / 10, out), out


def write(cache: FrameCache, part: PartSpec, frames: np.ndarray, seed: int = 0) -> None:
    cache.write(part, frames, frames / 10, make_frames(frames, seed))


def settings(folder: Path, max_bytes: int = 1 << 30, *, reserve: int = 0, started_s: float | None = None):
    return CacheSettings(str(folder), max_bytes, reserve, time.time() if started_s is None else started_s)


@pytest.fixture
def cache(tmp_path: Path) -> FrameCache:
    return open_cache(settings(tmp_path / "cache"))


def stored_file(folder: Path) -> Path:
    (file,) = folder.rglob("*.part")
    return file


def disk_usage(folder: Path) -> int:
    used = 0
    for path in [folder, *folder.rglob("*")]:
        with suppress(FileNotFoundError):  # renamed meanwhile by a writer
            used += path.lstat().st_blocks * 512
    return used


@pytest.mark.parametrize("offset", [0, 10, 41, HEADER_BYTES + 3 * FRAME_BYTES + 17])
def test_a_changed_byte_is_a_missing_frame_and_can_be_stored_again(cache: FrameCache, tmp_path: Path, offset: int):
    part = make_part()
    write(cache, part, np.arange(8))
    with stored_file(tmp_path).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    found, out = read(cache, part, np.arange(8))
    assert not found.all()
    np.testing.assert_array_equal(out[found], make_frames(np.arange(8))[found])
    write(cache, part, np.arange(8))
    assert read(cache, part, np.arange(8))[0].all()


def test_files_with_other_names_stay(tmp_path: Path):
    """A folder with the user's own files is used without deleting them."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    names = ("download.part", "draft.new", f"{'a' * 63}.part", f"{'a' * 64}.part.old")
    for name in names:
        (folder / name).write_text("mine")
        os.utime(folder / name, (1, 1))
    cache = open_cache(settings(folder, FOLDER_BYTES + make_part().disk_bytes))
    for name in "ab":
        write(cache, make_part(name), np.arange(8))
    assert [(folder / name).read_text() for name in names] == ["mine"] * len(names)


@pytest.mark.parametrize("suffix", [".part", ".new"])
@pytest.mark.parametrize("kind", ["link", "hard link", "link to a folder", "folder", "fifo"])
def test_nothing_outside_is_read_or_changed_through_a_planted_file(tmp_path: Path, suffix: str, kind: str):
    outside, part = tmp_path / "outside", make_part()
    other = open_cache(settings(tmp_path / "other"))
    write(other, part, np.arange(8), 9)
    stored_file(tmp_path / "other").rename(outside)
    before = outside.read_bytes()
    (tmp_path / "empty").mkdir()
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    planted = (folder / part.name).with_suffix(suffix)
    if kind == "link":
        planted.symlink_to(outside)
    elif kind == "hard link":
        planted.hardlink_to(outside)
    elif kind == "link to a folder":
        planted.symlink_to(tmp_path / "empty")
    elif kind == "folder":
        planted.mkdir()
    else:
        os.mkfifo(planted)
    cache = open_cache(settings(folder))
    assert not read(cache, part, np.arange(8))[0].any()
    write(cache, part, np.arange(8))
    found, out = read(cache, part, np.arange(8))
    np.testing.assert_array_equal(out[found], make_frames(np.arange(8))[found])
    assert found.all() == (kind != "folder")
    assert outside.read_bytes() == before
    assert not any((tmp_path / "empty").iterdir())


@pytest.mark.parametrize("kind", ["link", "hard link", "folder"])
def test_a_planted_usage_file_is_rejected_and_left_alone(tmp_path: Path, kind: str):
    folder, outside = tmp_path / "cache", tmp_path / "outside"
    folder.mkdir(mode=0o700)
    outside.write_text("not to be changed")
    if kind == "folder":
        (folder / "usage").mkdir()
    else:
        (folder / "usage").symlink_to(outside) if kind == "link" else (folder / "usage").hardlink_to(outside)
    with pytest.raises(OSError, match="usage"):
        open_cache(settings(folder))
    cache = FrameCache(settings(folder))  # of a reader, whose run had opened the folder before
    write(cache, make_part(), np.arange(8))
    assert not read(cache, make_part(), np.arange(8))[0].any()
    assert outside.read_text() == "not to be changed"


def test_a_linked_folder_or_one_that_others_can_write_is_rejected(tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="not a folder"):
        open_cache(settings(tmp_path / "link"))
    (tmp_path / "open").mkdir(mode=0o700)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ValueError, match="chmod go-w"):
        open_cache(settings(tmp_path / "open"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_parts_of_another_user_are_missing(cache: FrameCache, tmp_path: Path):
    write(cache, make_part(), np.arange(8))
    os.chown(stored_file(tmp_path), 12345, 12345)
    assert not read(cache, make_part(), np.arange(8))[0].any()


def test_several_writers_stay_within_the_budget(tmp_path: Path):
    budget = FOLDER_BYTES + 10 * make_part().disk_bytes
    shared, peak = settings(tmp_path / "cache", budget), 0
    open_cache(shared)

    def fill(worker: int) -> None:
        nonlocal peak
        own = FrameCache(shared)
        for n in range(8):
            write(own, make_part(f"{worker} {n}"), np.arange(8))
            peak = max(peak, disk_usage(tmp_path / "cache"))

    threads = [threading.Thread(target=fill, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < peak <= budget
    assert len(list(tmp_path.rglob("*.part"))) == 10


def test_a_full_cache_keeps_the_parts_of_this_run_and_evicts_older_ones(tmp_path: Path):
    part = make_part()
    budget = FOLDER_BYTES + 4 * part.disk_bytes
    first = open_cache(settings(tmp_path / "cache", budget))
    names = [f"part {n}" for n in range(6)]
    for name in names:
        write(first, make_part(name), np.arange(8))
    kept = [read(first, make_part(name), np.arange(8))[0].all() for name in names]
    assert kept == [True] * 4 + [False] * 2  # nothing is evicted for a part of the same run

    later = open_cache(settings(tmp_path / "cache", budget, started_s=time.time() + 60))
    write(later, make_part("new"), np.arange(8))
    assert read(later, make_part("new"), np.arange(8))[0].all()
    assert disk_usage(tmp_path / "cache") <= budget


def test_a_smaller_budget_applies_from_the_start_of_the_next_run(tmp_path: Path):
    names = [f"part {n}" for n in range(6)]
    first = open_cache(settings(tmp_path / "cache"))
    for age, name in enumerate(names):
        write(first, make_part(name), np.arange(8))
        os.utime(tmp_path / "cache" / make_part(name).name, (1000 + age, 1000 + age))
    budget = FOLDER_BYTES + 2 * make_part().disk_bytes
    smaller = open_cache(settings(tmp_path / "cache", budget))
    assert disk_usage(tmp_path / "cache") <= budget
    assert [read(smaller, make_part(name), np.arange(8))[0].all() for name in names] == [False] * 4 + [True] * 2


def test_the_reserve_of_the_disk_is_left_free(tmp_path: Path):
    cache = open_cache(settings(tmp_path / "cache", reserve=shutil.disk_usage(tmp_path).total))
    write(cache, make_part(), np.arange(8))
    assert not list(tmp_path.rglob("*.part"))


def test_deleted_parts_and_leftovers_are_counted_again_at_the_next_start(tmp_path: Path):
    cache = open_cache(settings(tmp_path / "cache"))
    for name in "abc":
        write(cache, make_part(name), np.arange(8))
    (tmp_path / "cache" / make_part("a").name).unlink()
    (tmp_path / "cache" / make_part("b").name).with_suffix(".new").write_bytes(b"killed while it was made")
    assert not read(cache, make_part("a"), np.arange(8))[0].any()
    assert open_cache(settings(tmp_path / "cache")).stored_bytes() == FOLDER_BYTES + 2 * make_part().disk_bytes
    assert not list(tmp_path.rglob("*.new"))


def test_a_reader_on_another_node_fills_a_folder_of_its_own(recording: Path, tmp_path: Path):
    """Only the driver opens the cache at the start of a run; other nodes have their own disks."""
    node = settings(tmp_path / "of_a_node" / "cache", FOLDER_BYTES + 2 * 10**6)
    assert read_frames(recording, node, [1, 2]) == [1, 2]
    assert read_frames(recording, node, [1, 2]) == []


@dataclass
class CountedSource:
    """A source of known frames that records which frames were read."""

    decoded: list[int] = field(default_factory=list)

    def read_into(self, unit: Unit, frames: np.ndarray, times_s: np.ndarray, out: np.ndarray) -> int:
        self.decoded.extend(frames.tolist())
        out[:] = make_frames(frames)
        return 0


LENGTH = 70
NO_ROWS = np.empty(0, np.int64)
CAMERA = CameraSpec("top", "video", SHAPE[1], SHAPE[2])


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    (tmp_path / "recording").mkdir()
    (tmp_path / "recording/top.mp4").write_bytes(b"first version")
    return tmp_path / "recording"


def read_frames(recording: Path, cache: CacheSettings, frames: list[int], camera: CameraSpec = CAMERA, **other: float):
    """Read through the cache; return the decoded frames."""
    source, wanted = CountedSource(), np.array(frames)
    unit = Unit(0, 0, LENGTH, 0, "data.parquet", 0, (("top", "top.mp4", other.get("from_s", 0.0)),), NO_ROWS, NO_ROWS)
    out = np.empty((len(frames), *SHAPE), np.uint8)
    cached = CachedFrames(source, Root(str(recording)), camera, other.get("tolerance_s", 1e-4), cache)
    times_s = wanted / other.get("fps", 10.0)
    assert cached.read_into(unit, wanted, times_s, out) == len(frames) - len(source.decoded)
    np.testing.assert_array_equal(out, make_frames(wanted))
    return source.decoded


READS = st.lists(st.lists(st.integers(0, LENGTH - 1), min_size=1, max_size=40).map(sorted), min_size=1, max_size=8)


@given(READS, st.data())
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], max_examples=50)
def test_rows_are_right_whatever_is_stored_deleted_or_damaged(
    recording: Path, reads: list[list[int]], data: st.DataObject
):
    with tempfile.TemporaryDirectory() as folder:
        parts = data.draw(st.integers(0, 3), label="parts that fit")
        budget = FOLDER_BYTES + parts * (HEADER_BYTES + PART_FRAMES * FRAME_BYTES + 4096)
        cache = settings(Path(folder) / "cache", budget)
        open_cache(cache)
        for frames in reads:
            read_frames(recording, cache, frames)
            for file in sorted(Path(folder).rglob("*.part")):
                change = data.draw(st.sampled_from(["keep", "keep", "delete", "truncate", "damage"]))
                if change == "delete":
                    file.unlink()
                elif change == "truncate":
                    os.truncate(file, 4999)
                elif change == "damage":
                    with file.open("r+b") as opened:
                        opened.seek(data.draw(st.integers(0, file.stat().st_size - 1)))
                        opened.write(b"\x5a")


@pytest.mark.parametrize(
    "other",
    [
        {"from_s": 0.5},
        {"tolerance_s": 1e-3},
        {"fps": 20.0},
        {"camera": replace(CAMERA, pad="left_top")},
    ],
    ids=lambda other: next(iter(other)),
)
def test_other_settings_do_not_hit(recording: Path, tmp_path: Path, other: dict):
    cache, frames = settings(tmp_path / "cache"), [1, 2, 40]
    open_cache(cache)
    assert read_frames(recording, cache, frames) == frames
    assert read_frames(recording, cache, frames) == []
    assert read_frames(recording, cache, frames, **other) == frames


def test_a_changed_file_does_not_hit(recording: Path, tmp_path: Path):
    cache, file = settings(tmp_path / "cache"), recording / "top.mp4"
    open_cache(cache)
    read_frames(recording, cache, [1, 2, 40])
    before = file.stat()
    file.write_bytes(b"other version")  # of the same size
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read_frames(recording, cache, [1, 2, 40]) == [1, 2, 40]


def test_a_folder_that_cannot_be_used_on_a_node_reads_without_a_cache(recording: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert read_frames(recording, settings(tmp_path / "file" / "cache"), [3, 4]) == [3, 4]


def test_a_failing_disk_stores_and_returns_nothing(cache: FrameCache):
    part, frames = make_part(), np.arange(4)
    write(cache, part, frames[:2])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER_BYTES, limits[1]))
    try:
        write(cache, part, frames[2:])  # pwrite fails
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read(cache, part, frames)[0].tolist() == [True, True, False, False]
    write(cache, part, frames[2:])
    assert read(cache, part, frames)[0].all()


def test_a_lock_that_is_never_released_stores_nothing(cache: FrameCache, tmp_path: Path):
    part, frames = make_part(), np.arange(2)
    with (tmp_path / "cache" / "usage").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        write(cache, part, frames)
    assert not read(cache, part, frames)[0].any()
    again = FrameCache(settings(tmp_path / "cache"))
    write(again, part, frames)
    assert read(again, part, frames)[0].all()
