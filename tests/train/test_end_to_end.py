"""The whole path through real Ray: dataset -> read tasks -> feed -> TorchTrainer -> run folder."""

import json
import os
import shutil
import signal
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
from terminal import on_terminal, without_escapes
from without_ray import run_without_ray, threads_of, worker_here

from vlatune import cli
from vlatune.checkpoint.store import list_checkpoints
from vlatune.config import EvalConfig, RunConfig, to_json
from vlatune.dataset.meta.dataset_meta import load_meta
from vlatune.evaluate.evaluate_run import evaluate_run
from vlatune.pipeline import feed
from vlatune.policies.base import ModuleOptions
from vlatune.report.run_folder import read_config
from vlatune.report.sinks import read_jsonl
from vlatune.report.summary import read_summary
from vlatune.report.verdict import CONTENTION_FINE
from vlatune.run_setup import make_setup
from vlatune.train.driver.launch import train

pytestmark = pytest.mark.ray
STEPS = 12
METRICS = {"optimizer_step", "loss", "grad_norm", "lr", "samples_per_s", "wait_share", "step_s", "spilled_bytes"}
METRICS |= {"object_store_bytes", "epoch", "samples_seen", "wait_s"}
METRICS |= {"other_threads_share", "kept_share", "kept_by", "idle_share", "loss_by_task", "loss_by_dim"}
SUMMARY = {"optimizer_steps", "final_loss", "samples_per_s", "wait_share", "time_to_first_batch_s", "spilled_bytes"}
SUMMARY |= {"fallback_bytes", "peak_object_store_bytes", "restarts", "verdict"}


def run(config: RunConfig, folder: Path) -> Path:
    train(replace(config, output_dir=str(folder)))
    return folder


TOLD_OF_TORCH = """
import sys
from vlatune import cli
code = cli.main(sys.argv[1:])
print("torch in the driver:", "torch" in sys.modules)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def command_on_terminal(base_config, tmp_path_factory) -> tuple[Path, str]:
    """One worker, undisturbed: the run's folder, and what its command wrote.

    A process of its own, which RAY_ADDRESS leads to a cluster that it has not started and must not end. On a terminal, which
    becomes narrow after a while. With --deterministic=true, which changes nothing on a CPU.
    """
    folder = tmp_path_factory.mktemp("runs")
    (folder / "run.json").write_text(json.dumps(to_json(replace(base_config, output_dir=str(folder / "first")))))
    env = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    flags = [f"--config_path={folder / 'run.json'}", "--deterministic=true"]
    command = [sys.executable, "-c", TOLD_OF_TORCH, "train", *flags]
    code, written = on_terminal(command, env=env, columns=100, then={"held up by": 60})
    assert code == 0, written
    return folder / "first", written


@pytest.fixture(scope="module")
def first_run(command_on_terminal) -> Path:
    return command_on_terminal[0]


@pytest.fixture(scope="module")
def other_run(base_config, tmp_path_factory) -> Path:
    """Several draws, averaged weights, checkpoints elsewhere; the process that runs its reading dies at the start."""
    folder = tmp_path_factory.mktemp("runs") / "other"
    policy = replace(base_config.policy, train="expert", flow_samples=4)
    averaged = replace(base_config.optimizer, ema_decay=0.5)
    config = replace(base_config, policy=policy, optimizer=averaged, steps=3, save_freq=2, eval_freq=2)
    start = feed.start_coordinator
    with pytest.MonkeyPatch.context() as patch, worker_here():

        def start_and_kill(*args, **steps):
            """The first is a living process, and then a dead one, before it is asked for anything."""
            patch.setattr(feed, "start_coordinator", start)
            actor = start(*args, **steps)
            os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
            return actor

        patch.setattr(feed, "start_coordinator", start_and_kill)
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
    assert "<html" in (first_run / "report.html").read_text()[:200].lower()


def test_the_report_shows_what_the_run_wrote_down(first_run):
    """Whatever the page says of a run's end is in the summary, whose reader knows every key that its writer wrote."""
    told, page = read_summary(first_run), (first_run / "report.html").read_text()
    assert told is not None
    assert told.to_json() == json.loads((first_run / "summary.json").read_text())
    assert {"torch", "ray", "lerobot", "vlatune"} <= told.versions.keys()
    assert all(f">{version}</td>" in page for version in told.versions.values())
    assert "not recorded" not in page.lower()
    assert "Checkpoints kept, by optimizer step: 5, 10, 12." in page
    assert told.reader_restarts == 0


