"""Kept rows are found again by the same dataset, base and settings, and by no others."""

import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from safetensors.numpy import load_file, save_file

from vlatune.config.settings import DatasetConfig, PolicyConfig, RunConfig
from vlatune.run_setup import Setup, make_setup
from vlatune.train.cache_choice import PROBE_BYTES
from vlatune.train.driver.resume_rules import check_run, open_run
from vlatune.train.fingerprint import fingerprints
from vlatune.train.prefix_choice import choose_prefix


@pytest.fixture
def config(dataset_v3: Path, small_base: Path, tmp_path: Path) -> RunConfig:
    dataset = shutil.copytree(dataset_v3, tmp_path / "dataset")
    return RunConfig(
        dataset=DatasetConfig(root=(str(dataset),), cache=str(tmp_path / "store")),
        policy=PolicyConfig(path=str(shutil.copytree(small_base, tmp_path / "base")), keep_prefix="true"),
        steps=100,
        batch_size=4,
        output_dir=str(tmp_path / "run"),
    )


def identities(config: RunConfig, change: Callable[[Setup], Setup] = lambda setup: setup) -> tuple[bytes, ...]:
    setup = change(make_setup(config))
    settings = choose_prefix(config, setup, fingerprints(setup), on_gpu=False).settings
    assert settings is not None
    return settings.identities


def move_video(setup: Setup) -> Setup:
    """Return a setup whose meta/episodes places one episode of a camera at another time of its file."""
    (meta,) = setup.metas
    camera, span = next(iter(meta.episodes.videos.items()))
    from_s = span.from_s.copy()
    from_s[-1] += 0.1
    videos = {**meta.episodes.videos, camera: replace(span, from_s=from_s)}
    return replace(setup, metas=(replace(meta, episodes=replace(meta.episodes, videos=videos)),))


def test_the_same_inputs_find_their_rows(config: RunConfig, tmp_path: Path):
    first = identities(config)
    (tmp_path / "dataset").rename(tmp_path / "moved")
    elsewhere = replace(config.dataset, root=(str(tmp_path / "moved"),))
    assert identities(replace(config, dataset=elsewhere, seed=7, batch_size=2, steps=50)) == first


@pytest.mark.parametrize(
    "settings", [{"train": "heads"}, {"dtype": "bfloat16"}, {"compile": "true"}], ids=lambda one: next(iter(one))
)
def test_other_settings_never_find_them(config: RunConfig, settings: dict):
    assert identities(replace(config, policy=replace(config.policy, **settings))) != identities(config)


def test_another_place_in_the_video_never_finds_them(config: RunConfig):
    assert identities(config, move_video) != identities(config)


@pytest.mark.parametrize("folder", ["data", "videos"])
def test_a_file_that_was_written_again_never_finds_them(config: RunConfig, tmp_path: Path, folder: str):
    first = identities(config)
    file = next(path for path in sorted((tmp_path / "dataset" / folder).rglob("*")) if path.is_file())
    os.utime(file, ns=(0, 0))
    assert identities(config) != first


def test_a_weight_that_differs_after_its_first_bytes_never_finds_them(config: RunConfig, tmp_path: Path):
    first, file = identities(config), tmp_path / "base" / "model.safetensors"
    weights = load_file(file)
    weights[max(weights, key=lambda name: weights[name].nbytes)].reshape(-1)[-1] += 1
    save_file(weights, file)
    assert identities(config) != first


def test_a_remote_file_that_was_replaced_never_finds_them(config: RunConfig, tmp_path: Path):
    fs = fsspec.filesystem("memory")
    try:
        fs.put(str(tmp_path / "dataset"), "/replaced", recursive=True)
        remote = replace(config, dataset=replace(config.dataset, root=("memory://replaced",)))
        first = identities(remote)
        assert identities(remote) == first
        video = next(name for name in sorted(fs.find("/replaced/videos")))
        fs.pipe(video, fs.cat(video))
        assert identities(remote) != first
    finally:
        fs.rm("/replaced", recursive=True)


def test_auto_keeps_nothing_on_a_disk_that_cannot_be_measured(config: RunConfig):
    auto, setup = replace(config, policy=replace(config.policy, keep_prefix="auto")), make_setup(config)
    found, limits = fingerprints(setup), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PROBE_BYTES // 2, limits[1]))
    try:
        assert choose_prefix(auto, setup, found, on_gpu=False).settings is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert choose_prefix(config, setup, found, on_gpu=False).settings is not None


@pytest.mark.parametrize("recorded", ["true", "false"])
def test_auto_is_the_recorded_decision_for_every_check_of_the_folder(config: RunConfig, recorded: str):
    wanted = {
        name: replace(config, policy=replace(config.policy, keep_prefix=name)) for name in ("auto", "true", "false")
    }
    config.run_dir.mkdir()
    open_run(wanted[recorded])
    check_run(wanted["auto"])
    with pytest.raises(ValueError, match="keep_prefix"):
        check_run(wanted["false" if recorded == "true" else "true"])
