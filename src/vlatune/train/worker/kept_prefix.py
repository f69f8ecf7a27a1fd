"""Keep the outputs of a policy's frozen part as a by-product of training, and read them later.

    prefetching thread   read kept rows from disk into the batch's memory
    training thread      compute the missing rows, one sample at a time, on the device
    writing thread       wait for the copy to the host, write the row; rows are dropped if it falls behind

The bits of a row depend on its sample alone: it is always computed in a batch of one, at the length
of its own prompt, and rounded as it is stored. So losses do not depend on which rows were kept, lost
or damaged.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlatune.batch import PREFIX, SLOT, TOKEN_MASK, TOKENS, Columns, num_rows
from vlatune.data.frames.prefix_store import PrefixKey, PrefixLayout, PrefixSettings, PrefixStore
from vlatune.data.reader import make_unit, read_units
from vlatune.data.transforms import apply_all
from vlatune.feed.plan import DataPlan
from vlatune.feed.ray_blocks import HAS_IMAGES
from vlatune.feed.reorder_buffer import Empty
from vlatune.train.worker.transfer import Accelerator

MAX_WAITING_BYTES = 256 << 20
"""Rows that may wait to be written; further ones are dropped."""
SMALLEST_SCALE = 1e-30
CLOSE_S = 30.0
"""Seconds to write the waiting rows at the end of a run."""


def open_prefix(settings: PrefixSettings, device: torch.device, torch_threads: int) -> PrefixStore:
    """Return the rows that this device's kernels computed; other kernels' rows differ in the last bits."""
    if device.type == "cpu":
        kernels: tuple[str | int, ...] = ("cpu", torch.backends.cpu.get_cpu_capability(), torch_threads)
    else:
        kernels = (device.type, torch.get_device_module(device).get_device_name(device))
    return PrefixStore(settings.on_device(*kernels))


def to_stored(rows_NW: Tensor, layout: PrefixLayout) -> Tensor:
    """Return computed rows as they are stored, (..., tokens, `column_width`)."""
    if layout.stored == "same":
        return rows_NW
    grouped_NKG = rows_NW.float().unflatten(-1, (-1, layout.group))
    scale_NK1 = grouped_NKG.abs().amax(dim=-1, keepdim=True) / 127
    numbers_NW = (grouped_NKG / scale_NK1.clamp_min(SMALLEST_SCALE)).round().to(torch.int8).flatten(-2)
    return torch.cat([numbers_NW.view(torch.uint8), scale_NK1.squeeze(-1).view(torch.uint8)], dim=-1)


def from_stored(stored: Tensor, layout: PrefixLayout) -> Tensor:
    """Return rows in the layout's dtype, (..., tokens, width)."""
    dtype = torch.bfloat16 if layout.dtype == "bfloat16" else torch.float32
    if layout.stored == "same":
        return stored.view(dtype)
    numbers_NKG = stored[..., : layout.width].view(torch.int8).unflatten(-1, (-1, layout.group))
    scale_NK1 = stored[..., layout.width :].contiguous().view(torch.float32)[..., None]
    return (numbers_NKG * scale_NK1).flatten(-2).to(dtype)


@dataclass(frozen=True)
class Missing:
    """A row of a batch that has to be computed."""

    row: int
    key: PrefixKey


@dataclass(frozen=True)
class Planned:
    """Work of the training thread for a batch."""

    missing: tuple[Missing, ...]
    tokens: int
    """Tokens of the batch's longest row."""
    has_all: bool
    """True if every sample of the run had a row before this batch was read."""


