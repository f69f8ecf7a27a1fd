"""`vlatune inspect`: facts of intact datasets, and each kind of damage with its place, count and remedy."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlatune import cli
from vlatune.checks.inspect import inspect_dataset, inspection_text, train_command
from vlatune.findings import Finding

EPISODES, DATA = "meta/episodes/chunk-000/file-000.parquet", "data/chunk-000/file-000.parquet"
TOP, WRIST = "observation.images.top", "observation.images.wrist"
COMPUTE, SKIP = ("--dataset.stats=computed",), ("--dataset.on_bad_episode=skip",)


@pytest.fixture
def copy_of(tmp_path, dataset_v3, dataset_v21) -> Callable[[str], Path]:
    """Return an intact dataset that may be damaged."""

    def make(version: str = "v3.0") -> Path:
        source = {"v3.0": dataset_v3, "v2.1": dataset_v21}[version]
        return Path(shutil.copytree(source, tmp_path / version))

    return make


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def change_info(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    change_json(folder / "meta/info.json", change)


def change_stats(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    change_json(folder / "meta/stats.json", change)


def change_column(path: Path, column: str, change: Callable[[list[Any]], object]) -> None:
    table = pq.read_table(path)
    values = table.column(column).to_pylist()
    change(values)
    new = pa.array(values, table.schema.field(column).type)
    pq.write_table(table.set_column(table.column_names.index(column), column, new), path)


def change_rows(folder: Path, column: str, change: Callable[[list[float]], list[float]]) -> None:
    for path in (folder / "data").rglob("*.parquet"):
        change_column(path, column, lambda rows: rows.__setitem__(slice(None), [change(row) for row in rows]))


def set_values(column: str, values: dict[int, Any], file: str = DATA) -> Callable[[Path], None]:
    return lambda folder: change_column(
        folder / file, column, lambda rows: [rows.__setitem__(at, value) for at, value in values.items()]
    )


def rename_feature(folder: Path, old: str, new: str) -> None:
    def change(info: dict[str, Any]) -> None:
        info["features"] = {new if name == old else name: one for name, one in info["features"].items()}

    change_info(folder, change)


def only_finding(folder: Path, **options: bool) -> Finding:
    (finding,) = inspect_dataset(str(folder), **options).findings
    return finding


def test_facts_of_a_dataset(dataset_v3):
    found = inspect_dataset(str(dataset_v3))
    assert found.findings == ()
    facts = found.facts
    assert (facts["version"], facts["robot_type"]) == ("v3.0", "synthetic")
    action = next(one for one in facts["features"] if one["name"] == "action")
    assert (action["dtype"], action["shape"]) == ("float32", (3,))
    assert action["names"] == ("velocity_x", "velocity_y", "close")
    table = pq.read_table(dataset_v3 / EPISODES)
    lengths = table.column("length").to_numpy()
    expected = {"count": 7, "frames": lengths.sum(), "fps": 10.0, "duration_s": lengths.sum() / 10}
    expected |= {"min_length": lengths.min(), "median_length": np.median(lengths), "max_length": lengths.max()}
    assert facts["episodes"] == expected
    tasks = [task for tasks in table.column("tasks").to_pylist() for task in tasks]
    assert {one["task"]: one["episodes"] for one in facts["tasks"]} == {task: tasks.count(task) for task in tasks}
    size = sum(path.stat().st_size for path in (dataset_v3 / "videos" / TOP).rglob("*.mp4"))
    camera = {"name": TOP, "kind": "video", "height": 96, "width": 96, "codec": "h264", "pixel_format": "yuv420p"}
    camera |= {"fps": 10.0, "files": 3, "bytes": size, "opened": 1}
    assert camera in facts["cameras"]
    assert {"min", "max", "mean", "std", "q01", "q99"} <= set(facts["stats"]["action"])
    for kind in ("data", "videos", "meta"):
        real = sum(path.stat().st_size for path in (dataset_v3 / kind).rglob("*") if path.is_file())
        assert facts["bytes"][kind] == real > 0


def test_v21_has_no_quantiles_and_else_the_same_facts(dataset_v21, dataset_v3):
    old, new = inspect_dataset(str(dataset_v21), videos=True), inspect_dataset(str(dataset_v3))
    (finding,) = old.findings
    assert (finding.level, finding.place) == ("warn", "meta/episodes_stats.jsonl")
    assert finding.examples == ("observation.state", "action")
    assert all(old.facts[name] == new.facts[name] for name in ("episodes", "features", "tasks"))
    assert [one["files"] for one in old.facts["cameras"]] == [7, 7]


def test_tasks_of_an_episode_that_are_no_list(dataset_v21, tmp_path):
    folder = Path(shutil.copytree(dataset_v21, tmp_path / "dataset"))
    file = folder / "meta/episodes.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[0]["tasks"] = 0.5
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["inspect", str(folder)]) in (0, 1)


def test_a_url_is_inspected_like_a_folder(dataset_v3):
    fsspec.filesystem("memory").put(str(dataset_v3), "/inspect-from-a-url", recursive=True)
    remote, local = inspect_dataset("memory://inspect-from-a-url"), inspect_dataset(str(dataset_v3))
    assert remote.to_json() == local.to_json() | {"dataset": "memory://inspect-from-a-url"}


def test_a_videos_folder_with_another_name(copy_of):
    folder = copy_of()
    (folder / "videos").rename(folder / "video")
    finding = only_finding(folder)
    assert (finding.level, finding.place, finding.count, finding.flags) == ("fail", "videos/", 6, ())
    assert "rename video/ to videos/" in finding.remedy


def test_missing_and_stray_files(copy_of):
    folder = copy_of()
    (folder / f"videos/{TOP}/chunk-000/file-001.mp4").rename(folder / f"videos/{TOP}/chunk-000/episode_1.mp4")
    missing, stray = inspect_dataset(str(folder)).findings
    assert (missing.level, missing.flags) == ("fail", SKIP)
    assert missing.examples == (f"videos/{TOP}/chunk-000/file-001.mp4",)
    assert "episode_1.mp4" in missing.remedy
    assert (stray.level, stray.examples) == ("warn", (f"videos/{TOP}/chunk-000/episode_1.mp4",))


@pytest.mark.parametrize(
    ("file", "change", "level", "check", "examples"),
    [
        ("info", lambda info: info.update(total_episodes=3), "fail", "meta", ()),
        ("info", lambda info: info.update(total_frames=3), "fail", "meta", ()),
        ("stats", lambda stats: stats["action"].pop("q99"), "warn", "quantiles", ("action",)),
        ("stats", lambda stats: stats.clear(), "warn", "quantiles", ("observation.state", "action")),
        ("stats", lambda stats: stats[TOP].update(max=[[[255.0]]] * 3), "warn", "statistics", (TOP,)),
    ],
)
def test_wrong_values_of_a_file(copy_of, file, change, level, check, examples):
    folder = copy_of()
    change_json(folder / f"meta/{file}.json", change)
    finding = only_finding(folder)
    assert (finding.level, finding.check, finding.examples) == (level, check, examples)
    assert finding.place == f"meta/{file}.json"
    assert finding.remedy


@pytest.mark.parametrize(("old", "new"), [("action", "actions"), ("observation.state", "state")])
def test_features_with_other_names(copy_of, old, new):
    folder = copy_of()
    rename_feature(folder, old, new)
    finding = next(one for one in inspect_dataset(str(folder)).findings if one.check == "names")
    assert (finding.level, finding.flags) == ("fail", (f'--rename_map={{"{new}": "{old}"}}',))


def test_a_camera_with_another_name(copy_of):
    folder = copy_of("v2.1")
    rename_feature(folder, TOP, "image")
    (folder / f"videos/chunk-000/{TOP}").rename(folder / "videos/chunk-000/image")
    found = inspect_dataset(str(folder))
    finding = next(one for one in found.findings if one.check == "names")
    assert (finding.level, finding.flags) == ("warn", ('--rename_map={"image": "observation.images.image"}',))
    assert not found.has_failed
    assert '"image": "observation.images.image"' in str(train_command([found], {}))


def test_no_action_no_state_no_camera(copy_of):
    folder = copy_of()
    change_info(
        folder, lambda info: [info["features"].pop(name) for name in ("action", "observation.state", TOP, WRIST)]
    )
    levels = [one.level for one in inspect_dataset(str(folder)).findings if one.check == "names"]
    assert levels == ["fail", "warn", "warn"]


def test_wide_actions_and_depth_cameras(copy_of):
    folder = copy_of()

    def change(info: dict[str, Any]) -> None:
        info["features"]["action"] |= {"shape": [33], "names": None}
        info["features"][TOP]["info"]["is_depth_map"] = True

    change_info(folder, change)
    found = {one.check: one for one in inspect_dataset(str(folder)).findings}
    assert [found[name].level for name in ("dims", "depth", "statistics")] == ["warn", "warn", "fail"]
    assert found["depth"].examples == (TOP,)


def change_two_stats(stats: dict[str, Any]) -> None:
    stats["action"]["mean"][1] = float("nan")
    stats["observation.state"]["q01"][2] = stats["observation.state"]["q99"][2]


def test_wrong_statistics_name_their_dims_and_can_be_computed(copy_of):
    folder = copy_of()
    change_stats(folder, change_two_stats)
    nan, flat = (one for one in inspect_dataset(str(folder)).findings if one.level == "fail")
    assert (nan.examples, nan.flags) == (("action: dim 1 'velocity_y'",), COMPUTE)
    assert (flat.examples, flat.flags) == (("dim 2 'gripper_open'",), COMPUTE)
    assert str(train_command([inspect_dataset(str(folder))], {})).endswith(COMPUTE[0])


def test_a_constant_dim(copy_of):
    folder = copy_of()
    change_rows(folder, "action", lambda row: [*row[:-1], 0.5])
    for name in ("min", "max", "mean", "q01", "q99"):
        change_stats(folder, lambda stats, name=name: stats["action"][name].__setitem__(-1, 0.5))
    change_stats(folder, lambda stats: stats["action"]["q99"].__setitem__(-1, 0.5 + 1e-9))  # as estimates leave it
    finding = only_finding(folder)
    assert (finding.level, finding.examples) == ("warn", ("dim 2 'close'",))


def test_rows_that_are_not_finite(copy_of):
    folder = copy_of()
    change_rows(folder, "observation.state", lambda row: [float("nan"), *row[1:]])
    (finding,) = [one for one in inspect_dataset(str(folder)).findings if one.level == "fail"]
    assert finding.place == "data files, feature 'observation.state'"
    assert finding.examples[0] == "episode 0, frame 0"


def cut_video(folder: Path) -> None:
    videos = folder / f"videos/{TOP}/chunk-000"
    shutil.copy(videos / "file-002.mp4", videos / "file-000.mp4")  # one episode in place of three


def remove_edit_list(folder: Path) -> None:
    """Without its edit list, every frame of an H.264 file is some frames late."""
    file = folder / f"videos/{TOP}/chunk-000/file-000.mp4"
    assert file.read_bytes().count(b"elst") == 1
    file.write_bytes(file.read_bytes().replace(b"elst", b"free"))


def swap_episodes(folder: Path) -> None:
    first, second = pq.read_table(folder / EPISODES).column("length").to_pylist()[:2]
    set_values(f"videos/{TOP}/from_timestamp", {0: second / 10, 1: 0.0}, EPISODES)(folder)
    set_values(f"videos/{TOP}/to_timestamp", {0: (first + second) / 10, 1: second / 10}, EPISODES)(folder)


@pytest.mark.parametrize(
    ("damage", "check", "place", "example"),
    [
        (lambda folder: (folder / DATA).write_text("version https://git-lfs"), "episodes", "", DATA),
        (set_values("task_index", {0: 99}), "episodes", "", "task_index"),
        (set_values("frame_index", {3: 7}), "episodes", "", "episode 0"),
        (set_values(f"videos/{TOP}/from_timestamp", {1: 0.3}, EPISODES), "episodes", "", "episode 1 begins"),
        (swap_episodes, "episodes", "", "episode 0"),
        (cut_video, "episodes", "", "file-000.mp4"),
        (remove_edit_list, "videos", f"camera '{TOP}'", "file-000.mp4"),
    ],
)
def test_damaged_files_are_named_and_can_be_left_out(copy_of, damage, check, place, example):
    folder = copy_of()
    damage(folder)
    finding = next(one for one in inspect_dataset(str(folder)).findings if one.level == "fail")
    assert (finding.level, finding.check) == ("fail", check), finding
    assert finding.place.startswith(place)
    assert example in finding.examples[0]
    assert finding.flags == SKIP


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda info: info["features"][TOP].update(shape=[48, 64, 3]), "48x64"),
        (lambda info: info["features"][TOP]["info"].update({"video.fps": 30}), "30 fps"),
    ],
)
def test_videos_that_differ_from_info(copy_of, change, expected):
    folder = copy_of()
    change_info(folder, change)
    finding = only_finding(folder)
    assert (finding.level, finding.place, finding.count) == ("fail", f"camera '{TOP}'", 1)
    assert finding.expected == expected
    assert only_finding(folder, videos=True).count == 3


def test_a_damaged_video_after_the_first(copy_of):
    folder = copy_of()
    file = f"videos/{WRIST}/chunk-000/file-002.mp4"
    (folder / file).write_bytes(b"version https://git-lfs")
    finding = only_finding(folder)
    assert (finding.check, finding.flags, finding.count) == ("episodes", SKIP, 1)
    assert file in finding.examples[0]
    finding = only_finding(folder, videos=True)
    assert (finding.check, finding.flags, finding.count) == ("videos", SKIP, 1)


def test_a_task_that_only_episodes_list(copy_of):
    folder = copy_of()
    set_values("tasks", {0: ["\x1b[2J[bold]up[/bold]\n"]}, EPISODES)(folder)
    found = inspect_dataset(str(folder))
    unlisted = {one["task"]: one["episodes"] for one in found.facts["tasks"] if not one["has_index"]}
    assert unlisted == {"\x1b[2J[bold]up[/bold]\n": 1}
    text = inspection_text(found, width=80)
    assert "\x1b" not in text
    assert "?[2J[bold]up[/bold]?" in text


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: change_info(folder, lambda info: info.update(codebase_version="v1.6")),
        lambda folder: change_info(folder, lambda info: info.update(data_path="../data/file-{file_index:03d}.parquet")),
        lambda folder: (folder / "meta/tasks.parquet").unlink(),
        lambda folder: set_values(f"videos/{TOP}/from_timestamp", {1: float("nan")}, EPISODES)(folder),
        *(
            lambda folder, text=text: (folder / "meta/info.json").write_text(text)
            for text in (
                "",
                "[]",
                "{}",
                '{"fps": 10, "codebase_version": "v3.0", "features": {"a": 3, "b": {"shape": 2}}}',
            )
        ),
    ],
)
def test_invalid_metadata_is_one_failure(copy_of, damage):
    folder = copy_of()
    damage(folder)
    found = inspect_dataset(str(folder))
    (finding,) = found.findings
    assert (finding.level, found.facts) == ("fail", {})
    assert finding.remedy
    assert inspection_text(found, width=80)
    assert train_command([found], {}) is None


def test_text_json_and_exit_codes(copy_of, dataset_v3, dataset_v21, tmp_path, capsys):
    assert cli.main(["inspect", str(dataset_v3)]) == cli.OK
    out = capsys.readouterr().out
    for text in ("LeRobot v3.0, synthetic", "velocity_x", "h264", "q99", "no problems found", "--recipe=tiny"):
        assert text in out
    assert out.isascii()
    assert cli.main(["inspect", str(dataset_v21)]) == cli.OK
    assert "0 errors, 1 warning" in capsys.readouterr().out
    folder = copy_of()
    shutil.rmtree(folder / "data")
    assert cli.main(["inspect", str(folder)]) == cli.FAILED
    assert "1 error, 0 warnings" in capsys.readouterr().out
    assert cli.main(["inspect", str(folder), "--json"]) == cli.FAILED
    answer = json.loads(capsys.readouterr().out)
    assert (answer["findings"][0]["level"], answer["episodes"]["count"]) == ("fail", 7)
    assert cli.main(["inspect", str(tmp_path / "none")]) == cli.MISUSED
    assert "there is no such folder" in capsys.readouterr().err
