"""Damaged data and video files: read_lerobot, on_bad_episode=skip, inspect and train name what is damaged.

Good episodes are still read, with the right frames; only bad episodes are skipped.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import damage as do
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from damage import DATA, TOP, VIDEOS, WRIST, data, video

import vlatune
from vlatune.checks.inspect import inspect_dataset
from vlatune.config.settings import DatasetConfig, PolicyConfig, RunConfig
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.data.reader import read_unit
from vlatune.demo.generate import read_frame_id
from vlatune.feed.read_plan import ReadPlan
from vlatune.run_setup import make_setup

EPISODES = list(range(7))
OPTIONS = {"resize": None, "action_horizon": 4, "partitioning": "episode", "timestamps": "recorded"}
VIDEO_0, VIDEO_1 = f"{VIDEOS}/file-000.mp4", f"{VIDEOS}/file-001.mp4"
DATA_0, DATA_1 = f"{DATA}/file-000.parquet", f"{DATA}/file-001.parquet"


@dataclass(frozen=True)
class Case:
    damage: Callable[[Path], object]
    bad: list[int]
    """The episodes that cannot be read."""
    names: tuple[str, ...]
    """The damaged file, then the camera, column or values that every message about it names."""
    at_setup: bool = False
    """True if train's set-up finds it; otherwise only reading all files would."""
    in_inspect: bool = True
    """True if inspect reports an error; it does not read all rows and frames."""


CASES = {
    "mp4 missing": Case(lambda root: video(root, 1).unlink(), [3, 4, 5], (VIDEO_1, TOP), at_setup=True),
    "mp4 truncated": Case(lambda root: do.cut(video(root, 0), 0.7), [1, 2], (VIDEO_0, TOP), at_setup=True),
    "mp4 without moov": Case(lambda root: do.hide_moov(video(root, 0)), [0, 1, 2], (VIDEO_0, TOP), at_setup=True),
    "a Git LFS pointer": Case(
        lambda root: video(root, 1).write_text("version https://git-lfs.github.com/spec/v1"), [3, 4, 5], (VIDEO_1, TOP)
    ),
    "fewer frames than rows": Case(lambda root: do.drop_frames(video(root, 0), 3), [2], (VIDEO_0, TOP)),
    "a frame missing inside": Case(lambda root: do.drop_frame(video(root, 0), 14), [1], (VIDEO_0, TOP, "1.4000 s")),
    "another size": Case(lambda root: do.enlarge(video(root, 1)), [3, 4, 5], (VIDEO_1, TOP, "192x192", "96x96")),
    "twice the frame rate": Case(  # every other row would find a wrong frame at its time
        lambda root: do.change_rate(video(root, 0), 20), [0, 1, 2], (VIDEO_0, TOP, "20"), at_setup=True
    ),
    "info.json with another size": Case(
        lambda root: do.change_info(root, lambda info: info["features"][TOP].update(shape=[48, 64, 3])),
        EPISODES,
        (VIDEO_0, TOP, "96x96", "48x64"),
        at_setup=True,
    ),
    "parquet missing": Case(lambda root: data(root, 1).unlink(), [5, 6], (DATA_1,), at_setup=True),
    "parquet truncated": Case(lambda root: do.cut(data(root, 0), 0.7), [0, 1, 2, 3, 4], (DATA_0,), at_setup=True),
    "column missing": Case(lambda root: do.drop_column(data(root, 1), "action"), [5, 6], (DATA_1, "'action'")),
    "dtype changed to bool": Case(
        lambda root: do.cast_column(data(root, 1), "action", pa.list_(pa.bool_(), 3)),
        [5, 6],
        (DATA_1, "'action'", "bool"),
    ),
    "dtype changed to text": Case(
        lambda root: do.cast_column(data(root, 1), "frame_index", pa.string()),
        [5, 6],
        (DATA_1, "'frame_index'", "text"),
    ),
    "timestamps off": Case(
        lambda root: do.change_column(data(root, 0), "timestamp", lambda t, e: np.where(e == 1, t + 0.03, t)),
        [1],
        (VIDEO_0, TOP),
        in_inspect=False,
    ),
    "timestamps not finite": Case(
        lambda root: do.change_column(data(root, 0), "timestamp", do.in_episode(2, np.nan)),
        [2],
        (DATA_0, "frame 0", "timestamp", "nan"),
        in_inspect=False,
    ),
    "timestamps decrease": Case(
        lambda root: do.change_column(data(root, 0), "timestamp", lambda t, e: np.where(e == 0, t[::-1], t)),
        [0],
        (DATA_0, "timestamp"),
        at_setup=True,
        in_inspect=False,
    ),
    "rows of another episode": Case(
        lambda root: do.change_column(data(root, 0), "episode_index", do.in_episode(3, 9)),
        [3],
        (DATA_0, "episode_index 9", "episode_index 3"),
    ),
    "a row missing": Case(
        lambda root: do.drop_row(data(root, 0), 20), [1, 2, 3, 4], (DATA_0, "row 20", "episode_index 1")
    ),
    "an unknown task": Case(
        lambda root: do.change_column(data(root, 0), "task_index", do.in_episode(0, 99)),
        [0],
        (DATA_0, "task_index 99", "meta/tasks"),
        at_setup=True,
    ),
    "nulls": Case(
        lambda root: do.change_column(
            data(root, 0),
            "action",
            lambda rows, e: [None if one == 1 else row for row, one in zip(rows.tolist(), e, strict=True)],
        ),
        [1],
        (DATA_0, "'action'", "null"),
        in_inspect=False,
    ),
}


