"""A run without Ray: the real setup, policy, optimizer and saving of a worker, on one batch of real frames."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlatune.batch import IDS, SLOT, Columns
from vlatune.config.settings import DatasetConfig, PolicyConfig, RunConfig
from vlatune.data.transforms import apply_all
from vlatune.evaluate.held_out import read_held_out
from vlatune.feed.plan import Share
from vlatune.policies.base import ModuleOptions, trained_tensors
from vlatune.train.driver.resume_rules import ResumePoint, find_resume_point, open_run
from vlatune.train.worker.checkpointer import Checkpointer, Learning
from vlatune.train.worker.optimizer import Ema, make_groups, make_optimizer


def small_config(dataset: Path, base: Path, run_dir: Path, **changes: Any) -> RunConfig:
    given: dict[str, Any] = {
        "dataset": DatasetConfig(root=(str(dataset),), eval_split=0.2, run_length=4, window_rows=8),
        "policy": PolicyConfig(path=str(base), train="heads"),
        "output_dir": str(run_dir),
        "steps": 20,
        "save_every_s": 0.0,
    }
    return RunConfig(**given | changes)


class SmallRun:
    """One worker's parts, as the loop puts them together."""

    def __init__(self, config: RunConfig, lease_id: str | None = None) -> None:
        self.lease_id = lease_id
        self.printed: list[str] = []
        self.config = config
        self.start: ResumePoint = find_resume_point(config, say=self.printed.append)
        open_run(config)
        setup = self.start.setup
        torch.manual_seed(config.seed)
        options = ModuleOptions.of(config.policy)
        self.module: Any = setup.adapter.load_module(setup.policy, setup.binding, options, stats=setup.stats)
        self.module.train()
        self.trainable = trained_tensors(self.module)
        trained = {name: one for name, one in self.trainable.items() if one.requires_grad}
        factors = setup.adapter.rate_factors(setup.policy, config.optimizer.lr)
        groups = make_groups(trained, config.optimizer.lr, factors)
        self.optimizer = make_optimizer(groups, config.optimizer)
        self.ema = Ema(self.trainable, config.optimizer.ema_decay) if config.optimizer.ema_decay else None
        self.checkpointer = self._make_checkpointer()
        self.done, self.loss_sum, self.loss_count = self.checkpointer.restore()
        self.rows = read_held_out(setup, 2)

    def _make_checkpointer(self) -> Checkpointer:
        setup, cpu = self.start.setup, torch.device("cpu")
        averages = self.ema.tensors() if self.ema else None
        learning = Learning(self.trainable, self.optimizer, averages)
        plan = self.start.plan(self.config, self.lease_id)
        return Checkpointer(
            plan, self.config, setup.order, setup.binding, learning=learning, share=Share(0, 1), device=cpu
        )

    def batch(self) -> dict[str, Tensor]:
        columns: Columns = apply_all(self.start.setup.eval_transforms(0), self.rows)
        return {key: torch.from_numpy(value) for key, value in columns.items() if key not in (*IDS, SLOT)}

    def step(self) -> float:
        """An update with a little noise of torch's own generator, which a resumed run must draw again."""
        loss = self.module(self.batch()).loss * (1 + 0.01 * torch.rand(()))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema:
            self.ema.update()
        self.done += 1
        self.loss_sum, self.loss_count = self.loss_sum + loss.detach(), self.loss_count + 1
        self.checkpointer.stepped(loss.detach())
        return loss.item()

    def save(self) -> None:
        self.checkpointer.save(self.done, self.loss_sum, self.loss_count, gather=lambda mine: [mine])


@contextmanager
def running(config: RunConfig, lease_id: str | None = None) -> Iterator[SmallRun]:
    run = SmallRun(config, lease_id)
    run.checkpointer.begin()
    try:
        yield run
        run.checkpointer.finish()
    finally:
        run.checkpointer.close()


def make_finished(config: RunConfig, steps: int = 2) -> Path:
    """A run folder with one checkpoint after so many steps."""
    with running(config) as run:
        for _ in range(steps):
            run.step()
        run.save()
    return config.run_dir
