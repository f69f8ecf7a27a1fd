"""Which episodes cannot be used, found before a run begins: `on_bad_episode=skip`.

The driver reads every row and every packet of the wanted episodes once, file by file, in threads; nothing is decoded. Of
a data file only the row groups that hold wanted rows are read, each once; of a damaged one, only its own episodes are bad,
and nothing is kept but the rows' times, which the check of the videos needs. What is left is the same for every worker and
every restart, so the order of samples stays a pure function. A store that does not answer, or refuses, is not an episode's
fault: that error goes to the caller.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlatune.dataset.health.video_health import check_ends, check_frames, frame_times
from vlatune.dataset.meta.dataset_meta import DatasetMeta
from vlatune.dataset.meta.episodes import frames_of_others
from vlatune.dataset.meta.listing import check_present, one_per_file
from vlatune.dataset.order.partition import Selection, pick
from vlatune.dataset.reader import CameraSpec, ReadSpec, Unit, check_rows, column_names, make_unit, place_of
from vlatune.dataset.storage.parquet import UNREADABLE, opened
from vlatune.dataset.storage.tables import to_numpy
from vlatune.dataset.video.decoder import VideoPlace
from vlatune.dataset.video.images import check_image_columns

type Times = dict[int, np.ndarray]
"""Position of an episode -> the timestamps of its rows, float64."""
type Reasons = dict[int, str]
"""Position of an episode -> what is wrong with it."""


def check_data_file(meta: DatasetMeta, spec: ReadSpec, positions: Sequence[int]) -> tuple[Times, Reasons]:
    """Of the good episodes among these of one data file the times, of the bad ones the reasons."""
    times: Times = {}
    bad: Reasons = {}
    try:
        with opened(spec.root, meta.data_path(positions[0]), column_names(spec)) as parquet:
            _check_pictures(meta, spec, parquet, positions[0])
            groups = RowGroups(parquet, column_names(spec))
            for position in sorted(positions, key=lambda at: int(meta.episodes.data_offset[at])):
                try:
                    times[position] = _check_episode(spec, _whole_episode(meta, spec, position), groups)
                except ValueError as error:
                    bad[position] = str(error)
    except ValueError as error:  # the file as a whole
        bad = {position: str(error) for position in positions}
        times = {}
    return times, bad


def _check_pictures(meta: DatasetMeta, spec: ReadSpec, parquet: pq.ParquetFile, position: int) -> None:
    """That the columns are there; pictures themselves are for decoding."""
    try:
        check_image_columns(parquet, [camera.name for camera in spec.cameras if camera.kind == "image"])
    except ValueError as error:
        raise ValueError(f"dataset '{spec.root.url}': {meta.data_path(position)}: {error}") from error


def _whole_episode(meta: DatasetMeta, spec: ReadSpec, position: int) -> Unit:
    none = np.zeros(0, np.int64)
    return make_unit(meta, spec, position, none, none)


def _check_episode(spec: ReadSpec, unit: Unit, groups: "RowGroups") -> np.ndarray:
    where = place_of(spec, unit)
    try:
        table = groups.rows(unit.data_offset, unit.data_offset + unit.length)
    except PermissionError:
        raise
    except UNREADABLE as error:
        raise ValueError(f"{where}: is not readable parquet ({error}); fetch the dataset anew") from error
    values = {name: to_numpy(table.column(name), f"{where}, column '{name}'") for name in column_names(spec)}
    check_rows(spec, unit, values, groups.num_rows)
    return values["timestamp"].astype(np.float64)


class RowGroups:
    """Ranges of rows of a file, asked for in rising order; the row group used last stays in memory."""

    def __init__(self, parquet: pq.ParquetFile, columns: Sequence[str]) -> None:
        self._parquet, self._columns = parquet, list(columns)
        sizes = [parquet.metadata.row_group(number).num_rows for number in range(parquet.num_row_groups)]
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._begins = self._ends - np.array(sizes, dtype=np.int64)
        self._kept: tuple[int, pa.Table] | None = None
        self.num_rows = int(sum(sizes))

    def rows(self, begin: int, end: int) -> pa.Table:
        """Rows [begin, end); fewer where the file ends before."""
        parts = [self._parquet.schema_arrow.empty_table().select(self._columns)]
        for number in np.flatnonzero((self._ends > begin) & (self._begins < end)).tolist():
            low, high = max(begin - self._begins[number], 0), end - self._begins[number]
            parts.append(self._group(number).slice(low, high - low))
        return pa.concat_tables(parts)

    def _group(self, number: int) -> pa.Table:
        if self._kept is None or self._kept[0] != number:
            table = self._parquet.read_row_group(number, columns=self._columns, use_threads=False)
            self._kept = (number, table.select(self._columns))
        return self._kept[1]


THREADS = 8
"""Files that are read at once: the time goes into waiting for the disk or the store."""
SHOWN = 10


@dataclass(frozen=True)
class BadEpisode:
    dataset_index: int
    dataset: str
    episode: int
    """Its episode_index."""
    reason: str

    def to_json(self) -> dict[str, Any]:
        return {
            "dataset_index": self.dataset_index,
            "dataset": self.dataset,
            "episode": self.episode,
            "reason": self.reason,
        }


def find_bad_episodes(
    metas: Sequence[DatasetMeta],
    specs: Sequence[ReadSpec],
    selection: Selection,
    *,
    on_file: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[BadEpisode, ...]:
    """The selected episodes that cannot be read as `specs` ask; `on_file` gets the files done, and of all."""
    jobs = [
        _Job(meta, spec, selection.position[selection.dataset == number].tolist())
        for number, (meta, spec) in enumerate(zip(metas, specs, strict=True))
    ]
    total, done = sum(job.num_files for job in jobs), 0

    def count() -> None:
        nonlocal done
        done += 1
        on_file(done, total)

    pool = ThreadPoolExecutor(THREADS)
    try:
        return tuple(bad for job in jobs for bad in job.run(pool, count))
    finally:
        pool.shutdown(cancel_futures=True)  # after an error or Ctrl-C, the files that wait are not begun


class _Job:
    """The check of one dataset: first its data files, then, with the rows' times, its videos."""

    def __init__(self, meta: DatasetMeta, spec: ReadSpec, positions: Sequence[int]) -> None:
        self._meta, self._spec = meta, spec
        self._data = _by_file(meta, None, positions)
        self._cameras = [camera for camera in spec.cameras if camera.kind == "video"]
        self._videos = [(camera, group) for camera in self._cameras for group in _by_file(meta, camera.name, positions)]
        self.num_files = len(self._data) + len(self._videos)

    def run(self, pool: ThreadPoolExecutor, count: Callable[[], None]) -> Iterator[BadEpisode]:
        times: Times = {}
        reasons: dict[int, str] = {}
        for found, bad in pool.map(lambda group: check_data_file(self._meta, self._spec, group), self._data):
            times |= found
            reasons |= bad
            count()
        for bad in pool.map(lambda job: self._check_video(job[0], job[1], times), self._videos):
            reasons = bad | reasons  # the first reason is enough
            count()
        episodes, root = self._meta.episodes, self._spec.root
        for camera in self._cameras:
            shared = _frames_of_others(self._meta, camera)
            wanted = {position for group in self._data for position in group}
            bad = {position: f"dataset '{root.url}': {text}" for position, text in shared.items() if position in wanted}
            reasons = bad | reasons
        for position in sorted(reasons):
            yield BadEpisode(self._spec.dataset_index, root.url, int(episodes.index[position]), reasons[position])

    def _check_video(self, camera: CameraSpec, positions: Sequence[int], times: Times) -> dict[int, str]:
        """Of the episodes in one mp4 file, those whose rows are good and whose frames are not."""
        good = [position for position in positions if position in times]
        if not good:
            return {}
        places = {position: _place(self._meta, self._spec, camera, position) for position in good}
        from_s = self._meta.episodes.videos[camera.name].from_s
        wanted_s = {position: from_s[position] + times[position] for position in good}
        first = places[good[0]]
        try:
            found_s = frame_times(self._spec.root, first.file, camera.recorded, first)
        except ValueError as error:  # it begins with the place, which is another for every episode
            said = str(error).removeprefix(str(first))
            return {position: f"{place}{said}" for position, place in places.items()}
        return check_frames(found_s, wanted_s, places, tolerance_s=self._spec.tolerance_s)


