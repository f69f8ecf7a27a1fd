"""The best checkpoint is kept and used by `eval` and `export` with `--checkpoint=best`, however often checkpoints are saved."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from local_runs import RequestAfter, no_ray, run_locally, train_flags

from vlatune import cli
from vlatune.checkpoint.local_store import LocalStore
from vlatune.checkpoint.store import CHECKPOINTS
from vlatune.run.run_folder import read_config, read_validation_errors
from vlatune.run.summary import read_summary
from vlatune.train.heartbeat import Request

STEPS, SAMPLES = 8, 6


@pytest.fixture
def train(dataset_v3, small_base, tmp_path, capsys):
    """Return a run whose held-out error rises, because its learning rate is far too high: the newest checkpoint is not the best."""

    def train(*more: str, folder: Path = tmp_path / "run") -> Path:
        own = (f"--steps={STEPS}", "--optimizer.lr=1", "--scheduler.type=none", f"--eval_samples={SAMPLES}")
        flags = train_flags(dataset_v3, small_base, *own, "--keep_checkpoints=1", f"--output_dir={folder}", *more)
        with no_ray():
            assert cli.main(["train", *flags]) == 0, capsys.readouterr().err
        return folder

    return train


def store_of(folder: Path) -> LocalStore:
    return LocalStore(folder / CHECKPOINTS)


def best_of(curve: dict[int, float]) -> int:
    return min(curve, key=lambda step: (curve[step], step))


def check_kept(folder: Path) -> int:
    """Check that the best of all validations is stored besides the newest, each with the error of its own step; return its step."""
    curve, store = read_validation_errors(folder), store_of(folder)
    best = best_of(curve)
    newest = store.steps()[-1]
    assert best < newest, "the curve has its best last, and the test proves nothing"
    assert store.steps() == [best, newest]
    assert {step: store.manifest(step).score.val_error for step in store.steps()} == {
        best: curve[best],
        newest: curve.get(newest),
    }
    return best


def evaluate(folder: Path, capsys, *more: str) -> dict:
    capsys.readouterr()
    flags = [f"--max_samples={SAMPLES}", "--rollouts=0", "--json=true", *more]
    assert cli.main(["eval", str(folder), *flags]) == 0
    return json.loads(capsys.readouterr().out)


def exported_step(folder: Path, target: Path, capsys, *more: str) -> int:
    assert cli.main(["export", str(folder), str(target), *more]) == 0
    return int(capsys.readouterr().out.split("optimizer step ")[-1].split(",")[0])


@pytest.mark.parametrize(
    "saving",
    [
        ("--save_freq=3", "--eval_freq=2", "--save_every_s=0"),
        ("--save_freq=0", "--eval_freq=2", "--save_every_s=0.001"),
        ("--save_freq=0", "--eval_freq=3", "--save_every_s=0", "--optimizer.ema_decay=0.5"),
    ],
    ids=["save_freq unlike eval_freq", "by the clock", "only at the end, with averaged weights"],
)
def test_summary_eval_and_export_agree_on_the_best(train, tmp_path, capsys, saving):
    folder = train("--keep_best=1", *saving)
    best = check_kept(folder)
    summary = read_summary(folder)
    assert summary is not None
    assert summary.best_validation is not None
    assert (summary.best_checkpoint, summary.best_validation["optimizer_step"]) == (best, best)
    found = evaluate(folder, capsys, "--checkpoint=best")
    assert int(found["checkpoint"]) == best
    assert found["action_error"] == pytest.approx(summary.best_validation["action_error"], rel=1e-6)
    assert exported_step(folder, tmp_path / "exported", capsys, "--checkpoint=best") == best
    assert evaluate(folder, capsys)["checkpoint"] == f"{STEPS:08d}"


def test_a_stop_and_a_resume_keep_the_best(train, tmp_path):
    """The run is stopped by the driver, as on SIGTERM, after a step that was not validated, and resumed."""
    flags = ("--keep_best=1", "--eval_freq=2", "--save_freq=0", "--save_every_s=0")
    whole = train(*flags)
    config = replace(read_config(whole), output_dir=str(tmp_path / "stopped"))
    run_locally(config, driver=RequestAfter(Request.STOP, 4))
    stopped = tmp_path / "stopped"
    assert read_summary(stopped) is None
    assert store_of(stopped).steps() == [best_of(read_validation_errors(stopped)), 5]
    run_locally(replace(config, resume=True))
    assert check_kept(stopped) == check_kept(whole)
    assert read_validation_errors(stopped) == read_validation_errors(whole)


def test_early_stopping_selects_the_best(train, tmp_path, capsys):
    folder = train("--early_stop=2", "--eval_freq=1", "--save_freq=0", "--save_every_s=0")
    best = check_kept(folder)
    summary = read_summary(folder)
    assert summary is not None
    assert (summary.optimizer_steps, summary.best_checkpoint) == (best + 2, best)
    assert int(evaluate(folder, capsys)["checkpoint"]) == best
    assert exported_step(folder, tmp_path / "exported", capsys) == best
    assert exported_step(folder, tmp_path / "newest", capsys, f"--checkpoint={best + 2}") == best + 2
