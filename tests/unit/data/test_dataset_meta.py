"""`meta/` of both versions equals what LeRobot reads; an error names the invalid part and the remedy."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlatune.data.meta.dataset_meta import Feature, check_complete, fill_template, load_meta

EPISODES = "meta/episodes/chunk-000/file-000.parquet"
TASKS = "meta/tasks.parquet"
TOP = "observation.images.top"


@pytest.fixture(scope="module")
def lerobot_meta(dataset_v3):
    from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata

    return LeRobotDatasetMetadata("synthetic/test", root=dataset_v3)


@pytest.fixture
def copy_of(tmp_path, dataset_v3, dataset_v21) -> Callable[[str], Path]:
    """Make a copy of a dataset's `meta/`."""

    def make(version: str) -> Path:
        source = {"v3.0": dataset_v3, "v2.1": dataset_v21}[version]
        shutil.copytree(source / "meta", tmp_path / version / "meta")
        return tmp_path / version

    return make


def change_info(folder: Path, **changes) -> None:
    """Set keys of info.json; None removes."""
    info = json.loads((folder / "meta/info.json").read_text()) | changes
    info = {key: value for key, value in info.items() if value is not None}
    (folder / "meta/info.json").write_text(json.dumps(info))


def change_episodes(folder: Path, column: str, row: int, value: float) -> None:
    table = pq.read_table(folder / EPISODES)
    values = table.column(column).to_pylist()
    values[row] = value
    pq.write_table(table.set_column(table.column_names.index(column), column, pa.array(values)), folder / EPISODES)


def keep_episodes(folder: Path, keep: list[int]) -> None:
    pq.write_table(pq.read_table(folder / EPISODES).take(pa.array(keep, pa.int64())), folder / EPISODES)


def error_of(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the caller checks the message)
        load_meta(str(folder))
    return str(caught.value)


def test_v3_equals_lerobots_metadata(dataset_v3, lerobot_meta):
    meta, theirs = load_meta(str(dataset_v3)), lerobot_meta
    assert (meta.version, meta.fps, meta.num_frames) == ("v3.0", theirs.fps, theirs.total_frames)
    assert list(meta.cameras) == theirs.camera_keys
    assert {name: list(feature.shape) for name, feature in meta.features.items()} == {
        name: list(feature["shape"]) for name, feature in theirs.features.items()
    }
    assert {name: feature.dtype for name, feature in meta.features.items()} == {
        name: feature["dtype"] for name, feature in theirs.features.items()
    }
    assert list(meta.features["action"].names or ()) == theirs.names["action"]
    assert list(meta.tasks) == theirs.tasks.sort_values("task_index").index.tolist()
    for feature, stats in theirs.stats.items():
        for name, value in stats.items():
            assert np.array_equal(meta.stats[feature][name], np.asarray(value, np.float64).reshape(-1))


def test_v3_episodes_are_in_the_files_that_lerobot_reads(dataset_v3, lerobot_meta):
    meta = load_meta(str(dataset_v3))
    assert len(meta.episodes) == lerobot_meta.total_episodes == 7
    for position, theirs in enumerate(lerobot_meta.episodes):
        assert meta.episodes.index[position] == theirs["episode_index"]
        assert meta.episodes.length[position] == theirs["length"]
        assert meta.episodes.from_row[position] == theirs["dataset_from_index"]
        assert meta.data_path(position) == str(lerobot_meta.get_data_file_path(position))
        for camera in meta.cameras:
            assert meta.video_path(position, camera) == str(lerobot_meta.get_video_file_path(position, camera))
            assert meta.episodes.videos[camera].from_s[position] == theirs[f"videos/{camera}/from_timestamp"]
            assert meta.episodes.videos[camera].to_s[position] == theirs[f"videos/{camera}/to_timestamp"]


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_every_episode_begins_at_its_row_of_its_file(version, dataset_v3, dataset_v21):
    folder = dataset_v3 if version == "v3.0" else dataset_v21
    meta = load_meta(str(folder))
    for position in range(len(meta.episodes)):
        rows = pq.read_table(folder / meta.data_path(position)).slice(meta.episodes.data_offset[position])
        length = int(meta.episodes.length[position])
        assert rows.column("episode_index").to_pylist()[:length] == [position] * length
        assert rows.column("frame_index").to_pylist()[:length] == list(range(length))
        assert rows.column("index")[0].as_py() == meta.episodes.from_row[position]
        assert all((folder / meta.video_path(position, camera)).exists() for camera in meta.cameras)


