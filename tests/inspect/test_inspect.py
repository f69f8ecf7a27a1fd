"""`vlatune inspect`: the facts of whole datasets, and each kind of damage with its place, count and remedy."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlatune import cli
from vlatune.dataset.meta.listing import list_files, top_folder
from vlatune.dataset.storage.root import Root
from vlatune.inspect.inspection import inspect_dataset
from vlatune.inspect.problems import Problem
from vlatune.inspect.text import inspection_text

EPISODES = "meta/episodes/chunk-000/file-000.parquet"
TOP, WRIST = "observation.images.top", "observation.images.wrist"


@pytest.fixture
def copy_of(tmp_path, dataset_v3, dataset_v21) -> Callable[[str], Path]:
    """A whole dataset, free to be damaged."""

    def make(version: str = "v3.0") -> Path:
        source = {"v3.0": dataset_v3, "v2.1": dataset_v21}[version]
        return Path(shutil.copytree(source, tmp_path / version))

    return make


def change_info(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    info = json.loads((folder / "meta/info.json").read_text())
    change(info)
    (folder / "meta/info.json").write_text(json.dumps(info))


def change_stats(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    stats = json.loads((folder / "meta/stats.json").read_text())
    change(stats)
    (folder / "meta/stats.json").write_text(json.dumps(stats))


def change_column(path: Path, column: str, change: Callable[[list[Any]], object]) -> None:
    table = pq.read_table(path)
    values = table.column(column).to_pylist()
    change(values)
    new = pa.array(values, table.schema.field(column).type)
    pq.write_table(table.set_column(table.column_names.index(column), column, new), path)


def change_rows(folder: Path, column: str, change: Callable[[list[float]], list[float]]) -> None:
    """Every row of a feature, in all data files."""
    for path in (folder / "data").rglob("*.parquet"):
        change_column(path, column, lambda rows: rows.__setitem__(slice(None), [change(row) for row in rows]))


def rename_feature(info: dict[str, Any], old: str, new: str) -> None:
    info["features"] = {new if name == old else name: one for name, one in info["features"].items()}


def only_problem(folder: Path, **options: bool) -> Problem:
    (problem,) = inspect_dataset(str(folder), **options).problems
    return problem


# What is found


def test_the_facts_of_a_whole_dataset(dataset_v3):
    found = inspect_dataset(str(dataset_v3))
    assert found.problems == ()
    assert (found.version, found.robot_type) == ("v3.0", "synthetic")
    action = next(one for one in found.features if one.name == "action")
    assert (action.dtype, action.shape, action.names) == ("float32", (3,), ("velocity_x", "velocity_y", "close"))
    lengths = pq.read_table(dataset_v3 / EPISODES).column("length").to_numpy()
    assert found.episodes is not None
    assert (found.episodes.count, found.episodes.frames, found.episodes.fps) == (7, lengths.sum(), 10.0)
    assert (found.episodes.min_length, found.episodes.max_length) == (lengths.min(), lengths.max())
    assert found.episodes.median_length == np.median(lengths)
    assert found.episodes.duration_s == pytest.approx(lengths.sum() / 10)
    assert {one.task: one.episodes for one in found.tasks} == _counted_tasks(dataset_v3)
    assert all(one.has_index for one in found.tasks)


def _counted_tasks(folder: Path) -> dict[str, int]:
    """By another way: the rows' task_index."""
    sentences = pq.read_table(folder / "meta/tasks.parquet").to_pydict()
    rows = [pq.read_table(path).to_pandas() for path in sorted((folder / "data").rglob("*.parquet"))]
    episodes = {(int(e), int(t)) for one in rows for e, t in zip(one.episode_index, one.task_index, strict=True)}
    numbers = [task for _, task in episodes]
    return {text: numbers.count(n) for n, text in zip(sentences["task_index"], sentences["task"], strict=True)}


