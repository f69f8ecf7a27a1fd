"""[ray] Units of work -> Ray Data read tasks.

A task makes some blocks, one after the other: it fills buffers that are allocated once, applies the transforms, and
yields a table of the size that Ray neither joins nor splits. Tasks come in the order of the plan, and with
`preserve_order` their blocks do too.
"""

import collections
import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask
from ray.data.extensions import ArrowTensorArray

from vlatune.batch import Columns, num_rows
from vlatune.dataset.reader import ReadSpec, Unit, allocate, read_units
from vlatune.pipeline.transforms import Transform, apply_all

READ_S = "read_s"
"""Column of a block: seconds that reading a row took. The feed takes it off."""
READER_NICENESS = 19
"""The most that there is. Ray starts all workers with 15, those that train too, unless its cluster is ours."""
IDLE_POLICY: int | None = getattr(os, "SCHED_IDLE", None)
"""Linux takes a core on which nothing else runs for a free one: what wakes up goes there, and not to the core that trains.
Without it the training thread of the demo stood in a queue for 5.8 % of the loop, with it 4.3."""
TARGET_SHARE = 0.8
"""Ray's target over the size of our blocks: 1.25 times the target lies in the middle of what it neither joins nor splits."""


Blocks = tuple[list[Unit], ...]


@dataclass(frozen=True)
class SourceTask:
    """One read task: what runs, and what Ray is told of it before."""

    read: Callable[[], Iterator[pa.Table]]
    rows: int
    bytes: int
    files: tuple[str, ...] | None = None


class LeRobotSource(Datasource):
    """Read tasks that somebody planned, in their order: the product's only Datasource."""

    def __init__(self, tasks: Sequence[SourceTask], schema: pa.Schema | None = None) -> None:
        super().__init__()
        self._tasks, self._schema = list(tasks), schema

    def get_name(self) -> str:
        return "LeRobot"

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)

    def estimate_inmemory_data_size(self) -> int:
        return sum(task.bytes for task in self._tasks)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context=None
    ) -> list[ReadTask]:
        return [self._make_task(task, per_task_row_limit) for task in self._tasks]

    def _make_task(self, task: SourceTask, per_task_row_limit: int | None) -> ReadTask:
        metadata = BlockMetadata(num_rows=task.rows, size_bytes=task.bytes, input_files=task.files, exec_stats=None)  # pyright: ignore[reportArgumentType]
        return ReadTask(task.read, metadata, schema=self._schema, per_task_row_limit=per_task_row_limit)


def unit_tasks(
    specs: Sequence[ReadSpec],
    units: Sequence[Unit],
    transforms: Sequence[Transform],
    *,
    block_rows: int,
    task_blocks: int = 1,
    readers: int = 1,
) -> list[SourceTask]:
    """A fixed list of units, in blocks of `block_rows` rows, `task_blocks` of them per task."""
    row_bytes = sum(values.nbytes for values in allocate(specs[0], 1).values())
    tasks = cut_tasks(units, block_rows, staggered(task_blocks, readers))
    read = partial(_run_task, tuple(specs), transforms=tuple(transforms))
    return [SourceTask(partial(read, blocks), _rows(blocks), _rows(blocks) * row_bytes) for blocks in tasks]


def cut_units(units: Iterable[Unit], block_rows: int) -> Iterator[list[Unit]]:
    """The units' rows in lists of `block_rows` rows; a unit that does not fit goes on in the next list."""
    taken: list[Unit] = []
    room = block_rows
    for unit in units:
        rest = unit
        while len(rest.frames) >= room:
            begin, rest = _split(rest, room)
            yield [*taken, begin]
            taken, room = [], block_rows
        if len(rest.frames):
            taken.append(rest)
            room -= len(rest.frames)
    if taken:
        yield taken


def staggered(task_blocks: int, readers: int) -> Iterator[int]:
    """Blocks of each task: `task_blocks`, but less for the first ones, so that readers do not end all at once.

    Blocks are taken in order of tasks. Were all tasks equal, the consumer would get those of the first as they are
    made, at the speed of one reader, and then those of all others at once.
    """
    least = min(2, task_blocks)  # a run of frames should not be cut by more than one end of a task
    yield from (max(least, -(-task_blocks * number // readers)) for number in range(1, readers))
    yield from itertools.repeat(task_blocks)


def cut_tasks(units: Sequence[Unit], block_rows: int, sizes: Iterator[int]) -> Iterator[Blocks]:
    """The units in tasks of at most so many blocks each. A task ends with a unit where it can: the rest of one would be read
    by another process, which has to find its place in every video anew.
    """
    rest = collections.deque(units)
    while rest:
        room = next(sizes) * block_rows
        taken: list[Unit] = []
        while rest and len(rest[0].frames) <= room:
            taken.append(rest.popleft())
            room -= len(taken[-1].frames)
        if not taken:
            begin, end = _split(rest.popleft(), room)
            taken.append(begin)
            rest.appendleft(end)
        yield tuple(cut_units(taken, block_rows))


def _split(unit: Unit, rows: int) -> tuple[Unit, Unit]:
    """Its first rows, and the others."""
    return (
        replace(unit, frames=unit.frames[:rows], slots=unit.slots[:rows]),
        replace(unit, frames=unit.frames[rows:], slots=unit.slots[rows:]),
    )


def _run_task(specs: Sequence[ReadSpec], blocks: Blocks, transforms: Sequence[Transform]) -> Iterator[pa.Table]:
    give_way()
    yield from read_blocks(specs, blocks, transforms)


def give_way() -> None:
    """Reading gives way to training on the same cores: one that is ahead loses nothing, a step that waits does."""
    if os.getpriority(os.PRIO_PROCESS, 0) < READER_NICENESS:
        os.setpriority(os.PRIO_PROCESS, 0, READER_NICENESS)
    if IDLE_POLICY is not None and os.sched_getscheduler(0) != IDLE_POLICY:
        with contextlib.suppress(PermissionError):  # a container may forbid it
            os.sched_setscheduler(0, IDLE_POLICY, os.sched_param(0))


def read_blocks(
    specs: Sequence[ReadSpec], blocks: Sequence[Sequence[Unit]], transforms: Sequence[Transform]
) -> Iterator[pa.Table]:
    """What a read task runs."""
    for units in blocks:
        begin = time.perf_counter()
        columns = apply_all(transforms, read_units(specs, units))
        rows = num_rows(columns)
        columns[READ_S] = np.full(rows, (time.perf_counter() - begin) / rows, np.float32)
        yield to_table(columns)


def _rows(blocks: Iterable[Iterable[Unit]]) -> int:
    return sum(len(unit.frames) for units in blocks for unit in units)


def to_table(columns: Columns) -> pa.Table:
    """Columns as an Arrow table; fixed-shape arrays stay one contiguous buffer."""
    return pa.table({name: _to_arrow(values) for name, values in columns.items()})


def _to_arrow(values: np.ndarray) -> pa.Array:
    if values.ndim > 1:
        return ArrowTensorArray.from_numpy(values)
    return pa.array(values.tolist() if values.dtype == object else values)
