"""SIGKILL of either of two workers at any point: losses, validations, samples and weights equal the undisturbed run's to the last bit.

Without Ray (local_runs.py), so that many points are met in a minute; test_driver.py kills processes of runs with Ray.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from local_runs import Fault, assert_same_run, run_pair

from vlatune.checkpoint.local_store import REMOVING, WRITING
from vlatune.config.settings import DatasetConfig, OptimizerConfig, PolicyConfig, RunConfig
from vlatune.run.sinks import read_jsonl

STEPS, SAVE_FREQ = 8, 3
STEP_EVENTS = ("batch", "DistributedDataParallel", "optimizer begin", "optimizer end")
CASES = {
    "rank 0, in a step": (*(Fault(event, 2) for event in STEP_EVENTS), Fault("log", 2), Fault("request", 1)),
    "rank 1, in a step": tuple(Fault(event, 2, rank=1) for event in STEP_EVENTS),
    "in a validation": tuple(Fault("validation", count, rank) for count, rank in ((1, 0), (2, 1), (1, 1))),
    "in a save": (
        *(Fault(f"save: {phase}", 2) for phase in ("begun", "file", "written")),
        *(Fault(f"save: {phase}") for phase in ("synced", "committed")),
    ),
    "removing a checkpoint": (Fault("save: removing"),),
    "after the first save": (Fault("save: committed"), Fault("save: pruned"), Fault("save: pruned")),
}
"""Run -> the faults of its attempts; a fault counts its event from the start of the attempt."""


@pytest.fixture(scope="module")
def config(dataset_v3, small_base) -> RunConfig:
    return RunConfig(
        dataset=DatasetConfig(root=(str(dataset_v3),), eval_split=0.6, run_length=4, window_rows=8),
        policy=PolicyConfig(path=str(small_base), train="heads"),
        optimizer=OptimizerConfig(lr=1e-3, ema_decay=0.9),
        num_workers=2,
        batch_size=2,
        steps=STEPS,
        log_freq=2,
        eval_freq=2,
        eval_samples=34,  # two batches, one for each worker
        save_freq=SAVE_FREQ,
        save_every_s=0.0,
        keep_checkpoints=1,
        log_samples=True,
    )


@pytest.fixture(scope="module")
def clean(config, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("clean") / "run"
    assert run_pair(replace(config, output_dir=str(run_dir))) == 0
    assert [line["optimizer_step"] for line in read_jsonl(run_dir / "samples.jsonl")] == list(range(1, STEPS + 1))
    assert len({line["val_action_error"] for line in read_jsonl(run_dir / "validation.jsonl")}) == STEPS // 2
    return run_dir


@pytest.mark.parametrize("case", CASES)
def test_killed_run_equals_the_undisturbed_one(config, clean, tmp_path, case):
    run_dir = tmp_path / "run"
    restarts = run_pair(replace(config, output_dir=str(run_dir)), CASES[case])
    assert restarts == len(CASES[case])
    assert_same_run(run_dir, clean)
    by_episode = [json.loads((folder / "summary.json").read_text())["loss_by_episode"] for folder in (run_dir, clean)]
    assert by_episode[0] == by_episode[1] != []
    assert [path for prefix in (WRITING, REMOVING) for path in (run_dir / "checkpoints").glob(f"{prefix}*")] == []
