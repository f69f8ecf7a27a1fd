"""[ray] Read a dataset from a warm frame cache with the read tasks of a training run."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from benchmarks.feed.feed_consumers import read_spec
from vlatune.batch import SLOT, Columns
from vlatune.data.frames.cache import CacheSettings, open_cache
from vlatune.data.meta.dataset_meta import DatasetMeta
from vlatune.data.reader import ReadSpec, Unit, make_unit
from vlatune.feed.ray_blocks import CACHED, read_blocks

RUN_LENGTH = 32
"""Frames of a block, as in training."""


@dataclass(frozen=True)
class CachedRead:
    """Measurements of some passes over a dataset."""

    rows: int
    cached_rows: float
    seconds: float
    cpu_s: float
    """CPU seconds of the read tasks."""


def read_cached(meta: DatasetMeta, folder: Path, *, readers: int, passes: int) -> CachedRead:
    """Read all rows `passes` times with `readers` tasks; missing frames are added to the cache."""
    settings = CacheSettings(str(folder), 1 << 62, 0, time.time())
    open_cache(settings)
    spec = replace(read_spec(meta), cache=settings)
    units = [unit for position in range(len(meta.episodes)) for unit in _runs(meta, spec, position)] * passes
    task: Any = ray.remote(num_returns="streaming")(_read)
    begin_s = time.perf_counter()
    generators = [task.remote(spec, units[first::readers]) for first in range(readers)]
    rows, cached_rows, cpu_s = 0, 0.0, 0.0
    for generator in generators:
        for ref in generator:
            block: Any = ray.get(ref)
            if isinstance(block, float):
                cpu_s += block
            else:
                rows += len(block[SLOT])
                cached_rows += float(block[CACHED].sum())
    return CachedRead(rows, cached_rows, time.perf_counter() - begin_s, cpu_s)


def _runs(meta: DatasetMeta, spec: ReadSpec, position: int) -> Iterator[Unit]:
    length = int(meta.episodes.length[position])
    for begin in range(0, length, RUN_LENGTH):
        frames = np.arange(begin, min(begin + RUN_LENGTH, length))
        yield make_unit(meta, spec, position, frames, frames)


def _read(spec: ReadSpec, units: Sequence[Unit]) -> Iterator[Columns | float]:
    """Yield the blocks, then the CPU seconds of the task."""
    begin_s = time.process_time()
    yield from read_blocks((spec,), (), ([unit] for unit in units))
    yield time.process_time() - begin_s