@pytest.mark.parametrize(
    ("name", "steps", "weights"), [("first_run", [4, 8, 12], "trained"), ("other_run", [2], "ema")]
)
def test_validation_while_it_trains_is_what_eval_says_of_that_checkpoint(name, steps, weights, request):
    """To the last bit, with several draws and averaged weights too: the very same function on the same batches."""
    folder = request.getfixturevalue(name)
    looked_at = read_jsonl(folder / "validation.jsonl")
    assert [line["optimizer_step"] for line in looked_at] == steps
    figures = evaluate_run(folder, EvalConfig(checkpoint=(str(steps[-1]),), max_samples=10))
    assert figures["weights"] == weights
    told = {"val_loss": figures["val_loss"], "val_action_error": figures["action_error"]}
    assert looked_at[-1] == {"optimizer_step": steps[-1]} | told
    summary = read_summary(folder)
    assert summary is not None
    assert summary.best_validation is not None
    assert summary.best_validation["action_error"] == min(line["val_action_error"] for line in looked_at)
    assert summary.time_s["validation"] > 0


def test_checkpoints_elsewhere_and_a_process_of_readers_that_died_are_in_the_report(other_run):
    told, page = read_summary(other_run), (other_run / "report.html").read_text()
    place = str(other_run.parent / "elsewhere" / "other" / "checkpoints")
    assert told is not None
    assert (told.checkpoints, told.checkpoint_place) == ((2, 3), place)
    assert f"Checkpoints kept in {place}, by optimizer step: 2, 3." in page
    assert told.reader_restarts == 1
    assert "Reading begun anew</dt><dd>1</dd>" in page


def test_the_summary_says_where_cpu_and_wall_time_went(first_run):
    summary = json.loads((first_run / "summary.json").read_text())
    cpu, time_s = summary["cpu"], summary["time_s"]
    assert cpu.keys() >= {"train_thread_s", "compute_threads_s", "other_threads_s", "run_queue_wait_s", "idle_share"}
    assert None not in cpu.values()
    loop_s = time_s["total"] - time_s["start"]
    assert 0 < cpu["loop_s"] <= loop_s
    # The clocks are read one after the other, and a busy machine may take the core away in between.
    assert 0 < cpu["train_thread_s"] + cpu["run_queue_wait_s"] <= 1.1 * cpu["loop_s"] + 0.2
    parts = ("start", "wait", "compute", "kept_own", "kept_others", "checkpoint", "validation")
    assert sum(time_s[part] for part in parts) == pytest.approx(time_s["total"])
    if cpu["kept_own_s"] + cpu["kept_others_s"] >= CONTENTION_FINE * cpu["loop_s"]:
        assert "compute-bound" not in summary["verdict"]


def test_samples_are_each_used_once_an_epoch(first_run):
    """All of them; its last batch is filled up with some of those that it began with."""
    per_step = [record["samples"] for record in read_jsonl(first_run / "samples.jsonl")]
    assert [len(samples) for samples in per_step] == [8] * STEPS
    epochs = [line["epoch"] for line in read_jsonl(first_run / "metrics.jsonl")]
    times = Counter(tuple(s) for samples, epoch in zip(per_step, epochs, strict=True) if epoch == 0 for s in samples)
    assert len(times) == make_setup(read_config(first_run)).order.num_samples
    assert set(times.values()) == {1, 2}
    assert 0 < list(times.values()).count(2) < 8


def test_the_shuffle_in_the_summary_is_that_of_the_samples_that_were_used(first_run, dataset_v3):
    shuffle = json.loads((first_run / "summary.json").read_text())["shuffle"]
    per_step = [record["samples"] for record in read_jsonl(first_run / "samples.jsonl")]
    assert shuffle["global_batch"] == 8
    first_epoch = per_step[: shuffle["batches"]]
    starts = load_meta(str(dataset_v3)).episodes.from_row
    episodes = [np.searchsorted(starts, [index for _, index in samples], side="right") for samples in first_epoch]
    distinct = [len(np.unique(one)) for one in episodes]
    assert shuffle["distinct_episodes"]["order"] == pytest.approx(sum(distinct) / len(distinct))
    assert 0 <= shuffle["distance"] <= 1


