"""[ray] LeRobot datasets as a Ray Dataset: `vlatune.read_lerobot`.

The plan (read_plan.py) says which task reads what. A task fills one block after the other: buffers are allocated at
their size, pictures are decoded into them, and the table over them is the block. Blocks lie between 1.0 and 1.5 times
the size that this Dataset's context asks for, where Ray neither joins nor splits. Read workers import no torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import ray
import ray.data

from vlatune.batch import Columns
from vlatune.dataset.order.partition import Span
from vlatune.dataset.reader import Unit, allocate, read_units
from vlatune.dataset.request import Delivery
from vlatune.pipeline.read_plan import Names, ReadPlan, ReadTaskPlan, Roots, plan_read, task_blocks
from vlatune.pipeline.sizing import usable_cpus
from vlatune.pipeline.source import TARGET_SHARE, LeRobotSource, SourceTask, to_table
from vlatune.ray_internals import keep_pace


def read_lerobot(
    root: Roots,
    *,
    resize: tuple[int, int] | None = (224, 224),
    action_horizon: int | None = 50,
    cameras: Sequence[str] | None = None,
    episodes: Sequence[int] | None = None,
    delta_timestamps: Mapping[str, Sequence[float]] | None = None,
    partitioning: str = "file_group",
    storage_options: Mapping[str, Any] | None = None,
    rename_map: Names = None,
    feature_map: Names = None,
    tolerance_s: float = 1e-4,
    concurrency: int | None = None,
    block_bytes: int | None = None,
    on_bad_episode: str = "fail",
) -> ray.data.Dataset:
    """Rows of one or several LeRobot datasets (v3.0 or v2.1), decoded, resized and windowed; see docs/read_lerobot.md.

    Ray hands out blocks as they are finished; `dataset.context.execution_options.preserve_order = True` keeps the
    order of the plan, which is the datasets' own.

    Args:
        root: Folder or URL of a dataset, or several: their rows follow each other and carry `dataset_index`.
        resize: (height, width) of all pictures, letterboxed with the bars on both sides; None keeps the recorded size.
        action_horizon: Actions per row, from the row's own on, with `action_is_pad`; None gives single ones.
        cameras: The cameras to decode; all when None. An empty list decodes none.
        episodes: `episode_index` of those to read, from every dataset; all when None.
        delta_timestamps: Feature -> offsets in seconds, as in LeRobot: a window with `<feature>_is_pad`.
        partitioning: How rows are shared out to tasks: episode, file_group, chain, sequential or row_block.
        storage_options: Handed to fsspec for a URL.
        rename_map: The dataset's names of features -> the delivered ones, {"actions": "action", "state":
            "observation.state"}; one for all datasets, or one for each. As `vlatune train --rename_map`.
        feature_map: Another name for the same; its names give way to those of rename_map.
        tolerance_s: How far a frame may be from its row's time.
        concurrency: Read tasks that run at once; Ray decides when None.
        block_bytes: Size of a block, 16 MiB when None.
        on_bad_episode: "fail" ends with an error at the first bad episode; "skip" first checks all rows and mp4 files
            and leaves the bad episodes out, with a warning (`plan_read(...).skipped` lists them).
    """
    plan = plan_read(
        root,
        resize=resize,
        action_horizon=action_horizon,
        cameras=cameras,
        episodes=episodes,
        delta_timestamps=delta_timestamps,
        partitioning=partitioning,
        storage_options=storage_options,
        rename_map=rename_map,
        feature_map=feature_map,
        tolerance_s=tolerance_s,
        block_bytes=block_bytes,
        on_bad_episode=on_bad_episode,
        min_tasks=2 * _cluster_cpus(),
    )
    source = make_source(plan)
    dataset = ray.data.read_datasource(source, override_num_blocks=len(plan.tasks), concurrency=concurrency)
    # The context is this Dataset's own copy: the caller's other Datasets keep their block size.
    keep_pace(dataset.context)
    dataset.context.target_max_block_size = max(1, int(plan.block_rows * plan.row_bytes * TARGET_SHARE))
    return dataset


def _cluster_cpus() -> int:
    """Of the cluster that will read; of this machine when none is joined yet: Ray starts one here."""
    cpus = ray.cluster_resources().get("CPU", 1) if ray.is_initialized() else usable_cpus()
    return max(1, int(cpus))


def make_source(plan: ReadPlan) -> LeRobotSource:
    """The tasks of a plan, as Ray has them."""
    return LeRobotSource([_make_task(plan, task) for task in plan.tasks], schema=blank_schema(plan.tasks[0].delivery))


def _make_task(plan: ReadPlan, task: ReadTaskPlan) -> SourceTask:
    read = partial(read_task, task.delivery, task.places, task.spans, plan.block_rows)
    return SourceTask(read, task.rows, task.bytes, task.files)


def read_task(delivery: Delivery, places: Sequence[Unit], spans: Sequence[Span], block_rows: int) -> Iterator[pa.Table]:
    """What a read task runs."""
    for units in task_blocks(places, spans, block_rows):
        yield to_table(read_block(delivery, units))


def read_block(delivery: Delivery, units: Sequence[Unit]) -> Columns:
    """The units' rows, one after the other, under their delivered names."""
    columns = read_units({delivery.spec.dataset_index: delivery.spec}, units)
    return {name: columns[own] for own, name in delivery.names}


def blank_schema(delivery: Delivery) -> pa.Schema:
    """The schema of every block, from a row that nobody read."""
    row = allocate(delivery.spec, 1)
    for values in row.values():
        values[:] = "" if values.dtype == object else 0
    return to_table({name: row[own] for own, name in delivery.names}).schema