def check_first(metas: Sequence[DatasetMeta], specs: Sequence[ReadSpec], selection: Selection) -> None:
    """Refuse, in a moment, what most often is wrong: files that are not there, and a first episode that is not as
    meta/ says (its rows, and the headers of its mp4 files)."""
    for number, (meta, spec) in enumerate(zip(metas, specs, strict=True)):
        positions = selection.position[selection.dataset == number].tolist()
        if not positions:
            continue
        cameras = [camera for camera in spec.cameras if camera.kind == "video"]
        check_present(meta, [camera.name for camera in cameras], positions)
        for camera in cameras:
            shared = _frames_of_others(meta, camera)
            for position in (position for position in positions if position in shared):
                raise ValueError(f"dataset '{spec.root.url}': {shared[position]}")
        first = positions[0]
        _, bad = check_data_file(meta, spec, [first])
        if bad:
            raise ValueError(bad[first])
        for camera in cameras:
            place = _place(meta, spec, camera, first)
            check_ends(spec.root, place.file, camera.recorded, place)


def _frames_of_others(meta: DatasetMeta, camera: CameraSpec) -> dict[int, str]:
    """Nothing where every episode has a file of its own."""
    if "{episode_" in meta.templates["video_path"]:
        return {}
    return frames_of_others(meta.episodes, camera.name, meta.fps)


