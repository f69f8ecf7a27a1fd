"""Rows of `read_lerobot`, read in this process: equal to LeRobot's, right frames, plans, rejected arguments."""

import json
import pickle
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lerobot_rows import (
    PARTITIONINGS,
    SIZE,
    TOP,
    WRIST,
    check_frames,
    expected_ids,
    ids_of,
    read_here,
)
from ray.data.block import BlockAccessor

import vlatune
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.demo.generate import SyntheticSpec, draw_frame_id, make_dataset
from vlatune.feed.read_lerobot import LeRobotSource


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
@pytest.mark.parametrize("partitioning", PARTITIONINGS)
def test_rows_do_not_depend_on_partitioning_and_block_size(partitioning, version, dataset_v3, dataset_v21):
    root = {"v3.0": dataset_v3, "v2.1": dataset_v21}[version]
    for block_rows in (1, 4, 13, 1000):
        check_frames(root, read_here, partitioning, block_rows)


def test_a_read_task_imports_neither_torch_nor_lerobot(dataset_v3, tmp_path):
    task = LeRobotSource(vlatune.plan_read(dataset_v3, resize=SIZE, episodes=[0])).get_read_tasks(parallelism=1)[0]
    (tmp_path / "task").write_bytes(pickle.dumps(task.read_fn))
    code = f"""
import pickle, sys
rows = sum(len(table) for table in pickle.load(open({str(tmp_path / "task")!r}, "rb"))())
print(rows, *({{"torch", "lerobot", "torchvision", "datasets"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(task.metadata.num_rows)]


@pytest.mark.parametrize("seed", range(4))
def test_rows_windows_and_masks_equal_lerobots(seed, tmp_path):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    rng = np.random.default_rng(seed)
    spec = SyntheticSpec(
        episodes=int(rng.integers(2, 5)), frames=int(rng.integers(1, 9)), cameras=1, height=64, width=80, seed=seed,
        fps=int(rng.choice([5, 10, 15])), episodes_per_file=int(rng.integers(1, 4)), vary_length=True,
    )  # fmt: skip
    make_dataset(tmp_path / "d", spec)
    horizon = int(rng.integers(1, 12))
    back = [-2 / spec.fps, 0.0, 1 / spec.fps]
    ours = read_here(
        tmp_path / "d", resize=None, action_horizon=horizon, delta_timestamps={TOP: back, "observation.state": back},
        partitioning=PARTITIONINGS[seed], block_bytes=int(rng.integers(1, 400_000)),
    )  # fmt: skip
    windows = {TOP: back, "observation.state": back, "action": [step / spec.fps for step in range(horizon)]}
    theirs = LeRobotDataset(
        "a/b", root=tmp_path / "d", video_backend="pyav", delta_timestamps=windows, return_uint8=True
    )
    assert len(theirs) == len(ours["index"])
    for row in range(len(theirs)):
        item = theirs[row]
        assert ours["task"][row] == item["task"]
        for key, values in ours.items():
            if key not in ("task", "dataset_index"):
                assert np.array_equal(values[row], item[key].numpy()), (row, key)


def test_actions_without_a_window_and_with_custom_offsets(dataset_v3):
    single = read_here(dataset_v3, cameras=[], action_horizon=None)
    assert single["action"].shape == (len(single["index"]), 3)
    assert "action_is_pad" not in single
    ours = read_here(dataset_v3, cameras=[], action_horizon=7, delta_timestamps={"action": [0.1, 0.3]})
    assert ours["action"].shape[1:] == (2, 3)
    assert np.array_equal(ours["action"][:5], np.stack([single["action"][1:6], single["action"][3:8]], axis=1))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """Record a dataset with LeRobot: images in parquet, and features of other types."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    features = {
        "actions": {"dtype": "float32", "shape": (4,), "names": None},
        "state": {"dtype": "float64", "shape": (3,), "names": None},
        "image": {"dtype": "image", "shape": (64, 96, 3), "names": ["height", "width", "channels"]},
        "wrist_image": {"dtype": "image", "shape": (3, 48, 48), "names": ["channels", "height", "width"]},
        "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
        "next.done": {"dtype": "bool", "shape": (1,), "names": None},
        "grid": {"dtype": "int64", "shape": (2, 3), "names": None},
        "note": {"dtype": "string", "shape": (1,), "names": None},
    }
    root = tmp_path_factory.mktemp("recorded") / "d"
    dataset = LeRobotDataset.create("a/b", fps=10, features=features, root=root, use_videos=False)
    rng = np.random.default_rng(0)
    for episode, length in enumerate((5, 3, 6)):
        for frame in range(length):
            images = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((64, 96), (48, 48))]
            for image in images:
                draw_frame_id(image, episode, frame)
            row = {
                "actions": rng.normal(size=4).astype(np.float32),
                "state": rng.normal(size=3),
                "image": images[0],
                "wrist_image": images[1],
                "next.reward": np.array([frame / 7], np.float32),
                "next.done": np.array([frame == length - 1]),
                "grid": rng.integers(0, 9, (2, 3)),
                "note": f"{episode}-{frame}",
            }
            dataset.add_frame({**row, "task": f"task {episode % 2}"})
        dataset.save_episode()
    dataset.finalize()
    return root


