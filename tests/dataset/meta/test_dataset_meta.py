"""`meta/` of both versions: what LeRobot says, and for what is damaged the thing and the remedy."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlatune.dataset.meta.dataset_meta import Feature, check_complete, fill_template, load_meta
from vlatune.dataset.storage.root import Root

EPISODES = "meta/episodes/chunk-000/file-000.parquet"


@pytest.fixture(scope="module")
def lerobot_meta(dataset_v3):
    from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata

    return LeRobotDatasetMetadata("synthetic/test", root=dataset_v3)


@pytest.fixture
def copy_of(tmp_path, dataset_v3, dataset_v21) -> Callable[[str], Path]:
    """A dataset's `meta/`, free to be damaged."""

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


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the caller looks at the message)
        load_meta(str(folder))
    return str(caught.value)


def test_v3_is_what_lerobot_says(dataset_v3, lerobot_meta):
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


def test_v3_episodes_lie_where_lerobot_finds_them(dataset_v3, lerobot_meta):
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


def test_v21_holds_what_v3_holds(dataset_v3, dataset_v21):
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
    mixed, whole = load_meta(str(folder)).episodes, load_meta(str(dataset_v3)).episodes
    for column in ("index", "length", "from_row", "data_file", "data_offset"):
        assert np.array_equal(getattr(mixed, column), getattr(whole, column))


def test_a_dataset_without_statistics_has_none(copy_of):
    for version, name in {"v3.0": "stats.json", "v2.1": "episodes_stats.jsonl"}.items():
        folder = copy_of(version)
        (folder / "meta" / name).unlink()
        assert load_meta(str(folder)).stats == {}


def test_templates_that_info_leaves_out_are_lerobots_own(copy_of, dataset_v3):
    folder = copy_of("v3.0")
    change_info(folder, data_path=None, video_path=None)
    bare, whole = load_meta(str(folder)), load_meta(str(dataset_v3))
    assert bare.data_path(6) == whole.data_path(6)
    assert bare.video_path(6, bare.cameras[0]) == whole.video_path(6, bare.cameras[0])


def test_v21_chunks_are_counted_with_the_datasets_own_size(copy_of):
    folder = copy_of("v2.1")
    change_info(folder, chunks_size=3)
    assert load_meta(str(folder)).data_path(4) == "data/chunk-001/episode_000004.parquet"


def test_an_old_version_number_without_its_letter_is_understood(copy_of):
    folder = copy_of("v2.1")
    change_info(folder, codebase_version="2.1")
    assert load_meta(str(folder)).version == "v2.1"


def test_metadata_is_read_from_a_url(dataset_v3):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(dataset_v3 / "meta"), "/meta-from-a-url/meta", recursive=True)
    remote, local = load_meta("memory://meta-from-a-url"), load_meta(str(dataset_v3))
    assert remote.tasks == local.tasks
    assert np.array_equal(remote.episodes.from_row, local.episodes.from_row)
    assert remote.stats.keys() == local.stats.keys()


# What info.json says of features


@pytest.mark.parametrize(
    ("shape", "names", "expected"),
    [
        ((480, 640, 3), ("height", "width", "channels"), (480, 640)),
        ((3, 480, 640), ("channels", "height", "width"), (480, 640)),
        ((3, 480, 640), None, (480, 640)),
        ((480, 640, 3), None, (480, 640)),
        ((480, 640, 1), None, (480, 640)),
        ((640, 480, 3), ("width", "height", "channels"), (480, 640)),
        ((3, 480, 640), ("height", "width", "channels"), (480, 640)),
    ],
)
def test_the_recorded_size_is_found_in_either_order(shape, names, expected):
    assert Feature("video", shape, names, {}).height_width == expected


def test_depth_is_told_by_either_key():
    assert [Feature("video", (4, 4, 1), None, {key: True}).is_depth for key in ("is_depth_map", "video.is_depth_map")]
    assert not Feature("video", (4, 4, 3), None, {"is_depth_map": False}).is_depth


def test_names_of_older_recordings_are_taken_out_of_their_group(copy_of):
    folder = copy_of("v3.0")
    feature = {"dtype": "float32", "shape": [2], "names": {"motors": ["left", "right"]}}
    change_info(folder, features={"action": feature, "observation.state": {**feature, "names": None}})
    features = load_meta(str(folder)).features
    assert features["action"].names == ("left", "right")
    assert features["observation.state"].names is None


# Path templates