def check_terminal(written: str) -> None:
    """What a start waits for, then the figures, and in the end plain lines alone."""
    drawn = without_escapes(written)
    starts = ["1 worker: Ray starts them", "the model to be loaded"]
    for what in (*starts, "train       step 12 of 12", "loss ", "held out ", "speed ", "store ", "time ", "saved "):
        assert any(what in line for line in drawn), (what, written)
    begins = [place for place, line in enumerate(drawn) if line.startswith("train ")]
    assert (
        max(len(line) for line in drawn[begins[-1] :] if line.startswith(("train ", "loss ", "speed ", "saved "))) < 60
    )
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")  # the cursor is there again
    (last,) = [place for place, line in enumerate(drawn) if "step 12/12  loss " in line]
    assert last > begins[-1]
    left = "\n".join(drawn[last:])
    assert "3 checkpoints, the newest of step 12; 0 restarts\n" in left
    assert "vlatune: finished: 12 steps, loss " in left


def test_on_a_terminal_a_run_shows_how_far_it_is(command_on_terminal):
    written = command_on_terminal[1]
    check_terminal(written)
    assert "torch in the driver: False" in written  # seconds before the first step


def test_one_seed_gives_the_same_run_to_the_last_bit_also_on_a_cluster_of_others(base_config, first_run, tmp_path):
    """The second is made in this process, without Ray and without --deterministic; the first one's worker tells that it was on there."""
    second = tmp_path / "second"
    run_without_ray(replace(base_config, output_dir=str(second)), threads_of(first_run))
    assert losses(second) == losses(first_run)
    assert json.loads((first_run / "config.json").read_text())["deterministic"] is True
    by_run = [json.loads((one / "summary.json").read_text())["performance_flags"] for one in (first_run, second)]
    assert [flags["deterministic"] for flags in by_run] == [True, False]
    assert by_run[0]["cublas_workspace_config"] == ":4096:8"
    assert (second / "samples.jsonl").read_bytes() == (first_run / "samples.jsonl").read_bytes()


def test_evaluation_is_deterministic_and_renews_the_report(first_run):
    from vlatune.evaluate.evaluate_run import evaluate_run

    options = EvalConfig(max_samples=6, batch_size=4)
    figures = evaluate_run(first_run, options)
    assert figures == evaluate_run(first_run, options)
    assert json.loads((first_run / "eval.json").read_text())["num_samples"] == 6
    assert "blank" in (first_run / "report.html").read_text()


EVAL_KEYS = {"checkpoint", "episodes", "num_samples", "seed", "val_loss", "action_error", "mean_action_error"}
EVAL_KEYS |= {"blank_images_error", "blank_sentence_error", "per_dim_error", "per_horizon_error", "action_names"}
EVAL_KEYS |= {"blank_camera_errors", "rollouts"}


