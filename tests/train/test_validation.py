"""Validation while a run trains: the same for every number of workers, felt by nothing, kept over a stop, able to end a run."""

from pathlib import Path

import numpy as np
import pytest
import torch
from driving import validation_curve

from vlatune import cli
from vlatune.checkpoint.local_store import read_manifest
from vlatune.checkpoint.store import list_checkpoints
from vlatune.config import DatasetConfig, EvalConfig, PolicyConfig, RunConfig
from vlatune.evaluate.held_out import choose_held_out, cut_batches, read_chosen, read_held_out
from vlatune.evaluate.predictions import join_results, predict, predict_batches, prepare, without_pictures
from vlatune.pipeline.plan import Share
from vlatune.policies.base import ModuleOptions
from vlatune.report.sinks import read_jsonl
from vlatune.report.summary import read_summary
from vlatune.run_setup import make_setup
from vlatune.train.worker.optimizer import Ema
from vlatune.train.worker.validation import Validator


@pytest.fixture
def flags(dataset_v3, small_base, ray_local, without_ray_train) -> list[str]:
    return [
        f"--dataset.root={dataset_v3}",
        "--dataset.eval_split=0.2",
        "--dataset.run_length=4",
        "--dataset.window_rows=8",
        f"--policy.path={small_base}",
        "--policy.train=heads",
        "--batch_size=4",
        "--log_freq=1",
        "--optimizer.lr=0.01",
        "--scheduler.num_warmup_steps=0",
        "--max_restarts=0",
        "--eval_samples=6",
    ]


def train(flags: list[str], folder: Path, *more: str) -> Path:
    assert cli.main(["train", *flags, f"--output_dir={folder}", *more]) == 0
    return folder


def losses(folder: Path) -> list[float]:
    return [one["loss"] for one in read_jsonl(folder / "metrics.jsonl")]


def test_training_does_not_feel_it(flags, tmp_path):
    whole = train(flags, tmp_path / "whole", "--steps=4", "--eval_freq=1")
    without = train(flags, tmp_path / "without", "--steps=4", "--eval_freq=0")
    assert losses(whole) == losses(without)
    assert not (without / "validation.jsonl").read_text()


def test_a_run_that_goes_on_keeps_its_curve_and_forgets_what_its_checkpoint_does_not_know(flags, tmp_path, capsys):
    folder = train(flags, tmp_path / "run", "--steps=2", "--eval_freq=1")
    first = validation_curve(folder)
    with (folder / "validation.jsonl").open("a") as file:  # a kill after a validation, before its checkpoint
        file.write('{"optimizer_step": 3, "val_loss": 7.0, "val_action_error": 7.0}\n')
    train(flags, folder, "--steps=3", "--eval_freq=1", "--resume=true")
    capsys.readouterr()
    assert validation_curve(folder)[:2] == first
    assert [step for step, *_ in validation_curve(folder)] == [1, 2, 3]
    assert validation_curve(folder)[-1][2] != 7.0


def test_a_run_that_gets_no_better_ends_with_all_that_a_finished_one_has(flags, tmp_path, capsys):
    """At a learning rate of nearly nothing the error stays what it is."""
    still = [one for one in flags if not one.startswith("--optimizer.lr")]
    folder = train(still, tmp_path / "run", "--steps=9", "--eval_freq=1", "--early_stop=2", "--optimizer.lr=1e-30")
    summary = read_summary(folder)
    assert summary is not None
    assert (summary.finished, summary.optimizer_steps) == (True, 3)
    assert [step for step, *_ in validation_curve(folder)] == [1, 2, 3]
    assert [path.name for path in list_checkpoints(folder)] == ["00000003"]
    assert read_manifest(list_checkpoints(folder)[-1]).score.val_error == validation_curve(folder)[-1][2]
    assert "finished: 3 steps" in capsys.readouterr().out


def test_early_stop_without_a_validation_is_refused(dataset_v3, small_base, capsys):
    given = [f"--dataset.root={dataset_v3}", f"--policy.path={small_base}", "--steps=3", "--early_stop=2"]
    assert cli.main(["train", *given]) == 2
    assert "--early_stop=2: there is no validation that it could go by" in capsys.readouterr().err


@pytest.fixture(scope="module")
def small_setup(dataset_v3, small_base):
    return make_setup(
        RunConfig(
            dataset=DatasetConfig(root=(str(dataset_v3),), eval_split=0.4),
            policy=PolicyConfig(path=str(small_base), train="heads"),
        )
    )


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_the_figures_are_those_of_one_worker_to_the_bit(small_setup, num_workers):
    setup, options = small_setup, EvalConfig(max_samples=10, batch_size=4)
    module = setup.adapter.load_module(setup.policy, setup.binding, ModuleOptions("heads")).eval()
    whole = predict(setup, module, read_held_out(setup, 10), options)
    batches = cut_batches(setup, choose_held_out(setup, 10), 4)
    rows = {number: read_chosen(setup, one.frames) for number, one in batches.items()}
    shares = [{n: rows[n] for n in rows if n % num_workers == rank} for rank in range(num_workers)]
    prepared = [{n: prepare(setup, one, options, blanks=("none",)) for n, one in share.items()} for share in shares]
    results = [predict_batches(module, share.items(), options) for share in prepared]
    truth = {number: without_pictures(one) for number, one in rows.items()}
    merged = {number: one for result in results for number, one in result.items()}
    joined = join_results(setup, options, truth, merged, blanks=("none",))["none"]
    assert (joined.loss, joined.error()) == (whole.loss, whole.error())
    np.testing.assert_array_equal(joined.predicted_NTA, whole.predicted_NTA)


def test_what_came_after_the_best_counts_as_in_vain(small_setup, ray_local):
    validator = Validator(small_setup, Share(0, 1), EvalConfig(max_samples=2), every=10)
    seen = []
    for step, error in enumerate([0.5, 0.3, 0.3, 0.4, 0.2], start=1):
        validator.errors[step] = error
        seen.append(validator.in_vain())
    validator.close()
    assert seen == [0, 0, 1, 2, 0]
    assert validator.newest_error() == 0.2


def test_averages_stand_in_for_the_weights_and_leave_no_trace():
    weights = {"a": torch.randn(3), "b": torch.randn(2, 2)}
    ema = Ema(weights, 0.9)
    for weight in weights.values():
        weight.add_(1.0)
    ema.update()
    before = {name: (weight.clone(), ema.tensors()[name].clone()) for name, weight in weights.items()}
    with ema.in_place():
        assert all(torch.equal(weight, before[name][1]) for name, weight in weights.items())
    for name, weight in weights.items():
        assert torch.equal(weight, before[name][0])
        assert torch.equal(ema.tensors()[name], before[name][1])