def test_cameras_statistics_and_sizes(dataset_v3):
    found = inspect_dataset(str(dataset_v3))
    files = sorted((dataset_v3 / "videos" / TOP).rglob("*.mp4"))
    top = next(one for one in found.cameras if one.name == TOP)
    assert (top.height, top.width, top.codec, top.pixel_format, top.fps) == (96, 96, "h264", "yuv420p", 10.0)
    assert (top.files, top.bytes, top.opened) == (3, sum(path.stat().st_size for path in files), 1)
    action = next(one for one in found.stats if one.feature == "action")
    assert {"min", "max", "mean", "std", "q01", "q99"} <= set(action.present)
    assert action.nan_dims == action.degenerate_dims == ()
    for kind in ("data", "videos", "meta"):
        real = sum(path.stat().st_size for path in (dataset_v3 / kind).rglob("*") if path.is_file())
        assert found.bytes[kind] == real > 0


def test_every_video_is_opened_when_asked_for(dataset_v3):
    seen: list[tuple[int, int]] = []
    found = inspect_dataset(str(dataset_v3), videos=True, on_video=lambda done, total: seen.append((done, total)))
    assert [one.opened for one in found.cameras] == [3, 3]
    assert seen == [(done, 6) for done in range(1, 7)]
    assert found.problems == ()


def test_v21_lacks_quantiles_and_nothing_else(dataset_v21, dataset_v3):
    old, new = inspect_dataset(str(dataset_v21), videos=True), inspect_dataset(str(dataset_v3))
    (problem,) = old.problems
    assert (problem.severity, problem.place) == ("warning", "meta/episodes_stats.jsonl")
    assert problem.examples == ("observation.state", "action")
    assert not old.has_errors
    assert (old.episodes, old.features, old.tasks) == (new.episodes, new.features, new.tasks)
    assert [one.files for one in old.cameras] == [7, 7]


def test_a_url_is_inspected_like_a_folder(dataset_v3):
    fsspec.filesystem("memory").put(str(dataset_v3), "/inspect-from-a-url", recursive=True)
    remote, local = inspect_dataset("memory://inspect-from-a-url"), inspect_dataset(str(dataset_v3))
    assert asdict(remote) == asdict(local) | {"dataset": "memory://inspect-from-a-url"}


# What is wrong: the layout


def test_a_videos_folder_with_another_name(copy_of):
    folder = copy_of()
    (folder / "videos").rename(folder / "video")
    problem = only_problem(folder)
    assert (problem.severity, problem.place, problem.count) == ("error", "videos/", 6)
    assert "6 of 6 .mp4 files are missing" in problem.found
    assert "rename video/ to videos/" in problem.fix


def test_missing_and_stray_files(copy_of):
    folder = copy_of()
    (folder / f"videos/{TOP}/chunk-000/file-001.mp4").rename(folder / f"videos/{TOP}/chunk-000/episode_1.mp4")
    missing, stray = inspect_dataset(str(folder)).problems
    assert missing.severity == "error"
    assert missing.examples == (f"videos/{TOP}/chunk-000/file-001.mp4",)
    assert "1 of 6" in missing.found
    assert "episode_1.mp4" in missing.fix
    assert (stray.severity, stray.examples) == ("warning", (f"videos/{TOP}/chunk-000/episode_1.mp4",))


def test_a_link_without_its_target_is_a_missing_file(copy_of):
    folder = copy_of()
    path = folder / "data/chunk-000/file-000.parquet"
    path.unlink()
    path.symlink_to("gone")
    problem = only_problem(folder)
    assert problem.examples == ("data/chunk-000/file-000.parquet",)


def test_at_most_ten_missing_files_are_listed(copy_of):
    folder = copy_of("v2.1")
    shutil.rmtree(folder / "videos")
    problem = next(one for one in inspect_dataset(str(folder)).problems if one.severity == "error")
    assert (len(problem.examples), problem.count) == (10, 14)


def test_a_template_that_leaves_the_folder_is_an_error(copy_of):
    folder = copy_of()
    change_info(folder, lambda info: info.update(data_path="../data/file-{file_index:03d}.parquet"))
    found = inspect_dataset(str(folder))
    assert found.has_errors
    assert "leaves the dataset's folder" in found.problems[0].found
    assert found.features