@pytest.mark.parametrize("block_bytes", [1, 200_000])
def test_images_in_parquet_and_other_features_equal_lerobots(recorded, block_bytes):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    windows = {"actions": [0.0, 0.1, 0.2], "image": [-0.1, 0.0], "next.reward": [0.0, 0.1]}
    names = {"actions": "action", "state": "observation.state", "image": TOP}
    ours = read_here(
        recorded, resize=None, action_horizon=3, rename_map=names, block_bytes=block_bytes,
        delta_timestamps={"image": [-0.1, 0.0], "next.reward": [0.0, 0.1]},
    )  # fmt: skip
    theirs = LeRobotDataset("a/b", root=recorded, delta_timestamps=windows)
    own_of = {names.get(key, key): key for key in theirs.features}
    for row in range(len(theirs)):
        item = theirs[row]
        assert ours["task"][row] == item["task"]
        assert ours["note"][row] == item["note"]
        assert np.array_equal(ours["observation.state"][row], item["state"].numpy().astype(np.float32))
        for key in ("action", "next.done", "next.reward", "grid", "timestamp", "index", "task_index"):
            assert np.array_equal(ours[key][row], item[own_of[key]].numpy()), (row, key)
        for key in ("action", TOP, "next.reward"):
            assert np.array_equal(ours[f"{key}_is_pad"][row], item[f"{own_of[key]}_is_pad"].numpy()), (row, key)
        for key in (TOP, "wrist_image"):
            assert np.array_equal(ours[key][row], (item[own_of[key]] * 255).round().byte().numpy()), (row, key)
    assert ours["grid"].dtype == np.int64
    assert ours["next.done"].shape == (14,)
    assert ours["wrist_image"].shape == (14, 3, 48, 48)


def reencode(root: Path, encoder: str, options: dict[str, str]) -> None:
    """Encode with long GOPs, B-frames and a variable frame rate, in the mp4 files and in the rows."""
    meta = load_meta(str(root))
    wander = np.random.default_rng(0).integers(0, 60, int(meta.episodes.length.max()))
    wander[0] = 0  # meta/episodes states when an episode begins
    for camera in meta.cameras:
        files = {meta.video_path(position, camera) for position in range(len(meta.episodes))}
        for file in files:
            inside = [at for at in range(len(meta.episodes)) if meta.video_path(at, camera) == file]
            begins = meta.episodes.videos[camera].from_s
            times = [
                begins[at] * 1000 + frame * 100 + wander[frame]
                for at in inside
                for frame in range(meta.episodes.length[at])
            ]
            with av.open(str(root / file)) as source:
                frames = [frame.to_ndarray(format="rgb24") for frame in source.decode(video=0)]
            assert len(frames) == len(times)
            write_video(root / file, frames, [round(time) for time in times], encoder, options)
    for path in (root / "data").glob("*/*.parquet"):
        table = pq.read_table(path)
        frame = table.column("frame_index").to_numpy()
        seconds = pa.array((frame / 10 + wander[frame] / 1000).astype(np.float32))
        pq.write_table(table.set_column(table.column_names.index("timestamp"), "timestamp", seconds), path)


