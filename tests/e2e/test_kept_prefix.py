"""`vlatune train --policy.keep_prefix=true`: the same losses however much is kept, after kills, and with two workers."""

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from driving import TIMEOUT_S, finish, saved_steps, started, step_of, wait_until
from local_runs import assert_same_run, no_ray, run_locally, threads_of

from vlatune import cli
from vlatune.data.frames.cache import FOLDER_BYTES
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.policies.pi05.tiny import make_tiny_pi05
from vlatune.run.run_folder import read_config
from vlatune.run.sinks import read_jsonl

SAVE_FREQ = 6
STEPS = 24
"""Two epochs and a bit of the dataset."""
CLUSTER = ("--ray.num_cpus=2", "--ray.object_store_bytes=100000000")


def flags_of(dataset: Path, base: Path, store: Path, *more: str) -> list[str]:
    return [
        f"--dataset.root={dataset}",
        f"--policy.path={base}",
        "--policy.train=expert",
        "--policy.keep_prefix=true",
        f"--dataset.cache={store}",
        "--dataset.eval_split=0.2",
        "--dataset.run_length=4",
        "--dataset.window_rows=8",
        f"--steps={STEPS}",
        "--batch_size=4",
        "--scheduler.type=constant_with_warmup",  # the rate does not depend on --steps
        "--scheduler.num_warmup_steps=4",
        "--log_freq=1",
        f"--save_freq={SAVE_FREQ}",
        "--save_every_s=0",
        "--eval_freq=12",
        "--eval_samples=8",
        "--log_samples=true",
        *more,
    ]


def shares(run_dir: Path) -> list[float]:
    return [line["kept_prefix_share"] for line in read_jsonl(run_dir / "metrics.jsonl")]


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in read_jsonl(run_dir / "metrics.jsonl")]


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


@pytest.mark.parametrize(("dtype", "rel"), [("same", 1e-4), pytest.param("int8", 1e-2, marks=pytest.mark.slow)])
def test_losses_do_not_depend_on_what_is_kept(dtype, rel, dataset_v3, small_base, tmp_path, capsys):
    store = tmp_path / "store"

    def train(name: str, *more: str) -> Path:
        more = (f"--policy.keep_prefix_dtype={dtype}", f"--output_dir={tmp_path / name}", *more)
        flags = flags_of(dataset_v3, small_base, store, *more)
        with no_ray():
            assert cli.main(["train", *flags]) == 0, capsys.readouterr().err
        return tmp_path / name

    filling, warm = train("filling"), train("warm")
    assert shares(filling)[0] == 0
    assert shares(filling)[-1] > 0  # of the second epoch
    assert set(shares(warm)) == {1.0}
    assert (summary(warm)["kept_prefix_share"], summary(warm)["kept_prefix_samples"]) == (1.0, 4 * STEPS)
    assert_same_run(warm, filling)
    for part in sorted(store.rglob("*.part"))[::3]:
        part.unlink()
    partly = train("partly")
    assert 0.3 < sum(shares(partly)) / STEPS < 1
    assert_same_run(partly, filling)
    small = train("small", f"--dataset.cache_bytes={FOLDER_BYTES}")  # holds nothing
    assert_same_run(small, filling)
    computed = train("computed", "--policy.keep_prefix=false")
    assert losses(filling) == pytest.approx(losses(computed), rel=rel)
    assert summary(computed)["kept_prefix_share"] is None


def test_auto_is_recorded_and_followed_by_a_resumed_run(dataset_v3, small_base, tmp_path, capsys):
    flags = flags_of(dataset_v3, small_base, tmp_path / "store", f"--output_dir={tmp_path / 'run'}")
    flags = [one for one in flags if "keep_prefix" not in one and "steps=24" not in one]
    auto = "--policy.keep_prefix=auto"
    with no_ray():
        assert cli.main(["train", *flags, "--steps=4", auto]) == 0, capsys.readouterr().err  # less than an epoch
        assert read_config(tmp_path / "run").policy.keep_prefix == "false"
        resumed = [*flags, "--steps=30", "--resume=true"]  # several epochs
        assert cli.main(["train", *resumed, auto]) == 0, capsys.readouterr().err
        assert read_config(tmp_path / "run").policy.keep_prefix == "false"
        assert cli.main(["train", *resumed, "--steps=31", "--policy.keep_prefix=true"]) == 2