def test_listing_skips_hidden_names_and_ends_in_a_circle_of_links(tmp_path):
    (tmp_path / "data/.cache").mkdir(parents=True)
    (tmp_path / "data/.cache/x").write_text("x")
    (tmp_path / "data/a.parquet").write_text("abc")
    (tmp_path / "data/up").symlink_to(tmp_path / "data", target_is_directory=True)
    listed = list_files(Root(str(tmp_path)), "data")
    assert listed["data/a.parquet"] == 3
    assert not any(".cache" in name for name in listed)
    assert len(listed) < 20
    assert list_files(Root(str(tmp_path)), "nowhere") == {}


@pytest.mark.parametrize(
    ("template", "folder"), [("videos/{video_key}/a.mp4", "videos"), ("{video_key}/a.mp4", ""), ("a-{n}.mp4", "")]
)
def test_top_folder(template, folder):
    assert top_folder(template) == folder


# What is wrong: meta/


@pytest.mark.parametrize(
    ("name", "severity"), [("total_episodes", "error"), ("total_frames", "error"), ("total_tasks", "warning")]
)
def test_totals_that_disagree(copy_of, name, severity):
    folder = copy_of()
    change_info(folder, lambda info: info.update({name: 3}))
    problem = only_problem(folder)
    assert (problem.severity, problem.place, problem.found) == (severity, "meta/info.json", f"{name} is 3")


@pytest.mark.parametrize(
    ("old", "new", "severity"),
    [("action", "actions", "error"), ("observation.state", "state", "error")],
)
def test_features_with_other_names(copy_of, old, new, severity):
    folder = copy_of()
    change_info(folder, lambda info: rename_feature(info, old, new))
    problem = next(one for one in inspect_dataset(str(folder)).problems if "it is named" in one.found)
    assert (problem.severity, problem.place) == (severity, f"meta/info.json, feature '{new}'")
    assert f'--rename_map=\'{{"{new}": "{old}"}}\'' in problem.fix


def test_a_camera_with_another_name(copy_of):
    folder = copy_of("v2.1")
    change_info(folder, lambda info: rename_feature(info, TOP, "image"))
    (folder / f"videos/chunk-000/{TOP}").rename(folder / "videos/chunk-000/image")
    problem = next(one for one in inspect_dataset(str(folder)).problems if "it is named" in one.found)
    assert problem.severity == "warning"
    assert '"image": "observation.images.image"' in problem.fix
    assert not inspect_dataset(str(folder)).has_errors


def test_no_action_no_state_no_camera(copy_of):
    folder = copy_of()

    def change(info: dict[str, Any]) -> None:
        for name in ("action", "observation.state", TOP, WRIST):
            del info["features"][name]

    change_info(folder, change)
    by_found = {one.found.split(";")[0]: one.severity for one in inspect_dataset(str(folder)).problems}
    assert by_found["no feature 'action'"] == "error"
    assert by_found["no feature 'observation.state'"] == by_found["no camera"] == "warning"


def test_wide_actions_and_depth_cameras_are_warned_of(copy_of):
    folder = copy_of()

    def change(info: dict[str, Any]) -> None:
        info["features"]["action"] |= {"shape": [33], "names": None}
        info["features"][TOP]["info"]["is_depth_map"] = True

    change_info(folder, change)
    narrow, wide, depth = inspect_dataset(str(folder)).problems
    assert (narrow.severity, narrow.found) == ("error", "statistics of another width than the feature")
    assert (wide.severity, wide.found) == ("warning", "it has 33 dims")
    assert (depth.severity, depth.examples) == ("warning", (TOP,))


def test_missing_statistics(copy_of):
    folder = copy_of()
    (folder / "meta/stats.json").unlink()
    problem = only_problem(folder)
    assert (problem.severity, problem.examples) == ("warning", ("observation.state", "action"))
    assert problem.found == "features without statistics"


def test_missing_quantiles(copy_of):
    folder = copy_of()
    change_stats(folder, lambda stats: stats["action"].pop("q99"))
    problem = only_problem(folder)
    assert (problem.severity, problem.found, problem.examples) == ("warning", "features without quantiles", ("action",))


