"""SIGKILL of either worker at every named point: losses, validation, samples and weights are to the last bit the undisturbed run's.

Without Ray (forked_runs.py), so that all points are met in a minute, several of them by a run; `-m slow test_faults.py` meets
them with it.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from driving import validation_curve
from faults import POINTS, SAVE_POINTS, VALIDATION_POINTS, Fault
from test_matrix import check

from vlatune.checkpoint.local_store import ASIDE, REMOVING
from vlatune.checkpoint.store import list_checkpoints
from vlatune.config import DatasetConfig, OptimizerConfig, PolicyConfig, RunConfig, SchedulerConfig, to_json
from vlatune.report.sinks import read_jsonl

pytestmark = pytest.mark.early
STEPS, SAVE_FREQ, STEP, LOGGED_STEP, SAVED_STEP = 8, 3, 5, 4, 6
VALIDATED_STEP = 4
"""Between two checkpoints: what the first attempt wrote down of it is made again."""
WORK = tuple(point for point in POINTS if point != "report")
CASES = {
    "rank 0, in a step": (Fault("report", LOGGED_STEP), *(Fault(point, STEP) for point in WORK)),
    "rank 1, before the first checkpoint and in a step": (
        *(Fault(point, 1, rank=1) for point in ("data wait", "optimizer")),
        *(Fault(point, STEP, rank=1) for point in WORK),
    ),
    "in a validation": tuple(
        Fault(point, step, rank=rank)
        for step, ranks in ((2, (0, 1)), (VALIDATED_STEP, (1, 0)), (STEPS, (0, 1)))
        for point, rank in zip(VALIDATION_POINTS, ranks, strict=True)
    ),
    "in a save, and at the very end": (
        *(Fault(point, SAVED_STEP) for point in SAVE_POINTS[: SAVE_POINTS.index("save: committed") + 1]),
        *(Fault(point, STEPS) for point in ("after step", "save: begun", "save: committed")),
    ),
    **{  # a save that is committed is not made again
        f"in a save, {point}": (Fault(point, SAVED_STEP),)
        for point in SAVE_POINTS[SAVE_POINTS.index("save: committed") + 1 :]
    },
    "either rank": (Fault("backward", 4, rank=1), Fault("save: synced", SAVED_STEP)),
}
"""Run -> the faults that it meets, in this order, each of which ends an attempt: what was met is not met again."""
TO_THE_ROBOT = "to the robot"


@pytest.fixture(scope="module")
def runs(forked_pairs, dataset_v3, small_base, tmp_path_factory) -> dict[str, Path]:
    """Name of a case -> its run folder; `clean` is undisturbed."""
    folder = tmp_path_factory.mktemp("faults")
    config = RunConfig(
        dataset=DatasetConfig(root=(str(dataset_v3),), eval_split=0.2),
        policy=PolicyConfig(path=str(small_base), train="heads"),
        optimizer=OptimizerConfig(lr=1e-3, ema_decay=0.9),
        num_workers=2,
        batch_size=2,
        steps=STEPS,
        log_freq=2,
        eval_freq=2,
        eval_samples=8,
        save_freq=SAVE_FREQ,
        save_every_s=0.0,
        keep_checkpoints=1,
        log_samples=True,
    )
    found = {name: folder / str(number) / "run" for number, name in enumerate(["clean", *CASES, TO_THE_ROBOT])}
    for run_dir in found.values():
        run_dir.parent.mkdir()
    configs = {name: replace(config, output_dir=str(run_dir)) for name, run_dir in found.items()}
    several = PolicyConfig(path=str(small_base), train="expert", dtype="bfloat16", flow_samples=4)
    at_once = SchedulerConfig(num_warmup_steps=0)
    configs[TO_THE_ROBOT] = replace(
        configs[TO_THE_ROBOT], policy=several, optimizer=OptimizerConfig(lr=1e-2), scheduler=at_once
    )
    faults = CASES | {"clean": (), TO_THE_ROBOT: (Fault("backward", STEP, rank=1),)}
    jobs = [
        {"config": to_json(config), "faults": [asdict(fault) for fault in faults[name]]}
        for name, config in configs.items()
    ]
    forked_pairs(jobs)
    return found


def weights(run_dir: Path) -> dict[str, bytes]:
    newest = list_checkpoints(run_dir)[-1]
    return {file.name: file.read_bytes() for file in newest.glob("*.safetensors")}


def test_the_undisturbed_run_is_done_in_one_start(runs):
    assert (runs["clean"] / "restarts").read_text() == "0"
    assert [line["optimizer_step"] for line in read_jsonl(runs["clean"] / "samples.jsonl")] == list(range(1, STEPS + 1))
    steps, losses, errors = zip(*validation_curve(runs["clean"]), strict=True)
    assert steps == (2, 4, 6, 8)
    assert len(set(losses)) == len(set(errors)) == 4


def test_every_point_is_met():
    met = {(fault.point, fault.rank) for faults in CASES.values() for fault in faults}
    assert met >= {(point, rank) for point in (*WORK, *VALIDATION_POINTS) for rank in (0, 1)} | {
        (one, 0) for one in ("report", *SAVE_POINTS)
    }


@pytest.mark.parametrize("case", CASES)
def test_the_killed_run_is_the_undisturbed_one(runs, case):
    run_dir, clean = runs[case], runs["clean"]
    assert (run_dir / "restarts").read_text() == str(len(CASES[case]))
    ours, theirs = (read_jsonl(folder / "metrics.jsonl") for folder in (run_dir, clean))
    for key in ("optimizer_step", "loss", "loss_by_task", "loss_by_dim", "grad_norm", "lr", "samples_seen"):
        assert [line[key] for line in ours] == [line[key] for line in theirs], key
    assert read_jsonl(run_dir / "samples.jsonl") == read_jsonl(clean / "samples.jsonl")
    assert validation_curve(run_dir) == validation_curve(clean)
    assert weights(run_dir) == weights(clean)  # with the sums of losses by episode
    told = [json.loads((folder / "summary.json").read_text())["loss_by_episode"] for folder in (run_dir, clean)]
    assert told[0] == told[1] != []
    assert [path for prefix in (ASIDE, REMOVING) for path in (run_dir / "checkpoints").glob(f"{prefix}*")] == []


def test_two_workers_with_several_draws_in_bfloat16_to_the_robot_and_back(runs, small_base, tmp_path):
    """As those of one worker in test_matrix.py, over a restart."""
    assert (runs[TO_THE_ROBOT] / "restarts").read_text() == "1"
    check(runs[TO_THE_ROBOT], small_base, tmp_path / "exported", step=STEPS)
