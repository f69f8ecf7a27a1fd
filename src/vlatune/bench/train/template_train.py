"""[ray] The template's way to train: `python -m vlatune.bench.train.template_train JSON`; prints a line every so many steps.

Full-size frames as float32 through Ray Data's `iter_batches` in the process that trains, then LeRobot's processors and
`PI05Policy.forward`, with what the pull request changes: fused AdamW over a list made once, the loss left on the
device. For its speed alone: the template knows no action chunk, so that its one action stands for all of them here.
"""

import itertools
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from lerobot.policies.factory import make_pre_post_processors

from vlatune.batch import ACTION, IMAGE_PREFIX, STATE, TASK, Columns
from vlatune.bench import peer_readers as peers
from vlatune.bench.options import ReaderBench
from vlatune.bench.peer_readers import start_ray
from vlatune.bench.train.train_programs import TEMPLATE_MARK, TemplateJob
from vlatune.config import OptimizerConfig
from vlatune.dataset.meta.dataset_meta import DatasetMeta, load_meta
from vlatune.pipeline.sizing import usable_cpus
from vlatune.policies.pi05.load import load_policy
from vlatune.train.worker.optimizer import make_optimizer


def main(job: TemplateJob) -> None:
    start_ray(usable_cpus(), ReaderBench.object_store_bytes, as_ours=False)
    try:
        train(job)
    finally:
        ray.shutdown()


def train(job: TemplateJob) -> None:
    meta = load_meta(job.root)
    policy = load_policy(Path(job.base), train=job.train, dtype="float32").train()
    preprocess = _make_preprocessor(policy.config, job.base, meta)
    trainable = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(trainable, OptimizerConfig(lr=job.lr))
    loss_sum = torch.zeros(())
    for done, columns in enumerate(itertools.islice(read_batches(job, meta), job.steps), start=1):
        loss, _ = policy.forward(preprocess(to_batch(columns, policy.config.chunk_size)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss_sum += loss.detach()
        if done % job.log_freq == 0:
            mark = {TEMPLATE_MARK: done, "loss": loss_sum.item() / done}  # device sync: a log line
            sys.stdout.write(json.dumps(mark) + "\n")
            sys.stdout.flush()


def read_batches(job: TemplateJob, meta: DatasetMeta) -> Iterator[Columns]:
    """Epoch after epoch, each an execution of its own, in the order of the files."""
    positions = np.flatnonzero(np.isin(meta.episodes.index, job.episodes)).tolist()
    to_float: Any = partial(peers.to_float_chw, list(meta.cameras))
    while True:
        dataset = ray.data.read_datasource(peers.TemplateSource(meta, positions)).map_batches(
            to_float, batch_size=job.batch_size, batch_format="numpy"
        )
        batches: Any = dataset.iter_batches(batch_size=job.batch_size, batch_format="numpy", drop_last=True)
        yield from batches


def to_batch(columns: Columns, horizon: int) -> dict[str, Any]:
    """A batch as LeRobot's processors take it."""
    numbers = {key: np.stack(list(columns[key])).astype(np.float32) for key in (STATE, ACTION)}
    pictures = {key: torch.from_numpy(np.stack(list(columns[key]))) for key in columns if key.startswith(IMAGE_PREFIX)}
    action_BTA = torch.from_numpy(numbers[ACTION])[:, None].repeat(1, horizon, 1)
    return {**pictures, STATE: torch.from_numpy(numbers[STATE]), ACTION: action_BTA, TASK: list(columns[TASK])}


def _make_preprocessor(config: Any, base: str, meta: DatasetMeta) -> Any:
    """The base's own pipeline with this dataset's statistics."""
    stats = {key: {name: torch.as_tensor(v) for name, v in meta.stats[key].items()} for key in (STATE, ACTION)}
    features = {**config.input_features, **config.output_features}
    normalise = {"stats": stats, "features": features, "norm_map": config.normalization_mapping}
    preprocess, _ = make_pre_post_processors(
        config,
        base,
        preprocessor_overrides={"device_processor": {"device": "cpu"}, "normalizer_processor": normalise},
        postprocessor_overrides={"unnormalizer_processor": normalise | {"features": {ACTION: features[ACTION]}}},
    )
    return preprocess


if __name__ == "__main__":
    main(TemplateJob(**json.loads(sys.argv[1])))
