"""Every kind of damage through every door: the read tasks of read_lerobot, on_bad_episode=skip, inspect, train's set-up.

Each is told with file, episode, camera, what was expected and what to do; what is read is right; what is skipped was
asked for.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import damage as do
import numpy as np
import pyarrow as pa
import pytest
from damage import DATA, TOP, VIDEOS, WRIST, data, video

import vlatune
from vlatune.config import DatasetConfig, PolicyConfig, RunConfig
from vlatune.dataset.meta.dataset_meta import load_meta
from vlatune.dataset.reader import read_unit
from vlatune.dataset.synthetic.generate import read_frame_id
from vlatune.inspect.inspection import inspect_dataset
from vlatune.pipeline.read_plan import ReadPlan, task_blocks
from vlatune.run_setup import make_setup

EPISODES = list(range(7))
OPTIONS = {"resize": None, "action_horizon": 4, "partitioning": "episode"}


@dataclass(frozen=True)
class Case:
    damage: Callable[[Path], object]
    bad: list[int]
    """The episodes that cannot be read."""
    told: str
    """What the read task says of the first of them, as a regular expression, after dataset and episode."""
    at_setup: str | None = None
    """What train's set-up says before anything starts; None where only reading all files would tell."""
    in_inspect: str = ""
    """What inspect says among its errors; empty where the damage is in rows or frames that it does not look at."""


