"""`read_lerobot` through real Ray: order, frames, blocks, schema, errors."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from lerobot_rows import ROW_BYTES, SIZE, TOP, WRIST, check_frames, expected_ids, ids_of, joined

import vlatune
from vlatune.data.meta.dataset_meta import load_meta


def read_with_ray(*args, **options) -> dict[str, np.ndarray]:
    dataset = vlatune.read_lerobot(*args, **options)
    dataset.context.execution_options.preserve_order = True
    return joined(dataset.iter_batches(batch_size=None, batch_format="numpy"))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    from ray.data import DataContext

    context = DataContext.get_current()
    before, context.enable_progress_bars = context.enable_progress_bars, False
    yield
    context.enable_progress_bars = before


THROUGH_RAY = [
    ("v3.0", "episode", 5),
    ("v3.0", "file_group", 7),
    ("v3.0", "chain", 100),
    ("v3.0", "sequential", 3),
    ("v3.0", "row_block", 9),
    ("v2.1", "file_group", 10),
]


@pytest.mark.parametrize(("version", "partitioning", "block_rows"), THROUGH_RAY)
def test_rows_are_complete_in_order_and_with_their_frames(
    version, partitioning, block_rows, dataset_v3, dataset_v21, ray_local
):
    root = {"v3.0": dataset_v3, "v2.1": dataset_v21}[version]
    check_frames(root, read_with_ray, partitioning, block_rows)


def test_a_relative_path_is_resolved_on_the_driver(dataset_v3, ray_local, monkeypatch):
    """The cluster was started in another folder, as one that is joined is."""
    monkeypatch.chdir(dataset_v3.parent)
    rows = vlatune.read_lerobot(dataset_v3.name, cameras=[], action_horizon=None)
    monkeypatch.chdir("/")
    assert len(rows.take_all()) == vlatune.plan_read(dataset_v3, cameras=[], action_horizon=None).rows


def test_ray_keeps_the_planned_blocks(dataset_v3, ray_local):
    options = {"resize": SIZE, "action_horizon": 4, "partitioning": "chain", "block_bytes": 8 * (ROW_BYTES + 600)}
    plan = vlatune.plan_read(dataset_v3, **options)
    dataset = vlatune.read_lerobot(dataset_v3, **options)
    dataset.context.execution_options.preserve_order = True
    sizes = [len(batch["index"]) for batch in dataset.iter_batches(batch_size=None, batch_format="numpy")]
    assert plan.block_rows == 8
    wanted = []
    for task in plan.tasks:
        wanted += [8] * (task.rows // 8) + [task.rows % 8] * (task.rows % 8 > 0)
    assert sizes == wanted


def test_rows_and_schema_are_known_before_execution(dataset_v3, ray_local):
    dataset = vlatune.read_lerobot(dataset_v3, action_horizon=4)
    assert dataset.count() == len(expected_ids(dataset_v3))
    schema = dict(zip(dataset.schema().names, map(str, dataset.schema().types), strict=True))
    assert "(3, 224, 224)" in schema[TOP]
    assert "(4, 3)" in schema["action"]
    assert schema["task"] == "string"
    [row] = dataset.limit(1).take_all()  # `take(1)` would abandon its iterator, which keeps a block in the store
    assert set(row) == {
        TOP, WRIST, "observation.state", "action", "action_is_pad", "index", "episode_index", "frame_index", "timestamp",
        "dataset_index", "task", "task_index",
    }  # fmt: skip
    assert (row[TOP].dtype, row["action"].dtype, row["action_is_pad"].dtype) == (np.uint8, np.float32, bool)
    assert row["observation.state"].dtype == np.float32
    assert isinstance(row["task"], str)


def test_the_context_of_other_datasets_is_unchanged(dataset_v3, ray_local):
    from ray.data import DataContext

    before = DataContext.get_current().target_max_block_size
    dataset = vlatune.read_lerobot(dataset_v3, block_bytes=1_000_000, cameras=[])
    assert dataset.context.target_max_block_size < before == DataContext.get_current().target_max_block_size


def test_an_error_in_a_worker_names_episode_camera_and_file(dataset_v3, tmp_path, ray_local):
    root = Path(shutil.copytree(dataset_v3, tmp_path / "damaged"))
    file = load_meta(str(root)).video_path(4, TOP)
    (root / file).unlink()
    with pytest.raises(ValueError, match=f"damaged': episode 3, camera '{TOP}', {file}: the file is missing"):
        vlatune.read_lerobot(root, cameras=[TOP], partitioning="chain").materialize()


def test_several_datasets_are_concatenated(dataset_v3, dataset_v21, ray_local):
    rows = read_with_ray(
        [dataset_v3, str(dataset_v21)], resize=SIZE, cameras=[WRIST], action_horizon=4, episodes=[1, 5]
    )
    each = expected_ids(dataset_v3, [1, 5])
    assert ids_of(rows[WRIST]) == each + each
    assert rows["dataset_index"].tolist() == [0] * len(each) + [1] * len(each)
    assert TOP not in rows
    half = len(each)
    assert np.array_equal(rows["action"][:half], rows["action"][half:])
