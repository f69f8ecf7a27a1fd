"""The reader delivers LeRobot's values and pixels, the right frames by their burned-in ids, and errors for damaged files."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlatune.batch import Columns
from vlatune.data.meta.dataset_meta import DatasetMeta, load_meta
from vlatune.data.reader import (
    CameraSpec,
    ReadSpec,
    VectorSpec,
    allocate,
    make_unit,
    offsets_from_timestamps,
    read_into,
    read_unit,
    window_frames,
)
from vlatune.demo.generate import SyntheticSpec, make_dataset, read_frame_id

HORIZON = 5
TOP = "observation.images.top"


def make_spec(meta: DatasetMeta, *, size: int = 96, offsets: tuple[int, ...] | None = None, cameras=None) -> ReadSpec:
    """Read all cameras at `size`, the state, and the next HORIZON actions."""
    names = meta.cameras if cameras is None else cameras
    return ReadSpec(
        root=meta.root,
        dataset_index=0,
        tolerance_s=1e-4,
        cameras=tuple(CameraSpec(name, "video", size, size, offsets) for name in names),
        vectors=(
            VectorSpec("observation.state", "float32", meta.features["observation.state"].shape),
            VectorSpec("action", "float32", meta.features["action"].shape, tuple(range(HORIZON))),
        ),
        tasks=meta.tasks,
    )


def read(meta: DatasetMeta, spec: ReadSpec, episode: int, frames) -> Columns:
    frames = np.asarray(frames, dtype=np.int64)
    return read_unit(spec, make_unit(meta, spec, episode, frames, slots=frames + 1000))


def ids_of(images_NCHW: np.ndarray, **box) -> list[tuple[int, int] | None]:
    return [read_frame_id(image, **box) for image in images_NCHW]


@pytest.fixture(scope="module")
def meta(dataset_v3) -> DatasetMeta:
    return load_meta(str(dataset_v3))


@pytest.fixture(scope="module")
def lerobot_rows(dataset_v3) -> list[dict]:
    """Return every row as LeRobot reads it."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    window = {"action": [step / 10 for step in range(HORIZON)]}
    dataset = LeRobotDataset("synthetic/test", root=dataset_v3, video_backend="pyav", delta_timestamps=window)
    return [dataset[index] for index in range(len(dataset))]


@pytest.fixture
def damaged(dataset_v3, tmp_path) -> Path:
    """Return a copy of the dataset."""
    return Path(shutil.copytree(dataset_v3, tmp_path / "damaged"))


def test_every_row_has_lerobots_values_and_pixels(meta, lerobot_rows):
    spec, index = make_spec(meta), 0
    for episode, length in enumerate(meta.episodes.length):
        ours = read(meta, spec, episode, range(length))
        for row in range(length):
            theirs = lerobot_rows[index]
            for key in ("index", "episode_index", "frame_index", "task_index", "timestamp"):
                assert ours[key][row] == theirs[key].item(), key
            assert ours["task"][row] == theirs["task"]
            for key in ("observation.state", "action", "action_is_pad"):
                assert np.array_equal(ours[key][row], theirs[key].numpy()), key
            for camera in meta.cameras:
                assert np.array_equal(ours[camera][row], (theirs[camera] * 255).round().byte().numpy()), camera
            index += 1
    assert index == len(lerobot_rows) == meta.num_frames