TOP_0 = rf"camera '{TOP}', {VIDEOS}/file-000.mp4"
TOP_1 = rf"camera '{TOP}', {VIDEOS}/file-001.mp4"
CASES = {
    "mp4 missing": Case(
        lambda root: video(root, 1).unlink(),
        [3, 4, 5],
        rf", {TOP_1}: the file is missing; fetch it, or leave bad episodes out with on_bad_episode=skip",
        rf"camera '{TOP}': {VIDEOS}/file-001.mp4 is missing, one of 1 missing files; fetch it",
        "1 of 6 .mp4 files are missing",
    ),
    "mp4 truncated": Case(
        lambda root: do.cut(video(root, 0), 0.7),
        [1, 2],
        rf", {TOP_0}: (cannot be decoded|no frame within).*(fetch|re-encode)",
        rf"episode 0, {TOP_0}: it is cut off: its last frames are not there; fetch it anew",
        "it is cut off: its last frames are not there",
    ),
    "mp4 without moov": Case(
        lambda root: do.hide_moov(video(root, 0)),
        [0, 1, 2],
        rf", {TOP_0}: cannot be decoded \(Invalid data found[^)]*\); the file is damaged or not a video, fetch or re-encode it",
        rf"episode 0, {TOP_0}: cannot be opened as video \(Invalid data found[^)]*\); it is damaged or cut off: fetch",
        "files that cannot be opened as video",
    ),
    "a Git LFS pointer": Case(
        lambda root: video(root, 1).write_text("version https://git-lfs.github.com/spec/v1"),
        [3, 4, 5],
        rf", {TOP_1}: cannot be decoded .*fetch or re-encode it",
        None,
        "files that cannot be opened as video",
    ),
    "fewer frames than rows": Case(
        lambda root: do.drop_frames(video(root, 0), 3),
        [2],
        rf", {TOP_0}: no frame within 0.0001 s of [\d.]+ s \(nearest [\d.]+ s, the file's last: it has fewer frames than the "
        rf"episode has rows\); fetch or re-encode the file",
        None,
        "files with fewer frames than the episodes in them have rows",
    ),
    "a frame missing inside": Case(
        lambda root: do.drop_frame(video(root, 0), 14),
        [1],
        rf", {TOP_0}: no frame within 0.0001 s of 1.4000 s \(nearest 1.[35]000 s\); fetch or re-encode the file",
        None,
        "files with fewer frames than the episodes in them have rows",
    ),
    "another size": Case(
        lambda root: do.enlarge(video(root, 1)),
        [3, 4, 5],
        rf", {TOP_1}: its pictures are 192x192 \(height x width\), meta/info.json says 96x96; correct the camera's shape",
        None,
        "files with pictures of another size",
    ),
    "twice the frame rate": Case(  # every other row would find a frame at its time, and a wrong one
        lambda root: do.change_rate(video(root, 0), 20),
        [0, 1, 2],
        rf", {TOP_0}: it has 20 frames per second, meta/info.json says 10; re-encode it at that rate",
        rf"episode 0, {TOP_0}: it has 20 frames per second, meta/info.json says 10",
        "files with other frames per second",
    ),
    "half the frame rate": Case(
        lambda root: do.change_rate(video(root, 1), 5),
        [3, 4, 5],
        rf", {TOP_1}: it has 5 frames per second, meta/info.json says 10",
        None,
        "files with other frames per second",
    ),
    "info.json with another size": Case(
        lambda root: do.change_info(root, lambda info: info["features"][TOP].update(shape=[48, 64, 3])),
        EPISODES,
        rf", {TOP_0}: its pictures are 96x96 \(height x width\), meta/info.json says 48x64",
        rf"episode 0, {TOP_0}: its pictures are 96x96 .* says 48x64",
        "files with pictures of another size",
    ),
    "parquet missing": Case(
        lambda root: data(root, 1).unlink(),
        [5, 6],
        rf": {DATA}/file-001.parquet is missing; fetch the dataset anew",
        rf": {DATA}/file-001.parquet is missing, one of 1 missing files",
        "1 of 2 .parquet files are missing",
    ),
    "parquet truncated": Case(
        lambda root: do.cut(data(root, 0), 0.7),
        [0, 1, 2, 3, 4],
        rf": {DATA}/file-000.parquet is not readable parquet .*; fetch the dataset anew",
        rf": {DATA}/file-000.parquet is not readable parquet",
        f"{DATA}/file-000.parquet is not readable parquet",
    ),
    "parquet of no bytes": Case(
        lambda root: data(root, 1).write_bytes(b""),
        [5, 6],
        rf": {DATA}/file-001.parquet is not readable parquet .*; fetch the dataset anew",
        None,
        f"{DATA}/file-001.parquet is not readable parquet",
    ),
    "column missing": Case(
        lambda root: do.drop_column(data(root, 1), "action"),
        [5, 6],
        rf": {DATA}/file-001.parquet lacks the column 'action' that meta/info.json names; it has .*; fetch the file anew",
        None,
        f"{DATA}/file-001.parquet: 'action'",
    ),
    "dtype changed to double": Case(
        lambda root: do.cast_column(data(root, 1), "action", pa.list_(pa.float64(), 3)),
        [5, 6],
        rf", {DATA}/file-001.parquet: column 'action' holds float64 of shape \(3,\), meta/info.json says float32; write the",
        None,
        f"{DATA}/file-001.parquet: 'action' is",
    ),
    "dtype changed to text": Case(
        lambda root: do.cast_column(data(root, 1), "frame_index", pa.string()),
        [5, 6],
        rf", {DATA}/file-001.parquet: column 'frame_index' holds text, expected a whole number per row; fetch the file anew",
        None,
        f"{DATA}/file-001.parquet: 'frame_index' is",
    ),
    "timestamps off": Case(
        lambda root: do.change_column(data(root, 0), "timestamp", lambda t, e: np.where(e == 1, t + 0.03, t)),
        [1],
        rf", {TOP_0}: no frame within 0.0001 s of [\d.]+ s \(nearest [\d.]+ s.*raise tolerance_s if the frame is the right one",
    ),
    "timestamps that are no numbers": Case(
        lambda root: do.change_column(data(root, 0), "timestamp", do.in_episode(2, np.nan)),
        [2],
        rf", {DATA}/file-000.parquet: frame 0 has the timestamp nan s, expected times that rise",
    ),
    "timestamps that fall": Case(
        lambda root: do.change_column(data(root, 0), "timestamp", lambda t, e: np.where(e == 0, t[::-1], t)),
        [0],
        rf", {DATA}/file-000.parquet: frame \d has the timestamp [\d.]+ s.*, expected times that rise; record or convert",
        r"episode 0, .*expected times that rise",
        "timestamps that do not rise within their episode",
    ),
    "rows of another episode": Case(
        lambda root: do.change_column(data(root, 0), "episode_index", do.in_episode(3, 9)),
        [3],
        rf", {DATA}/file-000.parquet: row \d+ is episode_index 9, frame_index 0, .*; expected episode_index 3, frame_index 0",
        None,
        "rows that are not where meta/episodes places them",
    ),
    "a row missing": Case(
        lambda root: do.drop_row(data(root, 0), 20),
        [1, 2, 3, 4],
        rf", {DATA}/file-000.parquet: row 20 is .*; expected episode_index 1, .*; meta and data disagree: fetch the dataset",
        None,
        "files with fewer rows than the episodes in them",
    ),
    "a task without its sentence": Case(
        lambda root: do.change_column(data(root, 0), "task_index", do.in_episode(0, 99)),
        [0],
        rf", {DATA}/file-000.parquet: task_index 99 has no sentence; meta/tasks lists \d, expected 0 to \d; add the sentence",
        r"episode 0, .*: task_index 99 has no sentence",
        "rows whose task_index has no sentence",
    ),
    "nulls": Case(
        lambda root: do.change_column(
            data(root, 0),
            "action",
            lambda rows, e: [None if one == 1 else row for row, one in zip(rows.tolist(), e, strict=True)],
        ),
        [1],
        rf".*{DATA}/file-000.parquet, column 'action': \d+ values are null; every row must have a value",
    ),
}


