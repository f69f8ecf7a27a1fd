"""Plan the read tasks of `read_lerobot`. No Ray.

`read_lerobot` executes the plan of `plan_read`; inspect it with `print(vlatune.plan_read(root))`.
Planning reads `meta/` and, with `timestamps="auto"`, the rows' timestamps (of eight episodes if the
dataset is large or remote). All data and video files are read only with `on_bad_episode="skip"`.
Every mistake that shows in `meta/` is rejected here, before a task starts.

Features have two names: the dataset's own, used in its files, and the delivered name, after
`rename_map`. Callers may use either in `cameras` and `delta_timestamps`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from vlatune.batch import ACTION, STATE, TASK
from vlatune.console import progress_bar
from vlatune.data.features import (
    RESERVED,
    Dims,
    Names,
    camera_spec,
    likely_name,
    numpy_type,
    vector_spec,
    with_dims,
    with_names,
)
from vlatune.data.health.bad_episodes import BadEpisode, find_bad_episodes, leave_out, skip_line
from vlatune.data.health.timestamps import Timestamps, all_conversions, with_timestamps
from vlatune.data.meta.dataset_meta import DatasetMeta, Feature, check_complete, load_meta
from vlatune.data.meta.listing import one_per_file
from vlatune.data.order.partition import EpisodeFiles, check_partitioning, partition, select_episodes
from vlatune.data.read_spec import ReadSpec
from vlatune.data.reader import Unit, allocate, make_unit, offsets_from_timestamps
from vlatune.errors import did_you_mean
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

ROW_COLUMNS = ("index", "episode_index", "frame_index", "timestamp", "dataset_index", TASK)

logger = logging.getLogger(__name__)

Roots = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class Request:
    """Describe what to read from all datasets: the arguments of `read_lerobot`, see its docstring."""

    resize: tuple[int, int] | None = (224, 224)
    action_horizon: int | None = 50
    cameras: Sequence[str] | None = None
    episodes: Sequence[int] | None = None
    exclude_episodes: Sequence[int] | None = None
    delta_timestamps: Mapping[str, Sequence[float]] | None = None
    partitioning: str = "file_group"
    storage_options: Mapping[str, Any] | None = None
    rename_map: Names | Sequence[Names] | None = None
    select_dims: Dims | Sequence[Dims] | None = None
    tolerance_s: float = 1e-4
    timestamps: Timestamps = "auto"
    block_bytes: int | None = None
    on_bad_episode: str = "fail"

    def __post_init__(self) -> None:
        check_partitioning(self.partitioning)
        for argument, known in (("on_bad_episode", ("fail", "skip")), ("timestamps", get_args(Timestamps.__value__))):
            if getattr(self, argument) not in known:
                raise ValueError(f"{argument}='{getattr(self, argument)}': expected one of {', '.join(known)}")
        if isinstance(self.cameras, str):
            raise ValueError(f"cameras='{self.cameras}': expected a list of names, such as ['{self.cameras}']")
        if self.block_bytes is not None and self.block_bytes < 1:
            raise ValueError(f"block_bytes={self.block_bytes}: must be 1 or more")
        resize = self.resize
        if resize is not None and (len(resize) != 2 or not all(isinstance(side, int) and side > 0 for side in resize)):
            raise ValueError(f"resize={resize}: expected (height, width) in pixels, or None for the recorded size")
        if self.action_horizon is not None and self.action_horizon < 1:
            raise ValueError(
                f"action_horizon={self.action_horizon}: must be 1 or more; None gives single actions without a window"
            )
        for key, deltas in (self.delta_timestamps or {}).items():
            if len(deltas) == 0:
                raise ValueError(
                    f"delta_timestamps['{key}'] is empty; name at least one offset in seconds, such as 0.0"
                )


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


def make_read_specs(metas: Sequence[DatasetMeta], request: Request) -> tuple[tuple[ReadSpec, ...], tuple[str, ...]]:
    """Return a spec per dataset and the columns that all of them deliver in the same form.

    Other columns than cameras, actions and states are left out if they differ.
    """
    specs = [_make_spec(number, meta, request) for number, meta in enumerate(metas)]
    layouts = [row_layout(spec, meta) for spec, meta in zip(specs, metas, strict=True)]
    kept = [name for name, layout in layouts[0].items() if all(other.get(name) == layout for other in layouts[1:])]
    required = {ACTION, STATE, *(camera.column for spec in specs for camera in spec.cameras)}
    for name in dict.fromkeys(name for layout in layouts for name in layout if name not in kept):
        if name in required:
            raise ValueError(_disagreement(name, specs, layouts))
        logger.warning("feature '%s' is left out: not all datasets have it in the same form", name)
    read = [replace(spec, vectors=tuple(one for one in spec.vectors if one.column in kept)) for spec in specs]
    return tuple(read), tuple(kept)


def row_layout(spec: ReadSpec, meta: DatasetMeta) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Map each delivered column to (dtype, shape of one row)."""
    row, names = allocate(spec, 1), []
    for one in (*spec.cameras, *spec.vectors):
        names += [one.column] if one.offsets is None else [one.column, f"{one.column}_is_pad"]
    names += [*ROW_COLUMNS, *(name for name in ("task_index",) if name in meta.features)]
    return {name: (str(row[name].dtype), row[name].shape[1:]) for name in names}


