"""A request for rows -> the read tasks that will deliver them, known from `meta/` alone. No Ray.

`plan_read` is what `read_lerobot` runs on, so what it shows is what will happen: `print(vlatune.plan_read(root))`.
Only with `on_bad_episode="skip"` are data and video files read, to know which episodes are bad.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vlatune.console import progress_bar
from vlatune.dataset.health.bad_episodes import BadEpisode, find_bad_episodes, leave_out, skip_line
from vlatune.dataset.meta.dataset_meta import DatasetMeta, check_complete, load_meta
from vlatune.dataset.order.partition import (
    EpisodeFiles,
    Selection,
    Span,
    check_partitioning,
    cut_rows,
    partition,
    select_episodes,
)
from vlatune.dataset.reader import Unit, make_unit
from vlatune.dataset.request import Delivery, Request, make_deliveries
from vlatune.dataset.storage.root import Root
from vlatune.pipeline.memory import MAX_BLOCK_BYTES

TASK_BLOCKS = 32
"""Blocks of a task where the partitioning leaves it open: about ten seconds of decoding. Between two tasks a core is idle
for 0.1 to 0.2 s, as Ray looks for finished ones so often."""
MIN_TASKS = 8
"""A small dataset is cut into this many, so that all cores have work; `read_lerobot` asks for two per core."""
MAX_TASKS = 2000
"""More than this are not made for the size alone: Ray pays about a millisecond for each before the first row."""
SHOWN_TASKS = 10
ON_BAD_EPISODE = ("fail", "skip")

logger = logging.getLogger(__name__)

Roots = str | Path | Sequence[str | Path]
Names = Mapping[str, str] | Sequence[Mapping[str, str]] | None


@dataclass(frozen=True)
class ReadTaskPlan:
    """What one task reads: frames of some episodes of one dataset, in order."""

    meta: DatasetMeta = field(repr=False)
    delivery: Delivery = field(repr=False)
    spans: tuple[Span, ...]
    """Their `episode` is the place in the dataset's episode table."""

    @property
    def rows(self) -> int:
        return sum(span.rows for span in self.spans)

    @property
    def bytes(self) -> int:
        """Of the rows it delivers."""
        return self.rows * self.delivery.row_bytes

    @property
    def dataset_index(self) -> int:
        return self.delivery.spec.dataset_index

    @property
    def episodes(self) -> tuple[int, ...]:
        return tuple(int(self.meta.episodes.index[span.episode]) for span in self.spans)

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Names below the dataset's root, each once."""
        names = [name for unit in self.places for name in (unit.data_path, *(file for _, file, _ in unit.videos))]
        return tuple(dict.fromkeys(names))

    @cached_property
    def places(self) -> tuple[Unit, ...]:
        """For each span a unit of work without frames: the reader cuts it to the size of its blocks."""
        none = np.zeros(0, np.int64)
        return tuple(make_unit(self.meta, self.delivery.spec, span.episode, none, none) for span in self.spans)


@dataclass(frozen=True)
class ReadPlan:
    """All read tasks, in the order of their rows."""

    partitioning: str
    tasks: tuple[ReadTaskPlan, ...]
    row_bytes: int
    """Of the dataset whose rows are largest; they differ by the length of their sentences."""
    block_rows: int
    skipped: tuple[BadEpisode, ...] = ()
    """Episodes that were asked for and are left out (`on_bad_episode="skip"`)."""

    @property
    def rows(self) -> int:
        return sum(task.rows for task in self.tasks)

    @property
    def bytes(self) -> int:
        return sum(task.bytes for task in self.tasks)

    @property
    def files(self) -> tuple[tuple[int, str], ...]:
        """(dataset_index, name) of every file that is read, each once."""
        return tuple(dict.fromkeys((task.dataset_index, name) for task in self.tasks for name in task.files))

    @property
    def file_opens(self) -> int:
        """Pairs of a task and a file it reads: how many more than files shows what the partitioning costs."""
        return sum(len(task.files) for task in self.tasks)

    def __str__(self) -> str:
        lines = [f"{'task':>6} {'rows':>8} {'MB':>9} {'files':>6}  episodes"]
        lines += [_line(number, task) for number, task in enumerate(self.tasks[:SHOWN_TASKS])]
        if len(self.tasks) > SHOWN_TASKS:
            lines.append(f"{'...':>6} and {len(self.tasks) - SHOWN_TASKS} more")
        lines.append(
            f"{self.partitioning}: {len(self.tasks)} tasks, {self.rows} rows, {self.bytes / 1e6:.1f} MB in blocks of "
            f"{self.block_rows} rows ({self.block_rows * self.row_bytes / 1e6:.1f} MB); {len(self.files)} files, {self.file_opens} opens"
        )
        lines += [
            f"left out: episode {bad.episode} of dataset {bad.dataset_index}: {bad.reason}" for bad in self.skipped
        ]
        return "\n".join(lines)