@pytest.fixture
def root(dataset_v3, tmp_path) -> Path:
    """A copy of the dataset, free to be damaged."""
    return Path(shutil.copytree(dataset_v3, tmp_path / "damaged"))


def units_of(plan: ReadPlan):
    for task in plan.tasks:
        for units in task_blocks(task.places, task.spans, plan.block_rows):
            for unit in units:
                yield task.delivery.spec, unit


def read_all(plan: ReadPlan) -> tuple[list[int], dict[int, str]]:
    """The episodes that the read tasks read, each frame of which must be its row's, and what they say of the others."""
    read, refused = [], {}
    for spec, unit in units_of(plan):
        try:
            columns = read_unit(spec, unit)
        except ValueError as error:
            refused[unit.episode_index] = str(error)
            continue
        expected = [(unit.episode_index, frame) for frame in unit.frames.tolist()]
        for camera in spec.cameras:
            assert [read_frame_id(picture) for picture in columns[camera.name]] == expected
        read.append(unit.episode_index)
    return read, refused


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_reading_gives_right_frames_or_says_what_is_wrong(case: Case, root: Path):
    case.damage(root)
    read, refused = read_all(vlatune.plan_read(root, **OPTIONS))
    assert sorted(refused) == case.bad
    assert read == [one for one in EPISODES if one not in case.bad]
    first = case.bad[0]
    assert re.match(rf"dataset '{re.escape(str(root))}': episode {first}{case.told}", refused[first]), refused[first]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_skipping_leaves_out_the_bad_episodes_and_no_other(case: Case, root: Path, caplog):
    case.damage(root)
    if case.bad == EPISODES:
        with pytest.raises(
            ValueError, match=r"all 7 episodes are bad, so there is nothing to read; the first: dataset"
        ):
            vlatune.plan_read(root, on_bad_episode="skip", **OPTIONS)
        return
    plan = vlatune.plan_read(root, on_bad_episode="skip", **OPTIONS)
    assert [bad.episode for bad in plan.skipped] == case.bad
    assert all(str(root) in bad.reason for bad in plan.skipped)
    assert f"{len(case.bad)} of 7 episodes are bad and left out: {case.bad[0]}" in caplog.text
    assert f"left out: episode {case.bad[0]} of dataset 0: " in str(plan)
    read, refused = read_all(plan)
    assert refused == {}
    assert read == [one for one in EPISODES if one not in case.bad]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_inspect_names_what_it_can_know(case: Case, root: Path):
    case.damage(root)
    problems = inspect_dataset(str(root), videos=True).problems
    told = [f"{one.found} {' '.join(one.examples)}" for one in problems if one.severity == "error"]
    assert any(case.in_inspect in text for text in told) if case.in_inspect else True
    assert all(one.expected and one.fix and one.place for one in problems)