def row_bytes(spec: ReadSpec, columns: Sequence[str]) -> int:
    """Return the size of a delivered row with the longest task text of the dataset."""
    row = allocate(spec, 1)
    return sum(row[name].nbytes for name in columns) + max(map(len, spec.tasks), default=0)


def _make_spec(number: int, meta: DatasetMeta, request: Request) -> ReadSpec:
    names = {own: meta.names.get(own, own) for own in meta.features}
    windows = _windows(meta, request, names)
    cameras = tuple(
        camera_spec(meta, name, request.resize, windows.get(name), called=names[name])
        for name in _wanted_cameras(meta, request.cameras, names)
    )
    others = {name: one for name, one in meta.features.items() if name not in RESERVED and not one.is_camera}
    dropped = [f"'{name}' ({one.dtype})" for name, one in others.items() if numpy_type(one) is None]
    if dropped:
        text = "dataset '%s': features that are neither numbers nor a text are left out: %s"
        logger.warning(text, meta.root.url, ", ".join(dropped))
    vectors = tuple(  # actions and states are delivered as float32; other features keep their dtype
        vector_spec(
            meta, name, is_float32=names[name] in (ACTION, STATE), offsets=windows.get(name), called=names[name]
        )
        for name, one in others.items()
        if numpy_type(one) is not None
    )
    return ReadSpec(meta.root, number, request.tolerance_s, cameras, vectors, meta.tasks)


def _wanted_cameras(meta: DatasetMeta, wanted: Sequence[str] | None, names: Mapping[str, str]) -> list[str]:
    """Return own camera names in the dataset's order; reject depth and other non-RGB cameras."""
    known = {names[own]: own for own in meta.cameras}
    chosen = [known.get(name, name) for name in (known if wanted is None else wanted)]
    for own in chosen:
        if own not in meta.cameras:
            raise ValueError(
                f"dataset '{meta.root.url}': there is no camera '{own}'"
                f"{did_you_mean(own, known) or '; there are ' + (', '.join(known) or 'none')}"
            )
        if (what := _not_rgb(meta.features[own])) is not None:
            colour = [names[one] for one in meta.cameras if _not_rgb(meta.features[one]) is None]
            raise ValueError(
                f"dataset '{meta.root.url}': camera '{own}' is {what}, and only RGB is read; leave it out: cameras={colour}"
            )
    return [own for own in meta.cameras if own in chosen]


def _not_rgb(feature: Feature) -> str | None:
    """Return what a camera records instead of RGB images."""
    channels = int(np.prod(feature.shape)) // int(np.prod(feature.height_width))
    return "depth" if feature.is_depth else None if channels == 3 else f"an image of {channels} channels"


def _windows(meta: DatasetMeta, request: Request, names: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Map own feature names to offsets in frames."""
    can = {
        names[own]: own
        for own, feature in meta.features.items()
        if feature.is_camera or (own not in RESERVED and numpy_type(feature) not in (None, "object"))
    }
    windows: dict[str, tuple[int, ...]] = {}
    if request.action_horizon is not None:
        if ACTION not in names.values():
            likely = likely_name(ACTION, can.values())
            remedy = f"rename_map={{'{likely or '...'}': 'action'}}"
            raise ValueError(
                f"dataset '{meta.root.url}': there is no feature 'action', only {', '.join(can.values())}; name it with {remedy}, "
                f"or read none with action_horizon=None"
            )
        windows[next(own for own, name in names.items() if name == ACTION)] = tuple(range(request.action_horizon))
    for key, deltas in (request.delta_timestamps or {}).items():
        own = can.get(key, key)
        if own not in can.values():
            raise ValueError(
                f"delta_timestamps['{key}']: dataset '{meta.root.url}' has no such feature"
                f"{did_you_mean(key, can) or '; there are ' + ', '.join(can)}"
            )
        windows[own] = offsets_from_timestamps(deltas, meta.fps, request.tolerance_s, key)
    return windows


def _disagreement(name: str, specs: Sequence[ReadSpec], layouts: Sequence[Mapping[str, tuple]]) -> str:
    found = ", ".join(
        f"dataset '{spec.root.url}' has {f'{of[name][0]} of {of[name][1]}' if name in of else 'none'}"
        for spec, of in zip(specs, layouts, strict=True)
    )
    return f"feature '{name}': {found}; datasets that are read together must agree: use cameras, resize, or a rename_map per dataset"
