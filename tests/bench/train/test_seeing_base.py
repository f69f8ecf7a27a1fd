"""A base whose frozen part has learnt to see: what was trained is there, and what the benchmark trains is as it was."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from train.without_ray import run_without_ray

from vlatune.bench.options import TrainBench
from vlatune.bench.processes import Program
from vlatune.bench.train import time_to_quality
from vlatune.bench.train.time_to_quality import with_seeing_base
from vlatune.bench.train.train_cases import TrainJob
from vlatune.config import DatasetConfig, PolicyConfig, RunConfig
from vlatune.flags import config_from_dict
from vlatune.policies.pi05.trainable import TRAINED, UNUSED
from vlatune.run_setup import make_setup

WEIGHTS = "model.safetensors"


@pytest.fixture
def trained_here(monkeypatch) -> list[RunConfig]:
    """The program's run is made in this process, without Ray; what it was asked for."""
    asked = []

    def run(program: Program, *, timeout_s: float) -> None:
        file = Path(program.command[-1].removeprefix("--config_path="))
        asked.append(config_from_dict(RunConfig, json.loads(file.read_bytes()), str(file)))
        run_without_ray(asked[-1], 1)

    monkeypatch.setattr(time_to_quality, "watch", run)
    monkeypatch.setattr(time_to_quality, "SEEING_STEPS", 3)
    return asked


def test_what_is_frozen_has_learnt_and_what_trains_has_not(trained_here, dataset_v3, small_base, tmp_path):
    config = RunConfig(
        dataset=DatasetConfig(root=(str(dataset_v3),), eval_split=0.2),
        policy=PolicyConfig(path=str(small_base), train="expert", dtype="float32"),
        batch_size=4,
        steps=9,
        save_freq=0,
        save_every_s=0,
        eval_freq=0,
    )
    options = TrainBench(root=str(dataset_v3))
    job = with_seeing_base(TrainJob(config, (), num_workers=0), options, tmp_path)
    assert [(one.policy.train, one.steps) for one in trained_here] == [("full", 3)]
    folder = Path(str(job.config.policy.path))
    before, after = load_file(small_base / WEIGHTS), load_file(folder / WEIGHTS)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    unused = UNUSED.replace("{last}", "1")  # of two layers
    frozen = {name for name in before if not re.match(TRAINED["expert"], name) and not re.search(unused, name)}
    assert changed == frozen
    assert make_setup(job.config).policy.folder == str(folder), "it is a base like the other"
    assert sorted(one.name for one in tmp_path.iterdir()) == [folder.name]
    assert with_seeing_base(TrainJob(config, (), num_workers=0), options, tmp_path) == job, "made once"
    assert len(trained_here) == 1
