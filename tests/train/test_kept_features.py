"""`vlatune train --policy.keep_features=true` through Ray: ended in the stage or at work it goes on to the bit, and what it has
learnt is evaluated and exported as any other.
"""

import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from driving import PATIENCE_S, named, output, started, step_of, until
from test_driver import assert_same, saved_in
from without_ray import compute_here, no_ray, run_without_ray, threads_of, worker_here

from vlatune import cli
from vlatune.config import RunConfig
from vlatune.policies.base import ModuleOptions
from vlatune.report.run_folder import read_config
from vlatune.report.sinks import read_jsonl
from vlatune.run_setup import make_setup
from vlatune.train.driver import feature_stage, launch
from vlatune.train.driver.resume_rules import open_run

SAVE_FREQ = 6


def flags_of(dataset: Path, *more: str) -> list[str]:
    return [
        "--recipe=smolvla-tiny",
        f"--dataset.root={dataset}",
        "--dataset.eval_split=0.2",
        "--dataset.run_length=4",
        "--dataset.window_rows=8",
        "--policy.train=expert",
        "--policy.flow_samples=2",
        "--policy.keep_features=true",
        "--batch_size=4",
        "--scheduler.type=constant_with_warmup",  # the rate does not depend on --steps
        "--scheduler.num_warmup_steps=4",
        "--log_freq=1",
        f"--save_freq={SAVE_FREQ}",
        "--save_every_s=0",
        "--eval_freq=0",
        "--log_samples=true",
        *more,
    ]


def kept_in(run_dir: Path) -> dict[str, bytes]:
    folder = run_dir / "features"
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.raw")}


def keep_here(config: RunConfig) -> None:
    setup = make_setup(config)
    stage = feature_stage.Stage(setup, ModuleOptions.of(config.policy))
    feature_stage.open_features(setup.features, {})
    compute_here(stage, feature_stage.plan_parts(setup))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("temporary")
def test_killed_in_the_stage_and_at_work_it_is_a_run_to_which_nothing_happened(dataset_v3, tmp_path):
    run_dir = tmp_path / "run"
    flags = flags_of(dataset_v3, "--steps=100000", "--ray.num_cpus=2", "--ray.object_store_bytes=100000000")
    with started(run_dir, *flags) as process:
        until(lambda: named(process.pid, "ray::Encoder"), process, run_dir)
        os.kill(named(process.pid, "ray::Encoder")[0], signal.SIGKILL)
        until(lambda: "; going on with features of 12 files" in output(run_dir), process, run_dir)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=PATIENCE_S)
    assert not saved_in(run_dir)
    with started(run_dir, *flags) as process:
        until(lambda: saved_in(run_dir) and step_of(run_dir) >= SAVE_FREQ + 3, process, run_dir)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=PATIENCE_S)
    steps, threads = step_of(run_dir) + 6, threads_of(run_dir)
    run_without_ray(replace(read_config(run_dir), output_dir=str(run_dir), steps=steps), threads)
    clean = replace(read_config(run_dir), output_dir=str(tmp_path / "clean"), steps=steps)
    open_run(clean)  # else the folder would hold features and no run
    keep_here(clean)
    run_without_ray(clean, threads)
    assert kept_in(run_dir) == kept_in(tmp_path / "clean")
    assert_same(run_dir, tmp_path / "clean")


@pytest.mark.usefixtures("ray_local", "hears_ctrl_c")
def test_ended_by_ctrl_c_it_goes_on_with_two_workers_and_is_evaluated_and_exported(
    dataset_v3, tmp_path, capsys, monkeypatch
):
    one, two = tmp_path / "one", tmp_path / "two"
    with no_ray():
        assert cli.main(["train", *flags_of(dataset_v3, f"--output_dir={one}", "--steps=8")]) == 0
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if "features: 1 encoder" in text and len([line for line in said if "encoder" in line]) == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(launch, "_say", say)
    flags = flags_of(dataset_v3, f"--output_dir={two}", "--steps=8", "--num_workers=2", "--batch_size=2")
    assert cli.main(["train", *flags]) == 128 + signal.SIGINT
    assert (
        "asked to end by Ctrl-C before training began; the features that are computed stay" in capsys.readouterr().err
    )
    assert cli.main(["train", *flags]) == 0, capsys.readouterr().err
    assert kept_in(two) == kept_in(one)
    assert read_jsonl(two / "samples.jsonl") == read_jsonl(one / "samples.jsonl")
    file = next((two / "features/0/1").glob("*.raw"))
    file.write_bytes(b"\xff" * file.stat().st_size)
    with worker_here():  # how an error comes out of another process is shown of a damaged video, in test_end_to_end.py
        flags = flags_of(dataset_v3, f"--output_dir={two}", "--steps=60")
        assert cli.main(["train", *flags, "--resume=true"]) == 2
    assert re.search(
        rf"{file.name}': rows \d+ to \d+ hold numbers that are not finite; remove", capsys.readouterr().err
    )
    shutil.rmtree(two / "features")  # whoever looks at the result looks at pictures
    assert cli.main(["eval", str(two), "--max_samples=4"]) == 0, capsys.readouterr().err
    assert cli.main(["export", str(two), str(tmp_path / "exported")]) == 0, capsys.readouterr().err
    assert (tmp_path / "exported" / "model.safetensors").exists()
