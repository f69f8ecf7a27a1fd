"""The worker's loop without Ray: real model, optimizer and checkpoints."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from local_runs import RequestAfter, assert_same_run, run_locally
from safetensors.torch import load_file

from vlatune.batch import ACTION, Columns
from vlatune.config.settings import DatasetConfig, OptimizerConfig, PolicyConfig, RunConfig, SchedulerConfig
from vlatune.errors import RunStoppedError
from vlatune.run.sinks import read_jsonl
from vlatune.train.heartbeat import Request

STEPS, MICRO_STEPS, BAD_STEP, EMA_DECAY = 6, 2, 4, 0.5


@pytest.fixture
def config(dataset_v3, small_base, tmp_path) -> RunConfig:
    return RunConfig(
        dataset=DatasetConfig(root=(str(dataset_v3),), run_length=4, window_rows=8),
        policy=PolicyConfig(path=str(small_base), train="heads"),
        optimizer=OptimizerConfig(lr=1e-3, ema_decay=EMA_DECAY),
        scheduler=SchedulerConfig(num_warmup_steps=0, num_decay_steps=10),
        output_dir=str(tmp_path / "run"),
        steps=STEPS,
        batch_size=2,
        grad_accum=MICRO_STEPS,
        log_freq=3,
        save_freq=1,
        keep_checkpoints=STEPS,
        log_samples=True,
    )


def poison(micro_batch: int):
    """Return a change that makes one action of the given micro-batch NaN, and the list of its sample indices."""
    seen, indices = [], []

    def change(columns: Columns) -> Columns:
        if len(seen) == micro_batch:
            indices.extend(columns["index"].tolist())
            columns[ACTION][0, 0, 0] = np.nan
        seen.append(1)
        return columns

    return change, indices


def checkpoints(run_dir: Path) -> dict[int, Path]:
    return {int(path.name): path for path in sorted((run_dir / "checkpoints").glob("[0-9]*"))}


@pytest.mark.parametrize("save_freq", [1, 3])
def test_non_finite_step_is_neither_saved_nor_logged(config, save_freq):
    """The check runs before a save and before a log line; here one or the other comes first."""
    change, indices = poison((BAD_STEP - 1) * MICRO_STEPS + 1)
    with pytest.raises(RunStoppedError, match=rf"optimizer step {BAD_STEP}: .*rank 0, micro-step 1") as raised:
        run_locally(replace(config, save_freq=save_freq), change=change)
    assert ", ".join(f"(0, {index})" for index in indices) in str(raised.value)
    saved = checkpoints(config.run_dir)
    assert list(saved) == [step for step in range(1, BAD_STEP) if step % save_freq == 0]
    tensors = [tensor for path in saved.values() for tensor in load_file(path / "trainable.safetensors").values()]
    assert all(tensor.isfinite().all() for tensor in tensors)
    assert [line["optimizer_step"] for line in read_jsonl(config.run_dir / "metrics.jsonl")] == [3]


def test_run_averages_weights_and_records_flags_and_losses_by_group(config):
    run_dir = run_locally(config)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["performance_flags"]["device"] == "cpu"
    for before, after in pairwise(path for _, path in sorted(checkpoints(run_dir).items())):
        old, new = (load_file(path / "ema.safetensors") for path in (before, after))
        trained = load_file(after / "trainable.safetensors")
        for name, average in new.items():
            torch.testing.assert_close(average, old[name].lerp(trained[name], 1 - EMA_DECAY), rtol=1e-6, atol=1e-7)
    for line in read_jsonl(run_dir / "metrics.jsonl"):
        assert np.mean(line["loss_by_dim"]) == pytest.approx(line["loss"], rel=1e-5)
    assert sum(one["samples"] for one in summary["loss_by_episode"]) == STEPS // 2 * config.global_batch


def test_driver_request_is_carried_out_one_step_later(config):
    config = replace(config, save_freq=0, save_every_s=0.0)
    assert list(checkpoints(run_locally(config, driver=RequestAfter(Request.SAVE, 2)))) == [3, STEPS]


@pytest.mark.parametrize("end", ["stop request", "non-finite loss"])
def test_interrupted_run_resumes_bit_exactly(config, tmp_path, end):
    whole = run_locally(config)
    other = replace(config, output_dir=str(tmp_path / "other"))
    if end == "stop request":
        other = replace(other, save_freq=0, save_every_s=0.0)
        run_locally(other, driver=RequestAfter(Request.STOP, 2))
        assert list(checkpoints(other.run_dir)) == [3]
        assert not (other.run_dir / "summary.json").exists()
    else:
        with pytest.raises(RunStoppedError):
            run_locally(other, change=poison(BAD_STEP * MICRO_STEPS)[0])
    run_locally(other)
    assert_same_run(other.run_dir, whole)
    recorded = [json.loads((folder / "summary.json").read_text()) for folder in (other.run_dir, whole)]
    assert recorded[0]["loss_by_episode"] == recorded[1]["loss_by_episode"]
