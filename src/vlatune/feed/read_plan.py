"""Plan the read tasks for a request. No Ray.

`read_lerobot` executes the plan of `plan_read`; inspect it with `print(vlatune.plan_read(root))`.
Planning reads `meta/` and, with `timestamps="auto"`, the rows' timestamps (of eight episodes if the
dataset is large or remote). All data and video files are read only with `on_bad_episode="skip"`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vlatune.console import progress_bar
from vlatune.data.features import with_dims, with_names
from vlatune.data.health.bad_episodes import BadEpisode, find_bad_episodes, leave_out, skip_line
from vlatune.data.health.timestamps import all_conversions, with_timestamps
from vlatune.data.meta.dataset_meta import DatasetMeta, check_complete, load_meta
from vlatune.data.meta.listing import one_per_file
from vlatune.data.order.partition import EpisodeFiles, partition, select_episodes
from vlatune.data.read_spec import ReadSpec
from vlatune.data.reader import Unit, make_unit
from vlatune.data.request import Request, make_read_specs, row_bytes
from vlatune.feed.memory import MAX_BLOCK_BYTES
from vlatune.storage.root import Root

TASK_BLOCKS = 32
"""Blocks per task if the partitioning allows; long tasks amortise the idle time between them."""
MIN_TASKS = 8
"""Minimum number of tasks for small datasets; `read_lerobot` uses two per core."""
MAX_TASKS = 2000
"""Maximum number of tasks chosen by size, to limit Ray's overhead before the first row."""
SHOWN = 10
"""Tasks, and episodes of a task, that are printed."""

logger = logging.getLogger(__name__)

Roots = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class ReadTaskPlan:
    """Rows of one task: frames of some episodes of one dataset, in order."""

    spec: ReadSpec = field(repr=False)
    units: tuple[Unit, ...]
    row_bytes: int

    @property
    def rows(self) -> int:
        return sum(len(unit.frames) for unit in self.units)

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def episodes(self) -> tuple[int, ...]:
        return tuple(unit.episode_index for unit in self.units)

    @property
    def files(self) -> tuple[str, ...]:
        """Unique file names relative to the dataset's root."""
        names = [name for unit in self.units for name in (unit.data_path, *(file for _, file, _ in unit.videos))]
        return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class ReadPlan:
    """All read tasks, in row order."""

    partitioning: str
    tasks: tuple[ReadTaskPlan, ...]
    columns: tuple[str, ...]
    row_bytes: int
    """Largest row size of all datasets; it depends on the length of tasks."""
    block_rows: int
    skipped: tuple[BadEpisode, ...] = ()
    """Requested episodes that are excluded (`on_bad_episode="skip"`)."""

    @property
    def rows(self) -> int:
        return sum(task.rows for task in self.tasks)

    @property
    def bytes(self) -> int:
        return sum(task.bytes for task in self.tasks)

    @property
    def files(self) -> tuple[tuple[int, str], ...]:
        """Unique (dataset_index, name) of all files that are read."""
        return tuple(dict.fromkeys((task.spec.dataset_index, name) for task in self.tasks for name in task.files))

    def __str__(self) -> str:
        lines = [f"{'task':>6} {'rows':>8} {'MB':>9} {'files':>6}  dataset: episodes"]
        for number, task in enumerate(self.tasks[:SHOWN]):
            more = f", ... ({len(task.episodes)})" if len(task.episodes) > SHOWN else ""
            episodes = ", ".join(map(str, task.episodes[:SHOWN])) + more
            sizes = f"{number:>6} {task.rows:>8} {task.bytes / 1e6:>9.1f} {len(task.files):>6}"
            lines.append(f"{sizes}  {task.spec.dataset_index}: {episodes}")
        if len(self.tasks) > SHOWN:
            lines.append(f"{'...':>6} and {len(self.tasks) - SHOWN} more")
        opens = sum(len(task.files) for task in self.tasks)
        lines.append(
            f"{self.partitioning}: {len(self.tasks)} tasks, {self.rows} rows, {self.bytes / 1e6:.1f} MB in blocks of "
            f"{self.block_rows} rows ({self.block_rows * self.row_bytes / 1e6:.1f} MB); {len(self.files)} files, {opens} opens"
        )
        lines += [
            f"skipped: episode {bad.episode} of dataset {bad.dataset_index}: {bad.reason}" for bad in self.skipped
        ]
        return "\n".join(lines)