def test_statistics_that_are_nan_or_flat_name_their_dims(copy_of):
    folder = copy_of()

    def change(stats: dict[str, Any]) -> None:
        stats["action"]["mean"][1] = float("nan")
        stats["observation.state"]["q01"][2] = stats["observation.state"]["q99"][2]

    change_stats(folder, change)
    found = inspect_dataset(str(folder))
    nan, flat = found.problems
    assert (nan.severity, nan.examples) == ("error", ("action: 1 (velocity_y)",))
    assert (flat.severity, flat.examples) == ("warning", ("observation.state: 2 (gripper_open)",))
    facts = {one.feature: one for one in found.stats}
    assert facts["action"].nan_dims == ("1 (velocity_y)",)
    assert facts["observation.state"].degenerate_dims == ("2 (gripper_open)",)


def test_a_dim_that_never_changes_is_seen_through_rounding(copy_of):
    """As estimates of quantiles leave it: q01 and q99 differ in the last digits."""
    folder = copy_of()
    change_rows(folder, "action", lambda row: [*row[:-1], 0.5])
    change_stats(folder, lambda stats: [stats["action"][name].__setitem__(-1, 0.5) for name in ("min", "max", "mean")])
    change_stats(folder, lambda stats: stats["action"]["q01"].__setitem__(-1, 0.5))
    change_stats(folder, lambda stats: stats["action"]["q99"].__setitem__(-1, 0.5 + 1e-9))
    problem = only_problem(folder)
    assert (problem.severity, problem.examples) == ("warning", ("action: 2 (close)",))
    assert "never change" in problem.found


def test_a_dim_that_never_changes_though_the_statistics_say_so(copy_of):
    folder = copy_of()
    change_rows(folder, "action", lambda row: [*row[:-1], 0.5])
    found = [one for one in inspect_dataset(str(folder)).problems if "never change" in one.found]
    assert [(one.severity, one.examples) for one in found] == [("warning", ("2 (close)",))]
    assert re.search(r"in all \d+ rows", found[0].found)


def test_rows_that_are_no_numbers_are_an_error(copy_of):
    folder = copy_of()
    change_rows(folder, "observation.state", lambda row: [float("nan"), *row[1:]])
    (error,) = [one for one in inspect_dataset(str(folder)).problems if one.severity == "error"]
    assert error.place == "data files, feature 'observation.state'"
    assert error.examples[0] == "episode 0, frame 0"
    assert any(one.startswith("dim 0 (") for one in error.examples)


def test_a_task_index_without_a_sentence(copy_of):
    folder = copy_of()
    change_column(folder / "data/chunk-000/file-000.parquet", "task_index", lambda values: values.__setitem__(0, 99))
    problem = only_problem(folder)
    assert (problem.severity, problem.place) == ("error", "data/chunk-000/file-000.parquet")
    assert problem.examples == ("task_index 99: 1 rows",)


def test_a_data_file_that_is_no_parquet(copy_of):
    folder = copy_of()
    (folder / "data/chunk-000/file-000.parquet").write_text("version https://git-lfs")
    problem = only_problem(folder)
    assert (problem.severity, problem.place, problem.count) == ("error", "data files", 1)
    assert problem.examples[0].startswith("data/chunk-000/file-000.parquet is not readable parquet")


def test_a_sentence_that_only_the_episodes_name_is_shown_as_such(copy_of):
    folder = copy_of()
    change_column(folder / EPISODES, "tasks", lambda values: values.__setitem__(0, ["sing"]))
    found = inspect_dataset(str(folder))
    assert [(one.task, one.episodes) for one in found.tasks if not one.has_index] == [("sing", 1)]


# What is wrong: times and videos


def change_times(folder: Path, which: str, change: Callable[[list[float]], object]) -> None:
    change_column(folder / EPISODES, f"videos/{TOP}/{which}_timestamp", change)