@pytest.fixture
def config(root: Path, small_base: Path, tmp_path: Path) -> RunConfig:
    return RunConfig(
        dataset=DatasetConfig(root=(str(root),)),
        policy=PolicyConfig(path=str(small_base)),
        output_dir=str(tmp_path / "run"),
        batch_size=4,
    )


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.at_setup])
def test_train_is_refused_before_it_starts(name: str, root: Path, config: RunConfig):
    case = CASES[name]
    case.damage(root)
    with pytest.raises(ValueError, match=case.at_setup) as caught:
        make_setup(config, preflight=True)
    assert str(caught.value).startswith(f"dataset '{root}'")


# Layout


@pytest.mark.parametrize(("folder", "other"), [("videos", "video"), ("videos", "mp4"), ("data", "parquet")])
def test_a_folder_of_another_name(folder: str, other: str, root: Path, config: RunConfig):
    (root / folder).rename(root / other)
    _, refused = read_all(vlatune.plan_read(root, **OPTIONS))
    assert sorted(refused) == EPISODES
    with pytest.raises(ValueError, match=rf"missing, one of \d missing files; there is no folder {folder}/: rename"):
        make_setup(config, preflight=True)
    fix = next(one.fix for one in inspect_dataset(str(root)).problems if "are missing" in one.found)
    for text in (fix, *(refused.values() if folder == "videos" else ())):
        assert f"there is no folder {folder}/: rename" in text
        assert other in text
        assert f"to {folder}/, or correct the path in meta/info.json" in text


def test_fewer_episodes_than_promised_are_refused_by_both_doors(root: Path, config: RunConfig):
    do.change_info(root, lambda info: info.update(total_episodes=9))
    for door in (lambda: vlatune.plan_read(root), lambda: make_setup(config)):
        with pytest.raises(ValueError, match=r"says total_episodes 9, but meta/ lists only 7"):
            door()


def test_messages_name_the_door(tmp_path: Path, config: RunConfig):
    from dataclasses import replace

    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"; root must be the folder that holds meta/"):
        vlatune.plan_read(tmp_path / "empty")
    other = replace(config, dataset=replace(config.dataset, root=(str(tmp_path / "empty"),)))
    with pytest.raises(ValueError, match=r"; --dataset.root must be the folder that holds meta/"):
        make_setup(other)


# Skipping


def test_damage_inside_a_data_file_costs_only_its_own_episodes(root: Path):
    """A row group per episode, as LeRobot writes them: the file is small, and read whole when it is whole."""
    import pyarrow.parquet as pq

    meta, path = load_meta(str(root)), data(root, 0)
    begin = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    whole = bytearray(path.read_bytes())
    whole[begin : begin + 60] = bytes(60)
    path.write_bytes(whole)
    read, refused = read_all(vlatune.plan_read(root, cameras=[WRIST], **OPTIONS))
    assert list(refused) == [2]
    assert meta.data_path(2) in refused[2]
    assert "is not readable parquet" in refused[2]
    assert read == [0, 1, 3, 4, 5, 6]
    plan = vlatune.plan_read(root, cameras=[WRIST], on_bad_episode="skip", **OPTIONS)
    assert [bad.episode for bad in plan.skipped] == [2]


def test_only_what_is_asked_for_is_checked(root: Path):
    video(root, 0).unlink()
    assert vlatune.plan_read(root, cameras=[WRIST], on_bad_episode="skip", **OPTIONS).skipped == ()
    assert vlatune.plan_read(root, episodes=[3, 6], on_bad_episode="skip", **OPTIONS).skipped == ()
    plan = vlatune.plan_read(root, episodes=[1, 6], on_bad_episode="skip", **OPTIONS)
    assert [bad.episode for bad in plan.skipped] == [1]
    assert [task.episodes for task in plan.tasks] == [(6,)]


