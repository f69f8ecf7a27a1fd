"""`--dataset.cache=auto` follows the table: measured rates, the share that fits, and the planned epochs."""

from dataclasses import replace
from pathlib import Path

import pytest

from vlatune.config.settings import DatasetConfig, PolicyConfig, RunConfig
from vlatune.data.frames.cache import CacheSettings
from vlatune.data.frames.prefix_store import PrefixLayout, PrefixSettings
from vlatune.run_setup import make_setup
from vlatune.train.cache_choice import (
    MIN_GAIN,
    MIN_SHARE,
    USED,
    StepCost,
    StoreLevel,
    StorePlan,
    open_stores,
    plan_stores,
    why_not,
    with_cache,
)

FRAMES = StoreLevel("frames", 1000, 500, 1.0, make_s=0.01, read_s=0.001, decision=USED)
MANY = replace(FRAMES, num_samples=500_000)


@pytest.mark.parametrize(
    ("wanted", "epochs", "change", "is_cached"),
    [
        ("auto", 10.0, {}, True),
        ("auto", 1.0, {}, False),
        ("auto", 1.1, {}, True),
        ("auto", 10.0, {"share": 0.9 * MIN_SHARE}, False),
        ("auto", 10.0, {"share": MIN_SHARE}, True),
        ("auto", 10.0, {"read_s": 1.01 * FRAMES.make_s / MIN_GAIN}, False),
        ("auto", 10.0, {"read_s": 0.99 * FRAMES.make_s / MIN_GAIN}, True),
        ("/a/folder", 1.0, {"read_s": 1.0, "share": 0.0}, True),
        ("off", 10.0, {}, False),
        ("auto", 10.0, {"num_samples": 100}, False),  # decodes for 10 s in all
        ("auto", 10.0, {"num_samples": 200}, True),
        ("/a/folder", 10.0, {"num_samples": 100}, True),
    ],
)
def test_the_choice_follows_epochs_share_and_rates(wanted: str, epochs: float, change: dict, is_cached: bool):
    assert (why_not(wanted, epochs, replace(MANY, **change)) is None) == is_cached
    assert why_not(wanted, epochs, replace(MANY, **change), prefix_share=1.0) is not None


def test_frames_are_cached_beside_a_prefix_that_does_not_fit_if_they_take_little_from_it():
    assert why_not("auto", 10.0, MANY, prefix_share=0.5, room=6 * MANY.stored_bytes) is None
    assert why_not("/a/folder", 10.0, MANY, prefix_share=0.5, room=4 * MANY.stored_bytes) is not None
    few = replace(FRAMES, num_samples=200)  # saves 16 s if all of them are read
    assert [why_not("auto", 10.0, few, prefix_share=share, room=1e9) is None for share in (0.1, 0.9)] == [True, False]


def test_a_prefix_leaves_the_space_of_frames_that_are_cached_beside_it(config: RunConfig, tmp_path: Path):
    setup, cache = make_setup(config), CacheSettings(str(tmp_path), 10**9, 1000, 0.0)
    layout = PrefixLayout("test", image_tokens=2, max_prompt_tokens=8, width=4, dtype="float32")
    setup = replace(setup, kept=PrefixSettings(cache, layout, (b"data",), ()))
    used = with_cache(setup, StorePlan("data", 3.0, (FRAMES,), cache))
    assert used.specs[0].cache == cache
    assert (used.kept.cache.max_bytes, used.kept.cache.reserve_bytes) == (10**9 - 500_000, 501_000)
    assert with_cache(setup, StorePlan("data", 3.0, (FRAMES,), None)).kept.cache == cache


@pytest.mark.parametrize(
    ("step", "without_s", "with_s"),
    [
        (StepCost(), 500 * 0.01, 500 * (0.25 * 0.01 + 0.75 * 0.001)),
        (StepCost(0.005), 500 * 0.01, 500 * 0.005),
        (StepCost(0.005, is_on_readers_cores=True), 500 * 0.015, 500 * (0.005 + 0.25 * 0.01 + 0.75 * 0.001)),
    ],
)
def test_an_epoch_takes_the_step_or_reading(step: StepCost, without_s: float, with_s: float):
    plan = StorePlan("data", 3.0, (replace(FRAMES, share=0.75),), None, step)
    assert plan.epoch_s(plan.frames, is_stored=False) == pytest.approx(without_s)
    assert plan.epoch_s(plan.frames, is_stored=True) == pytest.approx(with_s)
    level = plan.to_json()["levels"][0]
    assert (level["epoch_s_without"], level["epoch_s_with"]) == pytest.approx((without_s, with_s))


@pytest.fixture
def config(dataset_v3: Path, small_base: Path, tmp_path: Path) -> RunConfig:
    return RunConfig(
        dataset=DatasetConfig(root=(str(dataset_v3),)),
        policy=PolicyConfig(path=str(small_base)),
        steps=100,
        batch_size=4,
        output_dir=str(tmp_path / "run"),
    )


def test_planning_measures_and_creates_nothing_and_a_start_makes_the_folder(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    setup = make_setup(config)
    plan = plan_stores(config, setup)
    assert not (tmp_path / "home").exists()
    frames = plan.frames
    assert frames.sample_bytes == 2 * 3 * 48 * 48
    assert frames.num_samples == setup.order.num_samples
    assert plan.epochs == pytest.approx(400 / setup.order.num_samples)
    assert frames.make_s > 0
    assert frames.read_s > 0
    assert len(plan.lines()) == 2 + len(plan.levels)
    opened = open_stores(replace(config, dataset=replace(config.dataset, cache=str(tmp_path / "frames"))), setup)
    assert opened.settings is not None
    assert (tmp_path / "frames" / "usage").exists()


@pytest.mark.parametrize("kind", ["file", "open folder"])
def test_auto_trains_without_a_cache_where_the_folder_cannot_be_used(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    folder = tmp_path / "home" / "vlatune" / "frames"
    folder.parent.mkdir(parents=True)
    if kind == "file":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    setup = make_setup(config)
    plan = open_stores(config, setup)
    assert plan.settings is None
    assert plan.frames.decision != USED
    with pytest.raises((OSError, ValueError)):
        open_stores(replace(config, dataset=replace(config.dataset, cache=str(folder))), setup)