def test_v21_holds_the_same_as_v3(dataset_v3, dataset_v21):
    new, old = load_meta(str(dataset_v3)), load_meta(str(dataset_v21))
    assert old.version == "v2.1"
    assert (old.fps, old.features, old.tasks, old.cameras) == (new.fps, new.features, new.tasks, new.cameras)
    for column in ("index", "length", "from_row"):
        assert np.array_equal(getattr(old.episodes, column), getattr(new.episodes, column))
    assert old.data_path(3) == "data/chunk-000/episode_000003.parquet"
    assert old.video_path(3, old.cameras[0]) == f"videos/chunk-000/{old.cameras[0]}/episode_000003.mp4"


def test_episodes_may_be_spread_over_files_in_any_order(copy_of, dataset_v3):
    folder = copy_of("v3.0")
    table = pq.read_table(folder / EPISODES)
    (folder / "meta/episodes/chunk-001").mkdir()
    pq.write_table(table.take([2, 0, 1]), folder / "meta/episodes/chunk-001/file-000.parquet")
    pq.write_table(table.take([6, 3, 5, 4]), folder / EPISODES)
    mixed, ordered = load_meta(str(folder)).episodes, load_meta(str(dataset_v3)).episodes
    for column in ("index", "length", "from_row", "data_file", "data_offset"):
        assert np.array_equal(getattr(mixed, column), getattr(ordered, column))


@pytest.mark.parametrize(
    ("version", "changes", "file"),
    [
        ("v3.0", {"data_path": None, "video_path": None}, "data/chunk-000/file-000.parquet"),
        ("v2.1", {"chunks_size": 3}, "data/chunk-001/episode_000004.parquet"),
        ("v2.1", {"codebase_version": "2.1"}, "data/chunk-000/episode_000004.parquet"),
    ],
)
def test_templates_and_chunk_sizes_have_defaults(version, changes, file, copy_of):
    folder = copy_of(version)
    change_info(folder, **changes)
    assert load_meta(str(folder)).data_path(4) == file


@pytest.mark.parametrize(
    ("shape", "names", "expected"),
    [
        ((480, 640, 3), ("height", "width", "channels"), (480, 640)),
        ((3, 480, 640), ("channels", "height", "width"), (480, 640)),
        ((3, 480, 640), None, (480, 640)),
        ((480, 640, 1), None, (480, 640)),
        ((640, 480, 3), ("width", "height", "channels"), (480, 640)),
        ((3, 480, 640), ("height", "width", "channels"), (480, 640)),
    ],
)
def test_the_recorded_size_is_found_in_either_order(shape, names, expected):
    assert Feature("video", shape, names, {}).height_width == expected


@pytest.mark.parametrize("odd", [3, "x", [3], {}, {"motors": 3}])
def test_unknown_forms_of_names_and_info_are_ignored(odd, copy_of):
    folder = copy_of("v3.0")
    info = json.loads((folder / "meta/info.json").read_text())
    for feature in info["features"].values():
        feature |= {"names": odd, "info": odd}
    change_info(folder, **info)
    assert load_meta(str(folder)).features["action"].shape == (3,)


@pytest.mark.parametrize("field", [".__class__", ".__class__.__mro__", "[0]", "!r", ":>10", ":03d"])
def test_a_template_cannot_access_attributes_or_other_fields(field):
    for template in (f"{{video_key{field}}}", "{0}", "{}", "{secret}", "{chunk_index:x}", "data/{chunk_index"):
        with pytest.raises(ValueError, match=r"meta/info.json: .*path template"):
            fill_template(template, {"chunk_index": 2}, {"video_key": "top"})
    with pytest.raises(ValueError, match="path template"):  # a value is not filled again
        fill_template("{video_key}", {"chunk_index": 2}, {"video_key": "{chunk_index}"})


def test_a_folder_without_a_dataset_is_an_error(tmp_path):
    assert f"dataset '{tmp_path / 'none'}'" in error_of(tmp_path / "none")
    assert f"dataset '{tmp_path}': " in error_of(tmp_path)
    with pytest.raises(ValueError, match=r"--dataset.root must be the folder"):
        load_meta(str(tmp_path), argument="--dataset.root")


INFO_ERRORS = [
    ("codebase_version", (None, "v2.0", "2.0", "v4.0", ["v3.0"]), "codebase_version"),
    ("fps", (None, 0, -10, "30", [30], True, float("nan"), float("inf")), "fps"),
    ("features", (None, [], {}, [{"name": "action"}], "action", 3), "'features' is"),
    ("features", ({"action": 3}, {"action": {"dtype": "float32"}}, {"action": {"shape": [2]}}), "feature 'action'"),
    (
        "features",
        tuple({"action": {"dtype": "float32", "shape": one}} for one in (7, None, [0], [2.5], [[7]])),
        "shape",
    ),
    ("features", ({"top": {"dtype": "video", "shape": [96, 96]}},), "feature 'top' has shape [96, 96]"),
    ("chunks_size", ("x", 0), "'chunks_size' is"),
    ("total_episodes", (-1,), "'total_episodes' is"),
    ("data_path", (3, ["a"], "data/{secret}.parquet", "data/{chunk_index"), "meta/info.json: "),
    ("data_path", ("../../{chunk_index}.parquet",), "leaves the dataset's folder"),
]


