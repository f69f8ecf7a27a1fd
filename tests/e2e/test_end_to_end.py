"""`vlatune train` through real Ray, then `eval` on its result."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from local_runs import no_ray, run_locally, threads_of

from vlatune import cli
from vlatune.checkpoint.store import list_checkpoints
from vlatune.config.settings import EvalConfig, RunConfig, to_json
from vlatune.evaluate.evaluate_run import evaluate_run
from vlatune.run.run_folder import read_config
from vlatune.run.sinks import read_jsonl
from vlatune.run.summary import read_summary
from vlatune.run_setup import make_setup
from vlatune.train.driver.launch import train

STEPS = 12
METRICS = {"optimizer_step", "loss", "grad_norm", "lr", "samples_per_s", "wait_share", "step_s", "spilled_bytes"}
METRICS |= {"object_store_bytes", "epoch", "samples_seen", "wait_s"}
METRICS |= {"cached_share", "other_process_share", "loss_by_task", "loss_by_dim"}
SUMMARY = {"optimizer_steps", "final_loss", "samples_per_s", "wait_share", "time_to_first_batch_s", "spilled_bytes"}
SUMMARY |= {"fallback_bytes", "peak_object_store_bytes", "restarts", "verdict"}

PROGRAM = """
import sys
from vlatune import cli
code = cli.main(sys.argv[1:])
print("\\nheavy:", *sorted({"torch", "transformers", "lerobot"} & set(sys.modules)))
sys.exit(code)
"""


def run(config: RunConfig, folder: Path) -> Path:
    train(replace(config, output_dir=str(folder)))
    return folder


@pytest.fixture(scope="module")
def first_run(base_config, tmp_path_factory) -> Path:
    """Return the folder of a run with one worker.

    The command joins the session's cluster through RAY_ADDRESS and must not end it. Its driver imports nothing that takes
    seconds. --deterministic=true changes nothing on a CPU.
    """
    folder = tmp_path_factory.mktemp("runs")
    (folder / "run.json").write_text(json.dumps(to_json(replace(base_config, output_dir=str(folder / "first")))))
    env = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    flags = [f"--config_path={folder / 'run.json'}", "--deterministic=true"]
    command = [sys.executable, "-P", "-c", PROGRAM, "train", *flags]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert printed[-1] == "heavy:"
    assert len([line for line in printed if line.startswith("step 12/12  loss ")]) == 1
    assert "vlatune: finished: 12 steps, loss " in done.stdout
    return folder / "first"


@pytest.fixture(scope="module")
def other_run(base_config, tmp_path_factory) -> Path:
    """A run with several noise samples, averaged weights and checkpoints elsewhere."""
    folder = tmp_path_factory.mktemp("runs") / "other"
    policy = replace(base_config.policy, train="expert", flow_samples=4)
    averaged = replace(base_config.optimizer, ema_decay=0.5)
    config = replace(base_config, policy=policy, optimizer=averaged, steps=3, save_freq=2, eval_freq=2)
    with no_ray():
        return run(replace(config, storage_path=str(folder.parent / "elsewhere")), folder)


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_jsonl(folder / "metrics.jsonl")]


def test_run_folder_is_complete(first_run):
    metrics = read_jsonl(first_run / "metrics.jsonl")
    assert [line["optimizer_step"] for line in metrics] == list(range(1, STEPS + 1))
    assert all(line.keys() == METRICS for line in metrics)
    assert metrics[-1]["epoch"] >= 1  # the end of an epoch was crossed
    summary = json.loads((first_run / "summary.json").read_text())
    assert summary.keys() >= SUMMARY
    assert summary["spilled_bytes"] == summary["fallback_bytes"] == 0
    assert summary["peak_object_store_bytes"] > 0
    assert [path.name for path in list_checkpoints(first_run)] == ["00000005", "00000010", "00000012"]
    page, reported = (first_run / "report.html").read_text(), read_summary(first_run)
    assert reported is not None
    assert {"torch", "ray", "lerobot", "vlatune"} <= reported.versions.keys()
    assert all(f">{version}</td>" in page for version in reported.versions.values())
    assert "not recorded" not in page.lower()
    assert "Checkpoints kept, by optimizer step: 5, 10, 12." in page
    parts = ("start", "wait", "compute", "checkpoint", "validation")
    assert sum(summary["time_s"][part] for part in parts) == pytest.approx(summary["time_s"]["total"])
    assert 0 <= summary["other_process_share"] <= 1


@pytest.mark.parametrize(
    ("name", "steps", "weights"), [("first_run", [4, 8, 12], "trained"), ("other_run", [2], "ema")]
)
def test_validation_during_training_equals_eval_of_that_checkpoint(name, steps, weights, request):
    """The runs are equal to the last bit, also with several noise samples and averaged weights."""
    folder = request.getfixturevalue(name)
    validations = read_jsonl(folder / "validation.jsonl")
    assert [line["optimizer_step"] for line in validations] == steps
    figures = evaluate_run(folder, EvalConfig(checkpoint=str(steps[-1]), max_samples=10))
    assert figures["weights"] == weights
    reported = {"val_loss": figures["val_loss"], "val_action_error": figures["action_error"]}
    assert validations[-1] == {"optimizer_step": steps[-1]} | reported
    summary = read_summary(folder)
    assert summary is not None
    assert summary.best_validation is not None
    assert summary.best_validation["action_error"] == min(line["val_action_error"] for line in validations)
    assert summary.time_s["validation"] > 0


def test_checkpoints_elsewhere_are_in_the_report(other_run):
    reported, page = read_summary(other_run), (other_run / "report.html").read_text()
    place = str(other_run.parent / "elsewhere" / "other" / "checkpoints")
    assert reported is not None
    assert (reported.checkpoints, reported.checkpoint_place) == ((2, 3), place)
    assert f"Checkpoints kept in {place}, by optimizer step: 2, 3." in page


def test_samples_are_each_used_once_an_epoch(first_run):
    """The last batch is filled up with samples of the first."""
    per_step = [record["samples"] for record in read_jsonl(first_run / "samples.jsonl")]
    assert [len(samples) for samples in per_step] == [8] * STEPS
    epochs = [line["epoch"] for line in read_jsonl(first_run / "metrics.jsonl")]
    times = Counter(tuple(s) for samples, epoch in zip(per_step, epochs, strict=True) if epoch == 0 for s in samples)
    assert len(times) == make_setup(read_config(first_run)).order.num_samples
    assert set(times.values()) == {1, 2}
    assert 0 < list(times.values()).count(2) < 8


def test_same_seed_gives_the_same_run_with_and_without_ray(base_config, first_run, tmp_path):
    """The second run is without Ray and without --deterministic, which changes nothing on a CPU."""
    second = tmp_path / "second"
    run_locally(replace(base_config, output_dir=str(second)), threads_of(first_run))
    assert losses(second) == losses(first_run)
    assert json.loads((first_run / "config.json").read_text())["deterministic"] is True
    by_run = [json.loads((one / "summary.json").read_text())["performance_flags"] for one in (first_run, second)]
    assert [flags["deterministic"] for flags in by_run] == [True, False]
    assert by_run[0]["cublas_workspace_config"] == ":4096:8"
    assert (second / "samples.jsonl").read_bytes() == (first_run / "samples.jsonl").read_bytes()


EVAL_KEYS = {"checkpoint", "episodes", "num_samples", "seed", "val_loss", "action_error", "mean_action_error"}
EVAL_KEYS |= {"blank_images_error", "blank_instruction_error", "per_dim_error", "per_horizon_error", "action_names"}
EVAL_KEYS |= {"blank_camera_errors", "rollouts"}


def test_eval_prints_a_table_or_json(first_run, capsys):
    words = ["eval", str(first_run), "--max_samples=4", "--batch_size=3", "--device=cpu"]
    assert cli.main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    figures = json.loads(out)
    assert err == ""
    assert figures.keys() == EVAL_KEYS | {"weights", "device"}
    assert (figures["checkpoint"], figures["weights"], figures["device"]) == ("00000012", "trained", "cpu")
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert json.loads((first_run / "eval.json").read_text()) == figures  # evaluated twice, with the same result
    assert "blank" in (first_run / "report.html").read_text()
    assert "{" not in text
    for part in ("checkpoint 00000012, trained weights, on cpu", "4 samples of 1 held-out episode", "report: "):
        assert part in text
    for key in ("action_error", "mean_action_error", "blank_images_error", "blank_instruction_error"):
        assert f" {figures[key]:.4f}" in text
    for name, value in figures["per_dim_error"].items():
        assert f"  {name:<38} {value:.4f}" in text


@pytest.mark.parametrize(
    ("flag", "printed"),
    [
        ("--max_samples=0", "--max_samples=0: must be 1 or more"),
        ("--batch_size=0", "--batch_size=0: must be 1 or more"),
        ("--seed=-1", "--seed=-1: must be 0 or more"),
        ("--checkpoint=7", "--checkpoint=7: there is no such checkpoint; there are: 00000005, 00000010, 00000012"),
        ("--weights=ema", "it has no averaged weights; leave --weights out"),
        ("--weights=best", "--weights=best: expected one of auto, ema, trained"),
        ("--device=gpu", "--device=gpu: "),
        ("--device=meta", "--device=meta: "),
        ("--device=cuda:99", "--device=cuda:99: "),
        ("--devise=cpu", "unknown flag --devise; did you mean --device?"),
    ],
)
def test_an_invalid_flag_of_eval_is_one_line_and_does_not_change_the_run(first_run, capsys, flag, printed):
    before = (first_run / "report.html").read_bytes()
    assert cli.main(["eval", str(first_run), "--max_samples=2", flag]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert printed in err
    assert (first_run / "report.html").read_bytes() == before


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_ends_an_evaluation_and_keeps_the_previous_results(first_run, capsys, monkeypatch):
    from vlatune.evaluate import predictions

    words = ["eval", str(first_run), "--max_samples=2", "--json"]
    assert cli.main(words) == 0
    before = {path.name: path.read_bytes() for path in first_run.glob("*eval*")}
    monkeypatch.setattr(predictions, "_run", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    capsys.readouterr()
    assert cli.main(words) == 130
    assert capsys.readouterr() == ("", "vlatune: interrupted\n")
    assert {path.name: path.read_bytes() for path in first_run.glob("*eval*")} == before


def test_trained_and_averaged_weights_of_a_checkpoint_are_evaluated(other_run):
    from vlatune.evaluate.evaluate_run import evaluate_run

    options = EvalConfig(max_samples=4, batch_size=4)
    found = [evaluate_run(other_run, replace(options, weights=one)) for one in ("auto", "ema", "trained")]
    found.append(evaluate_run(other_run, replace(options, checkpoint="2")))
    named = [(one["checkpoint"], one["weights"]) for one in found]
    assert named == [("00000003", "ema"), ("00000003", "ema"), ("00000003", "trained"), ("00000002", "ema")]
    assert len({one["action_error"] for one in found}) == 3


def test_a_damaged_video_ends_the_run_with_its_name(base_config, dataset_v3, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(dataset_v3, damaged)
    video = min(damaged.glob("videos/*/*/file-001.mp4"))  # not in the first batch, which is read before Ray starts
    video.write_bytes(video.read_bytes()[: video.stat().st_size // 3])
    dataset = replace(base_config.dataset, root=(str(damaged),))
    config = replace(base_config, dataset=dataset, batch_size=2, steps=30, max_restarts=2)
    with pytest.raises(
        ValueError, match=rf"episode \d+, camera 'observation.images.\w+', {video.relative_to(damaged)}"
    ):
        run(config, tmp_path / "run")
    failures = list((tmp_path / "run" / "logs").glob("failure-*.txt"))
    assert len(failures) == 1  # damaged data is not retried
