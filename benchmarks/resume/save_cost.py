"""Save a large PI0.5 with vlatune and like the template: compare bytes and blocking time.

vlatune uses the worker's `Checkpointer`: the loop waits for a copy of the trained tensors, the rest
runs on a thread. The template pickles the state of the complete model and optimizer to a temporary
folder, which `ray.train.report` copies to the storage before it returns, without syncing to disk.

The checkpoint of `heads` does not depend on the model's depth; the template's grows with it. Frozen
weights are bfloat16 in both.
"""

import gc
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from pyarrow import fs
from torch import Tensor

from benchmarks.base_models import Base, make_base, make_rows
from benchmarks.harness import alternate
from benchmarks.options import ResumeBench, StepBench
from vlatune.checkpoint.local_store import LocalStore
from vlatune.config.settings import OptimizerConfig, PolicyConfig, RunConfig
from vlatune.data.order.sample_order import OrderSpec
from vlatune.export.policy_files import make_policy_files
from vlatune.feed.plan import Share
from vlatune.policies.base import ModuleOptions
from vlatune.policies.pi05.model import Pi05Module
from vlatune.policies.pi05.weights import build_policy
from vlatune.train.worker.checkpointer import Checkpointer, Learning
from vlatune.train.worker.device import device_batches
from vlatune.train.worker.optimizer import Updater, make_optimizer
from vlatune.train.worker_job import CheckpointPlan

TRAINED = ("heads", "expert")
OURS, TEMPLATE = "vlatune", "the template"
CHUNK_BYTES = 64 * 1024 * 1024
"""Chunk size that Ray uses to copy a checkpoint."""


@dataclass(frozen=True)
class Save:
    """Measurements of one checkpoint."""

    stall_s: float
    """Seconds that training is blocked."""
    background_s: float
    """Seconds until it is on disk, in parallel to training."""
    num_bytes: int


Saves = dict[str, list[Save]]
"""Implementation -> one save per round."""


class Learner:
    """A model after one optimizer step, so that optimizer moments exist."""

    def __init__(self, base: Base, train: str, *, dtype: str = "bfloat16", seed: int = 0) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        options = ModuleOptions(train, dtype)
        self.module: Pi05Module = Pi05Module.load(base.spec, base.binding, options, self.device).train()
        self.left_out = _left_out(base, self.module)
        self.trainable = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        config = OptimizerConfig()
        self.optimizer = make_optimizer(self.trainable.values(), config)
        updater = Updater(self.module, list(self.trainable.values()), self.optimizer, clip_norm=config.grad_clip_norm)
        batches = device_batches(iter([base.columns(make_rows(base, 1, seed))]), self.device)
        updater.update([next(batches).tensors], 1)
        batches.close()


def _left_out(base: Base, module: Pi05Module) -> dict[str, Tensor]:
    """Return the vocabulary heads, which the template saves and vlatune does not load."""
    there = module.policy.state_dict().keys()
    return {
        name: torch.zeros(parameter.shape, dtype=torch.bfloat16)
        for name, parameter in build_policy(base.spec, None).named_parameters()
        if name not in there
    }


class OurSaves:
    """Save checkpoints to a run folder, keeping only the newest."""

    def __init__(self, learner: Learner, base: Base, train: str, run_dir: Path) -> None:
        self._store, self._device, self._done = LocalStore(run_dir / "checkpoints"), learner.device, 0
        policy = PolicyConfig(path=str(base.folder), train=train)
        config = RunConfig(policy=policy, output_dir=str(run_dir), keep_checkpoints=1)
        order = OrderSpec(lengths=(64,), seed=0, global_batch=8, lanes=8, run_length=8, window_rows=8)
        files = make_policy_files(base.spec, base.binding, base.stats(), dtype=None)
        plan = CheckpointPlan(str(run_dir), None, resume_step=None, fingerprints={}, policy_files=files)
        learning = Learning(learner.trainable, learner.optimizer)
        self._checkpointer = Checkpointer(
            plan, config, order, base.binding, learning=learning, share=Share(0, 1), device=learner.device
        )
        self._checkpointer.begin()

    def save(self) -> Save:
        self._done += 1
        loss_sum = torch.zeros((), device=self._device)
        begin_s = time.perf_counter()
        self._checkpointer.save(self._done, loss_sum, 1, gather=lambda mine: [mine])
        stall_s = time.perf_counter() - begin_s
        self._checkpointer.finish()
        background_s = time.perf_counter() - begin_s - stall_s
        return Save(stall_s, background_s, folder_bytes(self._store.path(self._done)))


def save_template(learner: Learner, scratch: Path) -> Save:
    """Save like the template at the end of an epoch; removing the files is not timed."""
    storage = scratch / "storage"
    begin_s = time.perf_counter()
    local = Path(tempfile.mkdtemp(dir=scratch))
    state = {
        "model": learner.module.policy.state_dict() | learner.left_out,
        "optim": learner.optimizer.state_dict(),
        "epoch": 0,
        "step": 1,
    }
    with (local / "state.pkl").open("wb") as file:
        pickle.dump(state, file, protocol=pickle.HIGHEST_PROTOCOL)
    here = fs.LocalFileSystem()
    here.create_dir(str(storage))
    fs.copy_files(str(local), str(storage), source_filesystem=here, destination_filesystem=here, chunk_size=CHUNK_BYTES)
    saved = Save(time.perf_counter() - begin_s, 0.0, folder_bytes(storage))
    shutil.rmtree(local)
    shutil.rmtree(storage)
    return saved


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure_saves(folder: Path, options: ResumeBench, *, say: Callable[[str], None]) -> dict[str, Saves]:
    """Return fine-tuning mode -> saves of both implementations."""
    say(f"making a PI0.5 with random weights: width {options.width}, depth {options.depth}")
    size = StepBench(
        width=options.width, depth=options.depth, vision_depth=options.vision_depth, cameras=1, tokens=48, seed=options.seed
    )  # fmt: skip
    base = make_base(folder / "base", size)
    return {train: save_in_turns(base, train, folder, rounds=options.rounds, say=say) for train in TRAINED}


def save_in_turns(base: Base, train: str, folder: Path, *, rounds: int, say: Callable[[str], None]) -> Saves:
    """Alternate both implementations on one model, which is freed on return."""
    gc.collect()
    say(f"{train}: one optimizer step, so that there are moments to save")
    learner = Learner(base, train)
    ours = OurSaves(learner, base, train, folder / train)
    programs: dict[str, Callable[[], Save]] = {OURS: ours.save, TEMPLATE: partial(save_template, learner, folder)}
    saves: Saves = {program: [] for program in programs}

    def timer(program: str) -> Callable[[], float]:
        def save_once() -> float:
            saves[program].append(programs[program]())
            return 1000 * saves[program][-1].stall_s

        return save_once

    alternate(
        {program: timer(program) for program in programs}, rounds, say=lambda text: say(f"{train}: {text} ms of stall")
    )
    return saves