@pytest.mark.parametrize(("key", "values", "found"), INFO_ERRORS)
def test_an_invalid_value_in_info_is_named(key, values, found, copy_of):
    folder = copy_of("v3.0")
    good = (folder / "meta/info.json").read_text()
    for value in values:
        (folder / "meta/info.json").write_text(good)
        change_info(folder, **{key: value})
        message = error_of(folder)
        assert message.startswith(f"dataset '{folder}': ")
        assert found in message
    for content in (b"", b"{", b"\xff\xfe", b"[]", b"null"):
        (folder / "meta/info.json").write_bytes(content)
        assert error_of(folder).startswith(f"dataset '{folder}': meta/info.json")


def write_tasks(folder: Path, **columns: list) -> None:
    pq.write_table(pa.table(columns), folder / TASKS)


V3_ERRORS = {
    "gap": (lambda root: keep_episodes(root, [0, 1, 3, 4, 5, 6]), "lists episode 3 at place 2"),
    "gap in rows": (lambda root: change_episodes(root, "dataset_from_index", 4, 99), "episode 4 begins at row 99"),
    "negative time": (lambda root: change_episodes(root, f"videos/{TOP}/from_timestamp", 1, -1.0), "at -1.0 s"),
    "no file": (lambda root: (root / EPISODES).unlink(), "no meta/episodes/*/*.parquet"),
    "no parquet": (lambda root: (root / EPISODES).write_text("no"), f"{EPISODES} is not readable parquet"),
    "tasks no parquet": (lambda root: (root / TASKS).write_bytes(b"PAR1PAR1"), f"{TASKS} is not readable parquet"),
    "task columns": (lambda root: write_tasks(root, task_index=[0], text=["go"]), "expected task and task_index"),
    "task no text": (lambda root: write_tasks(root, task_index=[0], task=[3]), "expected text"),
}
"""Further errors are in `test_untrusted_datasets.py`."""


@pytest.mark.parametrize(("damage", "found"), V3_ERRORS.values(), ids=V3_ERRORS)
def test_damage_of_v3_metadata_is_named(damage, found, copy_of):
    folder = copy_of("v3.0")
    damage(folder)
    message = error_of(folder)
    assert message.startswith(f"dataset '{folder}': ")
    assert found in message
    assert "fetch" in message


def test_fewer_episodes_than_info_states_are_an_error(copy_of):
    """The last file of meta/episodes may be missing."""
    folder = copy_of("v3.0")
    keep_episodes(folder, [0, 1, 2, 3, 4])
    with pytest.raises(ValueError, match=r"total_episodes 7, but meta/ lists only 5"):
        check_complete(load_meta(str(folder)))
    change_info(folder, total_episodes=5)
    check_complete(load_meta(str(folder)))


def test_a_camera_without_columns_in_episodes_is_named(copy_of):
    folder = copy_of("v3.0")
    info = json.loads((folder / "meta/info.json").read_text())
    change_info(folder, features=info["features"] | {"observation.images.new": info["features"][TOP]})
    assert "lacks the column 'videos/observation.images.new/chunk_index'" in error_of(folder)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"action": 3}', '{"action": {"mean": ["x"]}}', '{"a": {"b": [[1], 2]}}']
)
def test_invalid_statistics_of_v3_are_named(content, copy_of):
    folder = copy_of("v3.0")
    (folder / "meta/stats.json").write_text(content)
    assert error_of(folder).startswith(f"dataset '{folder}': meta/stats.json")


@pytest.mark.parametrize("column", ["length", "data/file_index", f"videos/{TOP}/from_timestamp"])
def test_a_column_of_episodes_without_numbers_is_named(column, copy_of):
    folder = copy_of("v3.0")
    table = pq.read_table(folder / EPISODES)
    for values in (["a"] * 7, [None] * 7, [[1]] * 7):
        pq.write_table(table.set_column(table.column_names.index(column), column, pa.array(values)), folder / EPISODES)
        assert error_of(folder).startswith(f"dataset '{folder}': {EPISODES}, column '{column}'")


def test_tasks_are_found_in_an_unnamed_index(copy_of):
    folder = copy_of("v3.0")
    write_tasks(folder, task_index=[1, 0], __index_level_0__=["stop", "go"])
    assert load_meta(str(folder)).tasks == ("go", "stop")
