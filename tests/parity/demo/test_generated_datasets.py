"""Generated datasets are LeRobot datasets: LeRobot reads the right frame for each row and has the same schema."""

import json
import logging
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from vlatune.data.frames.resize import letterbox_box
from vlatune.demo.generate import SyntheticSpec, episode_lengths, make_dataset, read_frame_id
from vlatune.demo.world import CAMERAS, make_episode
from vlatune.demo.writer import ENCODERS

TINY = SyntheticSpec(episodes=7, frames=9, height=64, width=64, episodes_per_file=2, vary_length=True)


def open_with_lerobot(folder: Path, **options):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    return LeRobotDataset("synthetic/test", root=folder, video_backend="pyav", **options)


def test_lerobot_reads_v3_without_warnings(dataset_v3: Path, caplog, capfd) -> None:
    import lerobot.datasets.lerobot_dataset  # noqa: F401  (messages on import do not concern the dataset)

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


def test_v3_has_the_columns_that_lerobot_records(dataset_v3: Path, tmp_path: Path) -> None:
    """A dataset with the same features, recorded by LeRobot, has the same columns and types in all tables."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    ours = open_with_lerobot(dataset_v3)
    features = {key: feature for key, feature in ours.features.items() if "." in key or key == "action"}
    theirs = LeRobotDataset.create("synthetic/theirs", fps=10, features=features, root=tmp_path / "theirs")
    for frame_index in range(3):
        item = ours[frame_index]
        frame = {key: item[key].numpy() for key in features}
        images = {key: item[key].permute(1, 2, 0).numpy() for key in ours.meta.video_keys}
        theirs.add_frame(frame | images | {"task": item["task"]})
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


def test_lerobots_converter_reads_v21(dataset_v21: Path, tmp_path: Path) -> None:
    from lerobot.scripts.convert_dataset_v21_to_v30 import convert_dataset

    shutil.copytree(dataset_v21, tmp_path / "made")
    convert_dataset("synthetic/test", root=tmp_path / "made", push_to_hub=False)
    dataset = open_with_lerobot(tmp_path / "made", return_uint8=True)
    for index in range(0, len(dataset), 5):
        item = dataset[index]
        assert read_frame_id(item["observation.images.wrist"]) == (item["episode_index"], item["frame_index"])


@pytest.mark.parametrize(
    ("recorded", "shown"),
    [((480, 640), (224, 224)), ((640, 480), (224, 224)), ((123, 457), (100, 64)), ((64, 64), (64, 64))],
    ids=str,
)
def test_letterbox_box_is_where_lerobot_puts_the_image(recorded: tuple[int, int], shown: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    from lerobot.policies.common.vla_utils import resize_with_pad_torch

    white = torch.full((1, 3, *recorded), 255, dtype=torch.uint8)
    filled = resize_with_pad_torch(white, *shown)[0, 0].numpy() == 255
    rows, columns = np.flatnonzero(filled.any(axis=1)), np.flatnonzero(filled.any(axis=0))
    assert letterbox_box(recorded, shown) == (rows[0], columns[0], len(rows), len(columns))