def test_episodes_that_overlap_in_a_file(copy_of):
    folder = copy_of()
    change_times(folder, "to", lambda values: values.__setitem__(0, values[0] + 0.3))
    overlap, length = inspect_dataset(str(folder)).problems
    assert (overlap.severity, overlap.count) == ("error", 1)
    assert overlap.place == f"meta/episodes, camera '{TOP}'"
    assert overlap.examples[0].startswith("episode 1 begins at ")
    assert (length.severity, length.count) == ("warning", 1)
    assert length.examples[0].startswith("episode 0: 0.0000 s to ")


def test_an_episode_with_less_time_than_frames(copy_of):
    folder = copy_of()
    change_times(folder, "to", lambda values: values.__setitem__(6, values[6] - 0.2))
    problem = only_problem(folder)
    assert (problem.severity, problem.count) == ("error", 1)
    assert problem.examples[0].startswith("episode 6: ")


def test_an_end_at_the_last_frame_is_a_convention_where_nothing_follows_in_the_file(copy_of):
    """Reading takes from_timestamp and the rows' times; an end one frame early moves no picture."""
    folder = copy_of()
    change_times(folder, "to", lambda values: values.__setitem__(6, values[6] - 0.1))
    problem = only_problem(folder)
    assert (problem.severity, problem.count) == ("warning", 1)
    assert "(length - 1) / fps" in problem.found
    assert "nothing" in problem.fix


def test_an_episode_whose_last_frame_is_the_next_ones_first_is_an_error(copy_of):
    folder = copy_of()
    change_times(folder, "to", lambda values: values.__setitem__(0, values[0] - 0.1))
    change_times(folder, "from", lambda values: values.__setitem__(1, values[1] - 0.1))
    problems = inspect_dataset(str(folder)).problems
    assert any(one.severity == "error" and "another episode" in one.fix for one in problems)
    assert all("(length - 1)" not in one.found for one in problems)


def test_episodes_out_of_order_in_a_file_are_a_warning_when_they_do_not_overlap(copy_of):
    """Episodes 0 and 1 change places in the file: no overlap, but from_timestamp falls."""
    folder = copy_of()
    first, second = pq.read_table(folder / EPISODES).column("length").to_pylist()[:2]
    change_times(folder, "from", lambda values: values.__setitem__(slice(0, 2), [second / 10, 0.0]))
    change_times(folder, "to", lambda values: values.__setitem__(slice(0, 2), [(first + second) / 10, second / 10]))
    problem = only_problem(folder)
    assert (problem.severity, problem.count) == ("warning", 1)
    assert "does not rise" in problem.found


def test_times_that_are_not_numbers(copy_of):
    folder = copy_of()
    change_times(folder, "from", lambda values: values.__setitem__(1, float("nan")))
    assert inspect_dataset(str(folder)).has_errors


@pytest.mark.parametrize(
    ("change", "severity", "expected"),
    [
        (lambda info: info["features"][TOP].update(shape=[48, 64, 3]), "error", "48x64"),
        (lambda info: info["features"][TOP]["info"].update({"video.fps": 30}), "error", "30 fps, so that"),
        (lambda info: info["features"][TOP]["info"].update({"video.codec": "av1"}), "warning", "av1"),
    ],
)
def test_videos_that_are_not_what_info_says(copy_of, change, severity, expected):
    folder = copy_of()
    change_info(folder, change)
    problem = only_problem(folder)
    assert (problem.severity, problem.place, problem.count) == (severity, f"camera '{TOP}'", 1)
    assert problem.expected.startswith(expected)
    assert only_problem(folder, videos=True).count == 3


def test_a_video_beyond_the_first_is_opened_only_when_asked_for(copy_of):
    folder = copy_of()
    (folder / f"videos/{WRIST}/chunk-000/file-002.mp4").write_bytes(b"version https://git-lfs")
    assert inspect_dataset(str(folder)).problems == ()
    problem = only_problem(folder, videos=True)
    assert (problem.severity, problem.count) == ("error", 1)
    assert problem.examples[0].startswith(f"videos/{WRIST}/chunk-000/file-002.mp4: ")