def test_a_template_takes_known_fields():
    numbers, texts = {"chunk_index": 2, "file_index": 1234}, {"video_key": "observation.images.top"}
    template = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}-{file_index}.mp4"
    assert fill_template(template, numbers, texts) == "videos/observation.images.top/chunk-002/file-1234-1234.mp4"


@pytest.mark.parametrize(
    "template",
    [
        "{video_key.__class__}",
        "{video_key.__class__.__mro__}",
        "{video_key[0]}",
        "{video_key!r}",
        "{video_key:>10}",
        "{chunk_index:x}",
        "{0}",
        "{}",
        "{secret}",
        "{video_key:03d}",
        "data/{chunk_index",
        "data/chunk_index}",
    ],
)
def test_a_template_that_reaches_for_more_is_refused(template):
    with pytest.raises(ValueError, match=r"meta/info.json: .*path template") as caught:
        fill_template(template, {"chunk_index": 2}, {"video_key": "top"})
    assert template in str(caught.value)


def test_a_camera_named_like_a_field_is_not_filled_again():
    with pytest.raises(ValueError, match="cannot read the path template"):
        fill_template("{video_key}", {"chunk_index": 2}, {"video_key": "{chunk_index}"})


def test_a_template_that_leaves_the_folder_is_refused(copy_of):
    folder = copy_of("v3.0")
    change_info(folder, data_path="../../{chunk_index}.parquet")
    assert f"dataset '{folder}': the file name '../../0.parquet' leaves the dataset's folder" in refusal(folder)


# What is refused


def test_a_folder_that_is_not_there(tmp_path):
    message = refusal(tmp_path / "none")
    assert message == f"dataset '{tmp_path / 'none'}': there is no such folder; check the path"


def test_a_folder_without_a_dataset(tmp_path):
    message = refusal(tmp_path)
    assert f"dataset '{tmp_path}': no meta/info.json in it" in message
    assert "the path must be the folder that holds meta/, data/ and videos/" in message
    with pytest.raises(ValueError, match=r"--dataset.root must be the folder that holds meta/"):
        load_meta(str(tmp_path), argument="--dataset.root")


@pytest.mark.parametrize(
    ("version", "said", "remedy"),
    [
        (None, "has no codebase_version", "set it if the files are laid out"),
        ("v2.0", "says codebase_version 'v2.0'", "convert it with LeRobot's conversion scripts"),
        ("2.0", "says codebase_version '2.0'", "convert it with LeRobot's conversion scripts"),
        ("v4.0", "says codebase_version 'v4.0'", "it is newer than this vlatune: update vlatune"),
        (["v3.0"], "says codebase_version ['v3.0']", "convert the dataset"),
    ],
)
def test_another_version(version, said, remedy, copy_of):
    folder = copy_of("v3.0")
    change_info(folder, codebase_version=version)
    message = refusal(folder)
    assert f"dataset '{folder}': meta/info.json {said}; vlatune reads v3.0 and v2.1" in message
    assert remedy in message


@pytest.mark.parametrize("content", ["", "{", "{'fps': 10}", "\xff\xfe"])
def test_info_that_is_not_json(content, copy_of):
    folder = copy_of("v3.0")
    (folder / "meta/info.json").write_bytes(content.encode("latin-1"))
    assert f"dataset '{folder}': meta/info.json is not readable JSON" in refusal(folder)


@pytest.mark.parametrize("content", ["[]", "3", "null", '"v3.0"'])
def test_info_that_is_not_an_object(content, copy_of):
    folder = copy_of("v3.0")
    (folder / "meta/info.json").write_text(content)
    assert f"dataset '{folder}': meta/info.json: it is " in refusal(folder)
    assert "expected a JSON object, as LeRobot writes it; fetch meta/ anew" in refusal(folder)


@pytest.mark.parametrize("fps", [None, 0, -10, "30", "fast", [30], True, float("nan"), float("inf")])
def test_a_rate_that_is_no_number_above_0(fps, copy_of):
    folder = copy_of("v3.0")
    change_info(folder, fps=fps)
    found = "there is no 'fps'" if fps is None else f"'fps' is {fps!r}"
    assert refusal(folder) == (
        f"dataset '{folder}': meta/info.json: {found}, expected frames per second, a number above 0; "
        f"set it to the rate of the recording"
    )


@pytest.mark.parametrize("features", [None, [], {}, [{"name": "action"}], "action", 3])
def test_features_that_are_no_object(features, copy_of):
    folder = copy_of("v3.0")
    change_info(folder, features=features)
    message = refusal(folder)
    assert f"dataset '{folder}': meta/info.json: 'features' is " in message
    assert "expected an object of name -> {dtype, shape, names}; fetch meta/ anew" in message


