"""Validation during training: independent of the number of workers, without effect on training, able to end a run."""

from pathlib import Path

import pytest
import torch
from driving import validation_curve
from local_runs import NoDriver, no_ray, run_locally, train_flags
from local_runs import read_held_out as read_held_out_here

from vlatune import cli
from vlatune.checkpoint.local_store import LocalStore
from vlatune.checkpoint.store import list_checkpoints
from vlatune.config.flags import parse_flags
from vlatune.config.settings import DatasetConfig, EvalConfig, PolicyConfig, RunConfig
from vlatune.feed.plan import Share
from vlatune.run.sinks import read_jsonl
from vlatune.run.summary import read_summary
from vlatune.run_setup import make_setup
from vlatune.train.worker.validation import Validator, validation_options


@pytest.fixture
def flags(dataset_v3, small_base) -> list[str]:
    more = ("--optimizer.lr=0.01", "--scheduler.num_warmup_steps=0", "--eval_samples=6")
    return train_flags(dataset_v3, small_base, *more)


def train(flags: list[str], folder: Path, *more: str) -> Path:
    with no_ray():
        assert cli.main(["train", *flags, f"--output_dir={folder}", *more]) == 0
    return folder


def losses(folder: Path) -> list[float]:
    return [one["loss"] for one in read_jsonl(folder / "metrics.jsonl")]


def test_validation_does_not_change_training(flags, tmp_path):
    validated = train(flags, tmp_path / "validated", "--steps=4", "--eval_freq=1")
    without = train(flags, tmp_path / "without", "--steps=4", "--eval_freq=0")
    assert losses(validated) == losses(without)
    assert not (without / "validation.jsonl").read_text()


def test_a_resumed_run_keeps_validations_up_to_its_checkpoint(flags, tmp_path, capsys):
    folder = train(flags, tmp_path / "run", "--steps=2", "--eval_freq=1")
    first = validation_curve(folder)
    with (folder / "validation.jsonl").open("a") as file:  # a kill after a validation, before its checkpoint
        file.write('{"optimizer_step": 3, "val_loss": 7.0, "val_action_error": 7.0}\n')
    train(flags, folder, "--steps=3", "--eval_freq=1", "--resume=true")
    capsys.readouterr()
    assert validation_curve(folder)[:2] == first
    assert [step for step, *_ in validation_curve(folder)] == [1, 2, 3]
    assert validation_curve(folder)[-1][2] != 7.0


class FailsInValidation(NoDriver):
    def progress(self, event: str) -> None:
        if event == "validation":
            raise torch.OutOfMemoryError


def test_a_checkpoint_is_saved_before_a_validation_that_fails(flags, tmp_path):
    more = ("--steps=4", "--eval_freq=2", "--save_freq=2", f"--output_dir={tmp_path / 'run'}")
    with pytest.raises(torch.OutOfMemoryError):
        run_locally(parse_flags([*flags, *more], RunConfig), driver=FailsInValidation())
    store = LocalStore(tmp_path / "run" / "checkpoints")
    assert store.steps() == [2]
    assert store.problem(2) is None
    assert store.manifest(2).score.val_error is None


def test_early_stop_ends_the_run_as_finished(flags, tmp_path, capsys):
    """At a learning rate of almost zero the error does not change."""
    folder = train(flags, tmp_path / "run", "--steps=9", "--eval_freq=1", "--early_stop=2", "--optimizer.lr=1e-30")
    summary = read_summary(folder)
    assert summary is not None
    assert summary.optimizer_steps == 3
    assert [step for step, *_ in validation_curve(folder)] == [1, 2, 3]
    assert [path.name for path in list_checkpoints(folder)] == ["00000001", "00000003"]
    assert LocalStore(folder / "checkpoints").manifest(1).score.val_error == validation_curve(folder)[0][2]
    assert "finished: 3 steps" in capsys.readouterr().out


@pytest.fixture(scope="module")
def small_setup(dataset_v3, small_base):
    return make_setup(
        RunConfig(
            dataset=DatasetConfig(root=(str(dataset_v3),), eval_split=0.4),
            policy=PolicyConfig(path=str(small_base), train="heads"),
        )
    )


def test_validations_since_the_best_are_counted(small_setup):
    validator = Validator(small_setup, Share(0, 1), EvalConfig(max_samples=2), 10, read_held_out_here)
    seen = []
    for step, error in enumerate([0.5, 0.3, 0.3, 0.4, 0.2], start=1):
        validator.errors[step] = error
        seen.append(validator.without_progress())
    validator.close()
    assert seen == [0, 0, 1, 2, 0]
    assert validator.best_steps() == [5, 2, 3, 4, 1]


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_all_workers_evaluate_equally_many_batches(small_setup, workers):
    """As sharded layers need: a worker with fewer batches would let the others wait forever."""
    chosen: list[set[int]] = []

    def record(_, batches):
        chosen.append(set(batches))
        return iter(())

    for rank in range(workers):
        Validator(small_setup, Share(rank, workers), EvalConfig(max_samples=3, batch_size=1), 10, record).close()
    assert len({len(one) for one in chosen}) == 1
    assert set.union(*chosen) == {0, 1, 2}


def test_an_accelerator_evaluates_no_more_samples_at_once_than_it_trains_with():
    options = EvalConfig()
    small, large = (RunConfig(batch_size=size) for size in (2, 2 * options.batch_size))
    assert validation_options(small, torch.device("cuda")).batch_size == 2
    assert validation_options(large, torch.device("cuda")).batch_size == options.batch_size
    assert validation_options(small, torch.device("cpu")).batch_size == options.batch_size
