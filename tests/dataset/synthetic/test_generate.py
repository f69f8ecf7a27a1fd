"""Made datasets are what LeRobot says they are: it reads them without a word, and gets the right frame for each row."""

import hashlib
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pyarrow.parquet as pq
import pytest

from vlatune.dataset.synthetic.generate import SyntheticSpec, episode_lengths, make_dataset, read_frame_id
from vlatune.dataset.synthetic.world import CAMERAS, make_episode
from vlatune.dataset.synthetic.writer import ENCODERS
from vlatune.dataset.synthetic.writer_meta import LAYOUTS, plan_places

TINY = SyntheticSpec(episodes=7, frames=9, height=64, width=64, episodes_per_file=2, vary_length=True)


def open_with_lerobot(folder: Path, **options):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    return LeRobotDataset("synthetic/test", root=folder, video_backend="pyav", **options)


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def frame_ids(path: Path) -> list[tuple[int, int] | None]:
    with av.open(str(path)) as container:
        return [read_frame_id(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]


def read_rows(folder: Path) -> dict[str, np.ndarray]:
    """All rows of all data files, as arrays."""
    tables = [pq.read_table(path).to_pydict() for path in sorted((folder / "data").glob("*/*.parquet"))]
    return {key: np.array([value for table in tables for value in table[key]]) for key in tables[0]}


def test_lerobot_reads_v3_without_a_word(dataset_v3: Path, caplog, capfd) -> None:
    import lerobot.datasets.lerobot_dataset  # noqa: F401  (what is said on import is not about the dataset)

    capfd.readouterr()
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        open_with_lerobot(dataset_v3)[0]
    assert caplog.records == []
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("codec", ENCODERS)
def test_lerobot_gets_the_right_frames_and_task_for_every_row(codec: str, tmp_path: Path) -> None:
    spec = replace(TINY, codec=codec, cameras=3, fps=30)
    make_dataset(tmp_path / "made", spec)
    dataset = open_with_lerobot(tmp_path / "made", return_uint8=True)
    worlds = [make_episode(0, number, length, 30) for number, length in enumerate(episode_lengths(spec))]
    expected = [(number, frame) for number, world in enumerate(worlds) for frame in range(len(world.state_TS))]
    assert len(dataset) == len(expected)
    for index, (episode_index, frame_index) in enumerate(expected):
        item, world = dataset[index], worlds[episode_index]
        assert (item["index"], item["episode_index"], item["frame_index"]) == (index, episode_index, frame_index)
        assert item["task"] == world.task
        assert np.array_equal(item["observation.state"].numpy(), world.state_TS[frame_index])
        assert np.array_equal(item["action"].numpy(), world.action_TA[frame_index])
        for camera in CAMERAS:
            assert read_frame_id(item[f"observation.images.{camera}"]) == (episode_index, frame_index)


def test_lerobot_reads_action_windows_and_a_choice_of_episodes(dataset_v3: Path) -> None:
    """Chosen episodes lie in the second of two data files and the third of three mp4 files."""
    dataset = open_with_lerobot(dataset_v3, episodes=[5, 6], delta_timestamps={"action": [0.0, 0.1, 0.2]})
    rows = read_rows(dataset_v3)
    last = dataset[len(dataset) - 1]
    assert last["action_is_pad"].tolist() == [False, True, True]
    assert np.array_equal(dataset[0]["action"].numpy(), rows["action"][rows["episode_index"] == 5][:3])


def test_decoded_pictures_are_those_of_the_world(dataset_v3: Path) -> None:
    dataset = open_with_lerobot(dataset_v3, return_uint8=True)
    world = make_episode(0, 0, int(dataset.meta.episodes[0]["length"]), 10)
    for camera, name in enumerate(CAMERAS[:2]):
        seen = dataset[3][f"observation.images.{name}"].numpy().transpose(1, 2, 0).astype(int)
        error = np.abs(seen - world.render(3, camera, 96, 96))[24:]  # below the id
        assert error.mean() < 8


def test_v3_files_begin_at_different_episodes(dataset_v3: Path) -> None:
    meta = pq.read_table(dataset_v3 / "meta/episodes").to_pydict()
    key = "videos/observation.images.top"
    assert meta["data/file_index"] == [0, 0, 0, 0, 0, 1, 1]
    assert meta[f"{key}/file_index"] == [0, 0, 0, 1, 1, 1, 2]
    assert [meta[f"{key}/from_timestamp"][first] for first in (0, 3, 6)] == [0.0, 0.0, 0.0]
    assert len(set(meta["length"])) > 1
    ends = np.cumsum(meta["length"]).tolist()
    assert meta["dataset_to_index"] == ends
    assert meta["dataset_from_index"] == [0, *ends[:-1]]
    for begin, end, length in zip(
        meta[f"{key}/from_timestamp"], meta[f"{key}/to_timestamp"], meta["length"], strict=True
    ):
        assert end - begin == pytest.approx(length / 10)


@pytest.mark.parametrize("codec", ENCODERS)
def test_decoding_can_begin_at_every_episode(codec: str, tmp_path: Path) -> None:
    """Keyframes come every second frame at the latest, and again where an episode of odd length was before."""
    make_dataset(tmp_path / "made", replace(TINY, frames=5, vary_length=False, episodes_per_file=3, codec=codec))
    with av.open(str(tmp_path / "made/videos/observation.images.top/chunk-000/file-000.mp4")) as container:
        stream = container.streams.video[0]
        packets = [packet for packet in container.demux(stream) if packet.size]
        keyframes = {round(packet.pts * stream.time_base * 10) for packet in packets if packet.is_keyframe}
    assert len(packets) == 15
    assert {0, 2, 4, 5, 10} <= keyframes


def test_v3_episodes_have_the_columns_that_lerobot_records(dataset_v3: Path, tmp_path: Path) -> None:
    """A dataset with our features, recorded by LeRobot itself, has the same columns and types in all its tables."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    ours = open_with_lerobot(dataset_v3)
    features = {key: feature for key, feature in ours.features.items() if "." in key or key == "action"}
    theirs = LeRobotDataset.create("synthetic/theirs", fps=10, features=features, root=tmp_path / "theirs")
    for frame_index in range(3):
        item = ours[frame_index]
        frame = {key: item[key].numpy() for key in features}
        pictures = {key: item[key].permute(1, 2, 0).numpy() for key in ours.meta.video_keys}
        theirs.add_frame(frame | pictures | {"task": item["task"]})
    theirs.save_episode()
    theirs.finalize()
    for name in ("meta/episodes/chunk-000/file-000.parquet", "data/chunk-000/file-000.parquet", "meta/tasks.parquet"):
        schemas = [pq.read_schema(root / name) for root in (dataset_v3, tmp_path / "theirs")]
        assert {field.name: field.type for field in schemas[0]} == {field.name: field.type for field in schemas[1]}
    infos = [json.loads((root / "meta/info.json").read_text()) for root in (dataset_v3, tmp_path / "theirs")]
    assert infos[0].keys() == infos[1].keys()
    assert infos[0]["features"].keys() == infos[1]["features"].keys()
    video_infos = [info["features"]["observation.images.top"]["info"] for info in infos]
    assert video_infos[0].keys() == video_infos[1].keys()


def test_stats_are_exact(dataset_v3: Path) -> None:
    rows, stats = read_rows(dataset_v3), json.loads((dataset_v3 / "meta/stats.json").read_text())
    assert set(stats) == {*rows, "observation.images.top", "observation.images.wrist"}
    for key, values in rows.items():
        values = values.reshape(len(values), -1).astype(np.float64)
        expected = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
        expected |= {f"q{percent:02}": np.percentile(values, percent, axis=0) for percent in (1, 10, 50, 90, 99)}
        assert stats[key].pop("count") == [len(values)]
        assert stats[key].keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(stats[key][name], value, rtol=1e-12, err_msg=f"{key} {name}")


def test_stats_agree_with_lerobots_own(dataset_v3: Path) -> None:
    """Moments to float32. Its quantiles come from a histogram of 5000 bins and jump to a neighbouring value at a step,
    so an estimate must lie between the values next to the exact quantile, give or take a bin."""
    from lerobot.datasets.compute_stats import get_feature_stats

    rows, stats = read_rows(dataset_v3), json.loads((dataset_v3 / "meta/stats.json").read_text())
    for key in ("observation.state", "action"):
        values = rows[key].astype(np.float32)
        theirs = get_feature_stats(values, axis=0, keepdims=False)
        for name in ("min", "max", "mean", "std", "count"):
            np.testing.assert_allclose(stats[key][name], theirs[name], rtol=1e-4, atol=1e-6)
        ordered, bins = np.sort(values, axis=0), 2 * np.ptp(values, axis=0) / 5000
        for percent in (1, 10, 50, 90, 99):
            position = percent / 100 * (len(values) - 1)
            below, above = (
                ordered[max(math.floor(position) - 1, 0)],
                ordered[min(math.ceil(position) + 1, len(values) - 1)],
            )
            for quantile in (theirs[f"q{percent:02}"], np.array(stats[key][f"q{percent:02}"])):
                assert (quantile >= below - bins).all()
                assert (quantile <= above + bins).all()


def test_image_stats_agree_with_lerobots_own(tmp_path: Path) -> None:
    """Eight frames per episode: all of them are in the statistics, here and there."""
    from lerobot.datasets.compute_stats import get_feature_stats

    make_dataset(tmp_path / "made", replace(TINY, frames=8, episodes=2, vary_length=False, cameras=1))
    stats = json.loads((tmp_path / "made/meta/stats.json").read_text())["observation.images.top"]
    pictures = []
    for path in sorted((tmp_path / "made/videos").rglob("*.mp4")):
        with av.open(str(path)) as container:
            pictures += [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    theirs = get_feature_stats(np.stack(pictures).transpose(0, 3, 1, 2), axis=(0, 2, 3), keepdims=True)
    assert stats["count"] == theirs["count"].tolist() == [16]
    assert np.shape(stats["mean"]) == (3, 1, 1)
    for name in ("mean", "std"):  # ours are of the pictures before encoding
        np.testing.assert_allclose(stats[name], theirs[name][0] / 255, atol=0.03, err_msg=name)
    for name in ("q10", "q50", "q90"):  # theirs are averages of estimates; numpy's are held exactly in the next test
        np.testing.assert_allclose(stats[name], theirs[name][0] / 255, atol=0.12, err_msg=name)


def test_pixel_counts_give_numpys_quantiles() -> None:
    from vlatune.dataset.synthetic.writer_meta import PixelCounts

    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (5, 7, 11, 3), dtype=np.uint8) // np.array([1, 3, 9], np.uint8)
    counts = PixelCounts()
    for image in images:
        counts.add(image)
    stats, pixels = counts.stats(), images.reshape(-1, 3) / 255
    expected = {"min": pixels.min(0), "max": pixels.max(0), "mean": pixels.mean(0), "std": pixels.std(0)}
    expected |= {f"q{percent:02}": np.percentile(pixels, percent, axis=0) for percent in (1, 10, 50, 90, 99)}
    for name, value in expected.items():
        np.testing.assert_allclose(stats[name][:, 0, 0], value, atol=1e-12, err_msg=name)


def test_v21_is_laid_out_by_episode(dataset_v21: Path, dataset_v3: Path) -> None:
    info = json.loads((dataset_v21 / "meta/info.json").read_text())
    episodes = [json.loads(line) for line in (dataset_v21 / "meta/episodes.jsonl").read_text().splitlines()]
    tasks = [json.loads(line)["task"] for line in (dataset_v21 / "meta/tasks.jsonl").read_text().splitlines()]
    assert (info["codebase_version"], info["total_episodes"], info["total_videos"]) == ("v2.1", 7, 14)
    for episode in episodes:
        number, length = episode["episode_index"], episode["length"]
        names = {"episode_chunk": 0, "episode_index": number}
        rows = pq.read_table(dataset_v21 / info["data_path"].format(**names)).to_pydict()
        assert rows["frame_index"] == list(range(length))
        assert rows["episode_index"] == [number] * length
        assert {tasks[task_index] for task_index in rows["task_index"]} == set(episode["tasks"])
        for camera in CAMERAS[:2]:
            video = info["video_path"].format(video_key=f"observation.images.{camera}", **names)
            assert frame_ids(dataset_v21 / video) == [(number, frame) for frame in range(length)]
    older, newer = read_rows(dataset_v21), read_rows(dataset_v3)
    assert all(np.array_equal(older[key], newer[key]) for key in newer)


def test_lerobots_converter_reads_v21(dataset_v21: Path, tmp_path: Path) -> None:
    from lerobot.scripts.convert_dataset_v21_to_v30 import convert_dataset

    shutil.copytree(dataset_v21, tmp_path / "made")
    convert_dataset("synthetic/test", root=tmp_path / "made", push_to_hub=False)
    dataset = open_with_lerobot(tmp_path / "made", return_uint8=True)
    for index in range(0, len(dataset), 5):
        item = dataset[index]
        assert read_frame_id(item["observation.images.wrist"]) == (item["episode_index"], item["frame_index"])


@pytest.mark.parametrize("codec", ENCODERS)
@pytest.mark.parametrize("version", LAYOUTS)
def test_the_same_spec_gives_the_same_bytes(version: str, codec: str, tmp_path: Path) -> None:
    spec = replace(TINY, episodes=3, version=version, codec=codec)
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        make_dataset(tmp_path / name, replace(spec, seed=seed))
    one, two, other = (digests(tmp_path / name) for name in ("one", "two", "other"))
    assert one == two
    assert all(one[name] != other[name] for name in one if name.startswith(("data", "videos")))


def test_making_a_dataset_is_silent_and_needs_neither_torch_nor_ray(tmp_path: Path) -> None:
    """In a process of its own: encoders and libav decide once per process whether they print."""
    code = """if True:
        import sys
        from pathlib import Path
        from vlatune.dataset.synthetic.generate import SyntheticSpec, make_dataset
        for codec in ("h264", "hevc", "av1"):
            make_dataset(Path(sys.argv[1], codec), SyntheticSpec(episodes=1, frames=3, codec=codec))
        assert not {"torch", "ray", "lerobot"} & set(sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_lengths_are_given_or_vary_a_little() -> None:
    assert episode_lengths(SyntheticSpec(episodes=3, frames=5)) == [5, 5, 5]
    lengths = episode_lengths(SyntheticSpec(episodes=200, frames=50, vary_length=True))
    assert (min(lengths), max(lengths)) == (40, 60)
    assert lengths[:9] == episode_lengths(SyntheticSpec(episodes=9, frames=50, vary_length=True))


@pytest.mark.parametrize("version", LAYOUTS)
def test_episodes_of_one_frame_can_be_made(version: str, tmp_path: Path) -> None:
    make_dataset(tmp_path / "made", replace(TINY, episodes=3, frames=1, version=version, cameras=1))
    videos = sorted((tmp_path / "made/videos").rglob("*.mp4"))
    assert [ids for video in videos for ids in frame_ids(video)] == [(0, 0), (1, 0), (2, 0)]


def test_places_follow_the_example_and_chunks_hold_a_thousand_files() -> None:
    places = plan_places([5, 5, 5, 5], per_data_file=3, per_video_file=2)
    assert [place.data_file for place in places] == [0, 0, 0, 1]
    assert [(place.video_file, place.video_from_frame) for place in places] == [(0, 0), (0, 5), (1, 0), (1, 5)]
    assert LAYOUTS["v3.0"].data_file(1001) == "data/chunk-001/file-001.parquet"
    assert LAYOUTS["v3.0"].video_file(999, "cam") == "videos/cam/chunk-000/file-999.mp4"
    assert LAYOUTS["v2.1"].video_file(1001, "cam") == "videos/chunk-001/cam/episode_001001.mp4"


def test_every_episode_is_announced_once_it_is_written(tmp_path: Path) -> None:
    done: list[int] = []
    make_dataset(tmp_path / "made", replace(TINY, episodes=3), on_episode=done.append)
    assert done == [0, 1, 2]


def test_an_interrupted_make_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(episode_index: int) -> None:
        if episode_index == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_dataset(tmp_path / "made", TINY, on_episode=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_an_occupied_folder_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made/notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"made'.* is not empty; give another folder or remove this one"):
        make_dataset(tmp_path / "made", TINY)
    assert [path.name for path in tmp_path.rglob("*")] == ["made", "notes.txt"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    make_dataset(tmp_path, replace(TINY, episodes=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "meta", "videos"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"episodes": 0}, "--episodes=0: must be 1 or more"),
        ({"episodes": 65537}, "--episodes=65537: must be 65536 or less"),
        ({"frames": 0}, "--frames=0: must be 1 or more"),
        ({"frames": 4000, "vary_length": True}, r"--frames=4000: the longest has 4\d\d\d, must be 4096 or less"),
        ({"cameras": 4}, "--cameras=4: must be 3 or less"),
        ({"height": 62}, "--height=62: must be 64 or more"),
        ({"width": 97}, "--width=97: must be even"),
        ({"height": 480, "width": 64}, "--width=64: must be 480/4 or more"),
        ({"fps": 0}, "--fps=0: must be 1 or more"),
        ({"seed": -1}, "--seed=-1: must be 0 or more"),
        ({"episodes_per_file": 0}, "--episodes_per_file=0: must be 1 or more"),
        ({"version": "v3"}, "--version=v3: must be one of v3.0, v2.1"),
        ({"codec": "vp9"}, "--codec=vp9: must be one of h264, hevc, av1"),
        ({"state_noise": 2.0}, "--state_noise=2.0: must be 0 to 1"),
    ],
)
def test_what_cannot_be_made_is_refused(change: dict, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=complaint):
        make_dataset(tmp_path / "made", replace(SyntheticSpec(), **change))
    assert list(tmp_path.iterdir()) == []


def test_texture_and_noise_are_the_same_for_the_same_seed_and_spare_the_frame_id(tmp_path: Path) -> None:
    clean = SyntheticSpec(episodes=2, frames=6)
    noisy = replace(clean, texture=8.0, noise=4.0)
    for name, spec in {"clean": clean, "noisy": noisy, "again": noisy}.items():
        make_dataset(tmp_path / name, spec)
    films = {name: sorted((tmp_path / name / "videos").rglob("*.mp4")) for name in ("clean", "noisy", "again")}
    for one, two, plain in zip(films["noisy"], films["again"], films["clean"], strict=True):
        assert one.read_bytes() == two.read_bytes()
        assert one.stat().st_size > 2 * plain.stat().st_size
        assert frame_ids(one) == [(e, f) for e in range(2) for f in range(6)]


def test_rough_readings_hide_where_the_gripper_is_heading_and_pictures_and_actions_do_not(tmp_path: Path) -> None:
    exact = SyntheticSpec(episodes=12, frames=20, one_task=True, cameras=1)
    rough = replace(exact, state_noise=0.05)
    for name, spec in {"exact": exact, "rough": rough, "again": rough}.items():
        make_dataset(tmp_path / name, spec)
    films = {name: sorted((tmp_path / name / "videos").rglob("*.mp4")) for name in ("exact", "rough")}
    assert [file.read_bytes() for file in films["exact"]] == [file.read_bytes() for file in films["rough"]]
    rows = {name: read_rows(tmp_path / name) for name in ("exact", "rough", "again")}
    state, action = ({name: one[key] for name, one in rows.items()} for key in ("observation.state", "action"))
    np.testing.assert_array_equal(state["rough"], state["again"])
    np.testing.assert_array_equal(action["rough"], action["exact"])
    assert (state["rough"] - state["exact"]).std() == pytest.approx(0.05, rel=0.1)
    velocity = np.concatenate([action["exact"][at : at + 19, :2] for at in range(0, 240, 20)])
    moved = {
        name: np.concatenate([np.diff(state[name][at : at + 20, :2], axis=0) for at in range(0, 240, 20)]) * 10
        for name in ("exact", "rough")
    }
    assert np.abs(moved["exact"] - velocity).mean() < 1e-5
    assert np.abs(moved["rough"] - velocity).mean() > 1.2 * np.abs(velocity - velocity.mean(axis=0)).mean()


@pytest.mark.parametrize("codec", ["av1", "h264", "hevc"])
def test_encoding_leaves_the_process_as_it_was(codec: str, tmp_path: Path) -> None:
    """libsvtav1 makes a real-time process of one that root runs, and of all that it starts."""
    before = os.sched_getscheduler(0)
    make_dataset(tmp_path / codec, SyntheticSpec(episodes=1, frames=4, codec=codec))
    assert os.sched_getscheduler(0) == before