@pytest.mark.parametrize("shape", [7, "7", None, [0], [-1], [2.5], ["x"], [[7]], {"a": 1}])
def test_a_shape_that_is_no_list_of_whole_numbers(shape, copy_of):
    folder = copy_of("v3.0")
    change_info(folder, features={"action": {"dtype": "float32", "shape": shape}})
    message = refusal(folder)
    assert f"meta/info.json: feature 'action' has shape {shape!r}, expected a list of whole numbers, as [7]" in message
    assert message.endswith("fetch meta/ anew, or convert the dataset anew")


@pytest.mark.parametrize(("key", "value"), [("chunks_size", "x"), ("chunks_size", 0), ("total_episodes", -1)])
def test_counts_that_are_none(key, value, copy_of):
    folder = copy_of("v3.0")
    change_info(folder, **{key: value})
    assert f"meta/info.json: '{key}' is {value!r}, expected a whole number" in refusal(folder)


@pytest.mark.parametrize("template", [3, ["a"], "data/{secret}.parquet", "data/{chunk_index"])
def test_a_template_that_cannot_be_used(template, copy_of):
    folder = copy_of("v3.0")
    change_info(folder, data_path=template)
    assert refusal(folder).startswith(f"dataset '{folder}': meta/info.json: ")


def test_odd_notes_on_a_feature_are_not_read(copy_of):
    """names and info are for people; whatever is in them, the dataset is read."""
    folder = copy_of("v3.0")
    info = json.loads((folder / "meta/info.json").read_text())
    for odd in (3, "x", [3], {}, {"motors": 3}):
        for feature in info["features"].values():
            feature |= {"names": odd, "info": odd}
        (folder / "meta/info.json").write_text(json.dumps(info))
        assert load_meta(str(folder)).features["action"].shape == (3,)


@pytest.mark.parametrize("feature", [3, {"dtype": "float32"}, {"shape": [2]}, {"dtype": None, "shape": [2]}])
def test_a_feature_without_its_shape(feature, copy_of):
    folder = copy_of("v3.0")
    change_info(folder, features={"action": feature})
    assert "meta/info.json: feature 'action' lacks dtype or shape" in refusal(folder)


def test_a_camera_that_is_not_a_picture(copy_of):
    folder = copy_of("v3.0")
    change_info(folder, features={"top": {"dtype": "video", "shape": [96, 96]}})
    assert "camera 'top' has shape [96, 96], expected three sides, as [480, 640, 3]" in refusal(folder)


def test_a_gap_between_episodes(copy_of):
    folder = copy_of("v3.0")
    keep_episodes(folder, [0, 1, 3, 4, 5, 6])
    message = refusal(folder)
    assert f"dataset '{folder}': meta/ lists episode 3 after episode 1, expected episode 2" in message
    assert message.endswith("meta/ is damaged: fetch it anew, or convert the dataset anew")


def test_the_first_episodes_are_missing(copy_of):
    folder = copy_of("v3.0")
    keep_episodes(folder, [2, 3, 4, 5, 6])
    assert f"dataset '{folder}': meta/ lists episode 2 first, expected episode 0" in refusal(folder)


@pytest.mark.parametrize(("change", "how"), [(3, "leaves a gap before it"), (-3, "overlaps the episode before it")])
def test_rows_of_episodes_that_leave_a_gap_or_overlap(change, how, copy_of):
    folder = copy_of("v3.0")
    row = pq.read_table(folder / EPISODES).column("dataset_from_index").to_pylist()[4]
    change_episodes(folder, "dataset_from_index", 4, row + change)
    message = refusal(folder)
    assert f"dataset '{folder}': episode 4 begins at row {row + change} and {how}, expected row {row}; " in message
    assert message.endswith("meta/ is damaged: fetch it anew, or convert the dataset anew")


def test_a_gap_in_v21(copy_of):
    folder = copy_of("v2.1")
    lines = (folder / "meta/episodes.jsonl").read_text().splitlines()
    (folder / "meta/episodes.jsonl").write_text("\n".join(lines[:2] + lines[3:]))
    assert f"dataset '{folder}': meta/ lists episode 3 after episode 1, expected episode 2" in refusal(folder)


@pytest.mark.parametrize("time", [float("nan"), -1.0])
def test_an_episode_at_no_time_of_its_video(time, copy_of):
    folder = copy_of("v3.0")
    change_episodes(folder, "videos/observation.images.top/from_timestamp", 1, time)
    message = refusal(folder)
    assert f"episode 1, camera 'observation.images.top': meta/episodes places it at {time} s of chunk 0" in message