def write_video(path: Path, frames, times_ms: list[int], encoder: str, options: dict[str, str]) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream(encoder, rate=10, options=options)
        stream.height, stream.width, stream.pix_fmt = *frames[0].shape[:2], "yuv420p"
        stream.codec_context.time_base = stream.time_base = Fraction(1, 1000)
        for image, time in zip(frames, times_ms, strict=True):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


ENCODINGS = {
    "libx264": {"g": "30", "bf": "3", "crf": "18", "x264-params": "b-pyramid=normal:open-gop=1:log=-1"},
    "libx265": {
        "preset": "fast",
        "crf": "18",
        "x265-params": "bframes=3:keyint=30:open-gop=1:log-level=none:pools=none",
    },
    "libsvtav1": {"g": "30", "crf": "20", "preset": "8", "svtav1-params": "lp=1"},
}


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
@pytest.mark.parametrize("encoder", ENCODINGS)
def test_b_frames_and_a_variable_frame_rate_give_the_right_frames(version, encoder, tmp_path):
    root = tmp_path / "d"
    make_dataset(root, SyntheticSpec(episodes=3, frames=30, cameras=1, episodes_per_file=2, version=version))
    reencode(root, encoder, ENCODINGS[encoder])
    if encoder == "libx264":
        with av.open(str(root / load_meta(str(root)).video_path(0, TOP))) as made:
            order = [packet.pts for packet in made.demux(video=0) if packet.pts is not None]
        assert order != sorted(order), "the encoder made no B-frames"
    for block_bytes in (1, 7 * 30_000, 10**9):
        rows = read_here(root, resize=None, action_horizon=None, block_bytes=block_bytes)
        assert ids_of(rows[TOP]) == expected_ids(root)


def test_cameras_are_renamed_per_dataset(dataset_v3):
    maps = [{TOP: "camera.a", WRIST: "camera.b"}, {TOP: "camera.b", WRIST: "camera.a"}]
    rows = read_here([dataset_v3, dataset_v3], resize=SIZE, action_horizon=1, rename_map=maps, episodes=[2])
    half = len(rows["index"]) // 2
    assert np.array_equal(rows["camera.a"][:half], rows["camera.b"][half:])
    assert not np.array_equal(rows["camera.a"], rows["camera.b"])
    by_new_name = read_here(dataset_v3, resize=SIZE, rename_map=maps[0], cameras=["camera.b"], episodes=[2])
    assert np.array_equal(by_new_name["camera.b"], rows["camera.b"][:half])
    assert "camera.a" not in by_new_name


def test_datasets_with_different_cameras_or_actions_are_rejected(dataset_v3, recorded, tmp_path, caplog):
    names = {"actions": "action", "state": "observation.state", "image": TOP, "wrist_image": WRIST}
    with pytest.raises(ValueError, match=r"feature 'action': .* has float32 of \(50, 3\), .* has float32 of \(50, 4\)"):
        vlatune.plan_read([dataset_v3, recorded], rename_map=[{}, names])
    with pytest.raises(ValueError, match=rf"feature '{TOP}': .* has uint8 of \(3, 96, 96\), .* has none"):
        vlatune.plan_read([dataset_v3, recorded], rename_map={"actions": "action"}, resize=None)
    info = json.loads((dataset_v3 / "meta/info.json").read_text())
    other = Path(shutil.copytree(dataset_v3, tmp_path / "other"))
    for name, dtype in {"extra": "float32", "tree": "struct"}.items():
        info["features"][name] = {"dtype": dtype, "shape": [2], "names": None}
    (other / "meta/info.json").write_text(json.dumps(info))
    rows = read_here([dataset_v3, other], cameras=[], episodes=[0])
    assert not {"extra", "tree"} & rows.keys()
    assert "'extra' is left out" in caplog.text
    assert f"'{other}': features that are neither numbers nor a text are left out: 'tree' (struct)" in caplog.text


