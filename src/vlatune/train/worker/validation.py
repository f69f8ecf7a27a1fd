"""[ray] Validation while a run trains: `--eval_freq`, on the worker's own device and its own weights, no second model.

Held-out rows are read once, by Ray tasks on other cores, while training begins; a thread waits for them. Batches are the
same for every number of workers (`evaluate/held_out.py`), each computes some of them with the function that `vlatune eval`
uses, and all get all results: the figures do not depend on the number of workers, and neither do training's random states,
as nothing here draws from them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import ray
from torch import nn

from vlatune.batch import Columns
from vlatune.bounded_queue import ReadAhead
from vlatune.config import EvalConfig
from vlatune.evaluate.held_out import choose_held_out, cut_batches, read_chosen
from vlatune.evaluate.predictions import (
    BatchResult,
    Predictions,
    join_results,
    predict_batches,
    prepare,
    without_pictures,
)
from vlatune.pipeline.plan import Share
from vlatune.run_setup import Setup


@dataclass(frozen=True)
class Validation:
    loss: float
    action_error: float


class Validator:
    def __init__(self, setup: Setup, share: Share, options: EvalConfig, every: int) -> None:
        self._batches = cut_batches(setup, choose_held_out(setup, options.max_samples), options.batch_size)
        mine = {number: one.frames for number, one in self._batches.items() if number % share.num_workers == share.rank}
        self._setup, self._options, self._every = setup, options, every
        self._ahead: ReadAhead | None = ReadAhead(
            _read_batches(setup, mine), depth=max(1, len(mine)), name="held-out rows"
        )
        self._prepared: dict[int, tuple[Columns, ...]] = {}
        self._truth: dict[int, Columns] = {}
        self.errors: dict[int, float] = {}
        """Optimizer step -> action error, of every validation so far."""

    def is_due(self, optimizer_step: int) -> bool:
        return optimizer_step % self._every == 0

    def validate(
        self,
        optimizer_step: int,
        module: nn.Module,
        gather: Callable[[Any], list[Any]],
        on_batch: Callable[[int], None],
    ) -> Validation:
        """All workers call it after the same step. The host waits for the device: nothing else is under way."""
        if self._ahead is not None:
            rows: dict[int, Columns] = dict(self._ahead)
            self._ahead = None
            self._truth = _merge(gather({number: without_pictures(one) for number, one in rows.items()}))
            self._prepared = {n: prepare(self._setup, one, self._options, blanks=("none",)) for n, one in rows.items()}
        module.eval()
        results = predict_batches(module, self._prepared.items(), self._options, on_batch=on_batch)
        module.train()
        everyone = _merge(gather({number: astuple(one) for number, one in results.items()}))
        found = self._join({number: BatchResult(*parts) for number, parts in everyone.items()})
        self.errors[optimizer_step] = found.action_error
        return found

    def _join(self, results: Mapping[int, BatchResult]) -> Validation:
        """As `vlatune eval` does it: of several robots each in its own units, then their mean by the number of samples."""
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

    def newest_error(self) -> float | None:
        return self.errors[max(self.errors)] if self.errors else None

    def in_vain(self) -> int:
        """Validations in a row, up to the newest, that were no better than the best before them."""
        steps = sorted(self.errors)
        best = min(steps, key=lambda step: (self.errors[step], step), default=None)
        return 0 if best is None else len(steps) - 1 - steps.index(best)

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()


def _read_batches(setup: Setup, batches: Mapping[int, np.ndarray]) -> Iterator[tuple[int, Columns]]:
    """One batch in the object store at a time, and copied out of it at once: it is the feed's."""
    shared = ray.put(setup)
    for number, frames in batches.items():
        rows = ray.get(_read_task.remote(shared, frames))
        yield number, {key: np.array(values) for key, values in rows.items()}


@ray.remote(num_cpus=0)
def _read_task(setup: Setup, frames: np.ndarray) -> Columns:
    return read_chosen(setup, frames)


def _merge(by_rank: list[dict[int, Any]]) -> dict[int, Any]:
    return {number: value for one in by_rank for number, value in one.items()}
