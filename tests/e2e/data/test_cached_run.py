"""Training with the frame cache gives the same samples and losses as without it, whatever happens to the cache."""

import json
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import driving
import pytest

from vlatune.data.frames.cache import FOLDER_BYTES
from vlatune.ray_internals import TRAIN_WORKER_TITLE

STEPS = 24
"""Two epochs and a bit of the dataset."""


def all_flags(dataset: Path, base: Path, *flags: str) -> list[str]:
    return [
        f"--dataset.root={dataset}",
        f"--policy.path={base}",
        "--policy.train=heads",
        "--dataset.eval_split=0.2",
        f"--steps={STEPS}",
        "--batch_size=4",
        "--log_freq=1",
        "--eval_freq=12",
        "--eval_samples=8",
        "--log_samples=true",
        *flags,
    ]


def train(dataset: Path, base: Path, folder: Path, *flags: str) -> Path:
    driving.finish(folder, all_flags(dataset, base, *flags))
    return folder


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def results(folder: Path) -> tuple[list, list, list]:
    """Return what must not depend on the cache: losses, validation and samples."""
    losses = [(line["optimizer_step"], line["loss"], line["grad_norm"]) for line in lines(folder / "metrics.jsonl")]
    return losses, lines(folder / "validation.jsonl"), lines(folder / "samples.jsonl")


def cached_shares(folder: Path) -> list[float]:
    return [line["cached_share"] for line in lines(folder / "metrics.jsonl")]


def disk_usage(folder: Path) -> int:
    total = 0
    for path in (folder, *folder.rglob("*")):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:  # evicted meanwhile
            continue
    return total


@pytest.fixture(scope="module")
def uncached(dataset_v3: Path, small_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(dataset_v3, small_base, tmp_path_factory.mktemp("uncached") / "run", "--dataset.cache=off")


def test_losses_are_equal_without_a_cache_while_it_fills_and_from_it(
    dataset_v3: Path, small_base: Path, uncached: Path, tmp_path: Path
):
    cache = f"--dataset.cache={tmp_path / 'frames'}"
    filling = train(dataset_v3, small_base, tmp_path / "filling", cache)
    warm = train(dataset_v3, small_base, tmp_path / "warm", cache)
    assert results(filling) == results(uncached)
    assert results(warm) == results(uncached)
    assert cached_shares(filling)[0] < 1
    assert cached_shares(filling)[-1] > 0  # of the second epoch
    assert set(cached_shares(warm)) == {1.0}
    assert json.loads((warm / "summary.json").read_text())["spilled_bytes"] == 0


@pytest.mark.slow
def test_two_workers_have_equal_losses_with_and_without_a_cache(dataset_v3: Path, small_base: Path, tmp_path: Path):
    caches = {"uncached": "off", "filling": str(tmp_path / "frames"), "warm": str(tmp_path / "frames")}
    pair = ("--num_workers=2", "--batch_size=2")
    uncached, filling, warm = (
        train(dataset_v3, small_base, tmp_path / name, *pair, f"--dataset.cache={cache}")
        for name, cache in caches.items()
    )
    assert results(filling) == results(uncached)
    assert results(warm) == results(uncached)
    assert set(cached_shares(warm)) == {1.0}


@pytest.mark.slow
def test_a_budget_for_a_third_of_the_frames_is_never_exceeded(
    dataset_v3: Path, small_base: Path, uncached: Path, tmp_path: Path
):
    num_frames = json.loads((dataset_v3 / "meta/info.json").read_text())["total_frames"]
    budget = FOLDER_BYTES + num_frames * 2 * 3 * 48 * 48 // 3
    cache, peaks = tmp_path / "frames", [0]
    flags = all_flags(dataset_v3, small_base, f"--dataset.cache={cache}", f"--dataset.cache_bytes={budget}")

    def has_ended() -> bool:
        peaks.append(disk_usage(cache))
        return process.poll() is not None

    with driving.started(tmp_path / "run", *flags) as process:
        driving.wait_until(has_ended, process, tmp_path / "run")
    assert process.returncode == 0
    assert 0 < max(peaks) <= budget
    assert results(tmp_path / "run") == results(uncached)
    assert 0.1 < cached_shares(tmp_path / "run")[-1] < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["reader", "worker", "driver", "cache"])
def test_a_kill_or_a_deleted_cache_while_it_fills_changes_nothing(
    victim: str, dataset_v3: Path, small_base: Path, uncached: Path, tmp_path: Path
):
    """Kill processes, or delete the cache, as soon as the first part is there."""
    run, cache = tmp_path / "run", tmp_path / "frames"
    flags = all_flags(dataset_v3, small_base, f"--dataset.cache={cache}", "--save_freq=4")
    with driving.started(run, *flags) as process:
        driving.wait_until(lambda: any(cache.glob("*.part")), process, run)
        if victim == "cache":
            shutil.rmtree(cache, ignore_errors=True)
        elif victim == "driver":
            process.kill()
        else:
            title = driving.READER if victim == "reader" else TRAIN_WORKER_TITLE
            driving.wait_until(lambda: driving.named(process.pid, title), process, run)
            for pid in driving.named(process.pid, title):
                with suppress(ProcessLookupError):  # ended meanwhile
                    os.kill(pid, signal.SIGKILL)
        code = driving.exit_code(process, run)
    if victim == "driver":
        driving.finish(run, flags)
    else:
        assert code == 0
    assert results(run) == results(uncached)


@pytest.mark.slow
def test_two_runs_that_fill_one_cache_at_once_are_both_right(
    dataset_v3: Path, small_base: Path, uncached: Path, tmp_path: Path
):
    flags = all_flags(dataset_v3, small_base, f"--dataset.cache={tmp_path / 'frames'}")
    a, b = tmp_path / "a/run", tmp_path / "b/run"
    with driving.started(a, *flags) as first, driving.started(b, *flags) as second:
        assert [driving.exit_code(first, a), driving.exit_code(second, b)] == [0, 0]
    assert results(a) == results(b) == results(uncached)