def test_rows_have_the_types_of_the_contract(meta):
    spec = replace(make_spec(meta, size=48), dataset_index=3)
    columns = read(meta, spec, 2, [0, 4])
    images = dict.fromkeys(meta.cameras, ("uint8", (3, 48, 48)))
    numbers = dict.fromkeys(
        ("dataset_index", "index", "episode_index", "frame_index", "task_index", "slot"), ("int64", ())
    )
    state, action = (meta.features[key].shape for key in ("observation.state", "action"))
    vectors = {"observation.state": ("float32", state), "action": ("float32", (HORIZON, *action))}
    rest = {"action_is_pad": ("bool", (HORIZON,)), "timestamp": ("float32", ()), "task": ("object", ())}
    found = {key: (str(values.dtype), values.shape[1:]) for key, values in columns.items()}
    assert found == images | numbers | vectors | rest
    assert columns["dataset_index"].tolist() == [3, 3]
    assert columns["slot"].tolist() == [1000, 1004]


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_single_frames_and_gaps_are_the_right_ones(version, dataset_v3, dataset_v21):
    meta = load_meta(str({"v3.0": dataset_v3, "v2.1": dataset_v21}[version]))
    spec = make_spec(meta, cameras=[TOP])
    for episode, length in enumerate(meta.episodes.length):
        for frames in ([0], [1], [length // 2], [length - 1], [0, length - 1], range(0, length, 3), [1, 2, 7, 8]):
            columns = read(meta, spec, episode, frames)
            assert ids_of(columns[TOP]) == [(episode, frame) for frame in frames]
            assert columns["frame_index"].tolist() == list(frames)


def test_units_fill_their_own_rows_of_a_block(meta):
    spec = make_spec(meta, cameras=[TOP])
    frames = {2: np.array([3, 5]), 6: np.array([0, 1, 2])}
    block = allocate(spec, 5)
    read_into(spec, make_unit(meta, spec, 6, frames[6], slots=np.array([7, 9, 8])), block, 2)
    read_into(spec, make_unit(meta, spec, 2, frames[2], slots=np.array([4, 6])), block, 0)
    assert ids_of(block[TOP]) == [(2, 3), (2, 5), (6, 0), (6, 1), (6, 2)]
    assert block["slot"].tolist() == [4, 6, 7, 9, 8]
    alone = read(meta, spec, 6, frames[6])
    for key in ("action", "action_is_pad", "observation.state", "index", "task"):
        assert np.array_equal(block[key][2:], alone[key])


def test_the_nearest_frame_is_taken_within_the_tolerance(damaged):
    """Rows that are 0.02 s late find their frames within a larger tolerance."""
    rewrite(damaged, "timestamp", lambda values, _: values + np.float32(0.02))
    meta = load_meta(str(damaged))
    spec = replace(make_spec(meta, cameras=[TOP]), tolerance_s=0.03)
    length = int(meta.episodes.length[5])
    assert ids_of(read(meta, spec, 5, range(length))[TOP]) == [(5, frame) for frame in range(length)]


def rewrite(folder: Path, column: str, change: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> None:
    """Change a column of all data files, given its values and the episodes they belong to."""
    for path in (folder / "data").glob("*/*.parquet"):
        table = pq.read_table(path)
        values = change(table.column(column).to_numpy(), table.column("episode_index").to_numpy())
        pq.write_table(table.set_column(table.column_names.index(column), column, pa.array(values)), path)


def error_of(folder: Path, episode: int, frames, *, cameras=(TOP,)) -> str:
    meta = load_meta(str(folder))
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the caller checks the message)
        read(meta, make_spec(meta, cameras=cameras), episode, frames)
    return str(caught.value)


def test_a_file_without_video_is_named(damaged, meta):
    import av

    file = meta.video_path(4, TOP)
    with av.open(str(damaged / file), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        silence.sample_rate = 8000
        container.mux(stream.encode(silence))
        container.mux(stream.encode(None))
    assert f"episode 4, camera '{TOP}', {file}: there is no video stream in it" in error_of(damaged, 4, [0])


@pytest.mark.parametrize("codec", ["h264", "av1"])
def test_a_damaged_video_gives_right_frames_or_errors(codec, tmp_path):
    """Decoders conceal damage by default. FFmpeg cannot detect it in hevc."""
    root = tmp_path / codec
    make_dataset(root, SyntheticSpec(episodes=3, frames=12, cameras=1, codec=codec))
    path, noise = root / load_meta(str(root)).video_path(0, TOP), np.random.default_rng(0).bytes(40)
    content, messages = path.read_bytes(), []
    clean, _ = frames_or_errors(root, episodes=(0, 1, 2))
    for share in np.linspace(0.25, 0.95, 10):
        begin = int(share * len(content))
        path.write_bytes(content[:begin] + noise + content[begin + len(noise) :])
        right, errors = frames_or_errors(root, episodes=(0, 1, 2))
        assert all(np.array_equal(image, clean[place]) for place, image in right.items())
        messages += errors.values()
    assert len(messages) >= 10
    assert all("cannot be decoded" in message for message in messages)


def frames_or_errors(folder: Path, episodes) -> tuple[dict[tuple[int, int], np.ndarray], dict[tuple[int, int], str]]:
    """Read the frames one by one; return the frames, checked by their ids, and the errors."""
    meta, right, errors = load_meta(str(folder)), {}, {}
    spec = make_spec(meta, cameras=[TOP])
    for episode in episodes:
        for frame in range(int(meta.episodes.length[episode])):
            try:
                columns = read(meta, spec, episode, [frame])
            except ValueError as error:
                errors[episode, frame] = str(error)
            else:
                assert ids_of(columns[TOP]) == [(episode, frame)]
                right[episode, frame] = columns[TOP][0]
    return right, errors


@given(st.data())
def test_a_frame_of_the_episode_is_itself_and_another_is_the_nearest_and_padded(data):
    length = data.draw(st.integers(1, 30))
    rows = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=5))
    offsets = data.draw(st.lists(st.integers(-40, 40), min_size=1, max_size=8))
    frames, is_pad = window_frames(np.array(rows), offsets, length)
    assert frames.shape == is_pad.shape == (len(rows), len(offsets))
    for n, row in enumerate(rows):
        for t, offset in enumerate(offsets):
            nearest = min(range(length), key=lambda frame, wanted=row + offset: abs(frame - wanted))
            assert frames[n, t] == nearest
            assert is_pad[n, t] == (nearest != row + offset)


@given(st.lists(st.integers(-100, 100), max_size=20), st.sampled_from([5, 10, 15, 20, 24, 30, 50, 60]))
def test_seconds_on_the_grid_become_frames(offsets, fps):
    assert offsets_from_timestamps([offset / fps for offset in offsets], fps, 1e-4, "action") == tuple(offsets)


def test_seconds_off_the_grid_are_rejected_by_name():
    with pytest.raises(ValueError, match=r"delta_timestamps\['action'\]: 0.15 s .*1/10 s \(nearest 0.200000 s\); use"):
        offsets_from_timestamps([0.0, 0.1, 0.15], 10, 1e-4, "action")
    assert offsets_from_timestamps([0.15], 10, 0.06, "action") == (2,)
