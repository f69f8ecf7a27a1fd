"""`--dataset.timestamps`, derived columns and `--dataset.exclude_episodes`, on damaged copies of small datasets."""

import json
import shlex
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import damage as do
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vlatune
from vlatune import cli
from vlatune.checks.inspect import inspect_dataset, train_command
from vlatune.config.flags import parse_flags
from vlatune.config.settings import RunConfig
from vlatune.data.reader import make_unit, read_unit
from vlatune.demo.generate import read_frame_id
from vlatune.run_setup import make_setup

FPS = 10


@pytest.fixture
def v21(dataset_v21: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dataset_v21, tmp_path / "v21"))


@pytest.fixture
def v3(dataset_v3: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dataset_v3, tmp_path / "v3"))


def data_files(root: Path) -> list[Path]:
    return sorted((root / "data").glob("*/*.parquet"))


def change_times(file: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    do.change_column(file, "timestamp", lambda times, _: change(times))


def by_the_clock(times: np.ndarray) -> np.ndarray:
    """Return times of a clock that starts late and runs fast."""
    return 0.013 + times * 1.7


def read_ids(root: Path, **options) -> list[tuple[int, int]]:
    """Return (episode, frame) as burned into each image."""
    plan = vlatune.plan_read(root, resize=None, action_horizon=2, **options)
    ids = []
    for task in plan.tasks:
        spec = task.spec
        for unit in task.units:
            columns = read_unit(spec, unit)
            ids += [read_frame_id(image) for image in columns[spec.cameras[0].name]]
    return ids


def test_rows_stamped_by_a_clock_get_the_frames_of_their_index(v21: Path, caplog):
    expected = read_ids(v21)
    for file in data_files(v21):
        change_times(file, by_the_clock)
    assert read_ids(v21) == read_ids(v21, timestamps="frame_index") == expected
    assert "frames are matched with rows by frame_index" in caplog.text
    with pytest.raises(ValueError, match=r"no frame within 0.0001 s of 0.0130 s"):
        read_ids(v21, timestamps="recorded")


def test_timestamps_that_jump_are_matched_by_frame_index_in_shared_files(v3: Path, caplog):
    expected = read_ids(v3)
    change_times(data_files(v3)[1], lambda times: times[::-1])
    assert read_ids(v3) == expected
    assert "(--dataset.timestamps=frame_index)" in caplog.text


def test_an_episode_that_fits_neither_by_time_nor_by_number_is_an_error(v21: Path):
    """The episode has another number of frames than rows."""
    change_times(data_files(v21)[0], by_the_clock)
    videos = sorted((v21 / "videos/chunk-000").glob("*/episode_000000.mp4"))
    longer = max(sorted((v21 / "videos/chunk-000").glob("*/episode_*.mp4")), key=lambda path: path.stat().st_size)
    for video in videos:
        other = video.with_name(longer.name)
        shutil.copy(other, video)
    rows, frames = (
        pq.read_metadata(data_files(v21)[0]).num_rows,
        pq.read_metadata(data_files(v21)[int(longer.stem.rpartition("_")[2])]).num_rows,
    )
    assert rows != frames
    with pytest.raises(ValueError, match=rf"it has {frames} frames, the episode {rows} rows"):
        read_ids(v21, timestamps="frame_index", episodes=[0])


def test_frames_that_lie_at_irregular_recorded_times_are_found_by_them(v21: Path, caplog):
    """The frames of episode 0 jitter like its rows."""
    expected = read_ids(v21)

    def jitter(times: np.ndarray) -> np.ndarray:
        return times + np.where(np.arange(len(times)) % 2, 0.02, 0.0)

    change_times(data_files(v21)[0], jitter)
    for video in sorted((v21 / "videos/chunk-000").glob("*/episode_000000.mp4")):
        with av.open(str(video)) as old:
            images = [frame.to_ndarray(format="rgb24") for frame in old.decode(video=0)]
        with av.open(str(video), "w") as new:
            stream = new.add_stream("libx264", rate=FPS, options={"crf": "18", "bf": "0"})
            stream.height, stream.width, stream.pix_fmt = *images[0].shape[:2], "yuv420p"
            stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
            for image, time_s in zip(images, jitter(np.arange(len(images)) / FPS), strict=True):
                frame = av.VideoFrame.from_ndarray(image, format="rgb24")
                frame.pts, frame.time_base = round(time_s * 1000), Fraction(1, 1000)
                new.mux(stream.encode(frame))
            new.mux(stream.encode())
    assert read_ids(v21) == expected
    assert "frame_index" not in caplog.text


def test_missing_index_columns_are_derived_and_doubles_converted(v21: Path, caplog):
    tasks = [json.loads(line) for line in (v21 / "meta/tasks.jsonl").read_text().splitlines()]
    expected = read_ids(v21)

    for file in data_files(v21):
        do.cast_column(file, "action", pa.list_(pa.float64(), 3))
        do.cast_column(file, "frame_index", pa.float64())
        for name in ("index", "task_index", "timestamp"):
            do.drop_column(file, name)
    assert read_ids(v21) == expected
    assert "'index', 'timestamp', 'task_index'" in caplog.text
    assert all(name in caplog.text for name in ("'action'", "double", "float32"))
    assert len(tasks) > 1  # each episode names its one task
    assert cli.main(["inspect", str(v21)]) == cli.OK


def test_a_required_column_that_info_does_not_name_is_reported(v21: Path, capsys):
    do.change_info(v21, lambda info: info["features"].pop("episode_index"))
    for file in data_files(v21):
        do.drop_column(file, "episode_index")
    assert cli.main(["inspect", str(v21)]) == cli.FAILED
    text = " ".join(capsys.readouterr().out.split())
    assert "lacks the column 'episode_index'" in text
    with pytest.raises(ValueError, match=r"lacks the column 'episode_index' \(it has observation.state"):
        read_ids(v21)


def test_episodes_are_excluded_from_all_or_from_those_given(v3: Path):
    def episodes(**options) -> list[int]:
        return sorted({episode for episode, _ in read_ids(v3, **options)})

    assert episodes(exclude_episodes=[0, 5]) == [1, 2, 3, 4, 6]
    assert episodes(episodes=[1, 2, 3], exclude_episodes=[2, 6]) == [1, 3]
    with pytest.raises(
        ValueError, match=r"exclude_episodes: there is no episode 7; the dataset has 7 episodes, 0 to 6"
    ):
        episodes(exclude_episodes=[7])
    with pytest.raises(ValueError, match=r"exclude_episodes leaves no episode"):
        episodes(episodes=[2], exclude_episodes=[2])


def test_train_excludes_episodes(v3: Path, small_base: Path, tmp_path: Path):
    words = [f"--dataset.root={v3}", f"--policy.path={small_base}", f"--output_dir={tmp_path / 'run'}"]
    setup = make_setup(parse_flags([*words, "--dataset.exclude_episodes=[0,5]", "--batch_size=2"], RunConfig))
    assert sorted([*setup.training.position.tolist(), *setup.held_out.position.tolist()]) == [1, 2, 3, 4, 6]


def test_missing_videos_of_some_episodes_and_of_all(v21: Path, capsys):
    camera = min((v21 / "videos/chunk-000").iterdir())
    first, *others = sorted(camera.iterdir())
    first.unlink()
    assert cli.main(["inspect", str(v21)]) == cli.FAILED
    command = capsys.readouterr().out.splitlines()[-1]
    assert command.split()[:2] == ["vlatune", "train"]
    assert command.endswith(" --dataset.on_bad_episode=skip")
    for file in others:
        file.unlink()
    assert cli.main(["inspect", str(v21)]) == cli.FAILED
    text = " ".join(capsys.readouterr().out.split())
    assert "so no episode is complete" in text
    assert "on_bad_episode" not in text
    assert "vlatune train" not in text


def damage_file(folder: str, change: Callable[[Path], object]) -> Callable[[Path, int], None]:
    """Return a damage of one of the files below a folder of the dataset."""

    def changed(root: Path, number: int) -> None:
        files = sorted(path for path in (root / folder).rglob("*") if path.is_file())
        if files:
            change(files[number % len(files)])

    return changed


def damage_times(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path, int], None]:
    return damage_file("data", lambda file: change_times(file, change))