@pytest.mark.parametrize("partitioning", PARTITIONINGS)
def test_the_plan_adds_up_without_opening_data(partitioning, dataset_v3, tmp_path):
    root = Path(shutil.copytree(dataset_v3, tmp_path / "only meta"))
    shutil.rmtree(root / "data")
    shutil.rmtree(root / "videos")
    plan = vlatune.plan_read(root, partitioning=partitioning, block_bytes=2_000_000)
    meta = load_meta(str(root))
    assert plan.rows == sum(task.rows for task in plan.tasks) == meta.num_frames
    assert plan.bytes == sum(task.bytes for task in plan.tasks)
    names = {meta.data_path(at) for at in range(7)} | {
        meta.video_path(at, one) for at in range(7) for one in meta.cameras
    }
    assert {name for _, name in plan.files} == names
    assert {episode for task in plan.tasks for episode in task.episodes} == set(range(7))
    text = str(plan)
    assert f"{partitioning}: {len(plan.tasks)} tasks, {meta.num_frames} rows" in text
    assert len(text.splitlines()) == 2 + min(10, len(plan.tasks)) + (len(plan.tasks) > 10)


def test_planned_bytes_equal_the_rows_bytes(dataset_v3):
    plan = vlatune.plan_read(dataset_v3, resize=SIZE, action_horizon=4)
    tasks = LeRobotSource(plan).get_read_tasks(parallelism=1)
    real = sum(BlockAccessor.for_block(block).size_bytes() for task in tasks for block in task())
    assert plan.bytes == pytest.approx(real, rel=0.02)
    assert sum(task.metadata.size_bytes for task in tasks) == plan.bytes
    assert tasks[0].metadata.input_files == plan.tasks[0].files


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cameras": ["observation.images.tpo"]},
            r"no camera 'observation.images.tpo'; did you mean observation.images.t",
        ),
        ({"cameras": "top"}, r"cameras='top': expected a list of names"),
        ({"episodes": [3, 99]}, r"there is no episode 99; it has 7 episodes, 0 to 6"),
        ({"episodes": []}, r"no episode is selected"),
        ({"partitioning": "files"}, r"partitioning='files' is not known; .*file_group"),
        ({"action_horizon": 0}, r"action_horizon=0: must be 1 or more"),
        ({"resize": (0, 224)}, r"resize=\(0, 224\): expected \(height, width\)"),
        ({"block_bytes": 0}, r"block_bytes=0: must be 1 or more"),
        ({"on_bad_episode": "ignore"}, r"on_bad_episode='ignore': expected one of fail, skip"),
        (
            {"delta_timestamps": {"actoin": [0.0]}},
            r"delta_timestamps\['actoin'\]: .* no such feature; did you mean action",
        ),
        ({"delta_timestamps": {"action": []}}, r"delta_timestamps\['action'\] is empty"),
        ({"delta_timestamps": {"action": [0.05]}}, r"0.05 s is not a multiple of 1/10"),
        (
            {"rename_map": {"observation.images.tip": "x"}},
            r"has no feature 'observation.images.tip'; did you mean",
        ),
        ({"rename_map": {TOP: WRIST}}, rf"'{WRIST}' cannot be called '{WRIST}', as '{TOP}' is called that"),
        ({"rename_map": {"index": "row"}}, r"'index' keeps its name"),
        ({"rename_map": [{}, {}]}, r"rename_map: 2 maps for 1 datasets"),
    ],
)
def test_invalid_arguments_are_rejected_on_the_driver(options, message, dataset_v3):
    with pytest.raises(ValueError, match=message):
        vlatune.read_lerobot(dataset_v3, **options)


def test_an_action_of_another_name_is_suggested(recorded):
    with pytest.raises(ValueError, match=r"no feature 'action', .* name it with rename_map=\{'actions': 'ac"):
        vlatune.read_lerobot(recorded)
    assert "actions" in read_here(recorded, cameras=[], action_horizon=None)


@pytest.mark.parametrize("how", ["depth", "one channel"])
def test_depth_and_other_non_rgb_cameras_are_rejected_unless_excluded(how, dataset_v3, tmp_path):
    root = Path(shutil.copytree(dataset_v3, tmp_path / "depth"))
    info = json.loads((root / "meta/info.json").read_text())
    if how == "depth":
        info["features"][WRIST]["info"]["is_depth_map"] = True
    else:
        info["features"][WRIST]["shape"] = [96, 96, 1]
    (root / "meta/info.json").write_text(json.dumps(info))
    with pytest.raises(
        ValueError, match=rf"camera '{WRIST}' is .*, and only RGB is read; leave it out: cameras=\['{TOP}'\]"
    ):
        vlatune.read_lerobot(root)
    assert WRIST not in read_here(root, cameras=[TOP], episodes=[0], resize=SIZE)
