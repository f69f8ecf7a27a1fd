"""One checkpoint of a wide PI0.5, ours and the template's way: bytes, and how long training stands still for it.

Ours is the worker's own `Checkpointer`: the loop waits for a copy of what trains, the rest happens on a thread. The
template's way is a pickle of the whole model's and the optimizer's state in a temporary folder, which
`ray.train.report` then copies to the run's storage before it returns; nothing is synced to the disk.

What `heads` trains does not depend on the depth of the model, so its checkpoint here is that of the published depth.
The template's grows with the depth. Frozen weights have two bytes each, in both.
"""

import gc
import json
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

from vlatune.bench.base_models import Base, make_base, make_rows
from vlatune.bench.harness import alternate
from vlatune.bench.options import ResumeBench, StepBench
from vlatune.checkpoint.local_store import LocalStore
from vlatune.checkpoint.policy_files import make_policy_files
from vlatune.config import OptimizerConfig, PolicyConfig, RunConfig
from vlatune.dataset.order.sample_order import OrderSpec
from vlatune.policies.base import ModuleOptions
from vlatune.policies.pi05.module import Pi05Module, load_pi05
from vlatune.policies.pi05.weights import expected_shapes
from vlatune.train.worker.checkpointer import Checkpointer, Learning
from vlatune.train.worker.device import device_batches
from vlatune.train.worker.optimizer import Updater, make_optimizer
from vlatune.train.worker_job import CheckpointPlan

TRAINED = ("heads", "expert")
OURS, TEMPLATE = "vlatune", "the template's way"
CHUNK_BYTES = 64 * 1024 * 1024
"""Ray's own, when it copies a checkpoint."""


@dataclass(frozen=True)
class Save:
    """One checkpoint, written."""

    stall_s: float
    """Training stands still."""
    background_s: float
    """Until it is on the disk, while training goes on."""
    num_bytes: int


Saves = dict[str, list[Save]]
"""Way -> its saves, a round each."""


class Learner:
    """A model whose optimizer has made one step, so that its moments exist."""

    def __init__(self, base: Base, train: str, *, dtype: str = "bfloat16", seed: int = 0) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        options = ModuleOptions(train, dtype)
        self.module: Pi05Module = load_pi05(base.spec, base.binding, options, self.device).train()
        self.left_out = _left_out(base.folder, self.module)
        self.trainable = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        config = OptimizerConfig()
        self.optimizer = make_optimizer(self.trainable.values(), config)
        updater = Updater(self.module, list(self.trainable.values()), self.optimizer, clip_norm=config.grad_clip_norm)
        batches = device_batches(iter([base.columns(make_rows(base, 1, seed), flow_samples=1)]), self.device)
        updater.update([next(batches).tensors], 1)
        batches.close()


def _left_out(folder: Path, module: Pi05Module) -> dict[str, Tensor]:
    """What the template's model has, and saves, and ours does not load: the output heads over the vocabulary."""
    shapes = expected_shapes(folder, json.loads((folder / "config.json").read_bytes()))
    there = module.policy.state_dict().keys()
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items() if name not in there}


class OurSaves:
    """Checkpoints of one run folder; only the newest stays."""

    def __init__(self, learner: Learner, base: Base, train: str, run_dir: Path) -> None:
        self._store, self._device, self._done = LocalStore(run_dir / "checkpoints"), learner.device, 0
        policy = PolicyConfig(path=str(base.folder), train=train)
        config = RunConfig(policy=policy, output_dir=str(run_dir), keep_checkpoints=1)
        order = OrderSpec(lengths=(64,), seed=0, global_batch=8, lanes=8, run_length=8, window_rows=8)
        files = make_policy_files(base.spec, base.binding, base.stats(), dtype=None)
        plan = CheckpointPlan(str(run_dir), None, resume_step=None, fingerprints={}, policy_files=files)
        learning = Learning(learner.trainable, learner.optimizer)
        self._checkpointer = Checkpointer(
            plan, config, order, base.binding, learning=learning, rank=0, device=learner.device
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
    """The template's checkpoint at the end of an epoch; what it leaves is removed here, and that is not timed."""
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
    """What is trained -> the saves of both ways."""
    say(f"making a PI0.5 with random weights: width {options.width}, depth {options.depth}")
    size = StepBench(
        width=options.width, depth=options.depth, vision_depth=options.vision_depth, cameras=1, tokens=48, seed=options.seed
    )  # fmt: skip
    base = make_base(folder / "base", size)
    return {train: save_in_turns(base, train, folder, rounds=options.rounds, say=say) for train in TRAINED}


def save_in_turns(base: Base, train: str, folder: Path, *, rounds: int, say: Callable[[str], None]) -> Saves:
    """Both ways, the same model. It is let go with the return: it takes gigabytes."""
    gc.collect()
    say(f"{train}: one optimizer step, so that there are moments to save")
    learner = Learner(base, train)
    ours = OurSaves(learner, base, train, folder / train)
    ways: dict[str, Callable[[], Save]] = {OURS: ours.save, TEMPLATE: partial(save_template, learner, folder)}
    saves: Saves = {way: [] for way in ways}

    def timer(way: str) -> Callable[[], float]:
        def save_once() -> float:
            saves[way].append(ways[way]())
            return 1000 * saves[way][-1].stall_s

        return save_once

    alternate({way: timer(way) for way in ways}, rounds, say=lambda text: say(f"{train}: {text} ms of stall"))
    return saves