def test_a_video_with_too_few_frames(copy_of):
    folder = copy_of()
    videos = folder / f"videos/{TOP}/chunk-000"
    shutil.copy(videos / "file-002.mp4", videos / "file-000.mp4")  # one episode in place of three
    problem = only_problem(folder)
    assert problem.severity == "error"
    assert problem.found == "files with fewer frames than the episodes in them have rows"


def test_a_video_that_begins_late(copy_of):
    """Without its edit list every frame of an H.264 file is some frames late, and the rows show what was seen before."""
    folder = copy_of()
    file = folder / f"videos/{TOP}/chunk-000/file-000.mp4"
    content = file.read_bytes()
    assert content.count(b"elst") == 1
    file.write_bytes(content.replace(b"elst", b"free"))
    problem = only_problem(folder)
    assert (problem.severity, problem.place) == ("error", f"camera '{TOP}'")
    assert problem.found == "files whose first frame is later than the first row of the episodes in them"


# What cannot be read at all


def test_an_unsupported_version_is_the_whole_report(copy_of):
    folder = copy_of()
    change_info(folder, lambda info: info.update(codebase_version="v1.6"))
    found = inspect_dataset(str(folder))
    assert (found.version, found.features, found.episodes, found.bytes) == ("v1.6", (), None, {})
    (problem,) = found.problems
    assert "v1.6" in problem.found
    assert "conversion scripts" in problem.fix


def test_what_info_says_is_shown_when_the_rest_is_refused(copy_of):
    folder = copy_of()
    (folder / "meta/tasks.parquet").unlink()
    found = inspect_dataset(str(folder))
    (problem,) = found.problems
    assert problem.found == "no meta/tasks.parquet"
    assert [one.name for one in found.features][:2] == ["observation.state", "action"]
    assert found.episodes is not None
    assert (found.episodes.count, found.episodes.min_length) == (7, None)
    assert found.bytes["videos"] > 0


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"fps": 10}', '{"fps": 10, "codebase_version": "v3.0", "features": {"a": 3, "b": {"shape": 2}}}'],
)
def test_any_info_file_gives_a_report(copy_of, text):
    folder = copy_of()
    (folder / "meta/info.json").write_text(text)
    found = inspect_dataset(str(folder))
    assert len(found.problems) == 1
    assert found.has_errors
    assert inspection_text(found, width=80)


def test_a_v21_line_without_a_length_is_reported(copy_of):
    folder = copy_of("v2.1")
    (folder / "meta/episodes.jsonl").write_text('{"episode_index": 0}\n')
    problem = only_problem(folder)
    assert problem.found == "meta/episodes.jsonl, line 1: there is no 'length', expected a whole number"
    assert problem.fix == "fetch meta/ anew, or correct the line"


# The command


def test_the_command_prints_tables_and_ends_with_0(dataset_v3, capsys):
    assert cli.main(["inspect", str(dataset_v3)]) == 0
    out = capsys.readouterr().out
    for text in ("LeRobot v3.0, synthetic", "velocity_x", "h264", "q99", "no problems found"):
        assert text in out
    assert out.isascii()