@pytest.mark.timeout(1200)
def test_two_workers_that_fill_one_store(dataset_v3, small_base, tmp_path):
    flags = flags_of(dataset_v3, small_base, tmp_path / "store", "--num_workers=2", "--batch_size=2", *CLUSTER)
    finish(tmp_path / "filling" / "run", flags)
    finish(tmp_path / "warm" / "run", flags)
    filling, warm = tmp_path / "filling" / "run", tmp_path / "warm" / "run"
    assert max(shares(filling)) > 0
    assert set(shares(warm)) == {1.0}
    assert summary(warm)["kept_prefix_samples"] == 4 * STEPS
    assert summary(warm)["spilled_bytes"] == summary(warm)["fallback_bytes"] == 0
    assert_same_run(warm, filling)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_killed_run_equals_the_undisturbed_one(dataset_v3, small_base, tmp_path):
    """The store is deleted under the run, which then reads images that its readers had left out."""
    run_dir, store = tmp_path / "run", tmp_path / "store"
    flags = [*flags_of(dataset_v3, small_base, store, *CLUSTER, "--eval_freq=0"), "--steps=100000"]
    with started(run_dir, *flags) as process:
        wait_until(lambda: saved_steps(run_dir) and step_of(run_dir) >= STEPS, process, run_dir)
        for folder in store.iterdir():
            shutil.rmtree(folder, ignore_errors=True)
        wait_until(lambda: step_of(run_dir) >= STEPS + 8, process, run_dir)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=TIMEOUT_S)
    steps, threads = step_of(run_dir) + 6, threads_of(run_dir)
    config = replace(read_config(run_dir), steps=steps)
    run_locally(replace(config, output_dir=str(run_dir)), threads)
    clean = replace(config.dataset, cache=str(tmp_path / "empty"))
    run_locally(replace(config, output_dir=str(tmp_path / "clean"), dataset=clean), threads)
    assert_same_run(run_dir, tmp_path / "clean")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_samples_without_a_kept_prefix_read_cached_frames(dataset_v3, tmp_path):
    """The budget is for half of the prefixes; its limit counts both."""
    meta, store, budget = load_meta(str(dataset_v3)), tmp_path / "store", FOLDER_BYTES + 1_000_000
    state, action = (meta.features[key].shape[0] for key in ("observation.state", "action"))
    dims = {"state_dim": state, "action_dim": action, "horizon": 5, "image_size": 24}
    base = make_tiny_pi05(tmp_path / "base", cameras=meta.cameras, tasks=meta.tasks, **dims)
    flags = flags_of(dataset_v3, base, store, *CLUSTER, "--steps=54")  # three epochs
    finish(tmp_path / "partly" / "run", [*flags, f"--dataset.cache_bytes={budget}"])
    finish(tmp_path / "all" / "run", [*flags, f"--dataset.cache={tmp_path / 'other'}"])
    partly, everything = tmp_path / "partly" / "run", tmp_path / "all" / "run"
    kept, cached = (
        [line[name] for line in read_jsonl(partly / "metrics.jsonl")][-18:]
        for name in ("kept_prefix_share", "cached_share")
    )
    assert 0.1 < sum(kept) / 18 < 0.9
    assert sum(kept) / 18 + sum(cached) / 18 == pytest.approx(1.0, abs=0.15)
    assert sum(one.stat().st_blocks * 512 for one in store.iterdir()) <= budget
    assert {line["cached_share"] for line in read_jsonl(everything / "metrics.jsonl")} == {0.0}
    assert_same_run(partly, everything)


@pytest.mark.parametrize("mode", ["expert", "full"])
def test_doctor_states_the_space_that_is_needed(mode, dataset_v3, small_base, tmp_path, capsys):
    flags = flags_of(dataset_v3, small_base, tmp_path / "store", f"--output_dir={tmp_path / 'run'}")
    code = cli.main(["doctor", *flags, f"--policy.train={mode}", "--json"])
    findings = json.loads(capsys.readouterr().out.splitlines()[-1])["findings"]
    assert not (tmp_path / "run").exists()
    if mode == "full":  # the prefix changes with every step
        assert code == cli.FAILED
        return
    (found,) = (one for one in findings if one["check"] == "cache")
    assert found["level"] == "pass"
    (kept,) = (one for one in found["figures"]["levels"] if one["name"] == "prefix")
    assert kept["stored_bytes"] > 0
