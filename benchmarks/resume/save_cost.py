"""Save the trained heads of a large PI0.5: bytes and blocking time of a checkpoint.

The worker's `Checkpointer` is used: the loop waits for a copy of the trained tensors, the rest runs
on a thread. The checkpoint of `heads` does not depend on the model's depth.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.base_models import make_base, make_rows
from benchmarks.harness import say
from benchmarks.options import ResumeBench, StepBench
from vlatune.checkpoint.local_store import LocalStore
from vlatune.config.settings import OptimizerConfig, PolicyConfig, RunConfig
from vlatune.data.order.sample_order import OrderSpec
from vlatune.export.policy_files import make_policy_files
from vlatune.policies.base import ModuleOptions
from vlatune.policies.pi05.model import load_pi05
from vlatune.train.worker.checkpointer import Checkpointer, Learning
from vlatune.train.worker.device import device_batches
from vlatune.train.worker.optimizer import Updater, make_optimizer
from vlatune.train.worker_job import CheckpointPlan


@dataclass(frozen=True)
class Save:
    """Measurements of one checkpoint."""

    stall_s: float
    """Seconds that training is blocked."""
    background_s: float
    """Seconds until it is on disk, in parallel to training."""
    num_bytes: int


def measure_saves(folder: Path, options: ResumeBench) -> list[Save]:
    """Save once per round, after an optimizer step, so that optimizer moments exist."""
    say(f"making a PI0.5 with random weights: width {options.width}, depth {options.depth}")
    size = StepBench(
        width=options.width, depth=options.depth, vision_depth=options.vision_depth, cameras=1, tokens=48, seed=options.seed
    )  # fmt: skip
    base, run_dir = make_base(folder / "base", size), folder / "run"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = load_pi05(base.spec, base.binding, ModuleOptions("heads", "bfloat16"), device).train()
    trainable = {name: one for name, one in module.named_parameters() if one.requires_grad}
    optimizer = make_optimizer(trainable.values(), OptimizerConfig())
    updater = Updater(module, list(trainable.values()), optimizer, clip_norm=1.0)
    batches = device_batches(iter([base.columns(make_rows(base, 1, options.seed))]), device)
    updater.update([next(batches).tensors], 1)
    batches.close()
    policy = PolicyConfig(path=str(base.folder), train="heads")
    config = RunConfig(policy=policy, output_dir=str(run_dir), keep_checkpoints=1)
    order = OrderSpec(lengths=(64,), seed=0, global_batch=8, lanes=8, run_length=8, window_rows=8)
    files = make_policy_files(base.spec, base.binding, base.stats(), dtype=None)
    plan = CheckpointPlan(str(run_dir), None, resume_step=None, fingerprints={}, policy_files=files)
    learning = Learning(trainable, optimizer)
    checkpointer = Checkpointer(plan, config, order, base.binding, learning=learning, rank=0, device=device)
    checkpointer.begin()
    store, saves = LocalStore(run_dir / "checkpoints"), []
    for step in range(1, options.rounds + 1):
        loss_sum = torch.zeros((), device=device)
        begin_s = time.perf_counter()
        checkpointer.save(step, loss_sum, 1, gather=lambda mine: [mine])
        stall_s = time.perf_counter() - begin_s
        checkpointer.finish()
        background_s = time.perf_counter() - begin_s - stall_s
        saves.append(Save(stall_s, background_s, folder_bytes(store.path(step))))
    return saves


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
