"""[ray] LeRobot datasets as a Ray Dataset: `vlatune.read_lerobot`.

The plan (read_plan.py) assigns rows to tasks. A task fills preallocated buffers, block by block;
images are decoded into them without further copies. Blocks have 1.0 to 1.5 times the target size of
the Dataset's context, so Ray neither merges nor splits them. Read workers do not import torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask
from ray.data.extensions import ArrowTensorArray

from vlatune.batch import Columns
from vlatune.data.features import Dims, Names
from vlatune.data.health.timestamps import Timestamps
from vlatune.data.read_spec import ReadSpec
from vlatune.data.reader import Unit, make_blank_row, read_units
from vlatune.feed.plan import cut_units
from vlatune.feed.read_plan import ReadPlan, Roots, plan_read
from vlatune.feed.sizing import usable_cpus

TARGET_SHARE = 0.8
"""Ratio of Ray's target block size to ours; Ray keeps blocks of 1.25 times the target unchanged."""


def read_lerobot(
    root: Roots,
    *,
    resize: tuple[int, int] | None = (224, 224),
    action_horizon: int | None = 50,
    cameras: Sequence[str] | None = None,
    episodes: Sequence[int] | None = None,
    exclude_episodes: Sequence[int] | None = None,
    delta_timestamps: Mapping[str, Sequence[float]] | None = None,
    partitioning: str = "file_group",
    storage_options: Mapping[str, Any] | None = None,
    rename_map: Names | Sequence[Names] | None = None,
    select_dims: Dims | Sequence[Dims] | None = None,
    tolerance_s: float = 1e-4,
    timestamps: Timestamps = "auto",
    concurrency: int | None = None,
    block_bytes: int | None = None,
    on_bad_episode: str = "fail",
) -> ray.data.Dataset:
    """Read LeRobot datasets (v3.0 or v2.1) as a Ray Dataset; see docs/read_lerobot.md.

    Ray yields blocks as they finish; set `dataset.context.execution_options.preserve_order = True`
    to keep the order of the datasets.

    Args:
        root: Folder or URL of a dataset, or several, which are concatenated (see `dataset_index`).
        resize: (height, width) of all images, letterboxed and centred; None does not resize.
        action_horizon: Actions per row, starting with the row's, with `action_is_pad`; None gives
            single actions.
        cameras: Cameras to decode (default: all). An empty list decodes none.
        episodes: `episode_index` values to read from every dataset (default: all).
        exclude_episodes: `episode_index` values to exclude.
        delta_timestamps: Feature -> offsets in seconds, as in LeRobot: a window with
            `<feature>_is_pad`.
        partitioning: How rows are assigned to tasks: episode, file_group, chain, sequential or
            row_block.
        storage_options: fsspec options for URLs.
        rename_map: Dataset feature names -> output names, e.g. {"actions": "action", "state":
            "observation.state"}; one map for all datasets, or one for each. As `vlatune train
            --rename_map`.
        select_dims: Vector -> dims to return, in this order, by name, index or range, e.g.
            {"action": ["gripper", 0, "3:6"]}; one map for all datasets, or one for each. As
            `vlatune train --dataset.select_dims`.
        tolerance_s: Maximum difference between a frame's time and its row's timestamp.
        timestamps: How to find a row's frame: by its "recorded" timestamp, by "frame_index" / fps,
            or "auto": by frame_index, with a warning, if the recorded timestamps are implausible.
        concurrency: Maximum number of concurrent read tasks (default: chosen by Ray).
        block_bytes: Size of a block (default: 16 MiB).
        on_bad_episode: "fail" raises at the first bad episode; "skip" first checks all rows and mp4
            files and excludes bad episodes, with a warning (`plan_read(...).skipped` lists them).
    """
    options = {name: value for name, value in locals().items() if name not in ("root", "concurrency")}
    num_cpus = ray.cluster_resources().get("CPU", 1) if ray.is_initialized() else usable_cpus()
    plan = plan_read(root, min_tasks=2 * max(1, int(num_cpus)), **options)
    dataset = ray.data.read_datasource(
        LeRobotSource(plan), override_num_blocks=len(plan.tasks), concurrency=concurrency
    )
    # The context is a copy: the caller's other Datasets keep their block size.
    dataset.context.target_max_block_size = max(1, int(plan.block_rows * plan.row_bytes * TARGET_SHARE))
    return dataset


class LeRobotSource(Datasource):
    """Datasource of the read tasks of a plan, in order."""

    def __init__(self, plan: ReadPlan) -> None:
        super().__init__()
        self._plan = plan

    def get_name(self) -> str:
        return "LeRobot"

    def estimate_inmemory_data_size(self) -> int:
        return self._plan.bytes

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context=None
    ) -> list[ReadTask]:
        plan = self._plan
        row = make_blank_row(plan.tasks[0].spec)
        schema = to_table({name: row[name] for name in plan.columns}).schema
        return [
            ReadTask(
                partial(read_task, task.spec, plan.columns, task.units, plan.block_rows),
                BlockMetadata(num_rows=task.rows, size_bytes=task.bytes, input_files=task.files, exec_stats=None),  # pyright: ignore[reportArgumentType]
                schema=schema,
                per_task_row_limit=per_task_row_limit,
            )
            for task in plan.tasks
        ]


def read_task(spec: ReadSpec, columns: Sequence[str], units: Sequence[Unit], block_rows: int) -> Iterator[pa.Table]:
    """Read the blocks of a task; runs in a Ray worker."""
    for block in cut_units(units, block_rows):
        rows = read_units({spec.dataset_index: spec}, block)
        yield to_table({name: rows[name] for name in columns})


def to_table(columns: Columns) -> pa.Table:
    """Convert columns to an Arrow table; fixed-shape arrays remain one contiguous buffer."""
    return pa.table(
        {
            name: ArrowTensorArray.from_numpy(values)
            if values.ndim > 1
            else pa.array(values.tolist() if values.dtype == object else values)
            for name, values in columns.items()
        }
    )