def test_people_get_a_table_and_machines_json(first_run, capsys):
    words = ["eval", str(first_run), "--max_samples=4", "--batch_size=3", "--device=cpu"]
    assert cli.main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    figures = json.loads(out)
    assert err == ""
    assert figures.keys() == EVAL_KEYS | {"weights", "device", "variants"}
    assert (figures["checkpoint"], figures["weights"], figures["device"]) == ("00000012", "trained", "cpu")
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "{" not in text
    for part in ("checkpoint 00000012, trained weights, on cpu", "4 samples of 1 held-out episode", "report: "):
        assert part in text
    for key in ("action_error", "mean_action_error", "blank_images_error", "blank_sentence_error"):
        assert f" {figures[key]:.4f}" in text
    for name, value in figures["per_dim_error"].items():
        assert f"  {name:<38} {value:.4f}" in text


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--max_samples=0", "--max_samples=0: must be 1 or more"),
        ("--batch_size=0", "--batch_size=0: must be 1 or more"),
        ("--seed=-1", "--seed=-1: must be 0 or more"),
        ("--checkpoint=7", "--checkpoint=7: there is no such checkpoint; there are: 00000005, 00000010, 00000012"),
        ("--weights=ema", "it has no averaged weights; leave --weights out"),
        ("--weights=best", "--weights=best: expected one of auto, ema, trained, both"),
        ("--device=gpu", "--device=gpu: torch knows no such device; give cpu, cuda or cuda:1"),
        ("--device=meta", "--device=meta: there is no such device here"),
        ("--device=cuda:99", "--device=cuda:99: there is no such device here"),
        ("--devise=cpu", "unknown flag --devise; did you mean --device?"),
    ],
)
def test_a_wrong_flag_of_eval_is_one_line_and_leaves_the_run_as_it_was(first_run, capsys, flag, said):
    before = (first_run / "report.html").read_bytes()
    assert cli.main(["eval", str(first_run), "--max_samples=2", flag]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err
    assert (first_run / "report.html").read_bytes() == before


def test_eval_of_a_run_that_is_none_names_it(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "missing"):
        assert cli.main(["eval", str(folder)]) == 2
        assert f"'{folder}' is not a run folder: there is no config.json in it; RUN is the" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_ends_an_evaluation_and_leaves_the_one_before(first_run, capsys, monkeypatch):
    from vlatune.evaluate import predictions

    words = ["eval", str(first_run), "--max_samples=2", "--json"]
    assert cli.main(words) == 0
    before = {path.name: path.read_bytes() for path in first_run.glob("*eval*")}
    monkeypatch.setattr(predictions, "_run", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    capsys.readouterr()
    assert cli.main(words) == 130
    assert capsys.readouterr() == ("", "vlatune: interrupted\n")
    assert {path.name: path.read_bytes() for path in first_run.glob("*eval*")} == before


def test_the_host_reads_an_evaluation_once_however_many_batches_it_has(first_run):
    from vlatune.bench.step.host_sync import HostSyncSpy
    from vlatune.evaluate.held_out import read_held_out
    from vlatune.evaluate.predictions import predict_all

    config = replace(read_config(first_run), output_dir=str(first_run))
    setup = make_setup(config)
    module = setup.adapter.load_module(setup.policy, setup.binding, ModuleOptions.of(config.policy)).eval()
    rows = read_held_out(setup, 4)
    found = []
    for batch_size in (4, 1):
        with HostSyncSpy(resident=module.parameters()) as spy:
            predict_all(setup, module, rows, EvalConfig(batch_size=batch_size))
        found.append([sync for sync in spy.found if sync.place.startswith("evaluate/predictions.py")])
    assert found[0] == found[1]  # the losses and the actions, at the end
    assert {sync.what for sync in found[0]} >= {"cpu"}


def test_several_draws_per_observation_train_and_evaluation_takes_one(other_run):
    from vlatune.evaluate.evaluate_run import evaluate_run

    assert len(losses(other_run)) == 3
    assert evaluate_run(other_run, EvalConfig(max_samples=4, batch_size=4))["num_samples"] == 4


def test_variants_are_evaluated_in_one_command_each_as_it_is_alone(other_run, capsys):
    from vlatune.evaluate.evaluate_run import evaluate_run

    newest = evaluate_run(other_run, EvalConfig(max_samples=4, batch_size=4))
    words = ["eval", str(other_run), "--max_samples=4", "--batch_size=4", "--checkpoint=all", "--weights=both"]
    assert cli.main([*words, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    named = [(one["checkpoint"], one["weights"]) for one in figures["variants"]]
    assert named == [(step, kind) for step in ("00000003", "00000002") for kind in ("ema", "trained")]
    assert figures["variants"][0] == newest["variants"][0]
    assert len({one["action_error"] for one in figures["variants"]}) == 4
    assert figures | {"variants": None} == newest | {"variants": None}
    assert cli.main(words) == 0
    table = capsys.readouterr().out
    for one in figures["variants"]:
        assert f"  {one['checkpoint']}     {one['weights']:<7}   {one['val_loss']:.4f}" in table


def test_a_damaged_video_ends_the_run_with_its_name(base_config, dataset_v3, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(dataset_v3, damaged)
    video = min(damaged.glob("videos/*/*/file-001.mp4"))  # not the first, whose header is looked at before Ray starts
    video.write_bytes(video.read_bytes()[: video.stat().st_size // 3])
    config = replace(base_config, dataset=replace(base_config.dataset, root=(str(damaged),)), max_restarts=2)
    with pytest.raises(
        ValueError, match=rf"episode \d+, camera 'observation.images.\w+', {video.relative_to(damaged)}"
    ):
        run(config, tmp_path / "run")
    failures = list((tmp_path / "run" / "logs").glob("failure-*.txt"))
    assert len(failures) == 1  # a fault in the data is not tried again
