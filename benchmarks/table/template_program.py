"""[ray] Train like the template: `python -m benchmarks.table.template_program JSON`.

Full-size float32 frames pass through Ray Data into a `TorchTrainer`. The worker appends a line per
log interval to `progress.jsonl`; the driver writes `result.json`. The trained model is added to a
copy of the base for evaluation, because the template's checkpoints have no config.
"""

import itertools
import json
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train.torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from benchmarks import peer_readers as peers
from benchmarks.processes import folder_bytes
from benchmarks.table.template_step import (
    VERSIONS,
    Changes,
    Collate,
    TemplateTrainer,
    load_policy,
    load_preprocessor,
    masks_cut,
)
from vlatune.data.meta.dataset_meta import DatasetMeta, load_meta
from vlatune.feed.memory import SpillMeter, read_counters
from vlatune.feed.sizing import usable_cpus

PROGRESS, RESULT, MODEL = "progress.jsonl", "result.json", "model"
MARK, DATA_BEGIN = "optimizer_step", "data_begin_s"


@dataclass(frozen=True)
class TemplateJob:
    """Arguments of the program."""

    version: str
    """A key of VERSIONS."""
    folder: str
    root: str
    base: str
    train: str
    episodes: list[int]
    steps: int
    batch_size: int
    log_freq: int
    lr: float
    store_bytes: int
    num_workers: int = 1
    device: str = "cpu"

    @property
    def changes(self) -> Changes:
        return VERSIONS[self.version]


def main(job: TemplateJob) -> None:
    peers.start_ray(usable_cpus(), job.store_bytes, as_ours=False)
    folder = Path(job.folder)
    try:
        meter = SpillMeter(read_counters)
        trainer = TorchTrainer(
            train_worker,
            train_loop_config=asdict(job),
            scaling_config=ScalingConfig(num_workers=job.num_workers, use_gpu=job.device == "cuda"),
            run_config=RunConfig(name="run", storage_path=str(folder), failure_config=FailureConfig(max_failures=1)),
            datasets={"train": read_dataset(job, load_meta(job.root))},
        )
        metrics = trainer.fit().metrics or {}
        store = meter.close()
    finally:
        ray.shutdown()
    measured = {
        "spilled_bytes": store.spilled_bytes,
        "peak_store_bytes": meter.peak_bytes,
        "checkpoint_bytes": metrics["checkpoint_bytes"],
        "host_syncs": metrics["host_syncs"],
    }
    (folder / RESULT).write_text(json.dumps(measured))


def read_dataset(job: TemplateJob, meta: DatasetMeta) -> Any:
    """Return the rows of the training episodes in file order, images as CHW float32."""
    positions = np.flatnonzero(np.isin(meta.episodes.index, job.episodes)).tolist()
    source = peers.TemplateSource(meta, positions, hoisted=job.changes.hoisted_rows)
    convert = peers.to_float_chw_fused if job.changes.fused_images else peers.to_float_chw
    to_float: Any = partial(convert, list(meta.cameras))
    return ray.data.read_datasource(source).map_batches(to_float, batch_size=job.batch_size, batch_format="numpy")


def train_worker(config: dict[str, Any]) -> None:
    job = TemplateJob(**config)
    context, device = ray.train.get_context(), ray.train.torch.get_device()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    policy = load_policy(Path(job.base), job.train)
    preprocess = load_preprocessor(policy.config, Path(job.base), load_meta(job.root), device)
    wrap = ray.train.torch.prepare_model if world_size > 1 else lambda policy: policy
    trainer = TemplateTrainer(policy, preprocess, job.changes, device, lr=job.lr, steps=job.steps, wrap=wrap)
    note = partial(_note, Path(job.folder) / PROGRESS, rank)
    collate = Collate(device, job.changes)
    with masks_cut():
        note({DATA_BEGIN: time.time()})
        batches = trainer.batches(_epochs(job, collate))
        for done, batch in enumerate(itertools.islice(batches, job.steps), start=1):
            trainer.step(batch)
            if done % job.log_freq == 0:
                note({MARK: done, "loss": float(trainer.loss_sum) / done})
        assert collate.first is not None
        syncs = trainer.count_host_syncs(collate.first) if world_size == 1 else None
    with tempfile.TemporaryDirectory() as local:
        state = {"model": policy.state_dict(), "optim": trainer.optimizer.state_dict(), "epoch": 0, "step": job.steps}
        (Path(local) / "state.pkl").write_bytes(pickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL))
        metrics = {"checkpoint_bytes": folder_bytes(Path(local)), "host_syncs": syncs}
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(local) if rank == 0 else None)
    if rank == 0:
        shutil.copytree(job.base, Path(job.folder) / MODEL)
        policy.save_pretrained(Path(job.folder) / MODEL)


def _epochs(job: TemplateJob, collate: Collate) -> Iterator[Any]:
    """Yield batches epoch after epoch; each is a separate execution of the dataset."""
    shard: Any = ray.train.get_dataset_shard("train")
    while True:
        yield from shard.iter_torch_batches(batch_size=job.batch_size, collate_fn=collate, drop_last=True)


def _note(file: Path, rank: int, line: dict[str, Any]) -> None:
    if rank == 0:
        with file.open("a") as opened:
            opened.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(TemplateJob(**json.loads(sys.argv[1])))
