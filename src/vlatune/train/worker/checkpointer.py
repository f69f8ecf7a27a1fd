"""Save and restore checkpoints on a worker. No Ray.

Rank 0 writes; the other ranks send their random states and losses. The training loop only gathers a
few KB and copies the tensors to the host through a bounded buffer; a thread of
`checkpoint/snapshot.py` does the rest.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file as save_arrays
from torch import Tensor

from vlatune.checkpoint.local_store import OnPhase, Score, no_phase
from vlatune.checkpoint.snapshot import BackgroundWriter, Keep, Snapshot, Staging, TorchHost, join_copy
from vlatune.checkpoint.state import (
    LOSS_SUMS,
    LOSSES,
    RNG,
    Tensors,
    get_rng,
    load_ema,
    load_loss_sums,
    load_optimizer,
    load_rng,
    load_trainable,
    set_rng,
    stack_rng,
    tensors_to_save,
)
from vlatune.checkpoint.state_file import STATE, TrainState, read_state, state_bytes
from vlatune.checkpoint.store import WriteFile, open_store
from vlatune.config.settings import RunConfig, to_json
from vlatune.data.order.sample_order import OrderSpec, cursor_at
from vlatune.export.policy_files import POLICY_FOLDER
from vlatune.feed.plan import Share
from vlatune.feed.sizing import usable_ram_bytes
from vlatune.policies.base import Binding
from vlatune.storage.lease import check_lease, lease_file
from vlatune.train.worker_job import CheckpointPlan

BEFORE_WRITES = ("synced", "uploaded", "committed")
"""Phases directly before a checkpoint is published, and before older ones are removed."""


@dataclass(frozen=True)
class Learning:
    """The tensors of a worker that are saved."""

    trainable: Tensors
    optimizer: torch.optim.Optimizer
    ema: Tensors | None = None
    loss_sums: Tensor | None = None
    """This rank's losses by group since the last log line."""