@pytest.fixture
def root(dataset_v3, tmp_path) -> Path:
    return Path(shutil.copytree(dataset_v3, tmp_path / "damaged"))


@pytest.fixture
def config(root: Path, small_base: Path, tmp_path: Path) -> RunConfig:
    return RunConfig(
        dataset=DatasetConfig(root=(str(root),), timestamps="recorded"),
        policy=PolicyConfig(path=str(small_base)),
        output_dir=str(tmp_path / "run"),
        batch_size=4,
    )


def read_all(plan: ReadPlan) -> tuple[list[int], dict[int, str]]:
    """Return the episodes that can be read, after checking each frame, and the errors of the others."""
    read, errors = [], {}
    for task in plan.tasks:
        for unit in task.units:
            try:
                columns = read_unit(task.spec, unit)
            except ValueError as error:
                errors[unit.episode_index] = str(error)
                continue
            expected = [(unit.episode_index, frame) for frame in unit.frames.tolist()]
            for camera in task.spec.cameras:
                assert [read_frame_id(image) for image in columns[camera.name]] == expected
            read.append(unit.episode_index)
    return read, errors


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_damage_is_named_and_good_episodes_are_read(case: Case, root: Path, config: RunConfig):
    case.damage(root)
    good = [one for one in EPISODES if one not in case.bad]
    read, errors = read_all(vlatune.plan_read(root, **OPTIONS))
    assert (sorted(errors), read) == (case.bad, good)
    for episode, error in errors.items():
        assert str(root) in error
        assert f"episode {episode}" in error
    assert all(name in errors[case.bad[0]] for name in case.names), errors[case.bad[0]]
    if good:
        plan = vlatune.plan_read(root, on_bad_episode="skip", **OPTIONS)
        assert [bad.episode for bad in plan.skipped] == case.bad
        reason = plan.skipped[0].reason
        assert all(name in reason for name in (str(root), f"episode {case.bad[0]}", *case.names)), reason
        assert reason in str(plan)
        assert read_all(plan) == (good, {})
    else:
        with pytest.raises(ValueError, match="all 7 episodes are bad"):
            vlatune.plan_read(root, on_bad_episode="skip", **OPTIONS)
    if case.at_setup:
        with pytest.raises(ValueError, match=re.escape(str(root))) as caught:
            make_setup(config, preflight=True)
        assert case.names[0] in str(caught.value)


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items() if case.in_inspect])
def test_inspect_names_the_damage(case: Case, root: Path):
    case.damage(root)
    failed = [one for one in inspect_dataset(str(root), videos=True).findings if one.level == "fail"]
    texts = [" ".join((str(one), *one.examples)) for one in failed]
    assert any(case.names[0] in text for text in texts), texts


