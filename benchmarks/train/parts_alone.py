"""Measure the step or reading in isolation: `python -m benchmarks.train.parts_alone step|reading
CONFIG SECONDS`.

The step is the worker's, on one fixed batch; reading runs a read task's code in one process without
Ray. CONFIG is a file with a run's config. Prints seconds per sample after a warm-up as JSON.
"""

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from vlatune.batch import num_rows
from vlatune.config.flags import config_from_dict
from vlatune.config.settings import RunConfig
from vlatune.data.reader import Unit, read_units
from vlatune.data.transforms import apply_all
from vlatune.feed.plan import DataPlan, Share, cut_units, make_units, plan_steps
from vlatune.feed.ray_blocks import read_blocks
from vlatune.policies.base import ModuleOptions
from vlatune.run_setup import Setup, make_setup
from vlatune.train.driver.launch import run_shape
from vlatune.train.driver.ray_cluster import size_for_this_host
from vlatune.train.worker.device import set_performance_flags
from vlatune.train.worker.optimizer import LossTable, Updater, make_groups, make_optimizer
from vlatune.train.worker.transfer import collate

WARM_UP_SHARE = 0.25


def main(what: str, config: RunConfig, measure_s: float) -> None:
    setup = make_setup(config)
    plan = setup.data_plan
    work = step_alone(config, setup, plan) if what == "step" else read_alone(config, plan)
    sys.stdout.write(json.dumps(measure(work, measure_s)) + "\n")


def measure(work: Callable[[], int], measure_s: float) -> dict[str, float]:
    """Return wall and CPU seconds per sample of a function that returns its number of samples."""
    _repeat(work, WARM_UP_SHARE * measure_s)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    samples = _repeat(work, measure_s)
    cpu_s, wall_s = time.process_time() - begin_cpu_s, time.perf_counter() - begin_s
    return {"wall_s": wall_s / samples, "cpu_s": cpu_s / samples}


def step_alone(config: RunConfig, setup: Setup, plan: DataPlan) -> Callable[[], int]:
    """Return an optimizer step on the first batch of the run."""
    device = torch.device("cpu")
    set_performance_flags(device, size_for_this_host(config, run_shape(config, setup)).torch_threads)
    options = ModuleOptions.of(config.policy)
    module = setup.adapter.load_module(setup.policy, setup.binding, options, device, stats=setup.stats).train()
    trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
    factors = setup.adapter.rate_factors(setup.policy, config.optimizer.lr)
    optimizer = make_optimizer(make_groups(trained, config.optimizer.lr, factors), config.optimizer)
    updater = Updater(
        module,
        list(trained.values()),
        optimizer,
        clip_norm=config.optimizer.grad_clip_norm,
        losses=LossTable(setup.loss_groups, device),
    )
    columns = apply_all(plan.transforms, read_units(plan.specs, _first_units(plan, config.batch_size)))
    batch = collate({key: values[: config.batch_size] for key, values in columns.items()}).to_tensors().tensors

    def step() -> int:
        updater.update([batch], 1)
        return config.batch_size

    return step


def read_alone(config: RunConfig, plan: DataPlan) -> Callable[[], int]:
    """Return a function that reads the next block of the run's plan, cyclically."""
    units = _units(plan, config.steps)
    blocks = list(cut_units(units, max(config.batch_size, config.dataset.run_length)))
    stream = itertools.chain.from_iterable(read_blocks(plan.specs, plan.transforms, blocks) for _ in itertools.count())
    return lambda: num_rows(next(stream))


def _units(plan: DataPlan, steps: int) -> list[Unit]:
    share = Share(0, 1)
    pieces = plan_steps(plan.order, share, 0, min(steps, plan.order.batches_per_epoch))
    return make_units(plan, share, pieces)


def _first_units(plan: DataPlan, rows: int) -> list[Unit]:
    """Return enough units for one batch."""

    def taken() -> Iterator[Unit]:
        missing = rows
        for unit in _units(plan, 1):
            if missing <= 0:
                return
            missing -= len(unit.frames)
            yield unit

    return list(taken())


def _repeat(work: Callable[[], int], at_least_s: float) -> int:
    """Repeat for some seconds, at least twice, and return the number of samples."""
    until_s, samples, times = time.perf_counter() + at_least_s, 0, 0
    while time.perf_counter() < until_s or times < 2:
        samples += work()
        times += 1
    return samples


if __name__ == "__main__":
    file = Path(sys.argv[2])
    main(sys.argv[1], config_from_dict(RunConfig, json.loads(file.read_bytes()), str(file)), float(sys.argv[3]))