class Checkpointer:
    def __init__(
        self,
        plan: CheckpointPlan,
        config: RunConfig,
        order: OrderSpec,
        binding: Binding,
        *,
        learning: Learning,
        share: Share,
        device: torch.device,
        on_phase: OnPhase = no_phase,
    ) -> None:
        self._report_phase = on_phase
        self._plan, self._config, self._order, self._binding = plan, config, order, binding
        self._learning, self._share, self._device = learning, share, device
        self._store = open_store(Path(plan.run_dir), plan.storage_path)
        most_bytes = buffer_bytes(config.save_buffer_bytes, usable_ram_bytes())
        self._staging = Staging(TorchHost(device), most_bytes=most_bytes)
        self._writer: BackgroundWriter | None = None
        self._rng: dict[str, Any] | None = None
        self._copy: Path | None = None
        """The checkpoint that was restored, shared by the ranks of this node."""
        self._loss_sum, self._loss_count = torch.zeros((), device=device), 0
        self._score, self._is_scored = Score(), threading.Event()

    def restore(self) -> tuple[int, Tensor, int]:
        """Load the checkpoint; return its step, this rank's loss sum since the last log line, and
        its count."""
        zero = torch.zeros((), device=self._device)
        if self._plan.resume_step is None:
            return 0, zero, 0
        folder = self._copy = self._store.local_copy(self._plan.resume_step)
        state = read_state(self._store, self._plan.resume_step)
        load_trainable(folder, self._learning.trainable)
        load_optimizer(folder, self._learning.trainable, self._learning.optimizer)
        if self._learning.ema is not None:
            load_ema(folder, self._learning.ema)
        rank, num_workers = self._share.rank, self._share.num_workers
        self._rng = load_rng(folder, rank, num_workers)
        if self._learning.loss_sums is not None:
            load_loss_sums(folder, rank, num_workers, self._learning.loss_sums)
        return state.optimizer_step, zero + state.loss_sum(rank, num_workers), state.loss_count

    def begin(self) -> None:
        """Restore the random states and start the writer of rank 0."""
        if self._rng is not None:
            set_rng(self._rng, self._device)
        if self._share.rank == 0:
            self._check_lease()  # before the writer removes what an interrupted save has left
            keep = Keep(self._config.keep_checkpoints, self._config.kept_best)
            self._writer = BackgroundWriter(
                self._store, keep, every_s=self._config.save_every_s, on_phase=self._on_phase
            )

    def stepped(self, loss: Tensor) -> None:
        """Record a step's loss; raises if a save in the background has failed."""
        self._loss_sum, self._loss_count = self._loss_sum + loss, self._loss_count + 1
        if self._writer:
            self._writer.check()

    def is_due(self) -> bool:
        """True if rank 0's timer requires a save; other ranks are informed by `Consensus`."""
        return self._writer is not None and self._writer.is_due()

    def save(
        self,
        done: int,
        loss_sum: Tensor,
        loss_count: int,
        gather: Callable[[Any], list[Any]],
        *,
        awaits_error: bool = False,
    ) -> None:
        """Copy the state now and write it in the background; all ranks call it at the same step.

        With `awaits_error`, it is committed when its validation error is known, or none will be: after `validated` or
        `close`.
        """
        sums = torch.stack([loss_sum, self._loss_sum]).tolist()  # device sync: a save copies weights to the host anyway
        table = None if self._learning.loss_sums is None else self._learning.loss_sums.cpu().numpy().copy()  # as above
        everyone = gather((*sums, get_rng(self._device), table))
        if self._copy:  # all ranks have restored
            self._store.drop_copy(self._copy)
            self._copy = None
        tensors = tensors_to_save(self._learning.trainable, self._learning.optimizer, self._learning.ema)
        if not self._writer:
            join_copy(tensors)
        else:
            self._writer.wait()  # the buffer holds one save at a time
            snapshot = self._staging.begin(tensors)
            state = self._state(done, tuple(one[0] for one in everyone), loss_count)
            mean_loss = sum(one[1] for one in everyone) / len(everyone) / max(1, self._loss_count)
            files = self._files(snapshot, state, stack_rng([one[2] for one in everyone]))
            if table is not None:
                files[LOSSES] = partial(save_arrays, {LOSS_SUMS: np.stack([one[3] for one in everyone])})
            self._score = Score(mean_loss)
            if awaits_error:
                self._is_scored.clear()
            else:
                self._is_scored.set()
            self._writer.save(done, files, score=self._score, on_failure=snapshot.abort)
            snapshot.copy()
            self._writer.check()
        self._loss_sum, self._loss_count = torch.zeros_like(self._loss_sum), 0

    def validated(self, error: float) -> None:
        """Add the validation error to the last save, if it awaits one."""
        if not self._is_scored.is_set():
            self._score.val_error = error
            self._is_scored.set()

    def finish(self) -> None:
        """Wait until the last checkpoint is committed; raises if that failed."""
        if self._writer:
            self._writer.wait()

    def close(self) -> None:
        """Wait for a save in progress, however the loop ended."""
        self._is_scored.set()
        if self._writer:
            self._writer.join()

    def _on_phase(self, phase: str) -> None:
        self._report_phase(phase)  # first, as it may wait for the driver
        if phase == "written":
            self._is_scored.wait()
        if phase in BEFORE_WRITES:
            self._check_lease()

    def _check_lease(self) -> None:
        if self._plan.lease_id and self._plan.storage_path:
            check_lease(lease_file(Path(self._plan.run_dir), self._plan.storage_path), self._plan.lease_id)

    def _state(self, done: int, loss_sums: tuple[float, ...], loss_count: int) -> TrainState:
        cursor = cursor_at(self._order, done)
        return TrainState(
            optimizer_step=done,
            epoch=cursor.epoch,
            epoch_samples=cursor.batch * self._order.global_batch,
            samples_seen=done * self._order.global_batch,
            lanes=self._order.lanes,
            loss_sums=loss_sums,
            loss_count=loss_count,
            config=to_json(self._config),
            fingerprints=dict(self._plan.fingerprints),
            binding=self._binding,
        )

    def _files(self, snapshot: Snapshot, state: TrainState, rng: Mapping[str, Any]) -> dict[str, WriteFile]:
        """Return name -> function that writes the file; tensors first, in the order of copying."""
        files: dict[str, WriteFile] = {name: partial(snapshot.write, name) for name in snapshot.layouts}
        files[RNG] = partial(save_arrays, dict(rng))
        files[STATE] = partial(_write_bytes, state_bytes(state))
        for name, data in self._plan.policy_files.items():
            files[f"{POLICY_FOLDER}/{name}"] = partial(_write_bytes, data)
        return files


def _write_bytes(data: bytes, path: Path) -> None:
    path.write_bytes(data)


def buffer_bytes(wanted: int, ram_bytes: int) -> int:
    """Return the size of the save buffer: at most an eighth of the RAM, because it is page-locked on GPUs.

    >>> buffer_bytes(4 << 30, ram_bytes=16 << 30) >> 30
    2
    """
    return min(wanted, ram_bytes // 8)