@pytest.mark.parametrize(("folder", "other"), [("videos", "mp4"), ("data", "parquet")])
def test_a_folder_of_another_name(folder: str, other: str, root: Path, config: RunConfig):
    (root / folder).rename(root / other)
    _, errors = read_all(vlatune.plan_read(root, **OPTIONS))
    assert sorted(errors) == EPISODES
    with pytest.raises(ValueError, match=rf"there is no folder {folder}/: rename"):
        make_setup(config, preflight=True)
    fix = next(one.remedy for one in inspect_dataset(str(root)).findings if one.check == "files")
    assert f"there is no folder {folder}/: rename" in fix
    assert other in fix


def test_a_damaged_row_group_affects_only_its_episodes(root: Path):
    """LeRobot writes one row group per episode."""
    meta, path = load_meta(str(root)), data(root, 0)
    begin = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[begin : begin + 60] = bytes(60)
    path.write_bytes(content)
    read, errors = read_all(vlatune.plan_read(root, cameras=[WRIST], **OPTIONS))
    assert list(errors) == [2]
    assert meta.data_path(2) in errors[2]
    assert "is not readable parquet" in errors[2]
    assert read == [0, 1, 3, 4, 5, 6]
    plan = vlatune.plan_read(root, cameras=[WRIST], on_bad_episode="skip", **OPTIONS)
    assert [bad.episode for bad in plan.skipped] == [2]


def test_only_requested_cameras_and_episodes_are_checked(root: Path):
    video(root, 0).unlink()
    assert vlatune.plan_read(root, cameras=[WRIST], on_bad_episode="skip", **OPTIONS).skipped == ()
    assert vlatune.plan_read(root, episodes=[3, 6], on_bad_episode="skip", **OPTIONS).skipped == ()
    plan = vlatune.plan_read(root, episodes=[1, 6], on_bad_episode="skip", **OPTIONS)
    assert [bad.episode for bad in plan.skipped] == [1]
    assert [task.episodes for task in plan.tasks] == [(6,)]


def test_the_other_datasets_are_read_if_one_is_completely_bad(root: Path, dataset_v3: Path):
    shutil.rmtree(root / "data")
    plan = vlatune.plan_read([root, dataset_v3], on_bad_episode="skip", **OPTIONS)
    assert len(plan.skipped) == 7
    assert {task.spec.dataset_index for task in plan.tasks} == {1}


def test_errors_of_the_store_are_not_attributed_to_episodes(root: Path, monkeypatch):
    from vlatune.storage.root import Root

    real = Root.open

    def open_or_deny(self: Root, name: str):
        if name.startswith("data/"):
            raise PermissionError(f"'{name}': access denied")
        return real(self, name)

    monkeypatch.setattr(Root, "open", open_or_deny)
    with pytest.raises(PermissionError, match="access denied"):
        vlatune.plan_read(root, on_bad_episode="skip", **OPTIONS)
    with pytest.raises(PermissionError, match="access denied"):
        read_all(vlatune.plan_read(root, **OPTIONS))


def test_a_dataset_behind_a_url_is_checked_like_a_folder(root: Path):
    video(root, 2).unlink()
    do.cut(video(root, 0), 0.7)
    fsspec.filesystem("memory").put(str(root), "/damage-behind-a-url", recursive=True)
    plan = vlatune.plan_read("memory://damage-behind-a-url", on_bad_episode="skip", **OPTIONS)
    local = vlatune.plan_read(root, on_bad_episode="skip", **OPTIONS)
    assert [bad.episode for bad in plan.skipped] == [bad.episode for bad in local.skipped] == [1, 2, 6]
    assert read_all(plan) == ([0, 3, 4, 5], {})