def test_the_command_ends_with_1_when_there_are_errors(copy_of, capsys):
    folder = copy_of()
    shutil.rmtree(folder / "data")
    assert cli.main(["inspect", str(folder), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["problems"][0]["severity"] == "error"
    assert told["episodes"]["count"] == 7
    assert cli.main(["inspect", str(folder)]) == 1
    assert "problems: 1 error, 0 warnings" in capsys.readouterr().out


def test_a_warning_alone_ends_with_0(dataset_v21, capsys):
    assert cli.main(["inspect", str(dataset_v21)]) == 0
    assert "problems: 0 errors, 1 warning" in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_a_misuse(tmp_path, capsys):
    assert cli.main(["inspect", str(tmp_path / "none")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("width", [50, 80, 160])
def test_the_text_keeps_to_the_width(dataset_v3, width):
    found = inspect_dataset(str(dataset_v3))
    lines = inspection_text(found, width=width).splitlines()[1:]  # the first is the dataset's own name
    assert max(map(len, lines)) <= width


def test_a_sentence_cannot_reach_the_terminal(copy_of):
    folder = copy_of()
    change_column(folder / EPISODES, "tasks", lambda values: values.__setitem__(0, ["\x1b[2J[bold]up[/bold]\n"]))
    text = inspection_text(inspect_dataset(str(folder)), width=80)
    assert "\x1b" not in text
    assert "?[2J[bold]up[/bold]?" in text


# Many episodes


def write_many(folder: Path, episodes: int, *, files: int, per_file: int) -> None:
    """meta/ alone of a v3.0 dataset; each episode has statistics too, which nobody should read."""
    (folder / "meta/episodes/chunk-000").mkdir(parents=True)
    features = {
        "action": {"dtype": "float32", "shape": [7], "names": None},
        "observation.state": {"dtype": "float32", "shape": [7], "names": None},
        TOP: {"dtype": "video", "shape": [480, 640, 3], "names": ["height", "width", "channels"]},
    }
    totals = {"total_episodes": episodes, "total_frames": 100 * episodes}
    info = {"codebase_version": "v3.0", "fps": 20, **totals, "features": features}
    (folder / "meta/info.json").write_text(json.dumps(info))
    stats = {name: [float(step) for _ in range(7)] for step, name in enumerate(["q01", "q99"])}
    (folder / "meta/stats.json").write_text(json.dumps({"action": stats, "observation.state": stats}))
    pq.write_table(pa.table({"task_index": [0, 1], "task": ["lift", "push"]}), folder / "meta/tasks.parquet")
    for number, index in enumerate(np.array_split(np.arange(episodes), files)):
        pq.write_table(_many(index, per_file), folder / f"meta/episodes/chunk-000/file-{number:03d}.parquet")


def _many(index: np.ndarray, per_file: int) -> pa.Table:
    chunk, file = np.divmod(index // per_file, 1000)
    begin_s = (index % per_file) * 5.0
    tasks = pa.ListArray.from_arrays(np.arange(len(index) + 1, dtype=np.int32), np.array(["lift", "push"])[index % 2])
    wide = pa.FixedSizeListArray.from_arrays(np.zeros(len(index) * 600), 600)
    columns: Mapping[str, Any] = {
        "episode_index": index,
        "tasks": tasks,
        "length": np.full(len(index), 100),
        "dataset_from_index": index * 100,
        "data/chunk_index": chunk,
        "data/file_index": file,
        f"videos/{TOP}/chunk_index": chunk,
        f"videos/{TOP}/file_index": file,
        f"videos/{TOP}/from_timestamp": begin_s,
        f"videos/{TOP}/to_timestamp": begin_s + 5.0,
        "stats/action/mean": wide,
    }
    return pa.table(columns)


PEAK = """
import json, resource, sys
from vlatune.inspect.inspection import inspect_dataset
from vlatune.inspect.text import inspection_text
import pandas
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = inspect_dataset(sys.argv[1])
text = inspection_text(found, width=100)
grown_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
json.dump({"grown_bytes": grown_bytes, "text": text}, sys.stdout)
"""


def test_a_hundred_thousand_episodes(tmp_path):
    """480 MB of statistics per episode lie in meta/episodes; 10,000 files are missing twice, and ten are listed."""
    write_many(tmp_path, 100_000, files=4, per_file=10)
    done = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told["grown_bytes"] < 160e6  # 65 MB seen
    found = inspect_dataset(str(tmp_path))
    assert found.episodes is not None
    assert (found.episodes.count, found.episodes.frames) == (100_000, 10_000_000)
    assert [(one.task, one.episodes) for one in found.tasks] == [("lift", 50_000), ("push", 50_000)]
    assert [(one.severity, one.place, one.count) for one in found.problems] == [
        ("error", "data/", 10_000),
        ("error", "videos/", 10_000),
    ]
    assert all(len(one.examples) == 10 for one in found.problems)
    assert "- and 9,990 more" in told["text"]
    assert len(told["text"]) < 10_000