def test_fewer_episodes_than_info_promises(copy_of):
    """As when the last file of meta/episodes did not arrive."""
    folder = copy_of("v3.0")
    keep_episodes(folder, [0, 1, 2, 3, 4])
    meta = load_meta(str(folder))
    with pytest.raises(ValueError, match=r"says total_episodes 7, but meta/ lists only 5; fetch meta/ anew, or set"):
        check_complete(meta)
    change_info(folder, total_episodes=5)
    check_complete(load_meta(str(folder)))


def test_an_episode_that_is_listed_twice(copy_of):
    folder = copy_of("v3.0")
    keep_episodes(folder, [0, 1, 2, 2, 3, 4, 5, 6])
    assert "meta/ lists episode 2 after episode 2, expected episode 3: missing, or one is there twice" in refusal(
        folder
    )


@pytest.mark.parametrize("length", [0, -3])
def test_an_episode_without_frames(length, copy_of):
    folder = copy_of("v3.0")
    change_episodes(folder, "length", 4, length)
    assert f"dataset '{folder}': episode 4 has length {length}" in refusal(folder)


def test_an_episode_without_frames_in_v21(copy_of):
    folder = copy_of("v2.1")
    lines = (folder / "meta/episodes.jsonl").read_text().splitlines()
    lines[4] = json.dumps(json.loads(lines[4]) | {"length": 0})
    (folder / "meta/episodes.jsonl").write_text("\n".join(lines))
    assert f"dataset '{folder}': episode 4 has length 0" in refusal(folder)


def test_no_episodes_at_all_in_v21(copy_of):
    folder = copy_of("v2.1")
    (folder / "meta/episodes.jsonl").write_text("")
    assert f"dataset '{folder}': it has no episodes" in refusal(folder)


def test_no_episodes_at_all_in_v30(copy_of):
    folder = copy_of("v3.0")
    keep_episodes(folder, [])
    assert f"dataset '{folder}': it has no episodes" in refusal(folder)


def test_episodes_that_are_missing(copy_of):
    new, old = copy_of("v3.0"), copy_of("v2.1")
    (new / EPISODES).unlink()
    (old / "meta/episodes.jsonl").unlink()
    assert f"dataset '{new}': no meta/episodes/*/*.parquet; the dataset is incomplete" in refusal(new)
    assert f"dataset '{old}': no meta/episodes.jsonl, which a v2.1 dataset must have" in refusal(old)


def test_episodes_that_are_not_parquet(copy_of):
    folder = copy_of("v3.0")
    (folder / EPISODES).write_text("no")
    assert f"dataset '{folder}': {EPISODES} is not readable parquet" in refusal(folder)


def test_a_camera_that_the_episodes_do_not_know(copy_of):
    folder = copy_of("v3.0")
    info = json.loads((folder / "meta/info.json").read_text())
    camera = next(key for key, feature in info["features"].items() if feature["dtype"] == "video")
    change_info(folder, features=info["features"] | {"observation.images.new": info["features"][camera]})
    message = refusal(folder)
    assert "lacks the column 'videos/observation.images.new/chunk_index'" in message
    assert "meta/info.json and meta/episodes disagree: convert the dataset anew" in message


def test_a_line_that_is_not_json(copy_of):
    folder = copy_of("v2.1")
    with (folder / "meta/episodes.jsonl").open("a") as file:
        file.write('{"episode_index": 7,')
    assert f"dataset '{folder}': meta/episodes.jsonl, line 8 is not readable JSON" in refusal(folder)


def test_tasks_that_are_missing(copy_of):
    new, old = copy_of("v3.0"), copy_of("v2.1")
    (new / "meta/tasks.parquet").unlink()
    (old / "meta/tasks.jsonl").unlink()
    assert f"dataset '{new}': no meta/tasks.parquet" in refusal(new)
    assert f"dataset '{old}': no meta/tasks.jsonl, which a v2.1 dataset must have" in refusal(old)


def test_tasks_with_other_columns(copy_of):
    folder = copy_of("v3.0")
    pq.write_table(pa.table({"task_index": [0], "sentence": ["go"]}), folder / "meta/tasks.parquet")
    assert "meta/tasks.parquet has columns ['task_index', 'sentence'], expected task and task_index" in refusal(folder)


