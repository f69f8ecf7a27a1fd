"""Units become read tasks: in order, in blocks that are just full; a task makes some of them."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.data.block import BlockAccessor

from vlatune.dataset.meta.dataset_meta import load_meta
from vlatune.dataset.reader import CameraSpec, ReadSpec, Unit, VectorSpec, make_unit, read_unit
from vlatune.pipeline import source as source_module
from vlatune.pipeline.source import (
    READ_S,
    LeRobotSource,
    cut_tasks,
    cut_units,
    read_blocks,
    staggered,
    to_table,
    unit_tasks,
)
from vlatune.pipeline.transforms import Normalise, Rename


@dataclass(frozen=True)
class Rows:
    """All that cutting looks at."""

    number: int
    frames: range
    slots: range


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 40), max_size=40), st.integers(1, 60))
def test_blocks_are_full_but_the_last_and_keep_the_order_of_rows(sizes, block_rows):
    units = [Rows(number, range(size), range(100, 100 + size)) for number, size in enumerate(sizes)]
    blocks = list(cut_units(units, block_rows))  # pyright: ignore[reportArgumentType]
    rows = [sum(len(unit.frames) for unit in block) for block in blocks]
    assert rows[:-1] == [block_rows] * (len(rows) - 1)
    assert all(0 < last <= block_rows for last in rows[-1:])
    cut = [(unit.number, frame) for block in blocks for unit in block for frame in unit.frames]
    assert cut == [(unit.number, frame) for unit in units for frame in unit.frames]
    assert all([100 + frame for frame in unit.frames] == list(unit.slots) for block in blocks for unit in block)


@pytest.fixture(scope="module")
def spec_and_units(dataset_v3) -> tuple[ReadSpec, list[Unit]]:
    """Five units of three episodes."""
    meta = load_meta(str(dataset_v3))
    spec = ReadSpec(
        root=meta.root,
        dataset_index=0,
        tolerance_s=1e-4,
        cameras=(CameraSpec(meta.cameras[0], "video", 48, 48),),
        vectors=(VectorSpec("action", "float32", meta.features["action"].shape, (0, 1, 2)),),
        tasks=meta.tasks,
    )
    frames = [(0, [0, 1, 2]), (4, [3, 5]), (4, [8]), (6, [1, 2, 3, 4]), (0, [9])]
    slots = iter(np.random.default_rng(0).permutation(11))
    return spec, [
        make_unit(meta, spec, episode, np.array(few), np.array([next(slots) for _ in few])) for episode, few in frames
    ]


def as_numpy(table) -> dict[str, np.ndarray]:
    """A block as the feed gets it."""
    return BlockAccessor.for_block(table).to_numpy()


def test_a_block_is_its_units_one_after_the_other_transformed(spec_and_units):
    spec, units = spec_and_units
    low, high = np.full(units[0].frames.shape, -1.0), np.full(units[0].frames.shape, 3.0)
    transforms = [Rename({spec.cameras[0].name: "picture"}), Normalise("action", "MIN_MAX", low, high)]
    (table,) = read_blocks([spec], [units[:4]], transforms)
    columns, alone = as_numpy(table), [read_unit(spec, unit) for unit in units[:4]]
    for key in ("slot", "index", "timestamp", "action_is_pad", "task"):
        assert np.array_equal(columns[key], np.concatenate([part[key] for part in alone])), key
    assert np.array_equal(columns["picture"], np.concatenate([part[spec.cameras[0].name] for part in alone]))
    assert columns["picture"].dtype == np.uint8
    assert np.array_equal(columns["action"], (np.concatenate([part["action"] for part in alone]) + 1) / 2 - 1)


def test_fixed_shapes_stay_one_buffer_and_strings_stay_strings():
    columns = {"picture": np.arange(24, dtype=np.uint8).reshape(2, 3, 2, 2), "task": np.array(["a", "b"], object)}
    table = to_table(columns | {"slot": np.array([5, 6]), "is_pad": np.zeros((2, 2), bool)})
    assert table.num_rows == 2
    assert table.column("task").to_pylist() == ["a", "b"]
    back = as_numpy(table)
    assert np.array_equal(back["picture"], columns["picture"])
    assert back["is_pad"].dtype == bool
    assert back["slot"].tolist() == [5, 6]


@pytest.mark.parametrize("task_blocks", [1, 2])
def test_tasks_make_their_blocks_and_announce_their_rows(task_blocks, spec_and_units, monkeypatch):
    monkeypatch.setattr(source_module, "give_way", lambda: None)  # they run in this process
    spec, units = spec_and_units
    source = LeRobotSource(unit_tasks([spec], units, [], block_rows=4, task_blocks=task_blocks))
    tasks = source.get_read_tasks(parallelism=99)
    blocks = [list(task()) for task in tasks]
    sizes = [[len(block) for block in made] for made in blocks]
    assert sizes == {1: [[3], [3], [4], [1]], 2: [[4, 2], [4, 1]]}[task_blocks]
    assert [task.metadata.num_rows for task in tasks] == [sum(made) for made in sizes]
    assert source.num_tasks == len(tasks)
    columns = [as_numpy(block) for made in blocks for block in made]
    assert np.concatenate([one["slot"] for one in columns]).tolist() == [slot for unit in units for slot in unit.slots]
    assert all((one[READ_S] > 0).all() for one in columns)
    row_bytes = 3 * 48 * 48
    assert source.estimate_inmemory_data_size() >= 11 * row_bytes


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 30), st.integers(1, 12), st.integers(1, 8))
def test_tasks_end_with_a_unit_and_keep_the_order_of_rows(lengths, block_rows, task_blocks, readers):
    units = [Rows(number, range(length), range(length)) for number, length in enumerate(lengths)]
    tasks = list(cut_tasks(units, block_rows, staggered(task_blocks, readers)))  # pyright: ignore[reportArgumentType]
    rows = [[(unit.number, frame) for block in task for unit in block for frame in unit.frames] for task in tasks]
    assert [row for task in rows for row in task] == [(unit.number, frame) for unit in units for frame in unit.frames]
    rooms = [blocks * block_rows for blocks, _ in zip(staggered(task_blocks, readers), tasks, strict=False)]
    for task, taken, following, room in zip(tasks, rows, [*rows[1:], []], rooms, strict=True):
        assert 0 < len(taken) <= room
        assert len(task) == -(-len(taken) // block_rows)
        if following and following[0][1] > 0:  # in the middle of a unit: one that no such task could hold
            assert len(taken) == room
            assert {number for number, _ in taken} == {following[0][0]}
        elif following:
            assert len(taken) + lengths[following[0][0]] > room


@given(st.integers(0, 60), st.integers(1, 12), st.integers(1, 8))
def test_the_first_tasks_are_shorter_so_that_readers_end_one_after_the_other(blocks, task_blocks, readers):
    units = [Rows(number, range(1), range(1)) for number in range(blocks)]
    tasks = list(cut_tasks(units, 1, staggered(task_blocks, readers)))  # pyright: ignore[reportArgumentType]
    sizes = [len(task) for task in tasks]
    assert all(1 <= size <= task_blocks for size in sizes)
    first, rest = sizes[: readers - 1], sizes[readers - 1 :]
    assert first[:-1] == sorted(first[:-1])
    assert rest[:-1] == [task_blocks] * (len(rest) - 1)


def test_damage_is_named_by_the_task_that_meets_it(spec_and_units):
    spec, units = spec_and_units
    gone = Unit(**{**vars(units[1]), "videos": ((spec.cameras[0].name, "videos/none.mp4", 0.0),)})
    with pytest.raises(
        ValueError, match=r"episode 4, camera 'observation.images.top', videos/none.mp4: the file is miss"
    ):
        list(read_blocks([spec], [[units[0], gone]], []))
