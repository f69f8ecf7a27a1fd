"""`make_dataset`: reproducible, atomic, with exact statistics, in LeRobot's layout."""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pyarrow.parquet as pq
import pytest

from vlatune.demo.generate import SyntheticSpec, episode_lengths, make_dataset, read_frame_id
from vlatune.demo.writer import ENCODERS, PATHS

TINY = SyntheticSpec(episodes=7, frames=9, height=64, width=64, episodes_per_file=2, vary_length=True)


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def frame_ids(path: Path) -> list[tuple[int, int] | None]:
    with av.open(str(path)) as container:
        return [read_frame_id(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]


def read_rows(folder: Path) -> dict[str, np.ndarray]:
    tables = [pq.read_table(path).to_pydict() for path in sorted((folder / "data").glob("*/*.parquet"))]
    return {key: np.array([value for table in tables for value in table[key]]) for key in tables[0]}


def exact_stats(values: np.ndarray) -> dict[str, np.ndarray]:
    stats = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
    return stats | {f"q{percent:02}": np.percentile(values, percent, axis=0) for percent in (1, 10, 50, 90, 99)}


@pytest.mark.parametrize("codec", ENCODERS)
def test_every_episode_begins_with_a_keyframe(codec: str, tmp_path: Path) -> None:
    """The keyframe interval is two frames, and episodes have an odd number of frames."""
    before = os.sched_getscheduler(0)
    make_dataset(tmp_path / "made", replace(TINY, frames=5, vary_length=False, episodes_per_file=3, codec=codec))
    assert os.sched_getscheduler(0) == before  # libsvtav1 changes it if root runs it
    with av.open(str(tmp_path / "made/videos/observation.images.top/chunk-000/file-000.mp4")) as container:
        stream = container.streams.video[0]
        packets = [packet for packet in container.demux(stream) if packet.size]
        keyframes = {round(packet.pts * stream.time_base * 10) for packet in packets if packet.is_keyframe}
    assert len(packets) == 15
    assert {0, 2, 4, 5, 10} <= keyframes


def test_statistics_are_exact(dataset_v3: Path) -> None:
    rows, stats = read_rows(dataset_v3), json.loads((dataset_v3 / "meta/stats.json").read_text())
    assert set(stats) == {*rows, "observation.images.top", "observation.images.wrist"}
    for key, values in rows.items():
        assert stats[key].pop("count") == [len(values)]
        expected = exact_stats(values.reshape(len(values), -1).astype(np.float64))
        assert stats[key].keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(stats[key][name], value, rtol=1e-12, err_msg=f"{key} {name}")


@pytest.mark.parametrize(("version", "codec"), [("v3.0", "h264"), ("v3.0", "hevc"), ("v3.0", "av1"), ("v2.1", "h264")])
def test_the_same_spec_gives_the_same_bytes(version: str, codec: str, tmp_path: Path) -> None:
    spec = replace(TINY, episodes=3, version=version, codec=codec, noise=4.0)
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        make_dataset(tmp_path / name, replace(spec, seed=seed))
    one, two, other = (digests(tmp_path / name) for name in ("one", "two", "other"))
    assert one == two
    assert all(one[name] != other[name] for name in one if name.startswith(("data", "videos")))
    ids = [found for path in sorted((tmp_path / "one/videos").rglob("*top*/**/*.mp4")) for found in frame_ids(path)]
    assert ids == [(e, f) for e, length in enumerate(episode_lengths(spec)) for f in range(length)]


@pytest.mark.parametrize("version", PATHS)
def test_episodes_of_one_frame(version: str, tmp_path: Path) -> None:
    make_dataset(tmp_path, replace(TINY, episodes=3, frames=1, version=version, cameras=1))  # an empty folder is used
    videos = sorted((tmp_path / "videos").rglob("*.mp4"))
    assert [ids for video in videos for ids in frame_ids(video)] == [(0, 0), (1, 0), (2, 0)]


def test_progress_is_reported_and_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    done: list[int] = []

    def interrupt(episode_index: int) -> None:
        done.append(episode_index)
        if episode_index == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_dataset(tmp_path / "made", TINY, on_episode=interrupt)
    assert done == [0, 1, 2]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_files_is_rejected_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made/notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        make_dataset(tmp_path / "made", TINY)
    assert [path.name for path in tmp_path.rglob("*")] == ["made", "notes.txt"]


@pytest.mark.parametrize(
    "change",
    [
        {"episodes": 0},
        {"episodes": 65537},
        {"frames": 4000, "vary_length": True},
        {"cameras": 4},
        {"height": 62},
        {"width": 97},
        {"width": 64, "height": 480},
        {"seed": -1},
        {"version": "v3"},
        {"codec": "vp9"},
        {"state_noise": 2.0},
    ],
)
def test_an_invalid_spec_is_rejected_by_the_name_of_its_flag(change: dict, tmp_path: Path) -> None:
    name, value = next(iter(change.items()))
    with pytest.raises(ValueError, match=f"^--{name}={value}: "):
        make_dataset(tmp_path / "made", replace(SyntheticSpec(), **change))
    assert list(tmp_path.iterdir()) == []
