"""Validation during training (`--eval_freq`), with the worker's model and device.

Held-out rows are read once while training starts. Batches are the same for every
number of workers (`evaluate/held_out.py`); each worker computes some with the function that
`vlatune eval` uses, and all get all results. So the results do not depend on the number of workers
(on accelerators, for the same --batch_size). Training's random states are not used.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from vlatune.batch import ACTION_IS_PAD, PREFIX, Columns, num_rows
from vlatune.bounded_queue import ReadAhead
from vlatune.config.settings import EvalConfig, RunConfig
from vlatune.evaluate.held_out import choose_held_out, cut_batches
from vlatune.evaluate.predictions import (
    BatchResult,
    Predictions,
    join_results,
    predict_batches,
    prepare,
    to_device,
    without_images,
)
from vlatune.feed.plan import Share
from vlatune.run_setup import Setup
from vlatune.train.worker.kept_prefix import from_stored, to_stored


def validation_options(config: RunConfig, device: torch.device) -> EvalConfig:
    """Return the options of a run's validations.

    On an accelerator, a batch has no more samples than a training batch, which is known to fit.
    """
    options = EvalConfig(max_samples=config.eval_samples)
    return options if device.type == "cpu" else replace(options, batch_size=min(options.batch_size, config.batch_size))


ReadHeldOut = Callable[[Setup, Mapping[int, np.ndarray]], Iterator[tuple[int, Columns]]]
"""Reads batches of held-out frames by number."""


@dataclass(frozen=True)
class Validation:
    loss: float
    action_error: float
    int8_loss: float | None = None
    """Loss with prefixes rounded as the run keeps them, if it keeps int8."""


class Validator:
    def __init__(self, setup: Setup, share: Share, options: EvalConfig, every: int, read_held_out: ReadHeldOut) -> None:
        self._batches = cut_batches(setup, choose_held_out(setup, options.max_samples), options.batch_size)
        # All workers compute equally many, as sharded layers need; some batches are computed twice.
        total = len(self._batches)
        numbers = range(share.rank, -(-total // share.num_workers) * share.num_workers, share.num_workers)
        mine = {number % total: self._batches[number % total].frames for number in numbers}
        self._setup, self._options, self._every = setup, options, every
        self._ahead: ReadAhead | None = ReadAhead(
            read_held_out(setup, mine), depth=max(1, len(mine)), name="held-out rows"
        )
        self._prepared: dict[int, tuple[Columns, ...]] = {}
        self._truth: dict[int, Columns] = {}
        self.errors: dict[int, float] = {}
        """Optimizer step -> action error of every validation so far."""

    def is_due(self, optimizer_step: int) -> bool:
        return optimizer_step % self._every == 0

    def validate(
        self,
        optimizer_step: int,
        module: nn.Module,
        gather: Callable[[Any], list[Any]],
        on_batch: Callable[[int], None],
    ) -> Validation:
        """Validate; all workers call it after the same step. Synchronises with the device."""
        if self._ahead is not None:
            rows: dict[int, Columns] = dict(self._ahead)
            self._ahead = None
            self._truth = _merge(gather({number: without_images(one) for number, one in rows.items()}))
            valid = np.concatenate([(~one[ACTION_IS_PAD]).sum(axis=1) for one in self._truth.values()]).mean()
            self._prepared = {
                n: prepare(self._setup, one, self._options, valid, blanks=("none",)) for n, one in rows.items()
            }
        module.eval()
        results = predict_batches(module, self._prepared.items(), self._options, on_batch=on_batch)
        int8_loss = self._int8_loss(module, gather)
        module.train()
        everyone = _merge(gather({number: astuple(one) for number, one in results.items()}))
        found = self._join({number: BatchResult(*parts) for number, parts in everyone.items()})
        self.errors[optimizer_step] = found.action_error
        return replace(found, int8_loss=int8_loss)

    @torch.no_grad()
    def _int8_loss(self, module: Any, gather: Callable[[Any], list[Any]]) -> float | None:
        """Return the mean loss with rounded prefixes; None if the run keeps exact ones or none."""
        if self._setup.kept is None or (layout := self._setup.kept.layout).stored == "same":
            return None
        device, total = next(module.parameters()).device, 0.0
        for (columns,) in self._prepared.values():
            batch = to_device(columns, device)
            rounded_BSW = from_stored(to_stored(module.compute_kept(batch), layout), layout)
            total += module(batch | {PREFIX: rounded_BSW}).loss.double() * num_rows(columns)
        rows = sum(num_rows(columns) for (columns,) in self._prepared.values())
        losses, counts = zip(*gather((float(total), rows)), strict=True)  # device sync
        return sum(losses) / sum(counts)

    def _join(self, results: Mapping[int, BatchResult]) -> Validation:
        """Combine results as `vlatune eval`: per robot, then averaged by number of samples."""
        each: list[Predictions] = []
        for dataset in dict.fromkeys(one.dataset for one in self._batches.values()):
            truth = {number: self._truth[number] for number, one in self._batches.items() if one.dataset == dataset}
            joined = join_results(self._setup, self._options, truth, results, blanks=("none",), dataset=dataset)
            each.append(joined["none"])
        counts = [len(one.true_NTA) for one in each]
        if len(each) == 1:
            return Validation(each[0].loss, each[0].error())
        losses, errors = [one.loss for one in each], [one.error() for one in each]
        return Validation(float(np.average(losses, weights=counts)), float(np.average(errors, weights=counts)))

    def best_steps(self) -> list[int]:
        """Return the validated steps by increasing error; ties by step."""
        finite = [step for step, error in self.errors.items() if math.isfinite(error)]
        return sorted(finite, key=lambda step: (self.errors[step], step))

    def without_progress(self) -> int:
        """Return the number of validations since the best one."""
        best = self.best_steps()
        return sum(step > best[0] for step in self.errors) if best else len(self.errors)

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()


def _merge(by_rank: list[dict[int, Any]]) -> dict[int, Any]:
    return {number: value for one in by_rank for number, value in one.items()}