def plan_read(
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
    block_bytes: int | None = None,
    on_bad_episode: str = "fail",
    min_tasks: int = MIN_TASKS,
) -> ReadPlan:
    """What `read_lerobot` with the same arguments will do; reads `meta/`, and all files with on_bad_episode="skip"."""
    check_partitioning(partitioning)
    if on_bad_episode not in ON_BAD_EPISODE:
        raise ValueError(f"on_bad_episode='{on_bad_episode}': expected one of {', '.join(ON_BAD_EPISODE)}")
    if isinstance(cameras, str):
        raise ValueError(f"cameras='{cameras}': expected a list of names, such as ['{cameras}']")
    if block_bytes is not None and block_bytes < 1:
        raise ValueError(f"block_bytes={block_bytes}: must be 1 or more")
    request = Request(
        resize=None if resize is None else tuple(resize),  # pyright: ignore[reportArgumentType]  (checked there)
        action_horizon=action_horizon,
        cameras=None if cameras is None else tuple(cameras),
        delta_timestamps=delta_timestamps,
        tolerance_s=tolerance_s,
    )
    metas = [load_meta(Root(url, dict(storage_options or {})), argument="root") for url in _urls(root)]
    for meta in metas:
        check_complete(meta)
    renames = [
        {**features, **cameras}
        for features, cameras in zip(
            _per_root(feature_map, "feature_map", len(metas)),
            _per_root(rename_map, "rename_map", len(metas)),
            strict=True,
        )
    ]
    deliveries = make_deliveries(metas, request, renames)
    selection = select_episodes(metas, episodes)
    if len(selection) == 0:
        raise ValueError("episodes=[]: no episode is asked for; leave it out to read all")
    skipped = _find_bad(metas, deliveries, selection) if on_bad_episode == "skip" else ()
    usable = leave_out(selection, metas, skipped)
    return _plan(metas, deliveries, usable, partitioning, block_bytes or MAX_BLOCK_BYTES, skipped, min_tasks)


def _find_bad(
    metas: Sequence[DatasetMeta], deliveries: Sequence[Delivery], selection: Selection
) -> tuple[BadEpisode, ...]:
    specs = [delivery.spec for delivery in deliveries]
    with progress_bar("files checked") as show:
        bad = find_bad_episodes(metas, specs, selection, on_file=show)
    if bad:
        logger.warning("%s", skip_line(bad, len(selection)))
    return bad


def task_blocks(places: Sequence[Unit], spans: Sequence[Span], block_rows: int) -> Iterator[list[Unit]]:
    """A task's frames as units, in lists of `block_rows` rows: one list makes one block."""
    numbered = [Span(number, span.begin, span.end) for number, span in enumerate(spans)]
    for block in cut_rows(numbered, block_rows):
        frames = [np.arange(span.begin, span.end) for span in block]
        yield [
            replace(places[span.episode], frames=each, slots=np.zeros(span.rows, np.int64))
            for span, each in zip(block, frames, strict=True)
        ]


def _plan(
    metas: Sequence[DatasetMeta],
    deliveries: Sequence[Delivery],
    selection: Selection,
    partitioning: str,
    block_bytes: int,
    skipped: tuple[BadEpisode, ...],
    min_tasks: int,
) -> ReadPlan:
    row_bytes = max(delivery.row_bytes for delivery in deliveries)
    block_rows = max(1, block_bytes // row_bytes)
    total = int(selection.length.sum())
    task_rows = max(min(TASK_BLOCKS * block_rows, -(-total // min_tasks)), -(-total // MAX_TASKS))
    tasks = []
    for number, (meta, delivery) in enumerate(zip(metas, deliveries, strict=True)):
        positions = selection.position[selection.dataset == number]
        if len(positions) == 0:  # all of its episodes are bad
            continue
        files = _file_numbers(meta, delivery, positions)
        for spans in partition(partitioning, files, task_rows=task_rows, block_rows=block_rows):
            placed = tuple(span._replace(episode=int(positions[span.episode])) for span in spans)
            tasks.append(ReadTaskPlan(meta, delivery, placed))
    return ReadPlan(partitioning, tuple(tasks), row_bytes, block_rows, skipped)


def _file_numbers(meta: DatasetMeta, delivery: Delivery, positions: np.ndarray) -> EpisodeFiles:
    """Files as numbers; v2.1 has a file of each kind per episode, v3.0 counts them by chunk and file."""
    episodes = meta.episodes

    def number(chunk: np.ndarray, file: np.ndarray) -> np.ndarray:
        return positions if meta.version == "v2.1" else (chunk * (file.max() + 1) + file)[positions]

    spans = [episodes.videos[camera.name] for camera in delivery.spec.cameras if camera.kind == "video"]
    videos = [number(span.chunk, span.file) for span in spans]
    none = np.zeros((len(positions), 0), np.int64)
    return EpisodeFiles(
        lengths_E=episodes.length[positions],
        data_E=number(episodes.data_chunk, episodes.data_file),
        videos_EC=np.column_stack(videos) if videos else none,
    )


def _urls(root: Roots) -> list[str]:
    roots = [root] if isinstance(root, str | Path) else list(root)
    if not roots:
        raise ValueError("root=[]: name at least one dataset")
    return [str(one) for one in roots]


def _per_root(names: Names, argument: str, num_roots: int) -> list[Mapping[str, str]]:
    if names is None or isinstance(names, Mapping):
        return [names or {}] * num_roots
    if len(names) != num_roots:
        raise ValueError(f"{argument}: {len(names)} maps for {num_roots} datasets; give one for all, or one for each")
    return list(names)


def _line(number: int, task: ReadTaskPlan) -> str:
    shown = task.episodes[:6]
    more = f", ... ({len(task.episodes)})" if len(task.episodes) > len(shown) else ""
    where = f" of dataset {task.dataset_index}" if task.dataset_index else ""
    return f"{number:>6} {task.rows:>8} {task.bytes / 1e6:>9.1f} {len(task.files):>6}  {', '.join(map(str, shown))}{more}{where}"
