"""[ray] Units of work -> Ray Data read tasks.

One task makes one block: it fills buffers that are allocated once, applies the transforms, and yields a table
that is exactly as large as Ray's target, so that Ray neither joins nor splits it. Tasks come in the order of
the plan, and with `preserve_order` their blocks do too.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask
from ray.data.extensions import ArrowTensorArray

from vlatune.batch import Columns
from vlatune.dataset.reader import ReadSpec, Unit, allocate, read_into
from vlatune.pipeline.transforms import Transform, apply_all


class UnitSource(Datasource):
    """A fixed list of units, cut into tasks of about `block_rows` rows."""

    def __init__(
        self, specs: Sequence[ReadSpec], units: Sequence[Unit], transforms: Sequence[Transform], *, block_rows: int
    ) -> None:
        super().__init__()
        self._specs = tuple(specs)
        self._transforms = tuple(transforms)
        self._groups = group_units(units, block_rows)
        self._row_bytes = sum(values.nbytes for values in allocate(specs[0], 1).values())

    def get_name(self) -> str:
        return "LeRobot"

    @property
    def num_tasks(self) -> int:
        return len(self._groups)

    def estimate_inmemory_data_size(self) -> int:
        return self._row_bytes * sum(len(unit.frames) for group in self._groups for unit in group)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context=None
    ) -> list[ReadTask]:
        return [self._make_task(group) for group in self._groups]

    def _make_task(self, group: Sequence[Unit]) -> ReadTask:
        rows = sum(len(unit.frames) for unit in group)
        metadata = BlockMetadata(num_rows=rows, size_bytes=rows * self._row_bytes, input_files=None, exec_stats=None)
        return ReadTask(partial(read_block, self._specs, tuple(group), self._transforms), metadata)


def group_units(units: Sequence[Unit], block_rows: int) -> list[list[Unit]]:
    """Neighbouring units together as long as they fit a block; a unit is never cut."""
    groups: list[list[Unit]] = []
    rows = block_rows
    for unit in units:
        if rows + len(unit.frames) > block_rows:
            groups.append([])
            rows = 0
        groups[-1].append(unit)
        rows += len(unit.frames)
    return groups


def read_block(specs: Sequence[ReadSpec], units: Sequence[Unit], transforms: Sequence[Transform]) -> Iterable[pa.Table]:
    """What a read task runs."""
    rows = sum(len(unit.frames) for unit in units)
    columns = allocate(specs[units[0].dataset_index], rows)
    at = 0
    for unit in units:
        read_into(specs[unit.dataset_index], unit, columns, at)
        at += len(unit.frames)
    yield to_table(apply_all(transforms, columns))


def to_table(columns: Columns) -> pa.Table:
    """Columns as an Arrow table; fixed-shape arrays stay one contiguous buffer."""
    return pa.table({name: _to_arrow(values) for name, values in columns.items()})


def _to_arrow(values: np.ndarray) -> pa.Array:
    if values.ndim > 1:
        return ArrowTensorArray.from_numpy(values)
    return pa.array(values.tolist() if values.dtype == object else values)