def damage_type(name: str, kind: pa.DataType) -> Callable[[Path, int], None]:
    return damage_file("data", lambda file: do.cast_column(file, name, kind))


def set_info(key: str, value: object) -> Callable[[Path, int], None]:
    return lambda root, number: do.change_info(root, lambda info: info.update({key: value}))


def swap_videos(root: Path, number: int) -> None:
    files = sorted((root / "videos").glob("**/*.mp4"))
    first, second = files[number % len(files)], files[(number + 1) % len(files)]
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


def add_nan(file: Path) -> None:
    def change(values: np.ndarray, _: np.ndarray) -> np.ndarray:
        values[len(values) // 2, 0] = np.nan
        return values

    do.change_column(file, "action", change)


DAMAGES: dict[str, Callable[[Path, int], None]] = {
    "clock": damage_times(by_the_clock),
    "late start": damage_times(lambda times: times + 0.03),
    "stamped since 1970": damage_times(lambda times: times + 1.7e9),
    "times that fall": damage_times(lambda times: times[::-1]),
    "one time of NaN": damage_times(lambda times: np.where(np.arange(len(times)) == 3, np.nan, times)),
    "twice the times": damage_times(lambda times: 2 * times),
    "a row less": damage_file("data", lambda file: do.drop_row(file, 0)),
    **{
        f"no {name}": damage_file("data", lambda file, name=name: do.drop_column(file, name))
        for name in ("index", "task_index", "timestamp", "frame_index", "episode_index", "action")
    },
    "doubles": damage_type("action", pa.list_(pa.float64(), 3)),
    "frame_index as floats": damage_type("frame_index", pa.float64()),
    "index as text": damage_type("index", pa.string()),
    "NaN": damage_file("data", add_nan),
    "no data file": damage_file("data", Path.unlink),
    "half a data file": damage_file("data", lambda file: do.cut(file, 0.5)),
    "no video": damage_file("videos", Path.unlink),
    "half a video": damage_file("videos", lambda file: do.cut(file, 0.5)),
    "an empty video": damage_file("videos", lambda file: do.cut(file, 0)),
    "videos swapped": swap_videos,
    "another fps": set_info("fps", 20),
    "fewer episodes promised": set_info("total_episodes", 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damages=st.lists(st.tuples(st.sampled_from(sorted(DAMAGES)), st.integers(0, 6)), min_size=1, max_size=3))
def test_train_reads_every_dataset_that_inspect_accepts(
    version, damages, dataset_v21, dataset_v3, small_base, tmp_path_factory
):
    """The command that `inspect` prints for a damaged dataset reads every episode."""
    root = tmp_path_factory.mktemp("damaged") / "dataset"
    shutil.copytree(dataset_v21 if version == "v2.1" else dataset_v3, root)
    try:
        for name, number in damages:
            try:
                DAMAGES[name](root, number)
            except (OSError, pa.ArrowInvalid, ZeroDivisionError, IndexError, KeyError):
                continue  # the file is gone or damaged already
        command = train_command([inspect_dataset(str(root))], {})
        if command is None:
            return
        words = [word for word in shlex.split(command)[2:] if not word.startswith("--recipe")]
        config = parse_flags([*words, f"--policy.path={small_base}", f"--output_dir={root.parent}/run"], RunConfig)
        setup = make_setup(config, preflight=True)
        for chosen in (setup.training, setup.held_out):
            for number, position, length in zip(chosen.dataset, chosen.position, chosen.length, strict=True):
                frames = np.arange(length)
                spec = setup.specs[number]
                read_unit(spec, make_unit(setup.metas[number], spec, int(position), frames, np.zeros_like(frames)))
    finally:
        shutil.rmtree(root.parent)