def test_nothing_is_skipped_unless_asked_for(root: Path):
    video(root, 0).unlink()
    plan = vlatune.plan_read(root, **OPTIONS)
    assert plan.skipped == ()
    assert plan.rows == load_meta(str(root)).num_frames


def test_several_datasets_are_checked_each(root: Path, dataset_v3: Path, dataset_v21: Path, tmp_path: Path):
    old = Path(shutil.copytree(dataset_v21, tmp_path / "old"))
    (old / f"videos/chunk-000/{TOP}/episode_000004.mp4").unlink()
    video(root, 2).unlink()
    plan = vlatune.plan_read([dataset_v3, old, root], on_bad_episode="skip", **OPTIONS)
    assert [(bad.dataset_index, bad.dataset, bad.episode) for bad in plan.skipped] == [
        (1, str(old), 4),
        (2, str(root), 6),
    ]
    assert len(plan.tasks) == 7 + 6 + 6


def test_a_dataset_all_of_whose_episodes_are_bad_leaves_the_others(root: Path, dataset_v3: Path):
    shutil.rmtree(root / "data")
    plan = vlatune.plan_read([root, dataset_v3], on_bad_episode="skip", **OPTIONS)
    assert len(plan.skipped) == 7
    assert {task.dataset_index for task in plan.tasks} == {1}


def test_each_file_is_checked_once_and_counted(root: Path, monkeypatch):
    from vlatune.dataset.health import bad_episodes as health
    from vlatune.dataset.health import video_health
    from vlatune.dataset.order.partition import select_episodes

    meta = load_meta(str(root))
    specs = [vlatune.plan_read(root, **OPTIONS).tasks[0].delivery.spec]
    opened, real = [], video_health.av.open
    monkeypatch.setattr(video_health.av, "open", lambda name, **options: opened.append(name) or real(name, **options))
    seen: list[tuple[int, int]] = []
    found = health.find_bad_episodes([meta], specs, select_episodes([meta], None), on_file=lambda *at: seen.append(at))
    assert found == ()
    assert seen == [(done, 8) for done in range(1, 9)]  # two data files, two cameras with three mp4 files
    assert len(opened) == len(set(opened)) == 6


def test_a_store_that_refuses_is_not_an_episodes_fault(root: Path, monkeypatch):
    from vlatune.dataset.storage.root import Root

    real = Root.open

    def refuse(self: Root, name: str):
        if name.startswith("data/"):
            raise PermissionError(f"'{name}': access denied")
        return real(self, name)

    monkeypatch.setattr(Root, "open", refuse)
    with pytest.raises(PermissionError, match="access denied"):
        vlatune.plan_read(root, on_bad_episode="skip", **OPTIONS)
    with pytest.raises(PermissionError, match="access denied"):
        read_all(vlatune.plan_read(root, **OPTIONS))


def test_a_dataset_behind_a_url_is_checked_like_a_folder(root: Path):
    import fsspec

    video(root, 2).unlink()
    do.cut(video(root, 0), 0.7)
    fsspec.filesystem("memory").put(str(root), "/damage-behind-a-url", recursive=True)
    plan = vlatune.plan_read("memory://damage-behind-a-url", on_bad_episode="skip", **OPTIONS)
    local = vlatune.plan_read(root, on_bad_episode="skip", **OPTIONS)
    assert [bad.episode for bad in plan.skipped] == [bad.episode for bad in local.skipped] == [1, 2, 6]
    assert read_all(plan) == ([0, 3, 4, 5], {})


def test_an_unknown_way_is_refused(root: Path):
    with pytest.raises(ValueError, match="on_bad_episode='ignore': expected one of fail, skip"):
        vlatune.plan_read(root, on_bad_episode="ignore")