def _place(meta: DatasetMeta, spec: ReadSpec, camera: CameraSpec, position: int) -> VideoPlace:
    file = meta.video_path(position, camera.name)
    return VideoPlace(spec.root.url, int(meta.episodes.index[position]), camera.name, file)


def _by_file(meta: DatasetMeta, camera: str | None, positions: Sequence[int]) -> list[list[int]]:
    """Positions of the episodes, those of one file together."""
    files, group = one_per_file(meta, camera, positions)
    groups: list[list[int]] = [[] for _ in files]
    for position, file in zip(positions, group.tolist(), strict=True):
        groups[file].append(position)
    return [each for each in groups if each]


def leave_out(selection: Selection, metas: Sequence[DatasetMeta], bad: Sequence[BadEpisode]) -> Selection:
    """The selection without the bad episodes; refused when nothing is left."""
    by_dataset: dict[int, list[int]] = {}
    for one in bad:
        by_dataset.setdefault(one.dataset_index, []).append(one.episode)
    is_bad = np.zeros(len(selection), dtype=bool)
    for number, episodes in by_dataset.items():
        here = np.flatnonzero(selection.dataset == number)
        is_bad[here] = np.isin(metas[number].episodes.index[selection.position[here]], episodes)
    if bad and is_bad.all():
        raise ValueError(
            f"all {len(selection)} episodes are bad, so there is nothing to read; the first: {bad[0].reason}"
        )
    return pick(selection, ~is_bad)


def without(metas: Sequence[DatasetMeta], bad: Sequence[BadEpisode]) -> tuple[DatasetMeta, ...]:
    """The datasets, each knowing which of its episodes are left out."""
    made = []
    for number, meta in enumerate(metas):
        episodes = [one.episode for one in bad if one.dataset_index == number]
        made.append(replace(meta, left_out=frozenset(np.flatnonzero(np.isin(meta.episodes.index, episodes)).tolist())))
    return tuple(made)


def skip_line(bad: Sequence[BadEpisode], num_selected: int) -> str:
    """One line for the log."""
    shown = ", ".join(str(one.episode) for one in bad[:SHOWN])
    more = f", and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    return f"{len(bad)} of {num_selected} episodes are bad and left out: {shown}{more}; the first: {bad[0].reason}"