def test_tasks_that_do_not_count_from_zero(copy_of):
    new, old = copy_of("v3.0"), copy_of("v2.1")
    pq.write_table(pa.table({"task_index": [1, 2], "task": ["go", "stop"]}), new / "meta/tasks.parquet")
    (old / "meta/tasks.jsonl").write_text('{"task_index": 1, "task": "go"}\n{"task_index": 2, "task": "stop"}\n')
    for folder in (new, old):
        assert "task_index must count 0, 1, 2, ...; found 1, 2; fetch meta/ anew" in refusal(folder)


@pytest.mark.parametrize("content", [b"", b"no parquet", b"PAR1PAR1"])
def test_tasks_that_are_not_parquet(content, copy_of):
    folder = copy_of("v3.0")
    (folder / "meta/tasks.parquet").write_bytes(content)
    message = refusal(folder)
    assert f"dataset '{folder}': meta/tasks.parquet is not readable parquet" in message
    assert message.endswith("; fetch meta/ anew")


@pytest.mark.parametrize("sentence", [None, 3])
def test_a_task_that_is_no_sentence(sentence, copy_of):
    new, old = copy_of("v3.0"), copy_of("v2.1")
    pq.write_table(pa.table({"task_index": [0], "task": [sentence]}), new / "meta/tasks.parquet")
    (old / "meta/tasks.jsonl").write_text(json.dumps({"task_index": 0, "task": sentence}))
    for folder in (new, old):
        assert f"the sentence of task_index 0 is {sentence!r}, expected text; fetch meta/ anew" in refusal(folder)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"action": 3}', '{"action": {"mean": ["x"]}}', '{"a": {"b": [[1], [1, 2]]}}']
)
def test_statistics_that_are_none(content, copy_of):
    folder = copy_of("v3.0")
    (folder / "meta/stats.json").write_text(content)
    message = refusal(folder)
    assert message.startswith(f"dataset '{folder}': meta/stats.json")
    assert message.endswith("delete the file and vlatune computes its own, or fetch meta/ anew")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("{", "is not readable JSON"),
        ("3", "is not a JSON object"),
        ('{"episode_index": 7}', "there is no 'length', expected a whole number"),
        ('{"episode_index": 7, "length": "12"}', "'length' is '12', expected a whole number"),
        ('{"episode_index": 7, "length": 1.5}', "'length' is '1.5', expected a whole number"),
        ('{"length": 12}', "there is no 'episode_index', expected a whole number"),
    ],
)
def test_a_line_of_episodes_that_is_none(line, found, copy_of):
    folder = copy_of("v2.1")
    with (folder / "meta/episodes.jsonl").open("a") as file:
        file.write(line)
    message = refusal(folder)
    assert message.startswith(f"dataset '{folder}': meta/episodes.jsonl, line 8")
    assert found in message
    assert message.endswith("fetch meta/ anew, or correct the line")


@pytest.mark.parametrize(
    "stats",
    [
        None,
        3,
        {"action": 3},
        {"action": {"mean": [0, 0, 0]}},
        {"action": {key: [0, 0] for key in ("min", "max", "mean", "std")}},
    ],
)
def test_a_line_of_statistics_that_is_none(stats, copy_of):
    folder = copy_of("v2.1")
    if isinstance(stats, dict) and isinstance(stats["action"], dict):
        stats["action"]["count"] = [4]
    with (folder / "meta/episodes_stats.jsonl").open("a") as file:
        file.write(json.dumps({"episode_index": 7, "stats": stats}))
    message = refusal(folder)
    assert message.startswith(f"dataset '{folder}': meta/episodes_stats.jsonl, line 8")
    assert message.endswith("delete the file and vlatune computes its own, or fetch meta/ anew")


@pytest.mark.parametrize("column", ["length", "data/file_index", "videos/observation.images.top/from_timestamp"])
@pytest.mark.parametrize("values", [["a"] * 7, [None] * 7, [[1]] * 7])
def test_a_column_of_episodes_that_holds_no_numbers(column, values, copy_of):
    folder = copy_of("v3.0")
    table = pq.read_table(folder / EPISODES)
    pq.write_table(table.set_column(table.column_names.index(column), column, pa.array(values)), folder / EPISODES)
    assert refusal(folder).startswith(f"dataset '{folder}': {EPISODES}, column '{column}'")


def test_tasks_are_found_in_an_unnamed_index(copy_of):
    folder = copy_of("v3.0")
    table = pa.table({"task_index": [1, 0], "__index_level_0__": ["stop", "go"]})
    pq.write_table(table, folder / "meta/tasks.parquet")
    assert load_meta(Root(str(folder))).tasks == ("go", "stop")
