"""The rows of many episodes of one data file, read once from end to end and checked episode by episode.

Only the row groups that hold wanted rows are read, each once; of a damaged one, only its own episodes are bad. Nothing
is kept but the rows' times, which the check of the videos needs.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlatune.dataset.meta.dataset_meta import DatasetMeta
from vlatune.dataset.reader import ReadSpec, Unit, check_rows, column_names, make_unit, place_of
from vlatune.dataset.storage.parquet import UNREADABLE, opened
from vlatune.dataset.storage.tables import to_numpy
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