class KeptPrefix:
    """Reads, computes and writes the rows of one worker.

    `read` runs on the prefetching thread, `complete` on the training thread, for the same batches in
    the same order.
    """

    kept_rows = 0
    """Rows so far that were read instead of computed."""
    rows = 0
    has_all = False
    """True if every sample of the run has a row, and no batch that was read ahead lacks one."""

    def __init__(
        self, settings: PrefixSettings, plan: DataPlan, device: torch.device, torch_threads: int, empty: Empty
    ) -> None:
        self._settings, self._layout, self._plan, self._empty = settings, settings.layout, plan, empty
        self._store = open_prefix(settings, device, torch_threads)
        self._writer = Writer(self._store, None if device.type == "cpu" else Accelerator(device))
        self._planned: deque[Planned] = deque()
        self._counted = (0, 0)
        self._unchecked, self._lacking = self._samples(), None

    def read(self, batches: Iterator[Columns]) -> Iterator[Columns]:
        """Add the kept rows to each batch, and the images of lost ones."""
        for columns in batches:
            yield self._with_kept(columns)

    def _with_kept(self, columns: Columns) -> Columns:
        has_all = self._check_all()
        has_images = columns.pop(HAS_IMAGES, np.ones(num_rows(columns), bool))
        keys = list(self._store.keys(columns))
        tokens = max(key.tokens for key in keys)
        rows_BSW: np.ndarray | None = None
        missing = []
        for row, key in enumerate(keys):
            if not self._store.has(key):
                missing.append(Missing(row, key))
                continue
            if rows_BSW is None:
                rows_BSW = self._empty_rows(len(keys), tokens)
            if not self._store.read(key, rows_BSW[row, : key.tokens]):
                missing.append(Missing(row, key))
        for lost in missing:
            if not has_images[lost.row]:
                self._read_images(columns, lost.row)
        self._planned.append(Planned(tuple(missing), tokens, has_all))
        if rows_BSW is None:
            return columns
        for row, key in enumerate(keys):
            rows_BSW[row, key.tokens :] = 0  # masked, but must be finite
        used = columns if missing else {key: columns[key] for key in columns if key not in self._settings.cameras}
        return used | {PREFIX: rows_BSW}

    def _empty_rows(self, rows: int, tokens: int) -> np.ndarray:
        """Return uninitialised memory, of one size for all lengths: the pool keeps memory of each size."""
        most, width = self._layout.image_tokens + self._layout.max_prompt_tokens, self._layout.column_width
        flat = self._empty((rows * most * width,), self._layout.column_dtype)
        return flat[: rows * tokens * width].reshape(rows, tokens, width)

    def _read_images(self, columns: Columns, row: int) -> None:
        """Read the images of a row that was lost since its read task was planned."""
        dataset, episode, frame, slot = (
            int(columns[name][row]) for name in ("dataset_index", "episode_index", "frame_index", SLOT)
        )
        meta, spec = self._plan.metas[dataset], self._plan.specs[dataset]
        position = int(np.flatnonzero(meta.episodes.index == episode)[0])
        unit = make_unit(meta, spec, position, np.array([frame]), np.array([slot]))
        made = apply_all(self._plan.transforms, read_units(self._plan.specs, [unit]))
        for camera in self._settings.cameras:
            columns[camera][row] = made[camera][0]

    def complete(
        self, batch: Mapping[str, Tensor], compute: Callable[[Mapping[str, Tensor]], Tensor]
    ) -> dict[str, Tensor]:
        """Return the batch with PREFIX instead of images; missing rows are computed and kept."""
        planned = self._planned.popleft()
        self.has_all = planned.has_all
        total = len(batch[TOKENS])
        self.rows, self.kept_rows = self.rows + total, self.kept_rows + total - len(planned.missing)
        rest = {key: values for key, values in batch.items() if key not in self._settings.cameras}
        if PREFIX in batch:
            stored_BSX = batch[PREFIX]
        else:
            shape, dtype = (total, planned.tokens, self._layout.column_width), self._layout.column_dtype
            stored_BSX = torch.from_numpy(np.zeros(0, dtype)).new_zeros(shape, device=batch[TOKENS].device)
        for one in planned.missing:
            row_NX = to_stored(compute(self._one_sample(batch, one))[0], self._layout)
            stored_BSX[one.row, : one.key.tokens] = row_NX.view(stored_BSX.dtype)
            self._writer.offer(one.key, row_NX)
        return rest | {PREFIX: from_stored(stored_BSX, self._layout)}

    def _one_sample(self, batch: Mapping[str, Tensor], one: Missing) -> dict[str, Tensor]:
        sample = {key: values[one.row : one.row + 1] for key, values in batch.items() if key != PREFIX}
        if self._layout.max_prompt_tokens:
            prompt = one.key.tokens - self._layout.image_tokens
            sample |= {key: sample[key][:, :prompt] for key in (TOKENS, TOKEN_MASK)}
        return sample

    def _check_all(self) -> bool:
        """True if every sample of the run has a row. A call continues where the last one found none."""
        while sample := self._lacking or next(self._unchecked, None):
            if not self._store.has_sample(*sample):
                self._lacking = sample
                return False
            self._lacking = None
        return True

    def _samples(self) -> Iterator[tuple[int, int, int]]:
        """Yield dataset, episode and frame of every sample."""
        chosen = self._plan.selection
        for dataset, position, length in zip(chosen.dataset, chosen.position, chosen.length, strict=True):
            episode = int(self._plan.metas[dataset].episodes.index[position])
            yield from ((int(dataset), episode, frame) for frame in range(length))

    def take_share(self) -> float:
        """Return the share of kept rows since the last call, or of all if there were none: batches are read ahead."""
        (rows, kept), self._counted = self._counted, (self.rows, self.kept_rows)
        if rows == self.rows:
            rows = kept = 0
        return (self.kept_rows - kept) / max(1, self.rows - rows)

    def close(self) -> None:
        self._writer.close()


