"""A worker reads kept rows into memory of one size, and writes rows on a thread that training never waits for."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vlatune.batch import PREFIX, TOKEN_MASK, TOKENS, Columns
from vlatune.data.frames.cache import CacheSettings
from vlatune.data.frames.prefix_store import PrefixLayout, PrefixSettings
from vlatune.data.order.partition import Selection
from vlatune.train.worker.kept_prefix import MAX_WAITING_BYTES, KeptPrefix, Writer


class SlowStore:
    """Writes nothing before `ready` is set."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.written: dict[Any, np.ndarray] = {}

    def write(self, key: Any, row: np.ndarray) -> None:
        self.ready.wait()
        self.written[key] = row


def test_rows_are_dropped_while_the_disk_falls_behind():
    store: Any = SlowStore()
    writer: Any = Writer(store, None)
    for key in range(5):
        writer.offer(key, torch.empty(MAX_WAITING_BYTES // 5 * 2, dtype=torch.uint8))
    assert not store.written
    store.ready.set()
    writer.close()
    assert list(store.written) == [0, 1]


def test_rows_are_written_as_the_bits_of_the_tensor():
    store: Any = SlowStore()
    store.ready.set()
    writer: Any = Writer(store, None)
    row = torch.arange(12.0, dtype=torch.bfloat16).reshape(3, 4)
    writer.offer("key", row)
    writer.close()
    assert store.written["key"].tobytes() == row.view(torch.int16).numpy().tobytes()


def make_columns(prompts: list[int]) -> Columns:
    mask = np.arange(40) < np.array(prompts)[:, None]
    names = ("dataset_index", "episode_index", "frame_index")
    return {name: np.zeros(len(prompts), np.int64) for name in names} | {TOKENS: mask * 1, TOKEN_MASK: mask}


def test_batches_of_all_lengths_take_memory_of_one_size(tmp_path: Path):
    """A pool keeps memory of each size that it was asked for, pinned on an accelerator."""
    layout = PrefixLayout("test", image_tokens=2, max_prompt_tokens=40, width=3, dtype="float32")
    settings = PrefixSettings(CacheSettings(str(tmp_path), 1 << 30, 0, time.time()), layout, (b"data",), ())
    asked: list[int] = []

    def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        asked.append(np.empty(shape, dtype).nbytes)
        return np.full(shape, np.nan, dtype)

    none = np.zeros(0, np.int64)
    plan: Any = SimpleNamespace(selection=Selection(none, none, none), metas=())
    kept = KeptPrefix(settings, plan, torch.device("cpu"), 1, empty)
    for length in (5, 20, 40):
        (key,) = kept._store.keys(make_columns([length]))
        row = np.arange(key.tokens * 3, dtype=np.float32).reshape(-1, 3)
        kept._store.write(key, row)
        (columns,) = kept.read(iter([make_columns([length])]))
        np.testing.assert_array_equal(columns[PREFIX], row[None])
        assert columns[PREFIX].flags.c_contiguous
    assert asked == [layout.max_bytes] * 3