def plan_read(root: Roots, *, min_tasks: int = MIN_TASKS, **options: Any) -> ReadPlan:
    """Plan `read_lerobot` with the same options; reads `meta/`, and all files for "skip"."""
    request = Request(**options)
    urls = [root] if isinstance(root, str | Path) else list(root)
    if not urls:
        raise ValueError("root=[]: name at least one dataset")
    metas = [load_meta(Root(str(url), dict(request.storage_options or {})), argument="root") for url in urls]
    for meta in metas:
        check_complete(meta)
    given, dims = request.rename_map or {}, request.select_dims or ()
    common, each = (given, ()) if isinstance(given, Mapping) else ({}, given)
    if each and len(each) != len(metas):
        raise ValueError(f"rename_map: {len(each)} maps for {len(metas)} datasets; give one for all, or one for each")
    metas = with_names(metas, common, each, what=("rename_map", "rename_map"))
    metas = with_dims(metas, [dims] if isinstance(dims, Mapping) else dims, "select_dims")
    specs, columns = make_read_specs(metas, request)
    selection = select_episodes(metas, request.episodes, request.exclude_episodes)
    if len(selection) == 0:
        raise ValueError("episodes=[]: no episode is selected; leave it out to read all")
    specs, warnings = with_timestamps(metas, specs, selection, request.timestamps)
    for text in (*warnings, *all_conversions(metas, specs, selection)):
        logger.warning("%s", text)
    skipped: tuple[BadEpisode, ...] = ()
    if request.on_bad_episode == "skip":
        with progress_bar("files checked") as show:
            skipped = find_bad_episodes(metas, specs, selection, on_file=show)
        if skipped:
            logger.warning("%s", skip_line(skipped, len(selection)))
    usable, sizes = leave_out(selection, metas, skipped), [row_bytes(spec, columns) for spec in specs]
    block_rows = max(1, (request.block_bytes or MAX_BLOCK_BYTES) // max(sizes))
    total = int(usable.length.sum())
    task_rows = max(min(TASK_BLOCKS * block_rows, -(-total // min_tasks)), -(-total // MAX_TASKS))
    tasks: list[ReadTaskPlan] = []
    for number, (meta, spec) in enumerate(zip(metas, specs, strict=True)):
        positions = usable.position[usable.dataset == number]
        if len(positions) == 0:  # all of its episodes are bad
            continue
        files = _number_files(meta, spec, positions)
        for spans in partition(request.partitioning, files, task_rows=task_rows, block_rows=block_rows):
            units = []
            for span in spans:
                frames = np.arange(span.begin, span.end)
                units.append(make_unit(meta, spec, int(positions[span.episode]), frames, frames))
            tasks.append(ReadTaskPlan(spec, tuple(units), sizes[number]))
    return ReadPlan(request.partitioning, tuple(tasks), columns, max(sizes), block_rows, skipped)


def _number_files(meta: DatasetMeta, spec: ReadSpec, positions: np.ndarray) -> EpisodeFiles:
    """Number the data and mp4 files of each episode."""
    cameras = [camera.name for camera in spec.cameras if camera.kind == "video"]
    data_E, *videos = (one_per_file(meta, camera, positions.tolist())[1] for camera in (None, *cameras))
    videos_EC = np.column_stack(videos) if videos else np.zeros((len(positions), 0), np.int64)
    return EpisodeFiles(meta.episodes.length[positions], data_E, videos_EC)