class FrozenPart:
    """Holds what only computing rows needs: it leaves the device's memory once every row of the run is kept.

    It returns for validations, and for good if a row turns out to be lost.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device
        self._can_leave, self._is_out = device.type != "cpu", False

    def leave(self) -> None:
        """Move to the host; waits for the device."""
        if self._can_leave and not self._is_out:
            self._move(torch.device("cpu"))

    def compute(self, sample: Mapping[str, Tensor]) -> Tensor:
        if self._is_out:
            self._can_leave = False
            self._move(self._device)
        return self._module.compute_kept(sample)

    @contextmanager
    def present(self) -> Iterator[None]:
        """Have it on the device meanwhile."""
        was_out = self._is_out
        if was_out:
            self._move(self._device)
        yield
        if was_out:
            self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        for part in self._module.prefix_modules():
            part.to(device)
        self._is_out = device != self._device
        torch.accelerator.empty_cache()  # for other processes


class Writer:
    """Writes rows on a thread; `offer` never waits."""

    def __init__(self, store: PrefixStore, accelerator: Accelerator | None) -> None:
        self._store, self._accelerator = store, accelerator
        self._waiting_bytes, self._lock = 0, threading.Lock()
        self._rows: queue.SimpleQueue[tuple[PrefixKey, Tensor, torch.Event | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="prefix", daemon=True)

    def offer(self, key: PrefixKey, row: Tensor) -> None:
        """Write a row later, or drop it if too many are waiting."""
        with self._lock:
            if self._waiting_bytes + row.nbytes > max(MAX_WAITING_BYTES, 2 * row.nbytes):
                return
            self._waiting_bytes += row.nbytes
        if self._thread.ident is None:  # not before, so that a worker that fails to load leaves no thread
            self._thread.start()
        self._rows.put((key, *self._to_host(row.detach())))

    def close(self) -> None:
        """Write the waiting rows and stop."""
        if self._thread.ident is not None:
            self._rows.put(None)
            self._thread.join(timeout=CLOSE_S)

    def _to_host(self, row: Tensor) -> tuple[Tensor, torch.Event | None]:
        """Start to copy a row on a separate stream; nothing on the host waits for it."""
        device = self._accelerator
        if device is None:
            return row.contiguous(), None
        row, host = row.contiguous(), device.pinned(row.nbytes)
        computed, copied = device.event(), device.event()
        computed.record(device.compute_stream())
        device.copy_stream.wait_event(computed)
        with device.on_copy_stream():
            host.copy_(row.flatten().view(torch.uint8), non_blocking=True)
            device.record_stream(row, device.copy_stream)
            copied.record(device.copy_stream)
        return host, copied

    def _write_all(self) -> None:
        if self._accelerator:
            self._accelerator.enter_thread()
        while (item := self._rows.get()) is not None:
            key, host, copied = item
            if copied is not None:
                copied.synchronize()  # device sync of one copy, on this thread
            self._store.write(key, host.flatten().view(torch.uint8).numpy())
            with self._lock:
                self._waiting_bytes -= host.nbytes
